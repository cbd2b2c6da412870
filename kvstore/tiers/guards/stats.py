"""Statistics of a tier's calls: how many, how much, with what outcome, and how long they took."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import TierError, TierTimeoutError
from kvstore.tiers.base import Loan, Tier, Transfer
from kvstore.tiers.guards.base import TierWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvstore.keys import Namespace

OPERATIONS = ("scan", "contains", "get", "get_layers", "put", "remove", "clear", "reset")
# Upper bounds of the buckets: from 10 us to 168 s in steps of the square root of two; one more bucket takes the rest.
LATENCY_BOUNDS_S = tuple(1e-5 * 2 ** (step / 2) for step in range(49))
_MOVED = (Outcome.HIT, Outcome.STORED)


@dataclass(frozen=True)
class LatencyHistogram:
    """How long calls took, those that raised included.

    Attributes:
        buckets: calls in each bucket; ``LATENCY_BOUNDS_S`` has the upper bounds of all but the last.
        total_s: the sum of all.
        max_s: the longest.
    """

    buckets: tuple[int, ...]
    total_s: float
    max_s: float

    @property
    def count(self) -> int:
        """Calls measured."""
        return sum(self.buckets)

    def quantile_s(self, share: float) -> float:
        """An upper bound of the time within which ``share`` of the calls ended, at most 41% too long; 0 if no calls."""
        rank, seen = share * self.count, 0
        for bound_s, calls in zip(LATENCY_BOUNDS_S, self.buckets, strict=False):
            seen += calls
            if seen and seen >= rank:
                return min(bound_s, self.max_s)
        return self.max_s

    def since(self, earlier: LatencyHistogram | None) -> list[float]:
        """The calls that came since an earlier snapshot, as times with the same buckets and the same sum.

        Within each bucket all are given the same time, at the same share of the way from its lower to its upper bound.
        """
        if earlier is not None and earlier.buckets == self.buckets:
            return []
        before = earlier or LatencyHistogram((0,) * len(self.buckets), 0.0, 0.0)
        changed = [place for place, calls in enumerate(self.buckets) if calls != before.buckets[place]]
        calls = [self.buckets[place] - before.buckets[place] for place in changed]
        lows = [LATENCY_BOUNDS_S[place - 1] if place else 0.0 for place in changed]
        highs = [*LATENCY_BOUNDS_S, max(self.max_s, LATENCY_BOUNDS_S[-1])]
        spans = [highs[place] - low for place, low in zip(changed, lows, strict=True)]
        least_s = sum(count * low for count, low in zip(calls, lows, strict=True))
        spread_s = sum(count * span for count, span in zip(calls, spans, strict=True))
        share = (self.total_s - before.total_s - least_s) / spread_s if spread_s else 1.0
        share = min(1.0, max(share, 1e-6))  # rounding must not move a call to another bucket
        times_s: list[float] = []
        for place, count, low, span in zip(changed, calls, lows, spans, strict=True):
            times_s += [min(highs[place], low + share * span)] * count
        return times_s

    @property
    def p50_s(self) -> float:
        """The median, roughly."""
        return self.quantile_s(0.5)

    @property
    def p99_s(self) -> float:
        """What one call in a hundred exceeds, roughly."""
        return self.quantile_s(0.99)


@dataclass(frozen=True)
class OperationStats:
    """One operation's calls.

    Attributes:
        calls: all of them, those that raised included.
        chunks: asked for, or listed by ``scan``.
        moved_bytes: stored bytes of the chunks that were a ``HIT`` or ``STORED``.
        errors: calls that raised ``TierError``.
        timeouts: those of them that timed out.
        outcomes: chunks by outcome; ``contains`` counts True as ``HIT`` and False as ``MISS``.
        latency: how long the calls took.
    """

    calls: int
    chunks: int
    moved_bytes: int
    errors: int
    timeouts: int
    outcomes: Mapping[Outcome, int]
    latency: LatencyHistogram


@dataclass(frozen=True)
class TierStats:
    """A snapshot of all operations. Each operation is consistent in itself."""

    scan: OperationStats
    contains: OperationStats
    get: OperationStats
    get_layers: OperationStats
    put: OperationStats
    remove: OperationStats
    clear: OperationStats
    reset: OperationStats


@dataclass
class _Tally:
    """What one call adds."""

    chunks: int = 0
    moved_bytes: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    errors: int = 0
    timeouts: int = 0


class _Recorder:
    """The sums of one operation, under a lock of its own that is held for a few additions per call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._sum = _Tally()
        self._buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._total_s = 0.0
        self._max_s = 0.0

    @contextmanager
    def call(self) -> Iterator[_Tally]:
        """Measure one call; what the caller enters into the tally is added when it ends."""
        tally = _Tally()
        begin_s = time.perf_counter()
        try:
            yield tally
        except TierError as error:
            tally.errors = 1
            tally.timeouts = int(isinstance(error, TierTimeoutError))
            raise
        finally:
            self._add(tally, time.perf_counter() - begin_s)

    def _add(self, tally: _Tally, took_s: float) -> None:
        bucket = bisect_left(LATENCY_BOUNDS_S, took_s)
        with self._lock:
            self._calls += 1
            self._buckets[bucket] += 1
            self._total_s += took_s
            self._max_s = max(self._max_s, took_s)
            self._sum.chunks += tally.chunks
            self._sum.moved_bytes += tally.moved_bytes
            self._sum.errors += tally.errors
            self._sum.timeouts += tally.timeouts
            for outcome, chunks in tally.outcomes.items():
                self._sum.outcomes[outcome] += chunks

    def snapshot(self) -> OperationStats:
        with self._lock:
            return OperationStats(
                calls=self._calls,
                chunks=self._sum.chunks,
                moved_bytes=self._sum.moved_bytes,
                errors=self._sum.errors,
                timeouts=self._sum.timeouts,
                outcomes=dict(self._sum.outcomes),
                latency=LatencyHistogram(tuple(self._buckets), self._total_s, self._max_s),
            )


class Statistics(TierWrapper):
    """Counts and times the calls to a tier, a few microseconds each. ``snapshot`` may be called at any time."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._recorders = {operation: _Recorder() for operation in OPERATIONS}

    def snapshot(self) -> TierStats:
        """What happened so far, also after ``close``."""
        return TierStats(**{operation: recorder.snapshot() for operation, recorder in self._recorders.items()})

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Forward and count."""
        with self._recorders["scan"].call() as tally:
            found = self.inner.scan()
            tally.chunks = len(found)
            return found

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward and count."""
        with self._recorders["contains"].call() as tally:
            tally.chunks = len(refs)
            answers = self.inner.contains(refs)
            tally.outcomes.update(Outcome.HIT if answer else Outcome.MISS for answer in answers)
            return answers

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward and count."""
        with self._recorders["get"].call() as tally:
            tally.chunks = len(transfers)
            return self._enter(tally, transfers, self.inner.get(transfers), self.size_of)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward and count, a chunk in every call."""
        with self._recorders["get_layers"].call() as tally:
            tally.chunks = len(transfers)
            outcomes = self.inner.get_layers(transfers, layers)
            return self._enter(tally, transfers, outcomes, lambda ref: self.layer_bytes(ref.num_blocks, layers))

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward and count as ``get``."""
        with self._recorders["get"].call() as tally:
            tally.chunks = len(refs)
            loan = self.inner.borrow(refs)
            tally.outcomes.update(loan.outcomes)
            lent = (ref for ref, outcome in zip(refs, loan.outcomes, strict=True) if outcome is Outcome.HIT)
            tally.moved_bytes = sum(map(self.size_of, lent))
            return loan

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward and count."""
        with self._recorders["put"].call() as tally:
            tally.chunks = len(transfers)
            return self._enter(tally, transfers, self.inner.put(transfers), self.size_of)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward and count."""
        fixed = tuple(refs)
        with self._recorders["remove"].call() as tally:
            tally.chunks = len(fixed)
            self.inner.remove(fixed)

    def clear(self) -> None:
        """Forward and count."""
        with self._recorders["clear"].call():
            self.inner.clear()

    def reset(self, namespace: Namespace) -> None:
        """Forward and count."""
        with self._recorders["reset"].call():
            self.inner.reset(namespace)

    def _enter(
        self,
        tally: _Tally,
        transfers: Sequence[Transfer],
        outcomes: list[Outcome],
        size_bytes: Callable[[ChunkRef], int],
    ) -> list[Outcome]:
        tally.outcomes.update(outcomes)
        tally.moved_bytes = sum(
            size_bytes(transfer.ref) for transfer, outcome in zip(transfers, outcomes, strict=True) if outcome in _MOVED
        )
        return outcomes
