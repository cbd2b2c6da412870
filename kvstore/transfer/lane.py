"""Transfers between slots and one slower tier: reads and writes on separate threads, and the state of those in flight.

No caller waits for the tier. The wrappers around the tier ensure that every call ends in time. Small chunks that wait
for a thread are written together.

- *A write belongs to the epoch in which it began.* After ``clear`` or ``reset`` it stores nothing, and a read that
  began before is not a hit.
- *In order.* A write waits for the removals, clears and resets requested before it, so none of them undoes it.
- *At once, for readers.* A chunk to be removed is a miss from then on, although the tier may still have it. After
  ``clear`` or ``reset`` every chunk is a miss until the tier has carried that out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from kvstore.memory.slabs import LabelledPool
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, end_of
from kvstore.model.errors import KVStoreError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace
from kvstore.model.lifetime import Lifetime, lasts
from kvstore.model.retention import Retention
from kvstore.model.threads import start
from kvstore.model.throttle import Throttle
from kvstore.tiers.base import BoundedTier, Tier, Transfer, late_outcomes
from kvstore.tiers.loan import Loan
from kvstore.transfer.batches import Batches
from kvstore.transfer.removal_queue import RemovalQueue

logger = logging.getLogger(__name__)

WRITE_THREADS = 4
_MAX_LIMITS: Final = 1024  # times to live changed in one call, which has a deadline


class Arrival(NamedTuple):
    """Result of a read. ``pending`` is set if it timed out and may still write to its slot."""

    outcome: Outcome
    pending: Future[Any] | None = None


_REFUSED: Final = Arrival(Outcome.FAILED)


class Flushed(NamedTuple):
    """Number of writes to slower tiers since the last flush that did not store their chunk. True if there are none.

    Chunks that were removed, cleared or reset before they were written do not count.

    Attributes:
        failed: writes that a tier refused, or that could not begin.
        full: writes for which there was no room, in a tier or in its queue.
        pending: writes and removals that had not ended when time ran out.
    """

    failed: int = 0
    full: int = 0
    pending: int = 0

    def __bool__(self) -> bool:
        return not any(self)

    def plus(self, other: Flushed) -> Flushed:
        """Return the sum over two tiers."""
        return Flushed(self.failed + other.failed, self.full + other.full, self.pending + other.pending)


@dataclass(eq=False)
class _Write:
    """A write that has not been reported.

    Attributes:
        ref: the chunk.
        slot: holds its bytes.
        namespace_id: the namespace of these bytes.
        generation: clears and resets before it; the next one makes it void.
        after: the last removal that must come before it.
        trail, tenant, owner: of the chunk.
        until_s: the end of its time to live, in seconds since 1970; None for no end.
        limited: its time to live, if that has changed since the write began; the tier is told once it is stored.
        is_unwanted: the chunk was removed meanwhile, and is removed from the tier once it is stored.
        is_uncertain: if it fails, it may have stored the chunk, which is then removed from the tier.
        ended: its outcome, once nothing reads the slot.
    """

    ref: ChunkRef
    slot: int
    namespace_id: bytes | None
    generation: int
    after: int
    trail: bytes
    tenant: bytes
    owner: bytes
    until_s: float | None
    limited: Lifetime | None = None
    is_unwanted: bool = False
    is_uncertain: bool = False
    ended: Future[Outcome] = field(default_factory=Future)

    def transfer_of(self, source: ByteArray) -> Transfer:
        """Return what the tier is to store, from the slot's bytes."""
        found = Transfer(self.ref, source, self.namespace_id, self.trail, tenant=self.tenant, owner=self.owner)
        return found._replace(until_s=self.until_s)


class Lane:
    """Reads and writes of one tier, from and to the slots of a pool. Thread-safe.

    Args:
        cpu: the pool.
        tier: the tier to read and write; ``close`` closes it.
        on_written: called from any thread, exactly once for every ``write`` that has ended: with ``STORED``, ``FULL``
            for no room, or ``FAILED``.
        read_threads: reads in flight at once.
        asks_before_write: the part of the tier that is written to; it is asked before a write if another engine has
            stored the chunk already. None if there is no other writer.
        leaves_writes: report writes as done and do nothing, because another worker writes and removes the same bytes.
        namespace_id: the namespace of the chunks, until ``reset``; None if only the tier knows it.
    """

    def __init__(
        self,
        cpu: LabelledPool,
        tier: Tier,
        on_written: Callable[[ChunkRef, Outcome], None],
        *,
        read_threads: int = 4,
        asks_before_write: Tier | None = None,
        leaves_writes: bool = False,
        namespace_id: bytes | None = None,
    ) -> None:
        self._cpu = cpu
        self._tier = tier
        self._on_written = on_written
        self._asks_before_write = asks_before_write
        self._leaves_writes = leaves_writes
        self._readers = ThreadPoolExecutor(read_threads, f"kvstore-read-{tier.name}")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, f"kvstore-write-{tier.name}")
        self._removals = RemovalQueue(tier, lambda what, error: self._log(f"cannot {what} the %s tier: %s", error))
        self._lock = threading.Condition()
        self._namespace_id = namespace_id
        self._generation = 0  # clears and resets
        self._batches = Batches(cpu.slot_bytes)
        self._waiting: deque[_Write] = deque()
        self._writing: set[_Write] = set()  # including those that wait
        self._ending = 0  # writes that have ended and are being reported
        self._untold = Flushed()  # since the last flush
        self._limits: dict[ChunkRef, Lifetime] = {}  # times to live that the tier has yet to change
        self._throttle = Throttle(logger)

    @property
    def reads_layers(self) -> bool:
        """True if some layers of a chunk can be read before the others."""
        return self._tier.reads_layers

    def read(
        self, ref: ChunkRef, slot: int, layers: range | None = None, *, holder: ChunkRef | None = None
    ) -> Future[Arrival]:
        """Start to read a chunk, or some layers of it, into a slot; of a ``holder`` only the leading blocks."""
        buffer = self._cpu.claim(slot)  # now, so that a failed read does not leave the former content
        wanted = Transfer(ref, buffer) if holder is None else Transfer(holder, buffer, front_blocks=ref.num_blocks)
        return start(self._readers, partial(self._read, wanted, slot, layers, self._generation), lambda: _REFUSED)

    @property
    def lends(self) -> bool:
        """True if chunks can be read in place, in the tier's memory."""
        return self._tier.lends

    def borrow(self, refs: Sequence[ChunkRef]) -> Future[Loan]:
        """Start to borrow chunks; a broken tier lends none. The caller ends the loan."""
        return start(self._readers, partial(self._borrow, refs, self._generation), partial(Loan.refused, len(refs)))

    @property
    def generation(self) -> int:
        """Number of clears and resets so far. Bytes gathered from the model's blocks before one are void after it."""
        return self._generation

    def write(
        self,
        ref: ChunkRef,
        slot: int,
        generation: int | None = None,
        trail: bytes = b"",
        tenant: bytes = b"",
        *,
        owner: bytes = b"",
        until_s: float | None = None,
    ) -> None:
        """Start to write a slot's chunk, with what is known of it; the slot must not change before the write has ended.

        ``generation`` is its value when filling the slot began, None for now. ``until_s``: see ``Transfer``.
        """
        if self._leaves_writes:
            self._on_written(ref, Outcome.STORED)
            return
        with self._lock:
            began = self._generation if generation is None else generation
            write = _Write(ref, slot, self._namespace_id, began, self._removals.queued, trail, tenant, owner, until_s)
            self._writing.add(write)
            self._limits.pop(ref, None)
            try:
                self._writers.submit(self._write).add_done_callback(self._log_defect)
                self._waiting.append(write)
            except RuntimeError:  # no thread can be started
                write.ended.set_result(Outcome.FAILED)
        write.ended.add_done_callback(lambda ended: self._report_end(write, ended.result()))

    def refuse(self, ref: ChunkRef) -> None:
        """Report a write as failed without carrying it out."""
        with self._lock:
            self._untold = self._untold.plus(Flushed(failed=1))
        self._on_written(ref, Outcome.FAILED)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Start to remove chunks from the tier; one that is being written is removed after its write."""
        if self._leaves_writes:
            return
        with self._lock:
            leaving = set(refs)
            for ref in leaving:
                self._limits.pop(ref, None)  # or it would change the chunk that is stored next
            for write in self._writing:
                if write.ref in leaving:
                    write.is_unwanted = True
            leaving -= {write.ref for write in self._writing}
            if leaving:
                self._removals.remove(leaving)

    def note_times(self, retentions: Sequence[Retention], lifetimes: Sequence[Lifetime]) -> None:
        """Have the tier change times to live and, if it has a bound, note which of its chunks stay until when."""
        if self._leaves_writes:
            return
        if retentions and isinstance(self._tier, BoundedTier):
            self._removals.follow("note retention in", partial(self._tier.retain, retentions))
        with self._lock:
            writing = {write.ref: write for write in self._writing}
            for one in lifetimes:
                if one.ref in writing:
                    writing[one.ref].limited = one
                else:
                    self._limit(one)

    def _limit(self, lifetime: Lifetime) -> None:
        """Queue a change of a time to live, in place of an earlier one of the same chunk. Needs the lock."""
        if not self._limits:
            self._removals.follow("change times to live in", self._carry_out_limits)
        self._limits[lifetime.ref] = lifetime

    def _carry_out_limits(self) -> None:
        """Have the tier change times to live, so many in one call that it ends within its deadline."""
        with self._lock:
            changed, self._limits = [*self._limits.values()], {}
        for first in range(0, len(changed), _MAX_LIMITS):
            self._tier.limit(changed[first : first + _MAX_LIMITS])

    def clear(self, refs: Iterable[ChunkRef] = ()) -> None:
        """Start to remove all chunks from the tier; if that fails, at least these."""
        with self._lock:
            self._generation += 1  # voids reads and writes that began before
            self._limits.clear()
            self._removals.clear(refs)

    def reset(self, namespace: Namespace) -> None:
        """Start to remove all chunks from the tier; later writes belong to another namespace."""
        with self._lock:
            self._generation += 1  # voids reads and writes that began before
            self._limits.clear()
            self._namespace_id = namespace.id
            self._removals.reset(namespace)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all removals, clears and resets so far are done; False if time ran out first."""
        return self._removals.wait(self._removals.queued, timeout_s)

    def flush(self, timeout_s: float) -> Flushed:
        """Wait until all writes and removals so far have ended. Returns the failures since the last flush."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._lock.wait_for(lambda: not (self._writing or self._ending), timeout_s)
            untold, self._untold = self._untold, Flushed()
            pending = len(self._writing) + self._ending
        is_settled = self.settle(max(0.0, deadline_s - time.monotonic()))
        return untold.plus(Flushed(pending=pending + (0 if is_settled else self._removals.pending)))

    def close(self) -> None:
        """End all threads, drop the writes and removals that have not begun, and close the tier."""
        self._removals.close()  # first, because writes wait for it
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        while writes := self._take_waiting():
            _end(writes, Outcome.FAILED)
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True)  # running calls end within the tier's deadline
        self._tier.close()

    def _read(self, wanted: Transfer, slot: int, layers: range | None, generation: int) -> Arrival:
        if generation != self._generation or self._are_hidden([wanted.ref]):
            return Arrival(Outcome.MISS)
        self._cpu.settle(slot)  # here, where no model waits
        try:
            outcome = (self._tier.get_layers([wanted], layers) if layers else self._tier.get([wanted]))[0]
            return Arrival(outcome if generation == self._generation else Outcome.FAILED)
        except KVStoreError as error:
            self._log("cannot read from the %s tier: %s", error)
            return Arrival(Outcome.FAILED, error.pending if isinstance(error, TierTimeoutError) else None)

    def _are_hidden(self, refs: Sequence[ChunkRef]) -> bool:
        """Tell if any of these chunks must no longer be read; mostly the queue is idle, and its lock is not needed."""
        return self._removals.done < self._removals.queued and self._removals.hides(refs)

    def _borrow(self, refs: Sequence[ChunkRef], generation: int) -> Loan:
        if generation != self._generation or self._are_hidden(refs):
            return Loan.refused(len(refs))
        try:
            return self._tier.borrow(refs)
        except KVStoreError as error:
            self._log("cannot read from the %s tier: %s", error)
            return Loan.refused(len(refs))

    def _write(self) -> None:
        """Carry out the writes that wait longest; none is left if another call has taken them up."""
        writes = self._take_waiting()
        sending: dict[_Write, Transfer] = {}
        with ExitStack() as at_end:
            at_end.callback(_end, writes, Outcome.FAILED)
            try:
                sending = self._prepare(writes)
                if sending:
                    with self._batches.call() as outcomes:
                        outcomes.extend(self._tier.put([*sending.values()]))
                    self._end_put([*sending], outcomes)
            except TierError as error:
                self._log("cannot write to the %s tier: %s", error)
                if sending and isinstance(error, TierTimeoutError):
                    at_end.pop_all()
                    error.pending.add_done_callback(partial(self._end_late, [*sending]))

    def _take_waiting(self) -> list[_Write]:
        """Take the first write that waits, and of small chunks this thread's share of those that may go with it."""
        with self._lock:
            most = min(self._batches.size, len(self._waiting) // WRITE_THREADS)
            writes = [self._waiting.popleft()] if self._waiting else []
            while len(writes) < most and self._waiting[0].after == writes[0].after:
                writes.append(self._waiting.popleft())
        return writes

    def _prepare(self, writes: Sequence[_Write]) -> dict[_Write, Transfer]:
        """Return what the tier is to store, and end the other writes."""
        is_in_order = not writes or self._removals.wait(writes[0].after)
        sending: dict[_Write, Transfer] = {}
        for write in writes:
            source = self._cpu.read(write.slot, write.ref)
            if is_in_order and source is not None and not write.is_unwanted and not self._is_over(write):
                sending[write] = write.transfer_of(source)
        if self._asks_before_write is not None and sending:
            _end(_stored_before(self._asks_before_write, [*sending]), Outcome.STORED)
        _end((write for write in writes if write not in sending or self._is_over(write)), Outcome.FAILED)
        sending = {write: transfer for write, transfer in sending.items() if not write.ended.done()}
        # Of several chunks some may be stored. Only where nobody else writes, that room would be lost.
        is_uncertain = len(sending) > 1 and self._asks_before_write is None
        for write in sending:
            write.is_uncertain = is_uncertain
        return sending

    def _end_put(self, writes: Sequence[_Write], outcomes: Sequence[Outcome]) -> None:
        """End writes with the outcomes of a call; without them they have failed."""
        if len(outcomes) == len(writes):
            for write, outcome in zip(writes, outcomes, strict=True):
                write.is_uncertain = False
                write.ended.set_result(outcome)
        _end(writes, Outcome.FAILED)

    def _end_late(self, writes: Sequence[_Write], late: Future[Sequence[Outcome]]) -> None:
        """End writes with a call that timed out, which may have read their slots until now."""
        error = None if late.cancelled() else late.exception()
        if isinstance(error, TierTimeoutError):
            error.pending.add_done_callback(partial(self._end_late, writes))
            return
        self._log_defect(late)
        self._end_put(writes, late_outcomes(late))

    def _report_end(self, write: _Write, outcome: Outcome) -> None:
        with self._lock:
            self._writing.remove(write)
            self._ending += 1
            is_over = self._is_over(write)
            is_wanted = not (write.is_unwanted or is_over)
            if is_wanted and outcome is not Outcome.STORED:
                is_full = outcome is Outcome.FULL
                self._untold = self._untold.plus(Flushed(failed=int(not is_full), full=int(is_full)))
            if write.limited is not None and is_wanted and outcome is Outcome.STORED:
                self._limit(write.limited)
        if write.is_unwanted or write.is_uncertain or (is_over and outcome is Outcome.STORED):
            self._removals.remove([write.ref], lambda: self._report(write.ref, Outcome.FAILED))
        else:
            self._report(write.ref, outcome if is_wanted else Outcome.FAILED)

    def _report(self, ref: ChunkRef, outcome: Outcome) -> None:
        try:
            self._on_written(ref, outcome)
        finally:  # otherwise flush would wait forever
            with self._lock:
                self._ending -= 1
                self._lock.notify_all()

    def _log_defect(self, call: Future[Any]) -> None:
        """Log the error of a call whose future nobody reads."""
        error = None if call.cancelled() else call.exception()
        if isinstance(error, TierError):
            self._log("cannot write to the %s tier: %s", error)
        elif error is not None:
            logger.error("writing a chunk to the %s tier failed", self._tier.name, exc_info=error)

    def _is_over(self, write: _Write) -> bool:
        return write.generation != self._generation

    def _log(self, message: str, error: KVStoreError) -> None:
        """Warn at most once a minute: a broken tier fails every chunk in the same way."""
        self._throttle.log("any", message, self._tier.name, error)


def _end(writes: Iterable[_Write], outcome: Outcome) -> None:
    """End those of the writes that have not ended."""
    for write in writes:
        if not write.ended.done():
            write.ended.set_result(outcome)


def _stored_before(tier: Tier, writes: Sequence[_Write]) -> list[_Write]:
    """Return the writes whose chunks a tier has for long enough, and can find by their parts.

    It cannot find the parts of a chunk that an older engine stored without its trail.
    """
    told = zip(writes, tier.contains([write.ref for write in writes]), strict=True)
    held = [write for write, presence in told if presence and lasts(end_of(presence), write.until_s)]
    asked = (write.trail for write in held if write.trail and write.until_s is None)  # others could end it earlier
    trails = [*asked] if held and tier.keeps_trails else []
    nearest = tier.nearest(trails) if trails else []
    unknown = {trail for trail, near in zip(trails, nearest, strict=True) if trail not in near}
    return [write for write in held if write.trail not in unknown]
