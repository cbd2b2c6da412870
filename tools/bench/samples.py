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
"""Called with what is measured before each of its rounds."""


class BenchError(KVStoreError):
    """A path lost or changed what it moved: its times mean nothing."""


class Pair(NamedTuple):
    """One sample: a path, and its limit measured right beside it."""

    limit_s: float
    path_s: float


def require(kept: bool, broken: str) -> None:
    """End the run over a path that did not do what it was timed for.

    Raises:
        BenchError: with ``broken``, unless ``kept``.
    """
    if not kept:
        raise BenchError(broken)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """How long a call took, in seconds, and what it returned."""
    begin_s = time.perf_counter()
    result = call()
    return time.perf_counter() - begin_s, result


def paired(limit: Callable[[], object], path: Callable[[], T], *, limit_first: bool) -> tuple[Pair, T]:
    """Time a path and its limit, one right after the other, and return the path's result with the times.

    Callers alternate ``limit_first``, so that neither always finds what the other left in caches and queues.
    """
    limit_s = timed(limit)[0] if limit_first else 0.0
    path_s, result = timed(path)
    if not limit_first:
        limit_s = timed(limit)[0]
    return Pair(limit_s, path_s), result


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Filling and checking use torch, whose idle OpenMP threads would spin into the timed part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
