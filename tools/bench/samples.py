"""Samples: a path and its limit, timed one right after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from kvstore.model.errors import KVStoreError
from kvstore.model.keys import Namespace

T = TypeVar("T")

NAMESPACE = Namespace({"model": "bench"})
MIN_ROUNDS = 7
LOOKUP_ROUNDS = 300
LOOKUP_CHUNKS = 128
WARM_UP_ROUNDS = 3  # the second batch fills the pool, the third is the first to recycle

Tick = Callable[[], object]
"""Callback before each round."""
Limit = Callable[[], object]
"""Call that does the work a path is compared with."""


class BenchError(KVStoreError):
    """A path lost or changed bytes, so its times are meaningless."""


class Pair(NamedTuple):
    """One sample: the times of a path and of its limit, measured one right after the other."""

    limit_s: float
    path_s: float


class Pairing(NamedTuple):
    """Order of path and limit in one round."""

    limit_first: bool
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, limit: Limit, path: Callable[[], T]) -> tuple[Pair, T]:
        """Time a path and its limit, one right after the other; return the times, and the path's result."""
        limit_s = timed(limit, self.clock)[0] if self.limit_first else 0.0
        path_s, result = timed(path, self.clock)
        if not self.limit_first:
            limit_s = timed(limit, self.clock)[0]
        return Pair(limit_s, path_s), result


def require(kept: bool, broken: str) -> None:
    """End the run if a path did not do the work it was timed for.

    Raises:
        BenchError: ``kept`` is false; the message is ``broken``.
    """
    if not kept:
        raise BenchError(broken)


def timed(call: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[float, T]:
    """Return the seconds of a call, and its result."""
    begin_s = clock()
    result = call()
    return clock() - begin_s, result


def alternating(rounds: int, tick: Tick = lambda: None, warm_up: int = WARM_UP_ROUNDS) -> Iterator[Pairing]:
    """Announce each round, warm-up included, and yield its pairing; the limit runs first in every other round.

    Alternating the order keeps caches and queues left by one side from always favouring the other.
    """
    for number in range(warm_up + rounds):
        tick()
        yield Pairing(number % 2 == 0)


def columns(found: Sequence[Sequence[Pair]], warm_up: int = WARM_UP_ROUNDS) -> list[tuple[Pair, ...]]:
    """Return the samples of each path, given those of each round, without the warm-up rounds."""
    return list(zip(*found[warm_up:], strict=True))


def sampled(limit: Limit, path: Callable[[], object], rounds: int) -> list[Pair]:
    """Return the samples of a path that needs nothing between two rounds."""
    return [pair(limit, path)[0] for pair in alternating(rounds)][WARM_UP_ROUNDS:]
