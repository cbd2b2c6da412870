"""Processes of clients of one cache server, of which some are killed or frozen while they work."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import psutil

from support.forked import ForkedProcess, forker
from support.server_client import Result


class Clients:
    """Processes of which one at a time is killed and started again, or frozen for a while."""

    def __init__(self, urls: list[str], seconds: float, threads: int, seed: int = 0) -> None:
        self.urls = urls
        self.until_s = time.monotonic() + seconds
        self.threads = threads
        self.dice = random.Random(seed)
        self.seed = 1_000 * seed
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
            assert process.poll() is None, f"a client ended with {process.returncode}: {process.communicate()[0]!r}"
            if self.dice.random() < 0.5:
                process.kill()
                said, _ = process.communicate()
                assert not said, f"a client said before it was killed: {said!r}"
                self.processes[which] = self.start(self.urls[which])
            else:
                process.send_signal(signal.SIGSTOP)
                time.sleep(self.dice.uniform(0.1, 1.0))
                process.send_signal(signal.SIGCONT)
        return own_bytes

    def kill(self) -> None:
        """End all processes without their results."""
        for process in self.processes:
            process.kill()

    def results(self) -> Result:
        """Wait for the processes, and return the sum of their results."""
        total = Result()
        for process in self.processes:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, f"a client ended with {process.returncode}: {said!r}"
            for name, value in json.loads(said).items():
                setattr(total, name, getattr(total, name) + value)
        return total
