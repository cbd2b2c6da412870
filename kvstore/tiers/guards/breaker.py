"""Circuit breaker: a tier that keeps failing is bypassed, and probed at intervals until it works again.

It has three states. *Closed*: calls pass. *Open*, after some consecutive failures: calls are answered at once, without
I/O, as if the tier were empty and refused to store. *Probing*: after an interval one call passes, while others are
still answered at once. If it fails, the interval begins again.

Results count as follows:

- A ``TierError``, or a batch in which every chunk ``FAILED``, is a failure.
- A batch that reached the storage is a success: a ``HIT``, ``CORRUPT`` or ``STORED``.
- Other results prove nothing and change nothing, because ``MISS`` and ``FULL`` may be answered from memory, as may
  ``contains``. Otherwise lookups would keep a disk in use although every read fails. Where ``contains`` asks the
  storage, its answer is also a success.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import InvalidCallError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace
from kvstore.tiers.asking import Question, contains, look
from kvstore.tiers.base import Tier, Transfer, late_outcomes
from kvstore.tiers.guards.guard import TierWrapper
from kvstore.tiers.loan import Loan

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Read = Callable[[Sequence[Transfer]], list[Outcome]]
_REACHED = {Outcome.HIT, Outcome.CORRUPT, Outcome.STORED}


class BreakerState(Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass
class _Attempt:
    """Call that passes, and its proof that the tier works or fails; None if it proves nothing."""

    is_probe: bool
    works: bool | None = None
    reason: str = ""

    def judge(self, outcomes: Sequence[Outcome]) -> None:
        if not _REACHED.isdisjoint(outcomes):
            self.works = True
        elif outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
            self.works = False


class PendingRemovals:
    """Chunks that a tier must still remove, and the removals and puts under way. Thread-safe; no call waits.

    - While the removal of a chunk is pending, it cannot be read, although the tier may still hold it.
    - A put that succeeds settles the removal; one that fails does not, as the old bytes may still be stored.
    - While a removal may still take effect, even after a time-out, its chunks cannot be put.
    - While a chunk is being put, its pending removal waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[ChunkRef, None] = {}  # in order
        self._leaving: Counter[ChunkRef] = Counter()
        self._putting: Counter[ChunkRef] = Counter()

    def __len__(self) -> int:
        return len(self._pending)

    def refs(self) -> tuple[ChunkRef, ...]:
        """Return all chunks whose removal is pending now."""
        with self._lock:
            return tuple(self._pending)

    def hidden(self, refs: Iterable[ChunkRef]) -> set[ChunkRef]:
        """Return the chunks among ``refs`` that must not be read, because they were removed."""
        if not self._pending and not self._leaving:
            return set()
        with self._lock:
            return {ref for ref in refs if ref in self._pending or ref in self._leaving}

    def add(self, refs: Iterable[ChunkRef]) -> None:
        """Record removals that are not carried out now."""
        with self._lock:
            self._pending.update(dict.fromkeys(refs))

    def forget(self, refs: Sequence[ChunkRef]) -> None:
        """Settle removals of chunks that were removed in another way."""
        with self._lock:
            for ref in refs:
                self._pending.pop(ref, None)

    def begin_removal(self, refs: Iterable[ChunkRef]) -> tuple[ChunkRef, ...]:
        """Begin a removal; returns the chunks to remove, including pending ones. End it with ``end_removal``."""
        with self._lock:
            going = {ref: None for ref in self._pending if ref not in self._putting} | dict.fromkeys(refs)
            for ref in going:
                self._pending.pop(ref, None)
            self._leaving.update(going.keys())
            return tuple(going)

    def end_removal(self, refs: Iterable[ChunkRef]) -> None:
        """End a removal that can no longer take effect. If it failed, call ``add`` first."""
        with self._lock:
            self._leaving -= Counter(refs)

    def begin_put(self, refs: Iterable[ChunkRef]) -> set[ChunkRef]:
        """Begin a put. Returns the chunks that cannot be put now; end the put of the others with ``end_put``."""
        with self._lock:
            wanted = set(refs)
            refused = wanted & self._leaving.keys()
            self._putting.update(wanted - refused)
            return refused

    def end_put(self, refs: Iterable[ChunkRef], stored: Iterable[ChunkRef]) -> None:
        """End a put, which settles the removal of the chunks that it has ``stored``."""
        with self._lock:
            self._putting -= Counter(refs)
            for ref in stored:
                self._pending.pop(ref, None)


class CircuitBreaker(TierWrapper):
    """Wrapper that bypasses a tier that keeps failing.

    While it is open, lookups answer False, and ``get`` and ``put`` answer ``FAILED``, because ``MISS`` would make
    the index drop chunks that exist, and ``FULL`` would suggest a larger disk. ``remove`` is recorded, and carried out
    before the breaker closes: no removed chunk reappears. One that failed is repeated with the next. ``scan``,
    ``clear`` and ``reset`` always pass, because the caller must know if they succeeded.
    A ``TierError`` of a call that passes reaches the caller. The state changes under a lock that is not held
    during I/O. A probe that hangs keeps the breaker open, so put a ``Guard`` inside.

    Args:
        inner: the tier to guard.
        failures: number of consecutive failures that open the breaker.
        probe_interval_s: time from a failure of the open tier to the next probe.
        asks_storage: ``contains`` reaches the storage, so its answer is a success, and it may be a probe.
        clock: seconds. A jump of the clock costs at most one interval.

    Raises:
        InvalidCallError: ``failures`` is not positive, or the interval negative.
    """

    def __init__(
        self,
        inner: Tier,
        failures: int = 5,
        probe_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        asks_storage: bool = False,
    ) -> None:
        super().__init__(inner)
        if failures < 1 or not probe_interval_s >= 0:
            raise InvalidCallError(
                f"a breaker needs failures >= 1 and probe_interval_s >= 0, got {failures} and {probe_interval_s}"
            )
        self._max_failures = failures
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._asks_storage = asks_storage
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        self._since_s = 0.0  # the last failure while open
        self._removals = PendingRemovals()
        self._namespace_id: bytes | None = None  # of the last reset
        self._clears = 0  # number of begins and ends, so odd while one is under way
        self._is_shut = False

    @property
    def answers(self) -> bool:
        """False if calls are answered without the tier."""
        return self._state is BreakerState.CLOSED

    @property
    def state(self) -> BreakerState:
        """Current state."""
        return self._state

    @property
    def pending_removals(self) -> int:
        """Number of chunks that the tier must still remove."""
        return len(self._removals)

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        """Forward; all False while open. It is a probe only if it reaches the storage."""
        return [presence or False for presence in self._held(refs, contains)]

    def look(self, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
        """Forward like ``contains``; the parts of a tier have breakers of their own."""
        return self._held(refs, look)

    def _held(self, refs: Sequence[ChunkRef], question: Question) -> list[Presence | None]:
        with self._passage(may_probe=self._asks_storage) as passage:
            if passage is None:
                return [False] * len(refs)
            held = question(self.inner, refs)
            if self._asks_storage and refs:
                passage.works = True
            hidden = self._removals.hidden(refs)
            return [presence if ref not in hidden else False for ref, presence in zip(refs, held, strict=True)]

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Forward; all empty while open. Never a probe."""
        with self._passage(may_probe=False) as passage:
            return self.inner.nearest(trails) if passage else [()] * len(trails)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward; all ``FAILED`` while open, as the chunks may exist."""
        return self._get(transfers, self.inner.get)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward like ``get``."""
        return self._get(transfers, lambda some: self.inner.get_layers(some, layers))

    def _get(self, transfers: Sequence[Transfer], action: _Read) -> list[Outcome]:
        with self._passage() as passage:
            if passage is None:
                return [Outcome.FAILED] * len(transfers)
            hidden = self._removals.hidden(transfer.ref for transfer in transfers)
            outcomes = action([transfer for transfer in transfers if transfer.ref not in hidden])
            passage.judge(outcomes)
            return _merge([transfer.ref in hidden for transfer in transfers], Outcome.MISS, outcomes)

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward; all ``FAILED`` while open."""
        with self._passage() as passage:
            if passage is None:
                return Loan.refused(len(refs))
            hidden = self._removals.hidden(refs)
            loan = self.inner.borrow([ref for ref in refs if ref not in hidden])
            passage.judge(loan.outcomes)
            if not hidden:
                return loan
            left_out = [ref in hidden for ref in refs]
            outcomes, payloads = _merge(left_out, Outcome.MISS, loan.outcomes), _merge(left_out, None, loan.payloads)
            return Loan(outcomes, payloads, loan.end)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward; all ``FAILED`` while open. Chunks of a former epoch, or being removed, are also ``FAILED``."""
        namespace_id = self._namespace_id
        is_obsolete = namespace_id is not None and not any(item.belongs_to(namespace_id) for item in transfers)
        if transfers and is_obsolete and not self._is_shut:
            return [Outcome.FAILED] * len(transfers)  # this proves nothing about the storage
        with self._passage() as passage:
            if passage is None:
                return [Outcome.FAILED] * len(transfers)
            clears = self._clears
            refused = self._removals.begin_put(transfer.ref for transfer in transfers)
            outcomes = self._put([transfer for transfer in transfers if transfer.ref not in refused])
            if clears == self._clears and clears % 2 == 0:  # overtaken by a clear, a put fails on a sound tier
                passage.judge(outcomes)
            return _merge([transfer.ref in refused for transfer in transfers], Outcome.FAILED, outcomes)

    def _put(self, transfers: Sequence[Transfer]) -> Sequence[Outcome]:
        """Store chunks. The removal of chunks that are stored, even after a time-out, is settled."""

        def end(outcomes: Sequence[Outcome]) -> None:
            stored = [item.ref for item, outcome in zip(transfers, outcomes, strict=False) if outcome is Outcome.STORED]
            self._removals.end_put({item.ref for item in transfers}, stored)

        with ExitStack() as on_error:
            on_error.callback(end, ())
            try:
                outcomes = self.inner.put(transfers)
            except TierTimeoutError as error:
                on_error.pop_all()
                error.pending.add_done_callback(lambda late: end(late_outcomes(late)))
                raise
            on_error.pop_all()
        end(outcomes)
        return outcomes

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward, together with removals that failed before; record them while open.

        Raises:
            TierError: the tier is broken, and the breaker was still closed. The removal is repeated later.
        """
        fixed = tuple(refs)
        with self._passage(may_probe=False) as passage:
            if passage:
                self._remove_with_pending(fixed)
                return
        with self._lock:
            self._removals.add(fixed)
            has_recovered = self._state is BreakerState.CLOSED
        if has_recovered:  # between the check and the record
            self.remove(())

    def _tell(self, operation: str, action: Callable[[], None]) -> None:
        """Forward; nothing while open."""
        with self._passage(may_probe=False) as passage:
            if passage:
                super()._tell(operation, action)

    def clear(self) -> None:
        """Forward in any state; if it succeeds, it settles removals recorded before."""
        recorded = self._removals.refs()
        with self._clearing():
            self.inner.clear()
        self._removals.forget(recorded)

    def reset(self, namespace: Namespace) -> None:
        """Forward in any state; this settles removals recorded before.

        Raises:
            TierError: the tier is broken. It still is in the new namespace, or enters it before any other call.
        """
        self._try_pending()  # in the namespace that ends: other engines may still be there
        with self._clearing():
            self._namespace_id = namespace.id  # puts during the reset fail either way
            self.inner.reset(namespace)

    def _try_pending(self) -> None:
        """Carry out pending removals, or give them up. Chunks of one that hangs cannot be put."""
        if self._removals:
            try:
                self._remove_with_pending()
            except TierError as error:
                logger.warning("cannot remove chunks from the old namespace of the %s tier: %s", self.name, error)
            self._removals.forget(self._removals.refs())

    def close(self) -> None:
        """Forward. Removals still pending are lost, so their chunks are found again at the next start."""
        self._is_shut = True
        self.inner.close()

    @contextmanager
    def _passage(self, *, may_probe: bool = True) -> Iterator[_Attempt | None]:
        """Let a call pass, and judge it at its end; yields None if it must not pass."""
        passage = self._admit(may_probe=may_probe)
        with self._watch(passage) if passage else nullcontext():
            yield passage

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        self._clears += 1
        try:
            with self._watch(_Attempt(is_probe=False)):
                yield
        finally:
            self._clears += 1

    @contextmanager
    def _watch(self, passage: _Attempt) -> Iterator[None]:
        try:
            yield
        except TierError as error:
            passage.works, passage.reason = False, str(error)
            raise
        finally:  # also after exceptions that prove nothing, because a probe must end
            self._conclude(passage)

    def _admit(self, *, may_probe: bool) -> _Attempt | None:
        with self._lock:
            if self._state is BreakerState.CLOSED or self._is_shut:  # after close the tier itself refuses
                return _Attempt(is_probe=False)
            if may_probe and self._state is BreakerState.OPEN and self._is_probe_due():
                self._state = BreakerState.PROBING
                return _Attempt(is_probe=True)
            return None

    def _is_probe_due(self) -> bool:
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)  # after a jump back the interval begins again
        return now_s - self._since_s >= self._probe_interval_s

    def _conclude(self, passage: _Attempt) -> None:
        try:
            if passage.is_probe and passage.works and self._removals:
                passage.works = None
                self._remove_with_pending()
                passage.works = True
        except TierError as error:  # the probe's own result stands; the breaker stays open
            passage.works, passage.reason = False, str(error)
        finally:
            with self._lock:
                line = self._after_probe(passage) if passage.is_probe else self._after_call(passage)
            if line:
                logger.log(line[0], "%s", line[1])

    def _after_call(self, passage: _Attempt) -> tuple[int, str] | None:
        """Count a failure or a success while closed. Returns the line to log."""
        if self._state is not BreakerState.CLOSED or passage.works is None:
            return None  # a late call from before it opened changes nothing
        if passage.works:
            self._failures_in_a_row = 0
            return None
        self._failures_in_a_row += 1
        if self._failures_in_a_row < self._max_failures:
            return None
        self._state = BreakerState.OPEN
        self._since_s = self._clock()
        return logging.WARNING, (
            f"the {self.name} tier failed {self._failures_in_a_row} times in a row and is left out; it is tried again "
            f"every {self._probe_interval_s:g} s ({passage.reason or 'every chunk of the last call failed'})"
        )

    def _after_probe(self, passage: _Attempt) -> tuple[int, str] | None:
        """Close after a success, wait again after a failure. Returns the line to log."""
        if not passage.works:
            self._state = BreakerState.OPEN
            if passage.works is False:  # if it proved nothing, the next call is a probe
                self._since_s = self._clock()
            return None
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        return logging.INFO, f"the {self.name} tier works again"

    def _remove_with_pending(self, refs: Iterable[ChunkRef] = ()) -> None:
        """Remove chunks, together with those whose removal is pending.

        Raises:
            TierError: all of them are pending now.
        """
        going = self._removals.begin_removal(refs)
        with ExitStack() as on_error:
            on_error.callback(self._removals.end_removal, going)
            on_error.callback(self._removals.add, going)  # called first
            try:
                self.inner.remove(going)
            except TierTimeoutError as error:
                on_error.pop_all()
                self._removals.add(going)
                error.pending.add_done_callback(lambda _: self._removals.end_removal(going))
                raise
            on_error.pop_all()
        self._removals.end_removal(going)


def _merge(is_left_out: Sequence[bool], answer: T, others: Sequence[T]) -> list[T]:
    """Return the answers for a batch, with one answer for all chunks that were left out."""
    rest = iter(others)
    return [answer if is_out else next(rest) for is_out in is_left_out]
