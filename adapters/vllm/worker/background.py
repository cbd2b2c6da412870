"""Asynchronous loads and stores: requests wait for their loads while others compute, and stores follow a step.

Two threads, so that a load never queues behind a store. Everything else here is for the model's thread, which starts
the moves and collects what has ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple, TypeVar

from torch.profiler import record_function

from kvstore.adapters.vllm.plan import Fetch
from kvstore.keys import PrefixKey
from kvstore.paged.streams import Moment
from kvstore.transfer.mover import LoadResult, Mover, MoverCounters, StoreJob

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fetched(NamedTuple):
    """A load that has ended, and how long it took; revoked chunks count as ``failed``."""

    fetch: Fetch
    result: LoadResult
    seconds: float


class Saved(NamedTuple):
    """The stores of a step that have ended, the requests whose last stores these were, and how long it took."""

    step: int
    failed: set[PrefixKey]
    ended: Collection[str]
    seconds: float


class Background:
    """Carries out what no step waits for.

    Args:
        mover: the model's; ``close`` must come before its own.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._loader, self._storer = mover.for_thread(), mover.for_thread()
        self._loads = ThreadPoolExecutor(1, "kvstore-fetch")
        self._stores = ThreadPoolExecutor(1, "kvstore-save")
        self._fetching: dict[int, tuple[Fetch, Future[tuple[LoadResult, float]]]] = {}
        self._saving: deque[tuple[int, Collection[str], Future[tuple[set[PrefixKey], float]]]] = deque()
        self._revoked: set[int] = set()

    def counters(self) -> MoverCounters:
        """What was moved here so far."""
        return MoverCounters.sum([self._loader.counters, self._storer.counters])

    def fetch(self, fetch: Fetch) -> None:
        """Start a load, after what the model's thread has launched so far."""
        moment = self._mover.paged.moment()
        self._fetching[fetch.number] = (fetch, self._loads.submit(self._load, fetch, moment))

    def save(self, step: int, jobs: Sequence[StoreJob], ended: Collection[str]) -> None:
        """Start a step's stores, after what the model's thread has launched so far, and after all earlier ones."""
        moment = self._mover.paged.moment()
        self._saving.append((step, ended, self._stores.submit(self._store, jobs, moment)))

    def revoke_fetches(self) -> None:
        """Let all loads in flight fail: what they bring is out of date."""
        self._revoked.update(self._fetching)

    def finish_saves(self) -> None:
        """Wait until stores have read all their blocks. They copy to memory, so no tier can hold them up."""
        wait_for([saved for _, _, saved in self._saving])

    def take_fetched(self) -> list[Fetched]:
        """Loads that have ended since the last call."""
        done = [(fetch, *loaded.result()) for fetch, loaded in self._fetching.values() if loaded.done()]
        for fetch, _, _ in done:
            del self._fetching[fetch.number]
        ended = [Fetched(fetch, self._unless_revoked(fetch, result), seconds) for fetch, result, seconds in done]
        self._revoked &= self._fetching.keys()
        return ended

    def _unless_revoked(self, fetch: Fetch, result: LoadResult) -> LoadResult:
        if fetch.number not in self._revoked:
            return result
        return LoadResult({job.step.ref.prefix_key for job in fetch.loads}, result.lost)

    def take_saved(self) -> list[Saved]:
        """Stores that have ended since the last call, in their order."""
        ended = []
        while self._saving and self._saving[0][2].done():
            step, requests, saved = self._saving.popleft()
            ended.append(Saved(step, saved.result()[0], requests, saved.result()[1]))
        return ended

    def close(self, timeout_s: float) -> None:
        """End both threads once they are idle: a read may take until its tier's deadline."""
        for executor in (self._loads, self._stores):
            executor.shutdown(wait=False, cancel_futures=True)
        under_way: list[Future[Any]] = [loaded for _, loaded in self._fetching.values()]
        under_way += [saved for _, _, saved in self._saving]
        if wait_for([move for move in under_way if not move.cancelled()], timeout_s).not_done:
            logger.warning("asynchronous load left behind: it has not ended within %s s", timeout_s)

    def _load(self, fetch: Fetch, moment: Moment) -> tuple[LoadResult, float]:
        return _timed("kvstore::load", self._loader, moment, lambda: self._loader.load(fetch.loads))

    def _store(self, jobs: Sequence[StoreJob], moment: Moment) -> tuple[set[PrefixKey], float]:
        return _timed("kvstore::store", self._storer, moment, lambda: self._storer.store(jobs))


def _timed(what: str, mover: Mover, moment: Moment, move: Callable[[], T]) -> tuple[T, float]:
    begin_s = time.perf_counter()
    mover.paged.after(moment)
    with record_function(what):
        moved = move()
    return moved, time.perf_counter() - begin_s
