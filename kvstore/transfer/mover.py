"""Execution of the index's plans: copies between paged KV cache, slots and slower tiers. It makes no decisions.

On the host gathers and scatters run within the call, because the blocks belong to a model that must not run meanwhile.
On a device they are launched in the model's order, and only the consumer of the bytes waits, as slots record the end of
their uses. Reads from slower tiers run on lanes' threads, and each chunk is scattered as it arrives; writes follow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvstore.format.deviation import deviation
from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.memory.slabs import Filling, LabelledPool
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.model.threads import start
from kvstore.paged.base import BlockIds, ChunkBlocks, Copiers, PagedKV
from kvstore.paged.streams import DeviceEvent, Direction
from kvstore.tiers.base import start_closing
from kvstore.transfer.borrowing import use_borrowed
from kvstore.transfer.counters import MoverCounters
from kvstore.transfer.hot import HotChunks
from kvstore.transfer.lane import Arrival, Flushed, Lane
from kvstore.transfer.launcher import Launcher

logger = logging.getLogger(__name__)
_END_WAIT_S = 5.0
SCATTER_BYTES = 32 << 20  # scattered at once on the host while more is in transit, for threads disturb each other
SCATTER_PARTS = 4  # at least, of a small load, or all of its copies would begin after the last read
GATHER_BYTES = 64 << 20  # gathered at once on the host: each time threads wait for each other, then writes begin
FIRST_BYTES = 12 << 20  # gathered first, and then twice as much each time, as slower tiers are idle until then


class LoadJob(NamedTuple):
    """A load and its destination: the chunk's blocks from ``first_block`` on are copied to ``block_ids``."""

    step: LoadStep
    block_ids: BlockIds
    first_block: int


class StoreJob(NamedTuple):
    """A store and its source: the chunk's blocks."""

    step: StoreStep
    block_ids: BlockIds


class LoadResult(NamedTuple):
    """Keys of loads that ``failed``, and of those among them that are ``lost``: missing or damaged."""

    failed: set[PrefixKey]
    lost: set[PrefixKey]

    def note(self, ref: ChunkRef, outcome: Outcome) -> None:
        """Add the outcome of a chunk."""
        if outcome is not Outcome.HIT:
            self.failed.add(ref.prefix_key)
        if outcome in {Outcome.MISS, Outcome.CORRUPT}:
            self.lost.add(ref.prefix_key)


class StartedStores(NamedTuple):
    """Stores that have begun.

    Attributes:
        waiting: those not known to be complete, each with the end of its copy; on the host they are not copied yet.
        failed: keys of those that did not begin.
        generations: clears and resets of each lane when the stores began; another one voids them.
    """

    waiting: deque[tuple[StoreJob, DeviceEvent]]
    failed: set[PrefixKey]
    generations: Mapping[Place, int]


class Mover:
    """Data path of one worker.

    ``load``, ``store``, ``clear``, ``reset`` and the methods for ``layerwise`` are called from one thread at a time;
    ``for_thread`` makes a mover for another one. The index ensures that no two of them use a slot at the same time.

    Args:
        paged: the model's KV cache.
        cpu: the pool; ``close`` closes it.
        lanes: the slower tiers, each with the threads that serve it; ``close`` closes them.
        hot: copies of frequently loaded chunks on the device; ``close`` closes it.
        stuck: slots that abandoned reads may still write to, shared with another mover.
        staging_only: no chunk stays in the pool. Chunks lent by a remote tier are then scattered directly from there.
        copy_threads: number of threads that gather and scatter at once on the CPU, including the caller.
    """

    def __init__(
        self,
        paged: PagedKV,
        cpu: LabelledPool,
        lanes: Mapping[Place, Lane],
        hot: HotChunks | None = None,
        stuck: dict[int, list[Future[Any]]] | None = None,
        *,
        staging_only: bool = False,
        copy_threads: int = 1,
    ) -> None:
        self.counters = MoverCounters()
        self.on_arrival: Callable[[LoadStep], object] = bool  # called for each chunk read into its slot
        self._copiers = Copiers(copy_threads)
        self.paged = paged.with_help(self._copiers) if copy_threads > 1 else paged
        self.cpu = cpu
        self._lanes = dict(lanes)
        self._hot = hot
        self._layers = ThreadPoolExecutor(1, "kvstore-layers")  # has no thread before it is used
        self._stuck = {} if stuck is None else stuck
        self._staging_only = staging_only
        self.launcher = Launcher(cpu, paged.streams, self._note_failure)
        self.launches = paged.streams.now() is not None  # copies run asynchronously, on a device
        may_borrow = staging_only and Place.DISK not in self._lanes and not self.launches
        self._may_lend = self._lanes.get(Place.REMOTE) if may_borrow else None

    def for_thread(self, paged: PagedKV | None = None) -> Mover:
        """Return a mover over the same tiers for another thread, for blocks that the model does not use meanwhile.

        It has separate counters, uses no hot copies, and must be idle when this one is closed. ``paged`` is that of a
        mover whose streams and buffers it shares for loads; None for separate ones.
        """
        paged = self.paged.for_thread() if paged is None else paged
        return Mover(paged, self.cpu, self._lanes, stuck=self._stuck, staging_only=self._staging_only)

    def load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        """Load chunks into the paged cache; the blocks of failed ones hold garbage.

        A job without blocks only loads its chunk into its slot.
        """
        lender = self._may_lend
        if lender is None or not lender.lends:  # a tier with peers stops lending, because their chunks are copied
            return self._load_through_slots(jobs)
        lent: list[LoadJob] = []
        others: list[LoadJob] = []
        for job in jobs:
            (lent if self._is_lent(job) else others).append(job)
        result, borrowed = self._load_through_slots(others), self._load_borrowed(lender, lent)
        return LoadResult(result.failed | borrowed.failed, result.lost | borrowed.lost)

    def _is_lent(self, job: LoadJob) -> bool:
        """Tell if a chunk is read in place in the remote tier, which includes one missing from its slot."""
        ref, slot, source, _ = job.step
        is_elsewhere = source is Place.REMOTE or (source is Place.MEMORY and self.cpu.read(slot, ref) is None)
        return is_elsewhere and len(job.block_ids) > 0

    def _load_borrowed(self, lender: Lane, jobs: Sequence[LoadJob]) -> LoadResult:
        def scatter(number: int, payload: ByteArray) -> None:
            job = jobs[number]
            self.paged.scatter(job.block_ids, payload, job.step.ref.num_blocks, job.first_block)
            self.counters.chunks_loaded_from_remote += 1
            self.note_load(job, None, is_hot=False)

        result = LoadResult(set(), set())
        for job, outcome in zip(jobs, use_borrowed(lender, [job.step.ref for job in jobs], scatter), strict=True):
            result.note(job.step.ref, outcome)
        return result

    def _load_through_slots(self, jobs: Sequence[LoadJob]) -> LoadResult:
        reads = [None if job.step.source is Place.MEMORY else self.start_read(job.step) for job in jobs]
        try:
            return self._scatter_arrivals(jobs, reads)
        finally:  # also if scattering raises, because no read may use a released slot
            for job, read in zip(jobs, reads, strict=True):
                if read is not None:
                    self.end_read(job.step, read)

    def end_read(self, step: LoadStep, read: Future[Arrival]) -> None:
        """Cancel a read or wait for it; if it timed out, mark its slot as stuck."""
        if read.cancel() or read.exception() is not None:  # one that raised has also ended
            return
        if (pending := read.result().pending) is not None:
            self._stuck.setdefault(step.slot, []).append(pending)
            self.counters.read_timeouts += 1

    def _scatter_arrivals(self, jobs: Sequence[LoadJob], reads: Sequence[Future[Arrival] | None]) -> LoadResult:
        result = LoadResult(set(), set())
        arrived: list[tuple[LoadJob, ByteArray]] = []
        at_least = 1 if self.launches else min(SCATTER_BYTES // self.cpu.slot_bytes, len(jobs) // SCATTER_PARTS)
        for job, read in zip(jobs, reads, strict=True):
            if read is not None and not read.done() and len(arrived) >= at_least:
                self._scatter(arrived, result)  # while the next one is in transit
                arrived = []
            ref, slot = job.step[:2]
            outcome = Outcome.HIT if read is None else read.result().outcome
            if read is not None and outcome is Outcome.HIT:
                self.note_arrival(job.step)
            source = self.cpu.read(slot, ref) if outcome is Outcome.HIT else None
            if source is None:
                self.counters.mislabelled_slots += outcome is Outcome.HIT
                result.note(ref, Outcome.FAILED if outcome is Outcome.HIT else outcome)
            else:
                arrived.append((job, source))
        self._scatter(arrived, result)
        return result

    def _scatter(self, arrived: Sequence[tuple[LoadJob, ByteArray]], result: LoadResult) -> None:
        """Copy chunks from their slots, or from copies on the device, to their blocks."""
        if not arrived:
            return
        fillings = [self.cpu.filling(job.step.slot, job.step.ref) for job, _ in arrived]
        hot = [self.scatter_hot(job, filling) for (job, _), filling in zip(arrived, fillings, strict=True)]
        cold = [one for one, is_hot in zip(arrived, hot, strict=True) if len(one[0].block_ids) and not is_hot]
        chunks = [ChunkBlocks(job.block_ids, source, job.step.ref.num_blocks, job.first_block) for job, source in cold]
        slots = [job.step.slot for job, _ in cold]
        if self.launcher.launch(slots, Direction.IN, lambda: self.paged.scatter_chunks(chunks)) is None:
            result.failed.update(job.step.ref.prefix_key for job, _ in cold)
        for (job, _), filling, is_hot in zip(arrived, fillings, hot, strict=True):
            if job.step.ref.prefix_key not in result.failed:
                self.note_load(job, filling, is_hot=is_hot)

    def _note_failure(self, num_chunks: int) -> None:
        self.counters.failed_copies += num_chunks

    def deviation(self, job: LoadJob) -> float | None:
        """Return the deviation of a chunk's blocks from its slot; None if one of them cannot be read."""
        stored = self.cpu.read(job.step.slot, job.step.ref)
        if stored is None:
            return None
        num_blocks = job.step.ref.num_blocks
        fresh = np.zeros(self.paged.layout.payload_bytes(num_blocks), np.uint8)  # as where no row is gathered
        slots, ends = [job.step.slot], []
        self.launcher.attempt(slots, Direction.OUT, lambda: ends.append(self.paged.gather(job.block_ids, fresh)))
        for end in ends or self.paged.streams.ends():  # a part of what failed may write to ``fresh``
            self.paged.streams.reach(end)
        return deviation(fresh, stored, self.paged.layout, num_blocks) if ends else None

    def in_background(self, work: Callable[[], None]) -> Future[None]:
        """Start work on the thread that scatters layers while the model computes, or do it where there is none."""
        return start(self._layers, work, work)

    def scatter_hot(self, job: LoadJob, filling: Filling | None) -> bool:
        """Load a chunk from its copy on the device, if that is a copy of its slot's content."""
        if self._hot is None or filling is None or not len(job.block_ids):
            return False
        return self._hot.scatter(job.step.ref, filling, job.block_ids, job.first_block)

    def note_arrival(self, step: LoadStep) -> None:
        """Publish and count a chunk after a complete read into its slot."""
        self.cpu.publish(step.slot, step.ref)
        self.on_arrival(step)
        self.counters.chunks_loaded_from_disk += step.source is Place.DISK
        self.counters.chunks_loaded_from_remote += step.source is Place.REMOTE

    def note_load(self, job: LoadJob, filling: Filling | None, *, is_hot: bool) -> None:
        """Count a loaded chunk; ``filling`` is its slot's content then, None if it did not pass through its slot."""
        self.counters.chunks_loaded += 1
        self.counters.chunks_loaded_from_gpu += is_hot
        self.counters.bytes_scattered += self.paged.bytes_of(job.block_ids)
        if self._hot is None or filling is None or is_hot:
            return
        if self.paged.bytes_of(job.block_ids) == self.paged.layout.payload_bytes(job.step.ref.num_blocks):
            self._hot.note_load(job.step.ref, filling, job.block_ids)

    def store(self, jobs: Sequence[StoreJob]) -> set[PrefixKey]:
        """Gather chunks into their slots and start their writes. Returns the keys of those that failed.

        If gathering raises, the caller must count all of ``jobs`` as failed.
        """
        return self.finish_store(self.start_store(jobs))

    def start_store(self, jobs: Sequence[StoreJob]) -> StartedStores:
        """Launch a device's gathers in stream order, for ``finish_store``. Raises as ``store`` does."""
        stuck = {job.step.slot for job in jobs if self.is_stuck(job.step.slot)}
        failed = self.refuse(job for job in jobs if job.step.slot in stuck)
        ours = [job for job in jobs if job.step.slot not in stuck]
        generations = self.generations()
        if not self.launches:
            return StartedStores(deque((job, None) for job in ours), failed, generations)
        gathering = [job for job in ours if job.step.gather]
        with ExitStack() as on_error:
            on_error.callback(self.refuse, ours)
            events = self._launch_gathers(gathering)
            on_error.pop_all()
        if events is None:
            failed |= self.refuse(gathering)
            ours, events = [job for job in ours if not job.step.gather], ()
        ends = dict(zip((job.step.slot for job in gathering), events, strict=False))
        return StartedStores(deque((job, ends.get(job.step.slot)) for job in ours), failed, generations)

    def _launch_gathers(self, jobs: Sequence[StoreJob]) -> Sequence[DeviceEvent] | None:
        slots, chunks = [job.step.slot for job in jobs], [self._source(job) for job in jobs]
        return self.launcher.launch(slots, Direction.OUT, lambda: self.paged.gather_chunks(chunks))

    def _source(self, job: StoreJob) -> ChunkBlocks:
        """Claim a chunk's slot, and return it with the chunk's blocks."""
        slot = self.cpu.claim_on_device(job.step.slot, self.paged.streams)
        return ChunkBlocks(job.block_ids, slot, job.step.ref.num_blocks, 0)

    def finish_store(self, stores: StartedStores) -> set[PrefixKey]:
        """Publish chunks as their bytes arrive in memory, and start their writes. On any thread, one at a time."""
        waiting, failed, generations = stores
        most_bytes = FIRST_BYTES if any(job.step.targets for job, _ in waiting) else GATHER_BYTES
        try:
            while waiting:
                following = self._gather_next(waiting, min(most_bytes, GATHER_BYTES))
                most_bytes *= 2
                for job, event in following:
                    self.paged.streams.reach(event)
                    waiting.popleft()
                    failed |= self.note_store(job, generations)
        finally:
            self.refuse(job for job, _ in waiting)  # none, unless a copy raised
        return failed

    def _gather_next(
        self, waiting: Iterable[tuple[StoreJob, DeviceEvent]], most_bytes: int
    ) -> list[tuple[StoreJob, DeviceEvent]]:
        """Return the stores that complete next. On the host they are gathered here, as many as go well together."""
        if self.launches:
            return [*islice(waiting, 1)]
        most = max(1, most_bytes // self.cpu.slot_bytes)
        following = [*islice(waiting, most)]
        events = iter(self.paged.gather_chunks([self._source(job) for job, _ in following if job.step.gather]))
        return [(job, next(events) if job.step.gather else event) for job, event in following]

    def generations(self) -> dict[Place, int]:
        """Return the clears and resets of each lane so far."""
        return {place: lane.generation for place, lane in self._lanes.items()}

    def note_store(self, job: StoreJob, generations: Mapping[Place, int]) -> set[PrefixKey]:
        """Publish a chunk after its gather, which began when there were ``generations``, and start its writes.

        Returns its key if the slot was cleared meanwhile, which fails the store.
        """
        step, ref, slot = job.step, job.step.ref, job.step.slot
        is_there = not step.gather or self.cpu.publish(slot, ref)
        if step.gather and is_there:
            self.counters.chunks_stored += 1
            self.counters.bytes_gathered += self.paged.bytes_of(job.block_ids)
        for target in step.targets:
            self._lanes[target].write(
                ref, slot, generations[target], step.trail, step.tenant, owner=step.owner, until_s=step.until_s
            )
        return set() if is_there else {ref.prefix_key}

    def refuse(self, jobs: Iterable[StoreJob]) -> set[PrefixKey]:
        """Fail stores that cannot be carried out or trusted, and return their keys."""
        failed = set()
        for job in jobs:
            failed.add(job.step.ref.prefix_key)
            for target in job.step.targets:
                self._lanes[target].refuse(job.step.ref)
        return failed

    def remove(self, place: Place, refs: Iterable[ChunkRef]) -> None:
        """Start to remove chunks from a slower tier, if there is one; ``settle`` waits for it."""
        if place in self._lanes:
            self._lanes[place].remove(refs)

    def note_times(self, retentions: Sequence[Retention], lifetimes: Sequence[Lifetime]) -> None:
        """Start to note which chunks stay on disk until when, and which times to live have changed."""
        for place, lane in self._lanes.items():
            lane.note_times(retentions if place is Place.DISK else (), lifetimes)

    def clear(self, on_disk: Iterable[ChunkRef] = ()) -> None:
        """Clear every tier without waiting; if the disk fails to, at least the chunks ``on_disk`` are removed."""
        for place, lane in self._lanes.items():
            lane.clear(on_disk if place is Place.DISK else ())
        self._forget_memory()  # last, so that reads that passed the lanes' checks lose their slots

    def reset(self, namespace: Namespace) -> None:
        """Clear every tier, and enter another namespace, so that no former chunk is found."""
        for lane in self._lanes.values():
            lane.reset(namespace)
        self._forget_memory()  # last, as in ``clear``

    def _forget_memory(self) -> None:
        self.cpu.clear()
        if self._hot is not None:
            self._hot.clear()

    def settle(self, timeout_s: float) -> bool:
        """Wait until the slower tiers have carried out all removals so far; False if time ran out first."""
        deadline_s = time.monotonic() + timeout_s
        return all(lane.settle(max(0.0, deadline_s - time.monotonic())) for lane in self._lanes.values())

    def flush(self, timeout_s: float) -> Flushed:
        """Wait until all writes and removals so far have ended. Returns the failures since the last flush."""
        deadline_s, flushed = time.monotonic() + timeout_s, Flushed()
        for lane in self._lanes.values():
            flushed = flushed.plus(lane.flush(max(0.0, deadline_s - time.monotonic())))
        return flushed

    def close(self, timeout_s: float) -> bool:
        """Flush for at most ``timeout_s``, then end all threads and close the tiers. False if writes were dropped.

        Closing may take as long again, or 5 seconds if that is more. If a disk hangs, closing continues in the
        background, and the folder stays locked until it is done.
        """
        is_written = not self.flush(timeout_s).pending
        end = threading.Thread(target=self._end, name="kvstore-close", daemon=True)  # a disk must not keep the process
        end.start()
        end.join(max(timeout_s, _END_WAIT_S))
        if end.is_alive():
            logger.warning("a tier hangs: closing continues in the background, and its folder stays locked until then")
        return is_written

    def _end(self) -> None:
        for closing in start_closing(self._lanes.values()):
            closing.join()
        self._layers.shutdown(wait=True, cancel_futures=True)  # its reads have ended
        self._copiers.close()
        self.cpu.close()
        if self._hot is not None:
            self._hot.close()
        self.paged.settle()

    def reads_layers(self, place: Place) -> bool:
        """Tell if some layers of a chunk can be read from ``place`` before the others."""
        return place in self._lanes and self._lanes[place].reads_layers

    def start_read(self, step: LoadStep, layers: range | None = None) -> Future[Arrival]:
        """Start to read a chunk, or some layers of it, into its slot. ``end_read`` must follow."""
        lane = self._lanes.get(step.source)
        if lane is not None and not self.is_stuck(step.slot):
            return lane.read(step.ref, step.slot, layers, holder=step.holder)
        self.cpu.claim(step.slot)  # a load that relies on this read must not find the former content
        refused: Future[Arrival] = Future()
        refused.set_result(Arrival(Outcome.MISS if lane is None else Outcome.FAILED))
        return refused

    def is_stuck(self, slot: int) -> bool:
        """Tell if a read that timed out may still write to a slot."""
        if not all(pending.done() for pending in self._stuck.get(slot, ())):
            return True
        self._stuck.pop(slot, None)
        return False


def as_block_ids(ids: Iterable[int]) -> BlockIds:
    """Return block ids as the int64 array that gathers and scatters take."""
    return np.fromiter(ids, dtype=np.int64)
