"""Cache servers for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_tcp, short_folder


@pytest.fixture(params=["mapped", "framed"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "mapped" else serving_tcp() as server:
        yield server


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with short_folder() as folder:
        server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 0.1\n")
        try:
            yield server.start()
        finally:
            server.kill()
