"""Helpers of the tests of wrappers: chunks by number, a tier that breaks and is repaired, a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pytest

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import Transfer
from kvstore.tiers.guards import BreakerState, CircuitBreaker
from kvstore.tiers.loan import Loan
from support.faults import Fault, FaultInjector
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES, FakeTier

HANG_GUARD_S = 30.0
BRIEF_S = 0.02
HIT, MISS, STORED, FAILED, FULL, CORRUPT = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.FAILED,
    Outcome.FULL,
    Outcome.CORRUPT,
)


def ref_of(number: int, num_blocks: int = BLOCKS_PER_CHUNK) -> ChunkRef:
    return ChunkRef(number.to_bytes(16, "big"), num_blocks)


def transfer(number: int, fill: int | None = None) -> Transfer:
    return Transfer(ref_of(number), np.full(SLOT_BYTES, number if fill is None else fill, np.uint8))


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def broken() -> None:
    raise TierError("broken")


def fail(error: Exception) -> NoReturn:
    raise error


def break_down(tier: FakeTier) -> None:
    tier.before_get = tier.before_put = broken


def repair(tier: FakeTier) -> None:
    tier.before_get = tier.before_put = lambda: None


def injector(*faults: Fault, seed: int = 0) -> tuple[FakeTier, FaultInjector]:
    tier = FakeTier()
    tier.put([transfer(n) for n in range(4)])
    return tier, FaultInjector(tier, faults, seed)


class Bench:
    """A breaker that opens after three failures, over a tier with the chunks 0 to 3."""

    def __init__(self) -> None:
        self.tier = FakeTier()
        self.tier.put([transfer(n) for n in range(4)])
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.tier, failures=3, probe_interval_s=10.0, clock=self.clock)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            with pytest.raises(TierError):
                self.breaker.get([transfer(0)])

    def open(self) -> None:
        break_down(self.tier)
        self.fail(3)
        assert self.state() is BreakerState.OPEN

    def state(self) -> BreakerState:
        return self.breaker.state


class Lender(FakeTier):
    """Tier that lends what it holds, and counts loans that were not returned."""

    lends = True

    def __init__(self) -> None:
        super().__init__()
        self.put([transfer(n) for n in range(4)])
        self.calls = self.lent = 0

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        self.before_get()
        self.calls += 1
        held = [self.chunks.get(ref) for ref in refs]
        self.lent += 1
        return Loan(
            [MISS if payload is None else HIT for payload in held],
            [None if payload is None else np.frombuffer(payload, np.uint8) for payload in held],
            self._take_back,
        )

    def _take_back(self) -> None:
        self.lent -= 1
