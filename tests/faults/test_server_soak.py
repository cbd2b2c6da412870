"""Soak tests of one server with many processes and connections, killed and frozen at random: no wrong or lost byte."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest
from support.cache_server import ServerProcess, short_folder
from support.forked import ForkedProcess, forker
from support.redis_server import wait_for
from support.server_client import Result

from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server
from kvstore.tools.processes import free_port


class Clients:
    """Processes of which one at a time is killed and started again, or frozen for a while."""

    def __init__(self, urls: list[str], seconds: float, threads: int) -> None:
        self.urls = urls
        self.until_s = time.monotonic() + seconds
        self.threads = threads
        self.dice = random.Random(1)
        self.seed = 0
        self.processes = [self.start(url) for url in urls]

    def start(self, url: str) -> ForkedProcess:
        self.seed += 1
        left_s = max(1.0, self.until_s - time.monotonic())
        words = ["support.server_client", url, left_s, self.threads, self.seed]
        return forker().start(words, stdout=subprocess.PIPE)

    def disturb(self, watched: psutil.Process) -> list[int]:
        """Kill or freeze processes until the time is nearly over; return samples of the server's own memory."""
        own_bytes = []
        while time.monotonic() < self.until_s - 2:
            memory = watched.memory_info()
            own_bytes.append(memory.rss - memory.shared)
            time.sleep(self.dice.uniform(0.3, 1.5))
            which = self.dice.randrange(len(self.processes))
            process = self.processes[which]
            if self.dice.random() < 0.5:
                process.kill()
                process.communicate()
                self.processes[which] = self.start(self.urls[which])
            else:
                process.send_signal(signal.SIGSTOP)
                time.sleep(self.dice.uniform(0.1, 1.0))
                process.send_signal(signal.SIGCONT)
        return own_bytes

    def results(self) -> Result:
        """Wait for the processes, and return the sum of their results."""
        total = Result()
        for process in self.processes:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            for name, value in json.loads(said).items():
                setattr(total, name, getattr(total, name) + value)
        return total


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
    assert result.wrong == 0
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
