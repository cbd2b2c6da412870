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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import ClosedError, TierError, TierTimeoutError
from kvstore.index import LoadStep, StoreStep
from kvstore.keys import Namespace, PrefixKey
from kvstore.pages import BlockIds, PagedKV
from kvstore.tiers.base import ChunkRef, Outcome, Tier, Transfer
from kvstore.tiers.cpu import CpuTier

logger = logging.getLogger(__name__)

WRITE_THREADS = 4
_LOG_INTERVAL_S = 60.0
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


class _Arrival(NamedTuple):
    """How a read from disk ended. ``pending`` is set if it was given up and may still write to its slot."""

    outcome: Outcome
    pending: Future[Any] | None = None


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

    ``load``, ``store``, ``clear`` and ``reset`` are called from one thread at a time. ``on_written`` is called from any
    thread, exactly once for every store step with ``write_behind`` whose write has ended. That the disk answers in time
    is the business of the wrappers around it.
    """

    def __init__(
        self,
        paged: PagedKV,
        cpu: CpuTier,
        disk: Tier | None,
        on_written: Callable[[ChunkRef, bool], None],
        *,
        read_threads: int = 4,
    ) -> None:
        self.counters = MoverCounters()
        self._paged = paged
        self._cpu = cpu
        self._disk = disk
        self._on_written = on_written
        self._readers = ThreadPoolExecutor(read_threads, "kvstore-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "kvstore-write")
        self._stuck: dict[int, Future[Any]] = {}  # slots that a read given up may still write to
        self._write_lock = threading.Condition()
        self._ending = 0  # writes that have ended and are being reported
        self._writing: dict[Future[Sequence[Outcome]], ChunkRef] = {}
        self._doomed: set[ChunkRef] = set()  # removed while being written: they go as soon as they are there
        self._last_log_s = float("-inf")

    def load(self, jobs: Sequence[LoadJob]) -> LoadResult:
        """Bring chunks to the paged cache; the blocks of those that failed hold garbage.

        A job without blocks brings its chunk only to its slot.
        """
        reads = [self._start_read(job.step) for job in jobs]
        try:
            return self._scatter_arrivals(jobs, reads)
        finally:  # also if scattering raises: no read may be left that writes to a slot given back
            self._end_reads(jobs, reads)

    def _end_reads(self, jobs: Sequence[LoadJob], reads: Sequence[Future[_Arrival] | None]) -> None:
        """Withdraw or await all reads, and mark the slots of those given up."""
        for job, read in zip(jobs, reads, strict=True):
            if read is None or read.cancel() or read.exception() is not None:  # one that raised is over, too
                continue
            if (pending := read.result().pending) is not None:
                self._stuck[job.step.slot] = pending

    def _scatter_arrivals(self, jobs: Sequence[LoadJob], reads: Sequence[Future[_Arrival] | None]) -> LoadResult:
        result = LoadResult(set(), set())
        for job, read in zip(jobs, reads, strict=True):
            ref, slot, _ = job.step
            outcome = Outcome.HIT if read is None else read.result().outcome
            if read is not None and outcome is Outcome.HIT:
                self._cpu.publish(slot, ref)
                self.counters.chunks_loaded_from_disk += 1
            source = self._cpu.read(slot, ref) if outcome is Outcome.HIT else None
            if source is None:
                self.counters.mislabelled_slots += outcome is Outcome.HIT
                result.failed.add(ref.prefix_key)
                if outcome in {Outcome.MISS, Outcome.CORRUPT}:
                    result.lost.add(ref.prefix_key)
                continue
            if len(job.block_ids):
                self._paged.scatter(job.block_ids, source, ref.num_blocks, job.first_block)
            self.counters.chunks_loaded += 1
            self.counters.bytes_scattered += self._paged.layout.payload_bytes(len(job.block_ids))
        return result

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
            if job.step.write_behind:
                self._start_write(job.step.ref, job.step.slot)
        return failed

    def _gather(self, job: StoreJob) -> None:
        ref, slot, _, gather = job.step
        if not gather:
            return
        self._paged.gather(job.block_ids, self._cpu.claim(slot))
        self._cpu.publish(slot, ref)
        self.counters.chunks_stored += 1
        self.counters.bytes_gathered += self._paged.layout.payload_bytes(ref.num_blocks)

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
        self._forget_memory()
        self._guard("clear", lambda disk: disk.clear())

    def reset(self, namespace: Namespace) -> None:
        """Forget everything, and keep what comes under another namespace."""
        self._forget_memory()
        self._guard("reset", lambda disk: disk.reset(namespace))

    def _forget_memory(self) -> None:
        self._cpu.clear()
        with self._write_lock:
            self._doomed.update(self._writing.values())

    def flush(self, timeout_s: float) -> bool:
        """Wait until every write started so far has ended; False if time ran out first."""
        with self._write_lock:
            return self._write_lock.wait_for(lambda: not (self._writing or self._ending), timeout_s)

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
            logger.warning("the disk tier hangs and is closed behind; its folder stays locked until that is done")
        return flushed

    def _end(self) -> None:
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)  # what runs ends within the disk's deadline
        self._cpu.close()
        if self._disk is not None:
            self._disk.close()

    def _start_read(self, step: LoadStep) -> Future[_Arrival] | None:
        if not step.from_disk:
            return None
        if self._is_stuck(step.slot):
            refused: Future[_Arrival] = Future()
            refused.set_result(_Arrival(Outcome.FAILED))
            return refused
        return self._readers.submit(self._read, step.ref, step.slot)

    def _read(self, ref: ChunkRef, slot: int) -> _Arrival:
        """On a reader thread: bring one chunk from disk to its slot."""
        if self._disk is None:
            return _Arrival(Outcome.MISS)
        try:
            return _Arrival(self._disk.get([Transfer(ref, self._cpu.claim(slot))])[0])
        except TierTimeoutError as error:
            self.counters.read_timeouts += 1
            self._log("cannot read from the disk tier: %s", error)
            return _Arrival(Outcome.FAILED, error.pending)
        except TierError as error:
            self._log("cannot read from the disk tier: %s", error)
            return _Arrival(Outcome.FAILED)

    def _is_stuck(self, slot: int) -> bool:
        """Whether a read given up may still write to a slot."""
        pending = self._stuck.get(slot)
        if pending is None:
            return False
        if not pending.done():
            return True
        del self._stuck[slot]
        return False

    def _start_write(self, ref: ChunkRef, slot: int) -> None:
        with self._write_lock:
            future = self._writers.submit(self._write, ref, slot)
            self._writing[future] = ref
        future.add_done_callback(self._after_write)

    def _write(self, ref: ChunkRef, slot: int) -> Sequence[Outcome]:
        """On a writer thread: put one slot on disk."""
        source = self._cpu.read(slot, ref)
        if self._disk is None or source is None:
            return [Outcome.FAILED]
        return self._disk.put([Transfer(ref, source)])

    def _after_write(self, write: Future[Sequence[Outcome]]) -> None:
        """Report a write, unless the disk has yet to say what became of it: until then the slot is in use."""
        error = None if write.cancelled() else write.exception()
        if isinstance(error, TierTimeoutError):
            self._log("cannot write to the disk tier: %s", error)
            error.pending.add_done_callback(lambda late: self._end_write(write, late))
        else:
            self._end_write(write, write)

    def _end_write(self, write: Future[Sequence[Outcome]], ended: Future[Sequence[Outcome]]) -> None:
        with self._write_lock:
            ref = self._writing.pop(write)
            doomed = ref in self._doomed
            self._doomed.discard(ref)
            self._ending += 1
        try:
            stored = self._is_stored(ended)
            if doomed:
                self._guard("remove chunks from", lambda disk: disk.remove([ref]))
            self._on_written(ref, stored and not doomed)
        finally:  # or flush would wait forever
            with self._write_lock:
                self._ending -= 1
                self._write_lock.notify_all()

    def _is_stored(self, ended: Future[Sequence[Outcome]]) -> bool:
        if ended.cancelled():
            return False
        error = ended.exception()
        if error is None:
            return list(ended.result()) == [Outcome.STORED]
        if isinstance(error, TierError):
            self._log("cannot write to the disk tier: %s", error)
        else:
            logger.error("writing a chunk to the disk tier failed", exc_info=error)
        return False

    def _guard(self, what: str, action: Callable[[Tier], None]) -> None:
        """Do something to the disk tier of which a failure only leaves bytes behind."""
        if self._disk is None:
            return
        try:
            action(self._disk)
        except ClosedError:
            pass  # a write that hung came to its end after close: the next start finds what it left
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
