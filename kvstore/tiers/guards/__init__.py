"""Wrappers around tiers, each with one task, to be combined.

disk = guarded(DiskTier(...), GuardOptions(timeout_s=10.0))
breaker = find(disk, CircuitBreaker)
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.tiers.base import Tier
from kvstore.tiers.guards.base import TierWrapper, find, layers
from kvstore.tiers.guards.breaker import BreakerState, CircuitBreaker
from kvstore.tiers.guards.crew import Crew
from kvstore.tiers.guards.deadline import Deadline
from kvstore.tiers.guards.foreseen import Foreseen
from kvstore.tiers.guards.stats import Statistics

__all__ = [
    "BreakerState",
    "CircuitBreaker",
    "Crew",
    "Deadline",
    "Foreseen",
    "GuardOptions",
    "Statistics",
    "TierWrapper",
    "find",
    "guarded",
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


def guarded(tier: Tier, options: GuardOptions, crew: Crew | None = None) -> Statistics:
    """Return ``Statistics(CircuitBreaker(Deadline(Foreseen(tier))))``, the guards of a tier that may break.

    The order matters. Every exception of a tier becomes a ``TierError`` before it is counted. The deadline is inside
    the breaker, so that a time-out counts as a failure, a probe cannot hang, and a call that the breaker answers takes
    no thread. The statistics are outermost, and include the caller's wait for a thread. Tiers on one storage may share
    the threads of a ``crew``, which its owner closes.

    Raises:
        InvalidCallError: an option is out of range; the tier is closed then.
    """
    with ExitStack() as opened:
        opened.callback(tier.close)
        foreseen = Foreseen(tier)
        deadline = Deadline(
            foreseen, options.timeout_s, options.threads, slow_timeout_s=options.slow_timeout_s, crew=crew
        )
        opened.callback(deadline.close)
        breaker = CircuitBreaker(
            deadline, options.failures, options.probe_interval_s, asks_storage=options.asks_storage
        )
        opened.pop_all()
    return Statistics(breaker)
