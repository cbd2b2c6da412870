"""Carries out plans: paged KV cache <-> slots <-> disk. Has no policy; the index decided.

Gathers and scatters run on the caller's thread, because the blocks belong to a model that must not run meanwhile. Reads
from disk run on threads of their own, several at once, and the caller scatters each as it arrives. Writes to disk run
behind, on other threads, so that a load never queues behind a store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.errors import TierError
from kvstore.index import LoadStep, StoreStep
from kvstore.keys import PrefixKey
from kvstore.pages import BlockIds, PagedKV
from kvstore.tiers.base import ChunkRef, Outcome, Tier, Transfer
from kvstore.tiers.cpu import CpuTier

logger = logging.getLogger(__name__)

WRITE_THREADS = 2
_LOG_INTERVAL_S = 60.0


class LoadJob(NamedTuple):
    """A load and its destination: blocks ``first_block ...`` of the chunk go to ``block_ids``."""

    step: LoadStep
    block_ids: BlockIds
    first_block: int


class StoreJob(NamedTuple):
    """A store and its source: the chunk's blocks."""

    step: StoreStep
    block_ids: BlockIds


@dataclass
class MoverCounters:
    """What was moved since the start."""

    chunks_loaded: int = 0
    chunks_loaded_from_disk: int = 0
    chunks_stored: int = 0
    bytes_scattered: int = 0
    bytes_gathered: int = 0
    mislabelled_slots: int = 0
    read_timeouts: int = 0


class Mover:
    """One worker's data path.

    ``load``, ``store``, ``remove`` and ``clear`` are called from one thread at a time. ``on_written`` is called from a
    writer thread, exactly once for every store step with ``write_behind``.
    """

    def __init__(
        self,
        paged: PagedKV,
        cpu: CpuTier,
        disk: Tier | None,
        on_written: Callable[[ChunkRef, bool], None],
        *,
        read_threads: int = 4,
        read_timeout_s: float = 10.0,
    ) -> None:
        self.counters = MoverCounters()
        self._paged = paged
        self._cpu = cpu
        self._disk = disk
        self._on_written = on_written
        self._read_timeout_s = read_timeout_s
        self._readers = ThreadPoolExecutor(read_threads, "kvstore-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "kvstore-write")
        self._stuck: dict[int, Future[bool]] = {}  # slots that a read out of time may still write to
        self._write_lock = threading.Condition()
        self._ending = 0  # writes that have ended and are being reported
        self._writing: dict[Future[bool], ChunkRef] = {}
        self._doomed: set[ChunkRef] = set()  # removed while being written: they go as soon as they are there
        self._last_log_s = float("-inf")

    def load(self, jobs: Sequence[LoadJob]) -> set[PrefixKey]:
        """Bring chunks to the paged cache and return the keys of those that failed; their blocks hold garbage."""
        reads = [self._start_read(job.step) for job in jobs]
        try:
            return self._scatter_arrivals(jobs, reads)
        except BaseException:
            for job, read in zip(jobs, reads, strict=True):
                if read is not None and not read.done():
                    self._withdraw_read(job.step.slot, read)
            raise

    def _scatter_arrivals(self, jobs: Sequence[LoadJob], reads: Sequence[Future[bool] | None]) -> set[PrefixKey]:
        failed = set()
        patience_s = self._read_timeout_s
        for job, read in zip(jobs, reads, strict=True):
            ref, slot, from_disk = job.step
            try:
                arrived = read is None or read.result(patience_s)
            except FutureTimeoutError:
                arrived = False
                patience_s = 0.0  # the disk hangs: take what has arrived, and wait no more
                self._give_up_read(slot, read)
            if arrived and from_disk:
                self._cpu.publish(slot, ref)
                self.counters.chunks_loaded_from_disk += 1
            source = self._cpu.read(slot, ref) if arrived else None
            if source is None:
                self.counters.mislabelled_slots += arrived
                failed.add(ref.prefix_key)
                continue
            self._paged.scatter(job.block_ids, source, ref.num_blocks, job.first_block)
            self.counters.chunks_loaded += 1
            self.counters.bytes_scattered += self._paged.layout.payload_bytes(len(job.block_ids))
        return failed

    def store(self, jobs: Sequence[StoreJob]) -> set[PrefixKey]:
        """Gather chunks into their slots, start their writes, and return the keys of those that failed.

        If gathering raises, the caller must count all of ``jobs`` as failed.
        """
        failed = set()
        for number, job in enumerate(jobs):
            ref, slot, write_behind = job.step
            if self._is_stuck(slot):
                failed |= self.refuse([job])
                continue
            try:
                self._paged.gather(job.block_ids, self._cpu.claim(slot))
            except BaseException:
                self.refuse(jobs[number:])
                raise
            self._cpu.publish(slot, ref)
            self.counters.chunks_stored += 1
            self.counters.bytes_gathered += self._paged.layout.payload_bytes(ref.num_blocks)
            if write_behind:
                self._start_write(ref, slot)
        return failed

    def refuse(self, jobs: Iterable[StoreJob]) -> set[PrefixKey]:
        """Fail stores whose source blocks are not to be trusted, and return their keys."""
        failed = set()
        for job in jobs:
            failed.add(job.step.ref.prefix_key)
            if job.step.write_behind:
                self._on_written(job.step.ref, False)
        return failed

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Take chunks off the disk; one that is just being written goes when it is there."""
        if self._disk is None:
            return
        with self._write_lock:
            being_written = set(self._writing.values())
            gone: list[ChunkRef] = []
            later: list[ChunkRef] = []
            for ref in refs:
                (later if ref in being_written else gone).append(ref)
            self._doomed.update(later)
        if gone:
            self._guard("remove chunks from", lambda disk: disk.remove(gone))

    def clear(self) -> None:
        """Forget everything, in memory and on disk."""
        self._cpu.clear()
        with self._write_lock:
            self._doomed.update(self._writing.values())
        self._guard("clear", lambda disk: disk.clear())

    def flush(self, timeout_s: float) -> bool:
        """Wait until every write started so far has ended; False if time ran out first."""
        with self._write_lock:
            return self._write_lock.wait_for(lambda: not (self._writing or self._ending), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush within the bound, then end all threads and close the tiers. False if writes were given up."""
        deadline_s = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        left_s = max(0.0, deadline_s - time.monotonic())
        if flushed or self.flush(left_s):
            for pool in (self._readers, self._writers):
                if not self._stuck:
                    pool.shutdown(wait=True)
        self._cpu.close()
        if self._disk is not None:
            self._disk.close()
        return flushed

    def _start_read(self, step: LoadStep) -> Future[bool] | None:
        if not step.from_disk:
            return None
        if self._is_stuck(step.slot):
            refused: Future[bool] = Future()
            refused.set_result(False)
            return refused
        return self._readers.submit(self._read, step.ref, step.slot)

    def _read(self, ref: ChunkRef, slot: int) -> bool:
        """On a reader thread: bring one chunk from disk to its slot."""
        if self._disk is None:
            return False
        try:
            return self._disk.get([Transfer(ref, self._cpu.claim(slot))]) == [Outcome.HIT]
        except TierError as error:
            self._log("cannot read from the disk tier: %s", error)
            return False

    def _give_up_read(self, slot: int, read: Future[bool] | None) -> None:
        if read is not None:
            self._withdraw_read(slot, read)
        self.counters.read_timeouts += 1
        self._log("a read from the disk tier took longer than %s s", self._read_timeout_s)

    def _withdraw_read(self, slot: int, read: Future[bool]) -> None:
        if not read.cancel():
            self._stuck[slot] = read  # nobody may use this slot before that read has ended

    def _is_stuck(self, slot: int) -> bool:
        read = self._stuck.get(slot)
        if read is None:
            return False
        if not read.done():
            return True
        del self._stuck[slot]
        return False

    def _start_write(self, ref: ChunkRef, slot: int) -> None:
        with self._write_lock:
            future = self._writers.submit(self._write, ref, slot)
            self._writing[future] = ref
        future.add_done_callback(self._finish_write)

    def _write(self, ref: ChunkRef, slot: int) -> bool:
        """On a writer thread: put one slot on disk."""
        source = self._cpu.read(slot, ref)
        if self._disk is None or source is None:
            return False
        try:
            return self._disk.put([Transfer(ref, source)]) == [Outcome.STORED]
        except TierError as error:
            self._log("cannot write to the disk tier: %s", error)
            return False

    def _finish_write(self, future: Future[bool]) -> None:
        with self._write_lock:
            ref = self._writing.pop(future)
            doomed = ref in self._doomed
            self._doomed.discard(ref)
            self._ending += 1
        stored = False
        if not future.cancelled():
            if error := future.exception():
                logger.error("writing a chunk to the disk tier failed", exc_info=error)
            else:
                stored = future.result() and not doomed
        try:
            if doomed:
                self._guard("remove chunks from", lambda disk: disk.remove([ref]))
            self._on_written(ref, stored)
        finally:  # or flush would wait forever
            with self._write_lock:
                self._ending -= 1
                self._write_lock.notify_all()

    def _guard(self, what: str, action: Callable[[Tier], None]) -> None:
        """Do something to the disk tier of which a failure only leaves bytes behind."""
        if self._disk is None:
            return
        try:
            action(self._disk)
        except TierError as error:
            self._log("cannot %s the disk tier: %s", what, error)

    def _log(self, message: str, *values: object) -> None:
        """Warn at most once a minute: a broken disk fails every chunk in the same way."""
        now_s = time.monotonic()
        if now_s - self._last_log_s >= _LOG_INTERVAL_S:
            self._last_log_s = now_s
            logger.warning(message, *values)


def as_block_ids(ids: Iterable[int]) -> BlockIds:
    """Block ids as the int64 array that gathers and scatters take."""
    return np.fromiter(ids, dtype=np.int64)
