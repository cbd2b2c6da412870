"""Tests of leaks over a compressed day of a cache server, with many resets of engines and many namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest
from support.cache_server import ServerProcess, short_folder
from support.redis_server import wait_for

from kvstore.model.chunks import Outcome
from kvstore.model.keys import Namespace
from kvstore.server.disk_tiers import MAX_OPEN
from kvstore.testing.harness import EVEN, MINE, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server

A = make_ref(1)
_POOL_THREADS = 12  # of the pools for reads, writes and copies, which start them on demand
_SPARE_DESCRIPTORS = 8  # of tiers that are being opened and closed during the measurement
_GROWTH_BYTES = 24 << 20  # of the allocator, and for a namespace with chunks


class Taken(NamedTuple):
    """Resources of the server's process."""

    threads: int
    descriptors: int
    own_bytes: int


class Day:
    """A server in a separate process, with a disk."""

    def __init__(self, process: ServerProcess) -> None:
        assert process.process is not None
        self.url = process.url
        self.watched = psutil.Process(process.process.pid)
        self.folder = process.folder / "disk"

    def open_tier(self, namespace: Namespace) -> ServerTier:
        return ServerTier.open(TierSetup(namespace, EVEN, UNBOUNDED_BYTES, {"url": self.url, "timeout_s": 60.0}))

    def come_and_go(self, number: int) -> None:
        """Open a tier with a new namespace, which leaves a chunk behind."""
        tier = self.open_tier(Namespace({"model": f"model {number}"}))
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        tier.close()

    def settle(self) -> None:
        """Wait until no file is being written or deleted."""
        operator = Operator(parse_server(self.url, {"timeout_s": 60.0}))
        wait_for("all is on disk", lambda: operator.stats()["tiers"]["disk"]["unwritten"] == 0, timeout_s=120)
        operator.close()

    def taken(self) -> Taken:
        self.settle()
        memory = self.watched.memory_info()
        return Taken(self.watched.num_threads(), self.watched.num_fds(), memory.rss - memory.shared)

    def check(self, before: Taken) -> None:
        """Check that the server takes no more resources than before."""
        most_threads = before.threads + _POOL_THREADS
        wait_for("threads are as many as before", lambda: self.watched.num_threads() <= most_threads)
        most_descriptors = before.descriptors + _SPARE_DESCRIPTORS
        wait_for("descriptors are as many as before", lambda: self.watched.num_fds() <= most_descriptors)
        assert self.taken().own_bytes < before.own_bytes + _GROWTH_BYTES


@pytest.fixture
def day() -> Iterator[Day]:
    with short_folder() as folder:
        process = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 0.5\n")
        try:
            yield Day(process.start())
        finally:
            process.kill()


def resets(day: Day, warm: int, count: int) -> None:
    tier = day.open_tier(MINE)
    before = None
    for number in range(warm + count):
        if number == warm:
            before = day.taken()
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        tier.reset(MINE.at_epoch(f"{number:016x}"))
    assert before is not None
    day.check(before)
    tier.close()
    wait_for(
        "the folders of past epochs are deleted",
        lambda: [path for path in day.folder.iterdir() if not path.name.startswith(".")] == [],
        timeout_s=60,
    )


def namespaces(day: Day, count: int) -> None:
    warm = MAX_OPEN + 20
    for number in range(warm):
        day.come_and_go(number)
    before = day.taken()
    for number in range(warm, warm + count):
        day.come_and_go(number)
    day.check(before)
    tier = day.open_tier(Namespace({"model": "model 0"}))  # the first is still there
    assert tier.contains([A]) == [True]
    tier.close()


def test_some_resets(day: Day) -> None:
    resets(day, 30, 60)


def test_some_namespaces(day: Day) -> None:
    namespaces(day, 100)


@pytest.mark.soak
def test_two_thousand_resets(day: Day) -> None:
    resets(day, 100, 2000)


@pytest.mark.soak
def test_two_thousand_namespaces(day: Day) -> None:
    namespaces(day, 2000)
