"""Soak tests of one server with many processes and connections, killed and frozen at random: no wrong or lost byte."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from support.cache_server import ServerProcess, short_folder
from support.crowd import Clients
from support.redis_server import wait_for
from support.server_client import Result

from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server
from kvstore.tools.processes import free_port


def run(num_processes: int, threads: int, seconds: float) -> tuple[Result, list[int], dict[str, Any]]:
    """Run clients; return the sum of their results, the server's memory over time, and its state at the end."""
    with short_folder() as folder:
        port = free_port()
        server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 0.2\n")
        server.config.write_text(server.config.read_text().replace(server.url, f"{server.url}, kvs://127.0.0.1:{port}"))
        server.start()
        try:
            assert server.process is not None
            watched = psutil.Process(server.process.pid)
            urls = [(server.url, f"kvs://127.0.0.1:{port}")[number % 4 == 3] for number in range(num_processes)]
            clients = Clients(urls, seconds, threads)
            own_bytes = clients.disturb(watched)
            result = clients.results()
            operator = Operator(parse_server(server.url, {}))
            wait_for("all leases end", lambda: operator.stats()["leases"] == 0, timeout_s=60)
            state = operator.stats()
            operator.close()
            assert server.terminate() == 0
        finally:
            server.kill()
    return result, own_bytes, state


def check(result: Result, own_bytes: list[int], state: dict[str, Any]) -> None:
    assert result.wrong == result.corrupt == 0
    assert min(result.stored, result.hits, len(result.lookups_s)) > 0
    assert state["leased_bytes"] == state["clients"] == 0
    memory = state["tiers"]["memory"]
    assert memory["used_bytes"] <= memory["capacity_bytes"]
    middle = len(own_bytes) // 2
    assert max(own_bytes[middle:]) < max(own_bytes[:middle]) + (256 << 20)
    lookups_s = sorted(result.lookups_s)
    p99_ms = lookups_s[len(lookups_s) * 99 // 100] * 1e3
    print(f"\n{len(lookups_s)} lookups, p99 {p99_ms:.2f} ms; {result.stored} stored, {result.hits} hits, "
          f"{result.misses} misses, {result.failed} failed, {result.errors} errors; "
          f"MiB of the server's own: {[size >> 20 for size in own_bytes]}")  # fmt: skip


def test_a_few_clients_for_a_short_while() -> None:
    check(*run(3, 2, 5.0))


@pytest.mark.soak
def test_eight_processes_with_eight_connections() -> None:
    check(*run(8, 8, 60.0))
