"""Wrappers around tiers, to be combined.

disk = guarded(DiskTier(...), GuardOptions(timeout_s=10.0))
guard = find(disk, Guard)
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.tiers.abandonable_threads import AbandonableThreads
from kvstore.tiers.base import Tier
from kvstore.tiers.guards.breaker import BreakerState, CircuitBreaker
from kvstore.tiers.guards.guard import Guard, Statistics, TierWrapper, find, layers

__all__ = [
    "BreakerState",
    "CircuitBreaker",
    "Guard",
    "GuardOptions",
    "Statistics",
    "TierWrapper",
    "find",
    "guarded",
    "guarded_parts",
    "layers",
]


@dataclass(frozen=True)
class GuardOptions:
    """Options of the guards around a tier.

    Attributes:
        timeout_s: the deadline of a call about chunks.
        slow_timeout_s: the deadline of ``scan``, ``clear``, ``reset`` and ``close``.
        threads: calls at the same time; use more than the callers have threads.
        failures: consecutive failures after which the tier is bypassed.
        probe_interval_s: interval between trials of a bypassed tier.
        asks_storage: ``contains`` reaches the storage, so its answer proves that the tier works.
    """

    timeout_s: float = 10.0
    slow_timeout_s: float = 60.0
    threads: int = 8
    failures: int = 5
    probe_interval_s: float = 10.0
    asks_storage: bool = False


def guarded_parts(tier: Tier, options: GuardOptions) -> Tier:
    """Return a tier with guards, which are around its parts already if it has several, see ``TierSetup.guard``."""
    return guarded(tier, options) if tier.parts == (tier,) else Statistics(tier)


def guarded(tier: Tier, options: GuardOptions, shared: AbandonableThreads | None = None) -> CircuitBreaker:
    """Return ``CircuitBreaker(Guard(tier))``, the guards of a tier that may break.

    The order matters: a time-out or a defect is a ``TierError`` before the breaker counts it, a probe cannot hang, and
    a call that the breaker answers takes no thread. Tiers on one storage may share threads, which their owner closes.

    Raises:
        InvalidCallError: an option is out of range; the tier is closed then.
    """
    with ExitStack() as opened:
        opened.callback(tier.close)
        guard = Guard(tier, options.timeout_s, options.threads, slow_timeout_s=options.slow_timeout_s, shared=shared)
        opened.callback(guard.close)
        breaker = CircuitBreaker(guard, options.failures, options.probe_interval_s, asks_storage=options.asks_storage)
        opened.pop_all()
    return breaker
