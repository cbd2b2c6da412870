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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import InvalidCallError, TierError, TierTimeoutError
from kvstore.keys import Namespace
from kvstore.tiers.base import Loan, Tier, Transfer
from kvstore.tiers.guards.base import TierWrapper
from kvstore.tiers.guards.owed import OwedRemovals

logger = logging.getLogger(__name__)

T = TypeVar("T")
_REACHED = {Outcome.HIT, Outcome.CORRUPT, Outcome.STORED}


class BreakerState(Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass
class _Passage:
    """Call that passes, and its proof that the tier works or fails; None if it proves nothing."""

    is_probe: bool
    works: bool | None = None
    reason: str = ""

    def judge(self, outcomes: Sequence[Outcome]) -> None:
        if not _REACHED.isdisjoint(outcomes):
            self.works = True
        elif outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
            self.works = False


class CircuitBreaker(TierWrapper):
    """Wrapper that bypasses a tier that keeps failing.

    While it is open, ``contains`` answers False, and ``get`` and ``put`` answer ``FAILED``, because ``MISS`` would make
    the index drop chunks that exist, and ``FULL`` would suggest a larger disk. ``remove`` is recorded, and carried out
    before the breaker closes, so that no removed chunk reappears and no bytes are lost. A ``remove`` that failed is
    repeated with the next one, and until then its chunks are hidden. One that hangs may still take effect, so its
    chunks cannot be put until it has ended. ``scan``, ``clear`` and ``reset`` always pass, because the caller must know
    if they succeeded.

    Exceptions of calls while the breaker is closed reach the caller. The state changes under a lock that is not held
    during I/O. A probe that hangs keeps the breaker open, so put a ``Deadline`` inside.

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
            raise InvalidCallError(f"a breaker needs {failures=} of 1 at least and {probe_interval_s=} of 0 at least")
        self._max_failures = failures
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._asks_storage = asks_storage
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        self._since_s = 0.0  # the last failure while open
        self._owed = OwedRemovals()
        self._namespace_id: bytes | None = None  # of the last reset
        self._clears = 0  # number of begins and ends, so odd while one is under way
        self._is_shut = False

    @property
    def answers(self) -> bool:
        """False while it is open."""
        return not self.is_open

    @property
    def is_open(self) -> bool:
        """True if calls are answered without the tier."""
        return self._state is not BreakerState.CLOSED

    @property
    def state(self) -> BreakerState:
        """Current state."""
        return self._state

    @property
    def owed_removals(self) -> int:
        """Number of chunks that the tier must still remove."""
        return len(self._owed)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward; all False while open. It is a probe only if it reaches the storage.

        Raises:
            TierError: the tier is broken, and this call passed.
        """
        with self._passage(may_probe=self._asks_storage) as passage:
            if passage is None:
                return [False] * len(refs)
            held = self.inner.contains(refs)
            if self._asks_storage and refs:
                passage.works = True
            hidden = self._owed.hidden(refs)
            return [is_held and ref not in hidden for ref, is_held in zip(refs, held, strict=True)]

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Forward; all empty while open. Never a probe.

        Raises:
            TierError: the tier is broken, and this call passed.
        """
        with self._passage(may_probe=False) as passage:
            return self.inner.nearest(trails) if passage else [()] * len(trails)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward; all ``FAILED`` while open, as the chunks may exist.

        Raises:
            TierError: the tier is broken, and this call passed.
        """
        return self._get(transfers, self.inner.get)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward like ``get``."""
        return self._get(transfers, lambda some: self.inner.get_layers(some, layers))

    def _get(
        self, transfers: Sequence[Transfer], action: Callable[[Sequence[Transfer]], list[Outcome]]
    ) -> list[Outcome]:
        with self._passage() as passage:
            if passage is None:
                return [Outcome.FAILED] * len(transfers)
            hidden = self._owed.hidden(transfer.ref for transfer in transfers)
            outcomes = action([transfer for transfer in transfers if transfer.ref not in hidden])
            passage.judge(outcomes)
            return _merge([transfer.ref in hidden for transfer in transfers], Outcome.MISS, outcomes)

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward; all ``FAILED`` while open.

        Raises:
            TierError: the tier is broken, and this call passed.
        """
        with self._passage() as passage:
            if passage is None:
                return Loan.refused(len(refs))
            hidden = self._owed.hidden(refs)
            loan = self.inner.borrow([ref for ref in refs if ref not in hidden])
            passage.judge(loan.outcomes)
            if not hidden:
                return loan
            is_hidden = [ref in hidden for ref in refs]
            outcomes = _merge(is_hidden, Outcome.MISS, loan.outcomes)
            return Loan(outcomes, _merge(is_hidden, None, loan.payloads), loan.end)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward; all ``FAILED`` while open. Chunks of a former epoch, or being removed, are also ``FAILED``.

        Raises:
            TierError: the tier is broken, and this call passed.
        """
        if transfers and not self._is_shut and not any(item.belongs_to(self._namespace_id) for item in transfers):
            return [Outcome.FAILED] * len(transfers)  # this proves nothing about the storage
        with self._passage() as passage:
            if passage is None:
                return [Outcome.FAILED] * len(transfers)
            clears = self._clears
            refused = self._owed.begin_put(transfer.ref for transfer in transfers)
            outcomes = self._put([transfer for transfer in transfers if transfer.ref not in refused])
            if clears == self._clears and clears % 2 == 0:  # overtaken by a clear, a put fails on a sound tier
                passage.judge(outcomes)
            return _merge([transfer.ref in refused for transfer in transfers], Outcome.FAILED, outcomes)

    def _put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks. The removal of chunks that are stored, even after a time-out, is no longer owed."""
        refs = {transfer.ref for transfer in transfers}

        def end(outcomes: Sequence[Outcome] = ()) -> None:
            pairs = zip(transfers, outcomes, strict=False)
            self._owed.end_put(refs, [item.ref for item, outcome in pairs if outcome is Outcome.STORED])

        try:
            outcomes = self.inner.put(transfers)
        except TierTimeoutError as error:
            error.pending.add_done_callback(lambda late: end(_answer_of(late)))
            raise
        except BaseException:
            end()
            raise
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
                self._remove_with_owed(fixed)
                return
        with self._lock:
            self._owed.owe(fixed)
            has_recovered = self._state is BreakerState.CLOSED
        if has_recovered:  # between the check and the record
            self.remove(())

    def clear(self) -> None:
        """Forward in any state; this settles removals recorded before.

        Raises:
            TierError: the tier is broken, and may have removed nothing.
        """
        owed = self._owed.refs()
        with self._clearing():
            self.inner.clear()
        self._owed.forget(owed)

    def drop_spares(self, wanted_bytes: int) -> None:
        """Forward; nothing while open.

        Raises:
            TierError: the tier is broken, and the breaker was still closed.
        """
        with self._passage(may_probe=False) as passage:
            if passage:
                super().drop_spares(wanted_bytes)

    def reset(self, namespace: Namespace) -> None:
        """Forward in any state; this settles removals recorded before.

        Raises:
            TierError: the tier is broken. It still is in the new namespace, or enters it before any other call.
        """
        self._try_owed()  # in the namespace that ends: other engines may still be there
        with self._clearing():
            self._namespace_id = namespace.id  # puts during the reset fail either way
            self.inner.reset(namespace)

    def _try_owed(self) -> None:
        """Carry out owed removals, or give them up. Chunks of one that hangs cannot be put."""
        if self._owed:
            try:
                self._remove_with_owed()
            except TierError as error:
                logger.warning("chunks stay in the %s tier's old namespace: %s", self.name, error)
            self._owed.forget(self._owed.refs())

    def close(self) -> None:
        """Forward. Removals still owed are lost, so their chunks are found again at the next start."""
        self._is_shut = True
        self.inner.close()

    @contextmanager
    def _passage(self, *, may_probe: bool = True) -> Iterator[_Passage | None]:
        """Let a call pass, and judge it at its end; yields None if it must not pass."""
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
            passage.works, passage.reason = False, str(error)
            raise
        finally:  # also after exceptions that prove nothing, because a probe must end
            self._conclude(passage)

    def _admit(self, *, may_probe: bool) -> _Passage | None:
        with self._lock:
            if self._state is BreakerState.CLOSED or self._is_shut:  # after close the tier itself refuses
                return _Passage(is_probe=False)
            if may_probe and self._state is BreakerState.OPEN and self._is_probe_due():
                self._state = BreakerState.PROBING
                return _Passage(is_probe=True)
            return None

    def _is_probe_due(self) -> bool:
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)  # after a jump back the interval begins again
        return now_s - self._since_s >= self._probe_interval_s

    def _conclude(self, passage: _Passage) -> None:
        try:
            if passage.is_probe and passage.works and self._owed:
                passage.works = None
                self._remove_with_owed()
                passage.works = True
        except TierError as error:  # the probe's own result stands; the breaker stays open
            passage.works, passage.reason = False, str(error)
        finally:
            with self._lock:
                line = self._after_probe(passage) if passage.is_probe else self._after_call(passage)
            if line:
                level, message = line
                logger.log(level, "%s", message)

    def _after_call(self, passage: _Passage) -> tuple[int, str] | None:
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

    def _after_probe(self, passage: _Passage) -> tuple[int, str] | None:
        """Close after a success, wait again after a failure. Returns the line to log."""
        if not passage.works:
            self._state = BreakerState.OPEN
            if passage.works is False:  # if it proved nothing, the next call is a probe
                self._since_s = self._clock()
            return None
        self._state = BreakerState.CLOSED
        self._failures_in_a_row = 0
        return logging.INFO, f"the {self.name} tier works again"

    def _remove_with_owed(self, refs: Iterable[ChunkRef] = ()) -> None:
        """Remove chunks, together with those whose removal is owed.

        Raises:
            TierError: all of them are owed now.
        """
        going = self._owed.begin_removal(refs)
        try:
            self.inner.remove(going)
        except TierTimeoutError as error:
            self._owed.owe(going)
            error.pending.add_done_callback(lambda _: self._owed.end_removal(going))
            raise
        except BaseException:
            self._owed.owe(going)
            self._owed.end_removal(going)
            raise
        self._owed.end_removal(going)


def _merge(is_left_out: Sequence[bool], answer: T, others: Sequence[T]) -> list[T]:
    """Return the answers for a batch, with one answer for all chunks that were left out."""
    rest = iter(others)
    return [answer if is_out else next(rest) for is_out in is_left_out]


def _answer_of(late: Future[Sequence[Outcome]]) -> Sequence[Outcome]:
    """Return the outcomes of a put that timed out and has ended."""
    return () if late.cancelled() or late.exception() is not None else late.result()
