"""The scheduler side's books: what each request asked, got and left behind, and the sums of everything.

Kept by the scheduler's thread; ``totals`` may be read by others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.catalog.plans import Match, MissReason
from kvstore.ops import metrics
from kvstore.ops.meters import IndexMeter
from kvstore.ops.metrics import Meter, Tally, Totals

if TYPE_CHECKING:
    from kvstore.catalog.index import ChunkIndex
    from kvstore.keys import PrefixHasher

logger = logging.getLogger(__name__)

SUMMARY_INTERVAL_S: Final = 60.0


class HitSplit(NamedTuple):
    """Where the tokens of a request's external hit come from."""

    memory_tokens: int
    disk_tokens: int
    remote_tokens: int


NO_HIT: Final = HitSplit(0, 0, 0)


@dataclass
class _Account:
    """One request.

    Attributes:
        num_tokens: of the request, when it asked last.
        num_local_tokens: those that vLLM had itself.
        found_tokens: the end of the longest known prefix.
        offered_tokens: how many vLLM was told could be loaded.
        asks: whether it may load at all.
        is_declined: whether computing was found to be faster.
        is_admitted: whether it has been scheduled, and is counted.
        hit: what it got then.
        reason: why not more.
        stored_chunks: offered to the workers since.
        is_verified: it computes its hit all the same.
    """

    num_tokens: int = 0
    num_local_tokens: int = 0
    found_tokens: int = 0
    offered_tokens: int = 0
    asks: bool = False
    is_declined: bool = False
    is_admitted: bool = False
    hit: HitSplit = NO_HIT
    reason: MissReason | None = None
    stored_chunks: int = 0
    is_verified: bool = False


class Accounts:
    """Counts requests and collects everything else.

    Args:
        block_tokens: a hit shorter by less than that is whole.
        end_tokens: nothing is stored of a prompt behind the last multiple of this.
    """

    def __init__(self, block_tokens: int, end_tokens: int) -> None:
        self.totals = Totals()
        self._block_tokens = block_tokens
        self._end_tokens = end_tokens
        self._requests: dict[str, _Account] = {}
        self._tally = Tally()
        self._meter = Meter()
        self._index_meter = IndexMeter()
        self._summary = _Summary()
        self._was_enabled: bool | None = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def open(self, request_id: str) -> None:
        """A request has come whose KV may be shared."""
        self._requests[request_id] = _Account()

    def asked(self, request_id: str, num_tokens: int, num_local_tokens: int) -> None:
        """A request asks, or asks again; nothing is known of an answer."""
        account = self._requests.get(request_id)
        if account is not None and not account.is_admitted:
            account.num_tokens, account.num_local_tokens = num_tokens, num_local_tokens
            account.found_tokens, account.offered_tokens = num_local_tokens, 0
            account.asks = account.is_declined = False

    def answered(self, request_id: str, match: Match, num_external_tokens: int) -> None:
        """The answer, of which ``num_external_tokens`` are offered to vLLM."""
        account = self._requests.get(request_id)
        if account is not None and not account.is_admitted:
            account.found_tokens = max(account.num_local_tokens, match.num_tokens)
            account.offered_tokens = num_external_tokens
            account.asks = True

    def declined(self, request_id: str) -> None:
        """Nothing is offered after all: computing is faster."""
        account = self._requests.get(request_id)
        if account is not None and not account.is_admitted:
            account.offered_tokens, account.is_declined = 0, True

    def verified(self, request_id: str) -> None:
        """A request computes its hit all the same."""
        account = self._requests.get(request_id)
        if account is not None:
            account.is_verified = True

    def admitted(self, request_id: str, hit: HitSplit, index: ChunkIndex, hasher: PrefixHasher) -> None:
        """A request is scheduled: what it got counts, the first time. To be told after its load was planned."""
        account = self._requests.get(request_id)
        if account is None or account.is_admitted:
            return
        account.is_admitted, account.hit = True, hit  # later answers concern what it has computed itself
        account.reason = self._reason(account, index, hasher)
        self._tally.count(metrics.LOOKUPS.key())
        self._tally.count(metrics.ASKED_TOKENS.key(), account.num_tokens - account.num_local_tokens)
        for tier, tokens in zip(("memory", "disk", "remote"), hit, strict=True):
            self._tally.count(metrics.HIT_TOKENS.key(tier), tokens)
        if account.reason is not None:
            self._tally.count(metrics.MISSES.key(account.reason.value))

    def _reason(self, account: _Account, index: ChunkIndex, hasher: PrefixHasher) -> MissReason | None:
        """Why a request did not get all; None if it did."""
        got_tokens = sum(account.hit)
        end_tokens = account.num_tokens - account.num_tokens % self._end_tokens
        if end_tokens - account.num_local_tokens < self._block_tokens:
            return None  # nothing of it could have been stored
        if not account.asks:
            return MissReason.SWITCHED_OFF
        if account.is_declined:
            return MissReason.RECOMPUTE_FASTER
        if account.is_verified:
            return MissReason.VERIFIED
        if got_tokens < account.offered_tokens:
            return MissReason.NOT_TAKEN
        if not got_tokens and account.found_tokens - account.num_local_tokens >= self._block_tokens:
            return MissReason.TOO_SHORT
        return index.why_missing(hasher, account.found_tokens, end_tokens)

    def stored(self, request_id: str, num_chunks: int) -> None:
        """So many of a request's chunks are to be stored with the next step."""
        account = self._requests.get(request_id)
        if account is not None:
            account.stored_chunks += num_chunks

    def close(self, request_id: str) -> None:
        """A request has ended: one line about it."""
        account = self._requests.pop(request_id, None)
        if account is not None and account.is_admitted:
            logger.debug(
                "request %s: %d tokens, %d of them in vLLM's own cache; hit %d (memory %d, disk %d, remote %d); "
                "%d chunks stored; miss: %s",
                request_id,
                account.num_tokens,
                account.num_local_tokens,
                sum(account.hit),
                *account.hit,
                account.stored_chunks,
                account.reason.value if account.reason else "none",
            )

    # -- sums --------------------------------------------------------------------------------------------------------

    def add(self, tally: Tally) -> None:
        """Take in what the workers counted."""
        self._tally.add(tally)

    def take(self, index: ChunkIndex | None, *, enabled: bool, totals: Mapping[str, float] | None = None) -> Tally:
        """Everything since the last call; ``totals`` are what others counted since the start."""
        self._meter.advance(totals or {}, self._tally)
        if index is not None:
            self._index_meter.read(index, self._tally)
        if enabled is not self._was_enabled:
            self._was_enabled = enabled
            self._tally.show(metrics.ENABLED.key(), float(enabled))
        tally, self._tally = self._tally, Tally()
        self.totals.add(tally)
        self._summary.add(tally)
        return tally

    def summarize(self, now_s: float) -> None:
        """One line a minute, if anything happened."""
        line = self._summary.take_line(now_s)
        if line:
            logger.info("%s", line)


class _Summary:
    """What happened since the last line."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._counters: Tally = Tally()

    def add(self, tally: Tally) -> None:
        self._counters.add(Tally(tally.counters))

    def take_line(self, now_s: float) -> str:
        """A line once a minute; empty in between, and if nothing happened."""
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < SUMMARY_INTERVAL_S or not self._counters:
            return ""
        seconds, self._since_s = now_s - self._since_s, now_s
        counters, self._counters = self._counters.counters, Tally()

        def total(metric: metrics.Metric, *values: str) -> float:
            prefix = metric.key(*values)
            return sum(number for key, number in counters.items() if f"{key}|".startswith(f"{prefix}|"))

        asked, hit = total(metrics.ASKED_TOKENS), total(metrics.HIT_TOKENS)
        tiers = ", ".join(f"{tier} {total(metrics.HIT_TOKENS, tier):.0f}" for (tier,) in metrics.HIT_TOKENS.values)
        stored, evicted = total(metrics.STORED_CHUNKS), total(metrics.EVICTED_CHUNKS)
        failed = (metrics.FAILED_LOADS, metrics.FAILED_STORES, metrics.TIER_ERRORS)
        failures = sum(map(total, failed)) + sum(total(metrics.WRITES, tier, "failed") for tier in ("disk", "remote"))
        return (
            f"last {seconds:.0f} s: {total(metrics.LOOKUPS):.0f} requests asked for {asked:.0f} tokens, hit {hit:.0f} "
            f"({tiers}); {stored:.0f} chunks stored, {evicted:.0f} evicted, "
            f"{total(metrics.MOVED_BYTES) / 1e9:.2f} GB moved; {failures:.0f} failures"
        )
