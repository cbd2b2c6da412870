"""The way between slots and one slower tier: reads on threads of their own, writes behind, and what is under way.

That the tier answers in time is the business of the wrappers around it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstore.errors import ClosedError, TierError, TierTimeoutError
from kvstore.keys import Namespace
from kvstore.throttle import Throttle
from kvstore.tiers.base import ChunkRef, Loan, Outcome, Tier, Transfer
from kvstore.tiers.cpu import CpuTier

logger = logging.getLogger(__name__)

WRITE_THREADS = 4


class Arrival(NamedTuple):
    """How a read ended. ``pending`` is set if it was given up and may still write to its slot."""

    outcome: Outcome
    pending: Future[Any] | None = None


class Lane:
    """Reads and writes of one tier, from and to the slots of a pool. Thread-safe.

    Args:
        cpu: the pool.
        tier: where chunks come from and go to; ``close`` closes it.
        on_written: called from any thread, exactly once for every ``write`` that has ended.
        read_threads: reads in flight at once.
        asks_before_write: the part of the tier that is written, to be asked before: somebody else may have stored a
            chunk there. None if nobody else writes.
        leaves_writes: report a write as done and do nothing: another worker writes the same bytes, and removes them.
    """

    def __init__(
        self,
        cpu: CpuTier,
        tier: Tier,
        on_written: Callable[[ChunkRef, bool], None],
        *,
        read_threads: int = 4,
        asks_before_write: Tier | None = None,
        leaves_writes: bool = False,
    ) -> None:
        self._cpu = cpu
        self._tier = tier
        self._on_written = on_written
        self._asks_before_write = asks_before_write
        self._leaves_writes = leaves_writes
        self._readers = ThreadPoolExecutor(read_threads, f"kvstore-read-{tier.name}")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, f"kvstore-write-{tier.name}")
        self._lock = threading.Condition()
        self._ending = 0  # writes that have ended and are being reported
        self._writing: dict[Future[Sequence[Outcome]], ChunkRef] = {}
        self._doomed: set[ChunkRef] = set()  # removed while being written: they go as soon as they are there
        self._throttle = Throttle()

    @property
    def reads_layers(self) -> bool:
        """Whether some layers of a chunk can be had before the others."""
        return self._tier.reads_layers

    def read(self, ref: ChunkRef, slot: int, layers: range | None = None) -> Future[Arrival]:
        """Start to bring a chunk, or some layers of it, to a slot."""
        return self._readers.submit(self._read, ref, slot, layers)

    @property
    def lends(self) -> bool:
        """Whether chunks can be read from where they are in the tier's memory."""
        return self._tier.lends

    def borrow(self, refs: Sequence[ChunkRef]) -> Future[Loan]:
        """Start to borrow chunks; a tier that is broken lends none. Whoever gets the loan ends it."""
        return self._readers.submit(self._borrow, refs)

    def write(self, ref: ChunkRef, slot: int) -> None:
        """Start to write what a slot holds; the slot must not change before it has ended."""
        if self._leaves_writes:
            self._on_written(ref, True)
            return
        with self._lock:
            future = self._writers.submit(self._write, ref, slot)
            self._writing[future] = ref
        future.add_done_callback(self._after_write)

    def refuse(self, ref: ChunkRef) -> None:
        """Report a write that is not to be carried out."""
        self._on_written(ref, False)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Take chunks off the tier; one that is just being written goes when it is there."""
        if self._leaves_writes:
            return
        with self._lock:
            being_written = set(self._writing.values())
            gone: list[ChunkRef] = []
            later: list[ChunkRef] = []
            for ref in refs:
                (later if ref in being_written else gone).append(ref)
            self._doomed.update(later)
        if gone:
            self._guard("remove chunks from", lambda: self._tier.remove(gone))

    def clear(self) -> None:
        """Take everything off the tier."""
        self._doom_writes()
        self._guard("clear", self._tier.clear)

    def reset(self, namespace: Namespace) -> None:
        """Forget everything, and keep what comes under another namespace."""
        self._doom_writes()
        self._guard("reset", lambda: self._tier.reset(namespace))

    def flush(self, timeout_s: float) -> bool:
        """Wait until every write started so far has ended; False if time ran out first."""
        with self._lock:
            return self._lock.wait_for(lambda: not (self._writing or self._ending), timeout_s)

    def close(self) -> None:
        """End all threads, give up the writes that have not begun, and close the tier."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)  # what runs ends within the tier's deadline
        self._tier.close()

    def _read(self, ref: ChunkRef, slot: int, layers: range | None) -> Arrival:
        transfers = [Transfer(ref, self._cpu.claim(slot))]
        try:
            return Arrival((self._tier.get_layers(transfers, layers) if layers else self._tier.get(transfers))[0])
        except TierTimeoutError as error:
            self._log("cannot read from the %s tier: %s", error)
            return Arrival(Outcome.FAILED, error.pending)
        except TierError as error:
            self._log("cannot read from the %s tier: %s", error)
            return Arrival(Outcome.FAILED)

    def _borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        try:
            return self._tier.borrow(refs)
        except TierError as error:
            self._log("cannot read from the %s tier: %s", error)
            return Loan.refused(len(refs))

    def _write(self, ref: ChunkRef, slot: int) -> Sequence[Outcome]:
        source = self._cpu.read(slot, ref)
        if source is None:
            return [Outcome.FAILED]
        if self._asks_before_write is not None and self._asks_before_write.contains([ref]) == [True]:
            return [Outcome.STORED]
        return self._tier.put([Transfer(ref, source)])

    def _after_write(self, write: Future[Sequence[Outcome]]) -> None:
        """Report a write, unless the tier has yet to say what became of it: until then the slot is in use."""
        error = None if write.cancelled() else write.exception()
        if isinstance(error, TierTimeoutError):
            self._log("cannot write to the %s tier: %s", error)
            error.pending.add_done_callback(lambda late: self._end_write(write, late))
        else:
            self._end_write(write, write)

    def _end_write(self, write: Future[Sequence[Outcome]], ended: Future[Sequence[Outcome]]) -> None:
        with self._lock:
            ref = self._writing.pop(write)
            doomed = ref in self._doomed
            self._doomed.discard(ref)
            self._ending += 1
        try:
            stored = self._is_stored(ended)
            if doomed:
                self._guard("remove chunks from", lambda: self._tier.remove([ref]))
            self._on_written(ref, stored and not doomed)
        finally:  # or flush would wait forever
            with self._lock:
                self._ending -= 1
                self._lock.notify_all()

    def _is_stored(self, ended: Future[Sequence[Outcome]]) -> bool:
        if ended.cancelled():
            return False
        error = ended.exception()
        if error is None:
            return list(ended.result()) == [Outcome.STORED]
        if isinstance(error, TierError):
            self._log("cannot write to the %s tier: %s", error)
        else:
            logger.error("writing a chunk to the %s tier failed", self._tier.name, exc_info=error)
        return False

    def _doom_writes(self) -> None:
        with self._lock:
            self._doomed.update(self._writing.values())

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        """Do something to the tier of which a failure only leaves bytes behind."""
        try:
            action()
        except ClosedError:
            pass  # a write that hung came to its end after close: the next start finds what it left
        except TierError as error:
            self._log(f"cannot {what} the %s tier: %s", error)

    def _log(self, message: str, error: TierError) -> None:
        """Warn at most once a minute: a broken tier fails every chunk in the same way."""
        if self._throttle.is_due("any"):
            logger.warning(message, self._tier.name, error)
