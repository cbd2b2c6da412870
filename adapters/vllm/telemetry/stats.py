"""Statistics of the tokens that each request asked for, got and stored, and the sums of all counts.

Kept by the scheduler's thread; other threads may read ``totals``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvstore.index.plans import Match, MissReason, Place
from kvstore.ops import metrics
from kvstore.ops.meters import IndexMeter
from kvstore.ops.metrics import Meter, Tally, Totals

if TYPE_CHECKING:
    from kvstore.index.index import ChunkIndex
    from kvstore.model.keys import PrefixHasher

logger = logging.getLogger(__name__)

SUMMARY_INTERVAL_S: Final = 60.0


HitTokens = Mapping[Place, int]
"""Tokens of a request's external hit, by tier."""

NO_HIT: Final[HitTokens] = MappingProxyType(dict.fromkeys(Place, 0))


@dataclass
class RequestStats:
    """Statistics of one request's lookup and its result.

    Attributes:
        num_tokens: tokens of the request, when it asked last.
        num_local_tokens: tokens that vLLM had itself.
        found_tokens: the end of the longest known prefix.
        offered_tokens: tokens that were offered to vLLM for loading.
        asks: it may load at all.
        is_declined: computing was found to be faster.
        is_admitted: it has been scheduled, and is counted; later answers concern what it has computed itself.
        hit: the tokens that it got then.
        reason: the reason why it did not get more.
        stored_chunks: chunks offered to the workers since.
        is_verified: it computes its hit, for comparison.
        waits: it waits for an asynchronous load.
        begin_s: time when it asked first, on ``time.monotonic``.
        wait_s: time from then until its load had ended and it could be computed.
    """

    num_tokens: int = 0
    num_local_tokens: int = 0
    found_tokens: int = 0
    offered_tokens: int = 0
    asks: bool = False
    is_declined: bool = False
    is_admitted: bool = False
    hit: HitTokens = field(default_factory=lambda: NO_HIT)
    reason: MissReason | None = None
    stored_chunks: int = 0
    is_verified: bool = False
    waits: bool = False
    begin_s: float | None = None
    wait_s: float = 0.0

    def asked(self, num_tokens: int, num_local_tokens: int) -> None:
        """Note that the request asks, first or again, and has no answer so far."""
        if self.begin_s is None:
            self.begin_s = time.monotonic()
        if not self.is_admitted:
            self.num_tokens, self.num_local_tokens = num_tokens, num_local_tokens
            self.found_tokens, self.offered_tokens = num_local_tokens, 0
            self.asks = self.is_declined = False

    def answered(self, match: Match, num_external_tokens: int) -> None:
        """Note the answer, of which ``num_external_tokens`` are offered to vLLM."""
        if not self.is_admitted:
            self.found_tokens = max(self.num_local_tokens, match.num_tokens)
            self.offered_tokens = num_external_tokens
            self.asks = True

    def declined(self) -> None:
        """Note that nothing is offered after all, because computing is faster."""
        if not self.is_admitted:
            self.offered_tokens, self.is_declined = 0, True

    def has_waited(self) -> None:
        """Note that the request has what was loaded for it."""
        if self.begin_s is not None:
            self.wait_s = time.monotonic() - self.begin_s


class SchedulerStats:
    """Counts of requests, and of everything else.

    Args:
        block_tokens: a hit counts as whole if it lacks fewer tokens than this.
        end_tokens: nothing is stored of a prompt after the last multiple of this.
        sample_every: one in so many requests is logged at INFO; 0 for none.
    """

    def __init__(self, block_tokens: int, end_tokens: int, sample_every: int = 0) -> None:
        self.totals = Totals()
        self._block_tokens = block_tokens
        self._end_tokens = end_tokens
        self._sample_every = sample_every
        self._num_closed = 0
        self._tally = Tally()
        self._meter = Meter()
        self._index_meter = IndexMeter()
        self._recent = Tally()  # counts since the last summary, and its time
        self._since_s: float | None = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def admitted(self, stats: RequestStats, hit: HitTokens, index: ChunkIndex, hasher: PrefixHasher) -> bool:
        """Count the hit of a request when it is scheduled for the first time, and return True then.

        Call it after its load is planned.
        """
        if stats.is_admitted:
            return False
        stats.has_waited()
        stats.is_admitted, stats.hit = True, hit
        stats.reason = self._reason(stats, index, hasher)
        self._tally.count(metrics.LOOKUPS.key())
        self._tally.count(metrics.ASKED_TOKENS.key(), stats.num_tokens - stats.num_local_tokens)
        for place, num_tokens in hit.items():
            self._tally.count(metrics.HIT_TOKENS.key(place.value), num_tokens)
        if (owner := index.owners.of(hasher)) is not None:
            self._tally.count(metrics.QUOTA_ASKED_TOKENS.key(owner.name), stats.num_tokens - stats.num_local_tokens)
            self._tally.count(metrics.QUOTA_HIT_TOKENS.key(owner.name), sum(hit.values()))
        if stats.reason is not None:
            self._tally.count(metrics.MISSES.key(stats.reason.value))
        return True

    def end_of(self, stats: RequestStats) -> int:
        """Return the end of what can be stored of a request, in tokens."""
        return stats.num_tokens - stats.num_tokens % self._end_tokens

    def _reason(self, stats: RequestStats, index: ChunkIndex, hasher: PrefixHasher) -> MissReason | None:
        """Return the reason why a request did not get everything; None if it did."""
        got_tokens = sum(stats.hit.values())
        end_tokens = self.end_of(stats)
        if end_tokens - stats.num_local_tokens < self._block_tokens:
            return None  # nothing of it could have been stored
        if not stats.asks:
            return MissReason.SWITCHED_OFF
        if stats.is_declined:
            return MissReason.RECOMPUTE_FASTER
        if stats.is_verified:
            return MissReason.VERIFIED
        if got_tokens < stats.offered_tokens:
            return MissReason.NOT_TAKEN
        if not got_tokens and stats.found_tokens - stats.num_local_tokens >= self._block_tokens:
            return MissReason.TOO_SHORT
        return index.why_missing(hasher, stats.found_tokens, end_tokens)

    def log_request(self, request_id: str, stats: RequestStats) -> None:
        """Log one line about a request that has ended, at INFO if it is sampled."""
        if not stats.is_admitted:
            return
        self._num_closed += 1
        is_sampled = self._sample_every > 0 and self._num_closed % self._sample_every == 0
        logger.log(
            logging.INFO if is_sampled else logging.DEBUG,
            "request %s: %d tokens, %d of them in vLLM's own cache; hit %d (memory %d, disk %d, remote %d) in %.1f ms; "
            "%d chunks stored; miss: %s",
            request_id,
            stats.num_tokens,
            stats.num_local_tokens,
            sum(stats.hit.values()),
            *(stats.hit[place] for place in Place),
            stats.wait_s * 1e3,
            stats.stored_chunks,
            stats.reason.value if stats.reason else "none",
        )

    def wrong_field(self, field: str) -> None:
        """Count a request that is served without the cache because of a wrong field."""
        self._tally.count(metrics.REQUEST_FIELD_ERRORS.key(field))

    def hint(self, hint: str, result: str) -> None:
        """Count a request's hint, and its result."""
        self._tally.count(metrics.HINTS.key(hint, result))

    # -- sums --------------------------------------------------------------------------------------------------------

    def add(self, tally: Tally) -> None:
        """Add the workers' counts."""
        self._tally.add(tally)

    def take(
        self,
        index: ChunkIndex | None,
        totals: Mapping[str, float] = MappingProxyType({}),
        levels: Mapping[str, bool] = MappingProxyType({}),
    ) -> Tally:
        """Return the counts since the last call; ``totals`` since the start, and ``levels``, are kept elsewhere."""
        self._meter.advance(totals, self._tally)
        self._meter.show({key: float(level) for key, level in levels.items()}, self._tally)
        if index is not None:
            self._index_meter.read(index, self._tally)
        tally, self._tally = self._tally, Tally()
        self.totals.add(tally)
        self._recent.add(Tally(tally.counters))
        return tally

    def summarize(self, now_s: float) -> None:
        """Log one line a minute, if anything happened."""
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= SUMMARY_INTERVAL_S and self._recent:
            logger.info("%s", _summary(self._recent.counters, now_s - self._since_s))
            self._since_s, self._recent = now_s, Tally()


def _summary(counters: Mapping[str, float], seconds: float) -> str:
    def total(metric: metrics.Metric, *values: str) -> float:
        prefix = metric.key(*values)
        return sum(number for key, number in counters.items() if f"{key}|".startswith(f"{prefix}|"))

    asked, hit = total(metrics.ASKED_TOKENS), total(metrics.HIT_TOKENS)
    tiers = ", ".join(f"{tier} {total(metrics.HIT_TOKENS, tier):.0f}" for (tier,) in metrics.HIT_TOKENS.values)
    stored, evicted = total(metrics.STORED_CHUNKS), total(metrics.EVICTED_CHUNKS)
    dropped = total(metrics.REFUSED_CHUNKS) + sum(total(metrics.WRITES, t, "dropped") for t in ("disk", "remote"))
    failed = (metrics.FAILED_LOADS, metrics.FAILED_STORES, metrics.TIER_ERRORS)
    failures = sum(map(total, failed)) + sum(total(metrics.WRITES, tier, "failed") for tier in ("disk", "remote"))
    return (
        f"last {seconds:.0f} s: {total(metrics.LOOKUPS):.0f} requests asked for {asked:.0f} tokens, hit {hit:.0f} "
        f"({tiers}); {stored:.0f} chunks stored, {evicted:.0f} evicted, {dropped:.0f} dropped, "
        f"{total(metrics.MOVED_BYTES) / 1e9:.2f} GB moved; {failures:.0f} failures"
    )
