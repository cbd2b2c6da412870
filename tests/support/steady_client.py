"""One process of clients that expect no failure: each stores chunks, finds all it has stored, and checks every byte.

Its arguments are URLS THREADS SEED. It prints a line once each client has stored something; it ends when its input
ends, and prints one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import make_buffer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.server.tier import ServerTier
from support.server_client import LAYOUTS, content

NUM_CHUNKS = 40  # of each thread
LAYOUT = LAYOUTS[0]


class SteadyClient:
    """A client with chunks of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self.counts = Counter[str]()
        self.failures: list[str] = []
        self.longest_s = 0.0
        self._dice = random.Random(seed)
        self._seed = seed
        setup = TierSetup(Namespace({"model": "steady"}), LAYOUT, UNBOUNDED_BYTES, {"url": url, "timeout_s": 20.0})
        self._tier = ServerTier.open(setup)
        self._buffer = make_buffer(LAYOUT.slot_bytes)
        self._stored: list[ChunkRef] = []

    def work(self, ending: threading.Event) -> None:
        while not ending.is_set():
            begin_s = time.monotonic()
            try:
                self._step()
            except TierError as error:
                self._fail(str(error))
            self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
            self.counts["calls"] += 1
        for ref in self._stored:
            self._read(ref)
        self._tier.close()

    def _step(self) -> None:
        if self._dice.random() < 0.3 or not self._stored:
            ref = ChunkRef((self._seed << 32 | self._dice.randrange(NUM_CHUNKS)).to_bytes(16, "little"), 4)
            self._buffer[:] = content(ref, 0, len(self._buffer))
            (outcome,) = self._tier.put([Transfer(ref, self._buffer)])
            if outcome is not Outcome.STORED:
                self._fail(f"put: {outcome}")
            elif ref not in self._stored:
                self._stored.append(ref)
            self.counts["stored"] += 1
        elif self._dice.random() < 0.7:
            self._read(self._dice.choice(self._stored))
        elif not all(self._tier.contains(self._stored)):
            self._fail("a stored chunk is missing")

    def _read(self, ref: ChunkRef) -> None:
        self._buffer[:] = 0
        (outcome,) = self._tier.get([Transfer(ref, self._buffer)])
        if outcome is not Outcome.HIT:
            self._fail(f"get: {outcome}")
        elif (self._buffer != content(ref, 0, len(self._buffer))).any():
            self.counts["wrong"] += 1
        self.counts["read"] += 1

    def _fail(self, what: str) -> None:
        self.counts["failed"] += 1
        self.failures.append(what)


def main() -> None:
    urls, num_threads, seed = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    clients = [SteadyClient(urls[number % len(urls)], seed * num_threads + number) for number in range(num_threads)]
    ending = threading.Event()
    threads = [threading.Thread(target=client.work, args=(ending,)) for client in clients]
    for thread in threads:
        thread.start()
    while not all(client.counts["stored"] for client in clients):
        time.sleep(0.01)
    print("begun", flush=True)
    sys.stdin.read()
    ending.set()
    for thread in threads:
        thread.join()
    counts = sum((client.counts for client in clients), Counter[str]())
    failures = [failure for client in clients for failure in client.failures][:5]
    print(json.dumps({**counts, "failures": failures, "longest_s": max(client.longest_s for client in clients)}))
