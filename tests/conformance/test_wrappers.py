"""Every wrapper around a disk tier keeps the contract of a tier."""

from __future__ import annotations

from pathlib import Path

from support.faults import FaultInjector

from kvstore.chunks import ChunkRef
from kvstore.testing import BoundedTierConformance
from kvstore.testing.harness import MINE
from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.disk import folder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker, Deadline, GuardOptions, Statistics, TierWrapper, guarded

NOT_COUNTED = {".lock", "namespace.json", "layout.json"}
HANG_GUARD_S = 60.0


class Wrapped(BoundedTierConformance):
    """What they have in common: raw access goes to the files, round wrapper and tier."""

    persistent = True
    checks_bytes = True

    def wrap(self, tier: Tier) -> Tier:
        raise NotImplementedError

    def open_tier(self, setup: TierSetup) -> Tier:
        return self.wrap(DiskTier(self.folder, setup.namespace, setup.layout, setup.capacity_bytes))

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        path = self.path(ref)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        self.path(ref).write_bytes(value)

    def raw_remove(self, ref: ChunkRef) -> None:
        self.path(ref).unlink()

    def raw_used_bytes(self) -> int:
        files = (path for path in self.folder.rglob("*") if path.is_file() and path.name not in NOT_COUNTED)
        return sum(path.stat().st_size for path in files)

    def path(self, ref: ChunkRef) -> Path:
        return self.folder / MINE.id.hex() / folder.chunk_name(ref)


class TestTierWrapper(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return TierWrapper(tier)


class TestDeadline(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return Deadline(tier, HANG_GUARD_S)


class TestCircuitBreaker(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return CircuitBreaker(tier)


class TestStatistics(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return Statistics(tier)


class TestFaultInjector(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return FaultInjector(tier)


class TestGuarded(Wrapped):
    def wrap(self, tier: Tier) -> Tier:
        return guarded(tier, GuardOptions(timeout_s=HANG_GUARD_S))
