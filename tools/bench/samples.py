"""Samples: a path and its limit, timed one right after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from kvstore.errors import KVStoreError
from kvstore.keys import Namespace

T = TypeVar("T")

NAMESPACE = Namespace({"model": "bench"})
MIN_ROUNDS = 7
LOOKUP_ROUNDS = 300
LOOKUP_CHUNKS = 128
WARM_UP_ROUNDS = 3  # the second batch fills the pool, the third is the first to recycle

Tick = Callable[[str], None]
"""Callback before each round, with the name of the measurement."""
Limit = Callable[[], object]
"""Call that does the work a path is compared with."""


class BenchError(KVStoreError):
    """A path lost or changed bytes, so its times are meaningless."""


class Pair(NamedTuple):
    """One sample: the times of a path and of its limit, measured one right after the other."""

    limit_s: float
    path_s: float


def require(kept: bool, broken: str) -> None:
    """End the run if a path did not do the work it was timed for.

    Raises:
        BenchError: ``kept`` is false; the message is ``broken``.
    """
    if not kept:
        raise BenchError(broken)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call, and its result."""
    begin_s = time.perf_counter()
    result = call()
    return time.perf_counter() - begin_s, result


def alternating(name: str, rounds: int, tick: Tick) -> Iterator[bool]:
    """Announce each round, warm-up included, and yield True in every other round, in which the limit runs first.

    Alternating the order keeps caches and queues left by one side from always favouring the other.
    """
    for number in range(WARM_UP_ROUNDS + rounds):
        tick(name)
        yield number % 2 == 0


def paired(limit: Limit, path: Callable[[], T], *, limit_first: bool) -> tuple[Pair, T]:
    """Time a path and its limit, one right after the other; return the times, and the path's result."""
    limit_s = timed(limit)[0] if limit_first else 0.0
    path_s, result = timed(path)
    if not limit_first:
        limit_s = timed(limit)[0]
    return Pair(limit_s, path_s), result


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, as its OpenMP threads, idle after filling and checking, spin in the timed part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
