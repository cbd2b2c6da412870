"""Fixtures of cache servers for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_process, serving_tcp


@pytest.fixture(params=["mapped", "framed"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "mapped" else serving_tcp() as server:
        yield server


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with serving_process(disk_gib=0.1) as server:
        yield server
