"""A circuit breaker: a tier that fails again and again is left alone, and asked now and then whether it works again.

Three states. *Closed*: calls go through. *Open*, after some failures in a row: calls are answered at once, without I/O,
as if the tier were empty and refused to store. *Probing*: after an interval one call goes through, the others are still
answered at once; if it fails, the interval begins anew.

What counts:

- Failure is a ``TierError``, or a batch of which every chunk is ``FAILED``.
- Success is a batch for which the storage was reached: a ``HIT``, ``CORRUPT`` or ``STORED``.
- All else proves nothing, and changes nothing: ``MISS`` and ``FULL`` may come from memory, as ``contains`` does. A disk
  whose every read fails would otherwise be kept in use by the lookups between them. Where ``contains`` asks the
  storage, its answer is a success, too.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.errors import InvalidCallError, TierError
from kvstore.tiers.base import ChunkRef, Loan, Outcome, Tier, Transfer
from kvstore.wrappers.base import TierWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.keys import Namespace

logger = logging.getLogger(__name__)

_REACHED = {Outcome.HIT, Outcome.CORRUPT, Outcome.STORED}


class BreakerState(Enum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True)
class BreakerStats:
    """A snapshot of a breaker.

    Attributes:
        state: now.
        openings: how often it opened.
        recoveries: how often it closed again.
        probes: calls let through while it was open.
        short_cut_calls: calls answered without asking the tier.
        owed_removals: chunks that the tier must still forget.
    """

    state: BreakerState
    openings: int
    recoveries: int
    probes: int
    short_cut_calls: int
    owed_removals: int


class _Verdict(Enum):
    UNKNOWN = 0
    SUCCESS = 1
    FAILURE = 2


@dataclass
class _Passage:
    """A call that goes through, and what it turned out to prove."""

    is_probe: bool
    verdict: _Verdict = _Verdict.UNKNOWN
    reason: str = ""

    def judge(self, outcomes: Sequence[Outcome]) -> None:
        if not _REACHED.isdisjoint(outcomes):
            self.verdict = _Verdict.SUCCESS
        elif outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
            self.verdict = _Verdict.FAILURE


class CircuitBreaker(TierWrapper):
    """Leaves a tier alone that fails again and again.

    While it is open, ``contains`` answers False, ``get`` and ``put`` ``FAILED`` (not ``MISS``, which would make the
    index forget what is there, nor ``FULL``, which would send somebody to buy a disk). ``remove`` is remembered, and
    made good for before the breaker closes: no chunk comes back that was removed meanwhile, and no bytes are lost. A
    ``remove`` that failed is repeated with the next one.
    ``scan``, ``clear`` and ``reset`` always go through: whoever clears must know whether it was done.

    A call that raises while the breaker is closed raises here too. The state changes under a lock that is not held
    during I/O. A probe that hangs keeps the breaker open, so put a ``Deadline`` inside.

    Args:
        inner: the tier to guard.
        failures: how many in a row open it.
        probe_interval_s: from a failure of the open tier to the next probe.
        asks_storage: ``contains`` reaches the storage: an answer is a success, and it may be a probe.
        clock: seconds. A clock that jumps costs at most one interval more or less.

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
            raise InvalidCallError(f"a breaker needs {failures=} of 1 at least and {probe_interval_s=} of 0 at least")
        self._max_failures = failures
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._asks_storage = asks_storage
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        self._since_s = 0.0  # the last failure while open
        self._owed: dict[ChunkRef, None] = {}  # removals to make good for, in order
        self._clears = 0  # begun and ended: odd while one is under way
        self._openings = 0
        self._recoveries = 0
        self._probes = 0
        self._short_cut_calls = 0
        self._is_shut = False

    @property
    def is_open(self) -> bool:
        """Whether calls are answered without asking the tier."""
        return self._state is not BreakerState.CLOSED

    def stats(self) -> BreakerStats:
        """State and counts, all of one moment."""
        with self._lock:
            return BreakerStats(
                self._state,
                self._openings,
                self._recoveries,
                self._probes,
                self._short_cut_calls,
                len(self._owed),
            )

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward; all False while open. A probe only where it reaches the storage.

        Raises:
            TierError: the tier is broken, and this call went through.
        """
        with self._passage(may_probe=self._asks_storage) as passage:
            if passage is None:
                return [False] * len(refs)
            held = self.inner.contains(refs)
            if self._asks_storage and refs:
                passage.verdict = _Verdict.SUCCESS
            return held

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward; all ``FAILED`` while open: the chunks may well be there.

        Raises:
            TierError: the tier is broken, and this call went through.
        """
        return self._get(transfers, lambda: self.inner.get(transfers))

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward like ``get``."""
        return self._get(transfers, lambda: self.inner.get_layers(transfers, layers))

    def _get(self, transfers: Sequence[Transfer], action: Callable[[], list[Outcome]]) -> list[Outcome]:
        with self._passage() as passage:
            if passage is None:
                return [Outcome.FAILED] * len(transfers)
            outcomes = action()
            passage.judge(outcomes)
            return outcomes

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward; all ``FAILED`` while open.

        Raises:
            TierError: the tier is broken, and this call went through.
        """
        with self._passage() as passage:
            if passage is None:
                return Loan.refused(len(refs))
            loan = self.inner.borrow(refs)
            passage.judge(loan.outcomes)
            return loan

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward; all ``FAILED`` while open.

        Raises:
            TierError: the tier is broken, and this call went through.
        """
        with self._passage() as passage:
            if passage is None:
                return [Outcome.FAILED] * len(transfers)
            with self._lock:
                overtaken = [ref for ref, _ in transfers if ref in self._owed]
                for ref in overtaken:  # wanted again: a removal that ends after the put would take the new one
                    del self._owed[ref]
                clears = self._clears
            outcomes: list[Outcome] = []
            try:
                outcomes = self.inner.put(transfers)
            finally:
                self._owe_again(overtaken, transfers, outcomes)
            if clears == self._clears and clears % 2 == 0:  # a put that is overtaken by a clear fails on a sound tier
                passage.judge(outcomes)
            return outcomes

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward, together with removals that failed before; remembered while open.

        Raises:
            TierError: the tier is broken, and the breaker was still closed. The removal is repeated later.
        """
        fixed = tuple(refs)
        with self._passage(may_probe=False) as passage:
            if passage:
                self._remove_with_owed(fixed)
                return
        with self._lock:
            self._owed.update(dict.fromkeys(fixed))
            has_recovered = self._state is BreakerState.CLOSED
        if has_recovered:  # between the answer and the note
            self.remove(())

    def clear(self) -> None:
        """Forward in any state; removals remembered before are done with it.

        Raises:
            TierError: the tier is broken, and may have forgotten nothing.
        """
        with self._lock:
            owed = tuple(self._owed)
        with self._clearing():
            self.inner.clear()
        with self._lock:
            for ref in owed:
                self._owed.pop(ref, None)

    def drop_spares(self, wanted_bytes: int) -> None:
        """Forward; nothing while open.

        Raises:
            TierError: the tier is broken, and the breaker was still closed.
        """
        with self._passage(may_probe=False) as passage:
            if passage:
                self.inner.drop_spares(wanted_bytes)

    def reset(self, namespace: Namespace) -> None:
        """Forward in any state; removals remembered before are done with it.

        Raises:
            TierError: the tier is broken. It is in the new namespace all the same, or will be before it does anything.
        """
        with self._lock:
            self._owed = {}
        with self._clearing():
            self.inner.reset(namespace)

    def close(self) -> None:
        """Forward. Removals still owed are lost, and their chunks there again at the next start."""
        self._is_shut = True
        self.inner.close()

    @contextmanager
    def _passage(self, *, may_probe: bool = True) -> Iterator[_Passage | None]:
        """Let a call through, and draw the conclusion from it; None if it must not go."""
        passage = self._admit(may_probe=may_probe)
        if passage is None:
            yield None
            return
        with self._watch(passage):
            yield passage

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        self._clears += 1
        try:
            with self._watch(_Passage(is_probe=False)):
                yield
        finally:
            self._clears += 1

    @contextmanager
    def _watch(self, passage: _Passage) -> Iterator[None]:
        try:
            yield
        except TierError as error:
            passage.verdict, passage.reason = _Verdict.FAILURE, str(error)
            raise
        finally:  # also after exceptions that prove nothing, or a probe would never end
            self._conclude(passage)

    def _admit(self, *, may_probe: bool) -> _Passage | None:
        with self._lock:
            if self._state is BreakerState.CLOSED or self._is_shut:  # after close the tier itself says so
                return _Passage(is_probe=False)
            if may_probe and self._state is BreakerState.OPEN and self._is_probe_due():
                self._state = BreakerState.PROBING
                self._probes += 1
                return _Passage(is_probe=True)
            self._short_cut_calls += 1
            return None

    def _is_probe_due(self) -> bool:
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)  # after a jump back the interval begins anew
        return now_s - self._since_s >= self._probe_interval_s

    def _conclude(self, passage: _Passage) -> None:
        try:
            if passage.is_probe and passage.verdict is _Verdict.SUCCESS and self._owed:
                passage.verdict = _Verdict.UNKNOWN
                self._remove_with_owed()
                passage.verdict = _Verdict.SUCCESS
        except TierError as error:  # the probe's own result stands; the breaker stays open
            passage.verdict, passage.reason = _Verdict.FAILURE, str(error)
        finally:
            with self._lock:
                line = self._after_probe(passage) if passage.is_probe else self._after_call(passage)
            if line:
                level, message = line
                logger.log(level, "%s", message)

    def _after_call(self, passage: _Passage) -> tuple[int, str] | None:
        """Count a failure or a success of a closed breaker. Returns the line to log."""
        if self._state is not BreakerState.CLOSED or passage.verdict is _Verdict.UNKNOWN:
            return None  # a straggler from before it opened changes nothing
        if passage.verdict is _Verdict.SUCCESS:
            self._failures_in_a_row = 0
            return None
        self._failures_in_a_row += 1
        if self._failures_in_a_row < self._max_failures:
            return None
        self._state = BreakerState.OPEN
        self._since_s = self._clock()
        self._openings += 1
        return logging.WARNING, (
            f"the {self.name} tier failed {self._failures_in_a_row} times in a row and is left out; it is tried again "
            f"every {self._probe_interval_s:g} s ({passage.reason or 'every chunk of the last call failed'})"
        )

    def _after_probe(self, passage: _Passage) -> tuple[int, str] | None:
        """Close after a success, wait again after a failure. Returns the line to log."""
        if passage.verdict is not _Verdict.SUCCESS:
            self._state = BreakerState.OPEN
            if passage.verdict is _Verdict.FAILURE:  # one that proved nothing leaves it to the next call
                self._since_s = self._clock()
            return None
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        self._recoveries += 1
        return logging.INFO, f"the {self.name} tier works again"

    def _owe_again(
        self, overtaken: Sequence[ChunkRef], transfers: Sequence[Transfer], outcomes: Sequence[Outcome]
    ) -> None:
        """Remember removals in whose place a put was to come that did not: the old chunk is still there."""
        if not overtaken:
            return
        stored = {ref for (ref, _), outcome in zip(transfers, outcomes, strict=False) if outcome is Outcome.STORED}
        with self._lock:
            self._owed.update(dict.fromkeys(ref for ref in overtaken if ref not in stored))

    def _remove_with_owed(self, refs: Iterable[ChunkRef] = ()) -> None:
        """Remove chunks, and those whose removal is owed.

        Raises:
            TierError: all of them are owed now.
        """
        with self._lock:
            owed = {**self._owed, **dict.fromkeys(refs)}
            self._owed = {}
        try:
            self.inner.remove(tuple(owed))
        except TierError:
            with self._lock:
                self._owed = {**owed, **self._owed}
            raise
