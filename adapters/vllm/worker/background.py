"""Asynchronous loads and stores: requests wait for their loads while others compute, and stores follow a step.

A load never queues behind a store, and one from memory never behind one that reads a slower tier, which may hang. A few
of the slower ones run at once. Everything else here is for the model's thread, which starts the moves and collects the
results.

On a device the model's thread also launches a step's gathers, on a separate stream, because a thread that is late would
read blocks that have been overwritten. ``fence`` then orders the model's launches after them on the device, and only
the background thread waits for their bytes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from torch.profiler import record_function

from kvstore.adapters.vllm.plan import Fetch
from kvstore.index.plans import Place
from kvstore.model.keys import PrefixKey
from kvstore.model.threads import open_pool, start
from kvstore.paged.streams import DeviceEvent
from kvstore.transfer.counters import MoverCounters
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StartedStores, StoreJob
from kvstore.transfer.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

SLOW_LOADS: Final = 4  # at once, of those that read a slower tier


class Fetched(NamedTuple):
    """A load that has ended, with its time from its plan on; revoked chunks count as ``failed``."""

    fetch: Fetch
    result: LoadResult
    seconds: float


class Arrived(NamedTuple):
    """A chunk that has reached its slot while its load continues; others may load it from there."""

    fetch: int
    key: PrefixKey


class Saved(NamedTuple):
    """The stores of a step that have ended, the requests whose last stores these were, and the time they took."""

    step: int
    failed: set[PrefixKey]
    ended: Collection[str]
    seconds: float


class _Saving(NamedTuple):
    """Stores of a step that are under way, and the requests whose last stores these are."""

    step: int
    jobs: Sequence[StoreJob]
    ended: Collection[str]
    saved: Future[tuple[set[PrefixKey], float]]


class Background:
    """Background loads and stores, for which no step waits.

    Args:
        mover: the model's; ``stop`` and ``wait`` must come before its ``close``.
    """

    def __init__(self, mover: Mover) -> None:
        self._model = mover.paged
        self._loader, self._storer = mover.for_thread(), mover.for_thread()
        self._slow_loaders = [self._loader.for_thread(self._loader.paged) for _ in range(SLOW_LOADS)]
        self._idle_loaders: SimpleQueue[Mover] = SimpleQueue()  # of these; one for each thread
        for loader in self._slow_loaders:
            self._idle_loaders.put(loader)
        self._loads = open_pool(1, "kvstore-fetch")
        self._slow_loads = open_pool(SLOW_LOADS, "kvstore-fetch-slow")
        self._stores = open_pool(1, "kvstore-save")
        self._fetching: dict[int, tuple[Fetch, Future[LoadResult], Stopwatch]] = {}
        self._saving: deque[_Saving] = deque()
        self._following: deque[Future[None]] = deque()  # actions that have to follow stores
        self._revoked: set[int] = set()
        self._arrived: deque[Arrived] = deque()

    def counters(self) -> MoverCounters:
        """Return the counters of all moves here so far."""
        return MoverCounters.sum(mover.counters for mover in (self._loader, *self._slow_loaders, self._storer))

    def fetch(self, fetch: Fetch) -> None:
        """Start a load, after what the model's thread has launched so far."""
        event, watch, now_s = self._model.streams.now(), Stopwatch(self._loader.paged), time.perf_counter()
        is_slow = any(job.step.source is not Place.MEMORY for job in fetch.loads)
        if is_slow:
            load = partial(self._load_slowly, fetch, event, watch, now_s)
            loaded = start(self._slow_loads, load, lambda: LoadResult(_keys_of(fetch.loads), set()))
        else:
            loaded = self._loads.submit(self._load, self._loader, fetch, event, watch, now_s)
        self._fetching[fetch.number] = (fetch, loaded, watch)

    def save(self, step: int, jobs: Sequence[StoreJob], ended: Collection[str]) -> None:
        """Start a step's stores, after what the model's thread has launched so far, and after all earlier ones."""
        self._storer.paged.streams.hold(self._model.streams.now())
        with record_function("kvstore::gather"):
            stores = self._storer.start_store(jobs)
        self._saving.append(_Saving(step, jobs, ended, self._stores.submit(self._store, stores)))

    def fence(self) -> None:
        """Allow later work of the model's thread to overwrite blocks that are being stored."""
        if self._storer.launches:
            self._model.fence()
        else:
            self.finish_saves()

    def follow_saves(self, action: Callable[[], None]) -> None:
        """Run an action once all stores so far have been handed to the slower tiers."""
        if all(saving.saved.done() for saving in self._saving):
            action()
        else:
            self._following.append(self._stores.submit(action))

    def revoke_fetches(self) -> None:
        """Fail all loads in flight, because their chunks are out of date."""
        self._revoked.update(self._fetching)

    def forget_saves(self) -> None:
        """Include the stores in flight when all chunks are about to be forgotten.

        Those that a device carries out have their slots, and end in vain. Others have yet to read their blocks, and are
        waited for.
        """
        if not self._storer.launches:
            self.finish_saves()

    def finish_saves(self) -> None:
        """Wait until stores are in memory. Only the host copies at once; a device has other work to do first."""
        wait_for([saving.saved for saving in self._saving])

    def take_arrived(self) -> list[Arrived]:
        """Return the chunks that loads in flight have brought since the last call. Call it before ``take_fetched``."""
        taken = [self._arrived.popleft() for _ in range(len(self._arrived))]
        return [one for one in taken if one.fetch in self._fetching and one.fetch not in self._revoked]

    def take_fetched(self) -> list[Fetched]:
        """Return the loads that have ended since the last call."""
        done = [
            (fetch, self._result_of(fetch, loaded), watch)
            for fetch, loaded, watch in self._fetching.values()
            if loaded.done() and watch.has_stopped
        ]
        for fetch, _, _ in done:
            del self._fetching[fetch.number]
        ended = [Fetched(fetch, self._unless_revoked(fetch, result), watch.seconds) for fetch, result, watch in done]
        self._revoked &= self._fetching.keys()
        return ended

    def _result_of(self, fetch: Fetch, loaded: Future[LoadResult]) -> LoadResult:
        error = loaded.exception()
        if error is None:
            return loaded.result()
        logger.error("a defect: an asynchronous load has failed; its tokens are computed instead", exc_info=error)
        return LoadResult(_keys_of(fetch.loads), set())

    def _unless_revoked(self, fetch: Fetch, result: LoadResult) -> LoadResult:
        if fetch.number not in self._revoked:
            return result
        return LoadResult(_keys_of(fetch.loads), result.lost)

    def take_saved(self) -> list[Saved]:
        """Return the stores that have ended since the last call, in their order."""
        while self._following and self._following[0].done():
            self._following.popleft().result()
        ended = []
        while self._saving and self._saving[0].saved.done():
            ended.append(self._result_of_save(self._saving.popleft()))
        return ended

    def _result_of_save(self, saving: _Saving) -> Saved:
        error = saving.saved.exception()
        if error is None:
            failed, seconds = saving.saved.result()
            return Saved(saving.step, failed, saving.ended, seconds)
        logger.error("a defect: an asynchronous store has failed, and nothing of it is kept", exc_info=error)
        return Saved(saving.step, _keys_of(saving.jobs), saving.ended, 0.0)

    def ends(self) -> list[DeviceEvent]:
        """Return the ends of the work that was launched on the device here so far."""
        return [end for mover in (self._loader, self._storer) for end in mover.paged.streams.ends()]

    @property
    def num_saving(self) -> int:
        """Number of chunks that are being stored. From any thread."""
        return sum(len(saving.jobs) for saving in tuple(self._saving) if not saving.saved.done())

    def wait(self, timeout_s: float) -> bool:
        """Wait until the threads are done with all loads and stores that have begun; False if time ran out first.

        A read may take until its tier's deadline.
        """
        under_way: list[Future[Any]] = [*(loaded for _, loaded, _ in self._fetching.values()), *self._following]
        under_way += [saving.saved for saving in self._saving]
        return not wait_for([move for move in under_way if not move.cancelled()], timeout_s).not_done

    def stop(self) -> None:
        """Start nothing more. All threads end once they are idle."""
        for executor in (self._loads, self._slow_loads, self._stores):
            executor.shutdown(wait=False, cancel_futures=True)

    def _load_slowly(self, fetch: Fetch, event: DeviceEvent, watch: Stopwatch, planned_s: float) -> LoadResult:
        loader = self._idle_loaders.get()
        try:
            return self._load(loader, fetch, event, watch, planned_s)
        finally:
            self._idle_loaders.put(loader)

    def _load(self, loader: Mover, fetch: Fetch, event: DeviceEvent, watch: Stopwatch, planned_s: float) -> LoadResult:
        watch.queued_s = time.perf_counter() - planned_s
        loader.paged.streams.hold(event)
        loader.on_arrival = lambda step: self._arrived.append(Arrived(fetch.number, step.ref.prefix_key))
        with record_function("kvstore::load"), watch:
            return loader.load(fetch.loads)

    def _store(self, stores: StartedStores) -> tuple[set[PrefixKey], float]:
        begin_s = time.perf_counter()
        with record_function("kvstore::store"):
            failed = self._storer.finish_store(stores)
        return failed, time.perf_counter() - begin_s


def _keys_of(jobs: Iterable[LoadJob | StoreJob]) -> set[PrefixKey]:
    return {job.step.ref.prefix_key for job in jobs}
