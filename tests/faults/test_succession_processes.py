"""Servers are replaced by processes, of this version and of others, while processes of clients work."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import ServerProcess, short_folder
from support.forked import forker
from support.redis_server import wait_for
from support.versions import environment, make_later, unpack

from kvstore.tools.processes import free_port

EARLIER = ("b161d91", "0b42f7a")


class Crowd:
    """Processes of clients that expect no failure, over both addresses."""

    def __init__(self, server: ServerProcess, num_processes: int, num_threads: int) -> None:
        urls = f"{server.url},{server.tcp_url}"
        self._processes = [
            forker().start(
                ["support.steady_client", urls, num_threads, seed], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for seed in range(num_processes)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"

    def end(self) -> dict[str, Any]:
        """Let them read all that they have stored, and return the sum of what they saw."""
        said = [json.loads(process.communicate(timeout=120)[0]) for process in self._processes]
        total = {
            name: sum(each.get(name, 0) for each in said) for name in ("calls", "stored", "read", "wrong", "failed")
        }
        longest_ms = round(1000 * max(each["longest_s"] for each in said))
        return {**total, "failures": [text for each in said for text in each["failures"]], "longest_ms": longest_ms}


class Succession:
    """A server and its successors, as processes with one log."""

    def __init__(self, folder: Path) -> None:
        disk = f"local_disk: {folder}/disk\nmax_local_disk_size: 1\n"
        self.server = ServerProcess(folder, f"{disk}server_quotas: '*=1'\n", port=free_port()).start()

    def succeed(self, version: Path | None = None) -> None:
        """Replace the server, by one of another version if it is given."""
        former = self.server.process
        if version is None:
            self.server.start("--take-over")
        else:
            words = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(self.server.config)]
            with self.server.log.open("ab") as log:
                begin = log.tell()
                self.server.process = subprocess.Popen(
                    [*words, "--take-over"], env=environment(version), stdout=log, stderr=log, cwd=version
                )
            wait_for("the server is ready", lambda: b"ready" in self.server.log.read_bytes()[begin:])
        assert former is not None
        assert former.wait(30) == 0

    def pauses_ms(self) -> list[int]:
        """Return the time without service of each hand-over so far."""
        return sorted(map(int, re.findall(r"clients waited for (\d+) ms", self.server.log.read_text())))

    def kill_successor(self, after_s: float) -> None:
        """Kill a successor after a while; the server goes on, unless it has handed over by then."""
        words = ["kvstore.tools.cli", "serve", "--config", str(self.server.config), "--take-over"]
        with self.server.log.open("ab") as log:
            process = forker().start(words, stdout=log, stderr=log)
        time.sleep(after_s)
        process.kill()
        process.wait(30)


@contextmanager
def a_succession() -> Iterator[Succession]:
    with short_folder() as folder:
        succession = Succession(folder)
        try:
            yield succession
        finally:
            succession.server.kill()


def check(total: dict[str, Any]) -> None:
    print("\n", total)
    assert (total["wrong"], total["failed"], total["failures"]) == (0, 0, [])
    assert min(total["stored"], total["read"]) > 0


def test_clients_of_other_processes_notice_nothing() -> None:
    with a_succession() as succession:
        crowd = Crowd(succession.server, 2, 4)
        for _ in range(2):
            succession.succeed()
        check(crowd.end())
        assert succession.server.terminate() == 0


@pytest.mark.soak
def test_sixty_four_clients_and_twenty_successors_in_a_row() -> None:
    with a_succession() as succession:
        crowd = Crowd(succession.server, 8, 8)
        for _ in range(20):
            succession.succeed()
            assert succession.server.process is not None
            succession.server.process.send_signal(signal.SIGHUP)
            time.sleep(random.uniform(0.0, 0.5))
        check(crowd.end())
        print("clients waited for, in ms:", succession.pauses_ms())
        assert succession.server.log.read_bytes().count(b"configuration was read again") == 20
        assert succession.server.terminate() == 0


@pytest.mark.sweep
def test_successors_that_are_killed_at_any_moment() -> None:
    """Either nothing has happened, or the server has handed over already, and then all that is lost is the cache."""
    with a_succession() as succession:
        crowd = Crowd(succession.server, 2, 4)
        for number in range(30):
            succession.kill_successor(number * 0.01)
            assert succession.server.process is not None
            if succession.server.process.poll() is not None:
                succession.server.start()
        assert crowd.end()["wrong"] == 0


@pytest.mark.sweep
def test_a_later_version_takes_over_and_gives_back(tmp_path: Path) -> None:
    later = make_later(tmp_path / "later")
    with a_succession() as succession:
        crowd = Crowd(succession.server, 1, 4)
        for version in (later, None, later, None):
            succession.succeed(version)
        check(crowd.end())
        said = succession.server.log.read_text()
        assert "handing over to kvstore 99.1.0" in said
        assert "taking over from kvstore 99.1.0" in said
        assert succession.server.terminate() == 0


@pytest.fixture(params=EARLIER)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(request.param, tmp_path / "earlier")


def is_ready(server: ServerProcess) -> bool:
    return b"ready" in server.log.read_bytes()


def run_clients(version: Path, server: ServerProcess, *, seed: int, for_s: int = 3) -> list[subprocess.Popen[bytes]]:
    words = [sys.executable, "-c", "from support.server_client import main; main()"]
    return [
        subprocess.Popen(
            [*words, url, str(for_s), "2", str(seed + number)],
            env=environment(version),
            stdout=subprocess.PIPE,
            cwd=version,
        )
        for number, url in enumerate((server.url, server.tcp_url))
    ]


def results(clients: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    found = []
    for client in clients:
        out, _ = client.communicate(timeout=120)
        assert client.returncode == 0
        found.append(json.loads(out))
    return found


@pytest.mark.sweep
def test_engines_and_servers_of_earlier_versions_work_together(earlier: Path) -> None:
    """Clients of both versions at a server of each: every byte is right, whoever has stored it."""
    here = Path(__file__).parents[2]
    for version in (earlier, here):
        with short_folder() as folder:
            server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 1\n", port=free_port())
            with server.log.open("wb") as log:
                words = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(server.config)]
                process = subprocess.Popen(words, env=environment(version), stdout=log, stderr=log, cwd=version)
            server.process = process
            try:
                wait_for("the server is ready", partial(is_ready, server))
                found = results([*run_clients(earlier, server, seed=1), *run_clients(here, server, seed=3)])
                assert server.terminate() == 0
            finally:
                server.kill()
        for each in found:
            assert (each["wrong"], each.get("corrupt", 0), each["errors"]) == (0, 0, 0)
            assert min(each["stored"], each["hits"]) > 0


@pytest.mark.sweep
def test_clients_of_earlier_versions_see_a_restart(earlier: Path) -> None:
    """They repeat no call, so some fail; all else goes on over new connections, and no byte is wrong."""
    with a_succession() as succession:
        # Some wait for an answer until their deadline, which is after 20 s.
        clients = run_clients(earlier, succession.server, seed=1, for_s=30)
        for _ in range(3):
            succession.succeed()
            time.sleep(0.3)
        for each in results(clients):
            print(each["errors"], each["hits"])
            assert each["wrong"] == each.get("corrupt", 0) == 0
            assert min(each["stored"], each["hits"]) > 0


@pytest.mark.sweep
def test_an_earlier_server_cannot_be_replaced_and_goes_on(earlier: Path) -> None:
    with short_folder() as folder:
        server = ServerProcess(folder, port=free_port())
        words = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(server.config)]
        with server.log.open("wb") as log:
            server.process = subprocess.Popen(words, env=environment(earlier), stdout=log, stderr=log, cwd=earlier)
        try:
            wait_for("the server is ready", partial(is_ready, server))
            refused = subprocess.run([*words, "--take-over"], capture_output=True, check=False, timeout=60)
            assert refused.returncode == 2
            assert b"cannot be replaced" in refused.stderr
            (each, other) = results(run_clients(earlier, server, seed=1))
            assert each["errors"] == other["errors"] == 0
        finally:
            server.kill()
