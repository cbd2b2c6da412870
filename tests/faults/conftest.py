"""Fixtures of cache servers for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_process, serving_tcp
from support.succession import Line, a_line

from kvstore.server.disk_tiers import DiskOptions


@pytest.fixture(params=["mapped", "framed"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "mapped" else serving_tcp() as server:
        yield server


@pytest.fixture
def line() -> Iterator[Line]:
    with a_line() as line:
        yield line


@pytest.fixture
def disk_line(tmp_path: Path) -> Iterator[Line]:
    with a_line(disk=DiskOptions(tmp_path / "disk", 1 << 30)) as line:
        yield line


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with serving_process(disk_gib=0.1) as server:
        yield server
