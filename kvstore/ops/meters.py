"""Meters, which read the counters of the index, the mover and the tiers into tallies."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from kvstore.index.plans import Place
from kvstore.ops import metrics
from kvstore.ops.metrics import Meter, Tally
from kvstore.tiers.guards import BreakerState, CircuitBreaker, Statistics, find

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.engine.opening import OpenTiers
    from kvstore.handover.pusher import PushCounters
    from kvstore.index.index import ChunkIndex
    from kvstore.tiers.base import Tier
    from kvstore.transfer.counters import MoverCounters

_MEMORY: Final = Place.MEMORY.value
_DISK: Final = Place.DISK.value
_REMOTE: Final = Place.REMOTE.value
_SEVERITY: Final = {BreakerState.CLOSED: 0, BreakerState.PROBING: 1, BreakerState.OPEN: 2}
_DIRECTIONS: Final = {"load": "get", "store": "put"}


class IndexMeter:
    """Meter of an index's decisions and contents. For the index's thread only."""

    def __init__(self) -> None:
        self._meter = Meter()

    def read(self, index: ChunkIndex, tally: Tally) -> None:
        """Add what happened since the last time, and the gauges that changed."""
        self._meter.advance(_index_totals(index), tally)
        self._meter.show(_index_levels(index), tally)


def _index_totals(index: ChunkIndex) -> dict[str, float]:
    counters, writes = index.counters, metrics.WRITES
    return {
        metrics.STORED_CHUNKS.key(): counters.stored,
        metrics.REFUSED_CHUNKS.key(): counters.refused,
        metrics.FAILED_STORES.key(): counters.failed_stores,
        metrics.EVICTED_CHUNKS.key(_MEMORY): counters.evicted_memory,
        metrics.EVICTED_CHUNKS.key(_DISK): counters.evicted_disk,
        metrics.EXPIRED_CHUNKS.key(): counters.expired,
        metrics.FAILED_LOADS.key(): counters.failed_loads,
        metrics.LOST_CHUNKS.key(): counters.lost_chunks,
        **_quota_totals(index),
        writes.key(_DISK, "done"): counters.writes_done,
        writes.key(_DISK, "failed"): counters.writes_failed,
        writes.key(_DISK, "dropped"): counters.writes_dropped,
        writes.key(_REMOTE, "done"): counters.sends_done,
        writes.key(_REMOTE, "failed"): counters.sends_failed,
        writes.key(_REMOTE, "dropped"): counters.sends_dropped,
    }


def _index_levels(index: ChunkIndex) -> dict[str, float]:
    return {
        metrics.KNOWN_CHUNKS.key(): len(index),
        metrics.SLOTS.key(): index.num_slots,
        metrics.USED_SLOTS.key(): index.slots_in_use,
        metrics.LEASES.key(): index.leases,
        metrics.RETAINED_CHUNKS.key(): index.retained,
        **_quota_levels(index),
        metrics.QUEUED_WRITES.key(_DISK): index.queued_writes(Place.DISK),
        metrics.QUEUED_WRITES.key(_REMOTE): index.queued_writes(Place.REMOTE),
    }


def _quota_totals(index: ChunkIndex) -> dict[str, float]:
    totals: dict[str, float] = {}
    for owner in index.owners:
        totals[metrics.QUOTA_STORED_CHUNKS.key(owner.name)] = owner.stored
        totals[metrics.QUOTA_REFUSED_CHUNKS.key(owner.name)] = owner.refused
        totals[metrics.QUOTA_EVICTED_CHUNKS.key(owner.name, _MEMORY)] = owner.evicted_memory
        totals[metrics.QUOTA_EVICTED_CHUNKS.key(owner.name, _DISK)] = owner.evicted_disk
    return totals


def _quota_levels(index: ChunkIndex) -> dict[str, float]:
    levels: dict[str, float] = {}
    for owner in index.owners:
        for tier, share in owner.shares():
            levels[metrics.QUOTA_USED_BYTES.key(owner.name, tier)] = share.used_bytes * share.unit_bytes
            if share.is_bounded:
                levels[metrics.QUOTA_CAPACITY_BYTES.key(owner.name, tier)] = share.capacity_bytes * share.unit_bytes
    return levels


class _Observed:
    """A tier, and those of its wrappers that have counters."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        counted = [tier] if find(tier, Statistics) else tier.parts
        self.statistics = [statistics for part in counted if (statistics := find(part, Statistics))]

    def breakers(self) -> list[CircuitBreaker]:
        """Return the breakers of its parts, whose number may change between calls."""
        return [breaker for part in self.tier.parts if (breaker := find(part, CircuitBreaker))]


class WorkerMeter:
    """Meter of a worker's transfers and of the state of its tiers. For the worker's thread only."""

    def __init__(self, tiers: OpenTiers, moved: Callable[[], MoverCounters]) -> None:
        self._moved = moved
        self._disk = tiers.disk
        self._tiers = {place: _Observed(tier) for place, tier in ((_DISK, tiers.disk), (_REMOTE, tiers.remote)) if tier}
        self._meter = Meter(source=secrets.token_hex(8))  # distinguishes this worker's gauges from others'

    def read(self, tally: Tally) -> None:
        """Add what happened since the last time, and the gauges that changed."""
        totals = _mover_totals(self._moved())
        levels: dict[str, float] = {}
        for place, observed in self._tiers.items():
            self._read_tier(place, observed, totals, tally)
            states = [_SEVERITY[breaker.state] for breaker in observed.breakers()]
            levels[metrics.BREAKER_STATE.key(place)] = max(states, default=0)
        if self._disk is not None:
            levels[metrics.DISK_USED_BYTES.key()] = self._disk.used_bytes
            levels[metrics.DISK_CAPACITY_BYTES.key()] = self._disk.usable_bytes
        self._meter.advance(totals, tally)
        self._meter.show(levels, tally)

    def _read_tier(self, place: str, observed: _Observed, totals: dict[str, float], tally: Tally) -> None:
        moved = metrics.MOVED_BYTES
        totals[moved.key(place, "load")] = observed.tier.counters.bytes_read
        totals[moved.key(place, "store")] = observed.tier.counters.bytes_written
        totals[metrics.CORRUPT_CHUNKS.key(place)] = observed.tier.counters.corrupt
        if place == _REMOTE:
            totals[metrics.HELD_CHUNKS.key()] = observed.tier.counters.held
            totals[metrics.CLIENT_RESTARTS.key()] = observed.tier.counters.replaced
        for statistics in observed.statistics:
            for direction, operation in _DIRECTIONS.items():
                tally.observe(metrics.TIER_CALL_SECONDS.key(place, direction), statistics.take_times_s(operation))
        totals[metrics.TIER_ERRORS.key(place)] = sum(statistics.errors for statistics in observed.statistics)
        totals[metrics.TIER_TIMEOUTS.key(place)] = sum(statistics.timeouts for statistics in observed.statistics)


def push_totals(pushed: PushCounters, channel_bytes: int) -> dict[str, float]:
    """Return the totals of hand-overs to other engines, by metric."""
    chunks = metrics.PUSHED_CHUNKS
    return {
        chunks.key("sent"): pushed.sent,
        chunks.key("refused"): pushed.refused,
        chunks.key("failed"): pushed.failed,
        metrics.PUSHED_BYTES.key(): pushed.sent_bytes,
        metrics.CHANNEL_BYTES.key(): channel_bytes,
    }


def _mover_totals(mover: MoverCounters) -> dict[str, float]:
    loaded = metrics.LOADED_CHUNKS
    slow = mover.chunks_loaded_from_disk + mover.chunks_loaded_from_remote
    return {
        loaded.key(_MEMORY): mover.chunks_loaded - slow,
        loaded.key(_DISK): mover.chunks_loaded_from_disk,
        loaded.key(_REMOTE): mover.chunks_loaded_from_remote,
        metrics.GPU_LOADED_CHUNKS.key(): mover.chunks_loaded_from_gpu,
        metrics.MOVED_BYTES.key(_MEMORY, "load"): mover.bytes_scattered,
        metrics.MOVED_BYTES.key(_MEMORY, "store"): mover.bytes_gathered,
        metrics.MISLABELLED_SLOTS.key(): mover.mislabelled_slots,
        metrics.FAILED_COPIES.key(): mover.failed_copies,
        metrics.READ_TIMEOUTS.key(): mover.read_timeouts,
    }
