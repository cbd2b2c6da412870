"""Clients of one cache server for an hour, with checked contents and flat memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
from support.cache_server import ServerProcess, short_folder
from support.crowd import Clients
from support.redis_server import wait_for

from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server
from kvstore.tools.processes import free_port
from soak.part import Batch, Do, Part

PROCESSES: Final = 8
THREADS: Final = 8  # of each, with a connection of its own
SECONDS: Final = 30  # of a batch
_END_S: Final = 60.0  # for leases of clients that were killed


@contextmanager
def opened(_: Path) -> Iterator[Do]:
    """Yield batches of clients of one server, of which some are killed or frozen; the server goes on."""
    port = free_port()
    with short_folder() as folder:
        server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 0.2\n", port)
        try:
            server.start()
            yield lambda seed: _run(server, seed)
            assert server.terminate() == 0, "the server did not end by itself"
        finally:
            server.kill()


def _run(server: ServerProcess, seed: int) -> Batch:
    assert server.process is not None
    urls = [(server.url, server.tcp_url)[number % 4 == 3] for number in range(PROCESSES)]
    clients = Clients(urls, SECONDS, THREADS, seed)
    try:
        own_bytes = clients.disturb(psutil.Process(server.process.pid))
        result = clients.results()
    finally:
        clients.kill()
    operator = Operator(parse_server(server.url, {}))
    try:
        wait_for("all leases end", lambda: operator.stats()["leases"] == 0, timeout_s=_END_S)
        wait_for("all clients end", lambda: operator.stats()["clients"] == 0, timeout_s=_END_S)
        state = operator.stats()
    finally:
        operator.close()
    assert state["leased_bytes"] == 0, f"{state['leased_bytes']} bytes are leased to nobody"
    memory = state["tiers"]["memory"]
    assert memory["used_bytes"] <= memory["capacity_bytes"], memory
    assert not result.corrupt, f"{result.corrupt} reads found damage"
    assert result.hits, "nothing was found"
    notes = {"stored": result.stored, "reads checked": result.hits, "errors": result.errors}
    what = f"{result.wrong} reads brought other bytes than were stored" if result.wrong else ""
    return Batch(SECONDS, result.wrong, what, notes, own_bytes)


PART = Part("clients", f"seconds of {PROCESSES * THREADS} clients", 3_600, opened)
