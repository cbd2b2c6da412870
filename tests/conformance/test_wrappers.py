"""Tests of the tier contract with every wrapper around a disk tier; without sweeps, with all of them together."""

from __future__ import annotations

import pytest
from support.disk_files import DiskFiles
from support.faults import FaultInjector

from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker, Guard, GuardOptions, Statistics, TierWrapper, guarded

HANG_GUARD_S = 60.0


class Wrapped(DiskFiles):
    """Base of the tests here: raw access reads the files, and bypasses wrapper and tier."""

    def wrap(self, tier: Tier) -> Tier:
        raise NotImplementedError

    def open_tier(self, setup: TierSetup) -> Tier:
        return self.wrap(DiskTier(self.folder, setup.namespace, setup.layout, setup.capacity_bytes))


@pytest.mark.sweep
class TestTierWrapper(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return TierWrapper(tier)


@pytest.mark.sweep
class TestGuard(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return Guard(tier, HANG_GUARD_S)


@pytest.mark.sweep
class TestCircuitBreaker(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return CircuitBreaker(tier)


@pytest.mark.sweep
class TestStatistics(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return Statistics(tier)


@pytest.mark.sweep
class TestFaultInjector(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return FaultInjector(tier)


class TestGuarded(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return guarded(tier, GuardOptions(timeout_s=HANG_GUARD_S))
