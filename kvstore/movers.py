"""Carries out plans: paged KV cache <-> slots <-> slower tiers. Has no policy; the index decided.

Gathers and scatters run on the caller's thread, because the blocks belong to a model that must not run meanwhile. Reads
from slower tiers run on threads of their lanes, several at once, and the caller scatters each as it arrives. Writes run
behind, on other threads, so that a load never queues behind a store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstore.hot import HotChunks
from kvstore.keys import Namespace, PrefixKey
from kvstore.lanes import Arrival, Lane
from kvstore.pages import BlockIds, PagedKV
from kvstore.plans import LoadStep, Place, StoreStep
from kvstore.tiers.base import ByteArray, ChunkRef, Outcome
from kvstore.tiers.cpu import CpuTier

logger = logging.getLogger(__name__)

_END_WAIT_S = 5.0


class LoadJob(NamedTuple):
    """A load and its destination: blocks ``first_block ...`` of the chunk go to ``block_ids``."""

    step: LoadStep
    block_ids: BlockIds
    first_block: int


class StoreJob(NamedTuple):
    """A store and its source: the chunk's blocks."""

    step: StoreStep
    block_ids: BlockIds


class LoadResult(NamedTuple):
    """What did not arrive: ``failed``, and of these the ``lost``, whose chunk is missing or damaged."""

    failed: set[PrefixKey]
    lost: set[PrefixKey]


@dataclass
class MoverCounters:
    """What was moved since the start."""

    chunks_loaded: int = 0
    chunks_loaded_from_disk: int = 0
    chunks_loaded_from_remote: int = 0
    chunks_stored: int = 0
    bytes_scattered: int = 0
    bytes_gathered: int = 0
    chunks_loaded_from_gpu: int = 0
    mislabelled_slots: int = 0
    read_timeouts: int = 0


class Mover:
    """One worker's data path.

    ``load``, ``store``, ``clear`` and ``reset`` are called from one thread at a time.

    Args:
        paged: the model's KV cache.
        cpu: the pool; ``close`` closes it.
        lanes: the slower tiers, each with the threads that serve it; ``close`` closes them.
        hot: copies on the device of what is loaded often; ``close`` closes it.
    """

    def __init__(self, paged: PagedKV, cpu: CpuTier, lanes: Mapping[Place, Lane], hot: HotChunks | None = None) -> None:
        self.counters = MoverCounters()
        self._paged = paged
        self._cpu = cpu
        self._lanes = dict(lanes)
        self._hot = hot
        self._stuck: dict[int, Future[Any]] = {}  # slots that a read given up may still write to

    def load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        """Bring chunks to the paged cache; the blocks of those that failed hold garbage.

        A job without blocks brings its chunk only to its slot.
        """
        reads = [self._start_read(job.step) for job in jobs]
        try:
            return self._scatter_arrivals(jobs, reads)
        finally:  # also if scattering raises: no read may be left that writes to a slot given back
            self._end_reads(jobs, reads)

    def _end_reads(self, jobs: Sequence[LoadJob], reads: Sequence[Future[Arrival] | None]) -> None:
        """Withdraw or await all reads, and mark the slots of those given up."""
        for job, read in zip(jobs, reads, strict=True):
            if read is None or read.cancel() or read.exception() is not None:  # one that raised is over, too
                continue
            if (pending := read.result().pending) is not None:
                self._stuck[job.step.slot] = pending
                self.counters.read_timeouts += 1

    def _scatter_arrivals(self, jobs: Sequence[LoadJob], reads: Sequence[Future[Arrival] | None]) -> LoadResult:
        result = LoadResult(set(), set())
        for job, read in zip(jobs, reads, strict=True):
            ref, slot, place = job.step
            outcome = Outcome.HIT if read is None else read.result().outcome
            if read is not None and outcome is Outcome.HIT:
                self._cpu.publish(slot, ref)
                self.counters.chunks_loaded_from_disk += place is Place.DISK
                self.counters.chunks_loaded_from_remote += place is Place.REMOTE
            source = self._cpu.read(slot, ref) if outcome is Outcome.HIT else None
            if source is None:
                self.counters.mislabelled_slots += outcome is Outcome.HIT
                result.failed.add(ref.prefix_key)
                if outcome in {Outcome.MISS, Outcome.CORRUPT}:
                    result.lost.add(ref.prefix_key)
                continue
            if len(job.block_ids):
                self._scatter(job, source)
            self.counters.chunks_loaded += 1
            self.counters.bytes_scattered += self._paged.layout.payload_bytes(len(job.block_ids))
        return result

    def _scatter(self, job: LoadJob, source: ByteArray) -> None:
        ref = job.step.ref
        if self._hot is not None and self._hot.scatter(ref, job.block_ids, job.first_block):
            self.counters.chunks_loaded_from_gpu += 1
            return
        self._paged.scatter(job.block_ids, source, ref.num_blocks, job.first_block)
        if self._hot is not None and len(job.block_ids) == ref.num_blocks:
            self._hot.note_load(ref, job.block_ids)

    def store(self, jobs: Sequence[StoreJob]) -> set[PrefixKey]:
        """Gather chunks into their slots, start their writes, and return the keys of those that failed.

        If gathering raises, the caller must count all of ``jobs`` as failed.
        """
        failed = set()
        for number, job in enumerate(jobs):
            if self._is_stuck(job.step.slot):
                failed |= self.refuse([job])
                continue
            try:
                self._gather(job)
            except BaseException:
                self.refuse(jobs[number:])
                raise
            for target in job.step.targets:
                self._lanes[target].write(job.step.ref, job.step.slot)
        return failed

    def _gather(self, job: StoreJob) -> None:
        if not job.step.gather:
            return
        ref, slot = job.step.ref, job.step.slot
        self._paged.gather(job.block_ids, self._cpu.claim(slot))
        self._cpu.publish(slot, ref)
        self.counters.chunks_stored += 1
        self.counters.bytes_gathered += self._paged.layout.payload_bytes(ref.num_blocks)

    def refuse(self, jobs: Iterable[StoreJob]) -> set[PrefixKey]:
        """Fail stores whose source blocks are not to be trusted, and return their keys."""
        failed = set()
        for job in jobs:
            failed.add(job.step.ref.prefix_key)
            for target in job.step.targets:
                self._lanes[target].refuse(job.step.ref)
        return failed

    def remove(self, place: Place, refs: Iterable[ChunkRef]) -> None:
        """Take chunks off a slower tier, if there is one."""
        if place in self._lanes:
            self._lanes[place].remove(refs)

    def clear(self) -> None:
        """Forget everything, in every tier."""
        self._forget_memory()
        for lane in self._lanes.values():
            lane.clear()

    def reset(self, namespace: Namespace) -> None:
        """Forget everything, and keep what comes under another namespace."""
        self._forget_memory()
        for lane in self._lanes.values():
            lane.reset(namespace)

    def _forget_memory(self) -> None:
        self._cpu.clear()
        if self._hot is not None:
            self._hot.clear()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every write started so far has ended; False if time ran out first."""
        deadline_s = time.monotonic() + timeout_s
        return all(lane.flush(max(0.0, deadline_s - time.monotonic())) for lane in self._lanes.values())

    def close(self, timeout_s: float) -> bool:
        """Flush within the bound, then end all threads and close the tiers. False if writes were given up.

        The end may take as long again, or 5 seconds if that is more. With a disk that hangs it goes on behind, and the
        folder stays locked until then.
        """
        flushed = self.flush(timeout_s)
        end = threading.Thread(target=self._end, name="kvstore-close", daemon=True)  # a disk must not keep the process
        end.start()
        end.join(max(timeout_s, _END_WAIT_S))
        if end.is_alive():
            logger.warning("a tier hangs and is closed behind; a folder stays locked until that is done")
        return flushed

    def _end(self) -> None:
        closers = [threading.Thread(target=lane.close, daemon=True) for lane in self._lanes.values()]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        self._cpu.close()
        if self._hot is not None:
            self._hot.close()

    def _start_read(self, step: LoadStep) -> Future[Arrival] | None:
        if step.source is Place.MEMORY:
            return None
        lane = self._lanes.get(step.source)
        if lane is not None and not self._is_stuck(step.slot):
            return lane.read(step.ref, step.slot)
        refused: Future[Arrival] = Future()
        refused.set_result(Arrival(Outcome.MISS if lane is None else Outcome.FAILED))
        return refused

    def _is_stuck(self, slot: int) -> bool:
        """Whether a read given up may still write to a slot."""
        pending = self._stuck.get(slot)
        if pending is None:
            return False
        if not pending.done():
            return True
        del self._stuck[slot]
        return False


def as_block_ids(ids: Iterable[int]) -> BlockIds:
    """Block ids as the int64 array that gathers and scatters take."""
    return np.fromiter(ids, dtype=np.int64)
