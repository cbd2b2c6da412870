"""The CPU tier keeps the contract."""

from __future__ import annotations

from kvstore.chunks import ChunkRef
from kvstore.testing import BoundedTierConformance
from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.cpu import CpuTier


class TestCpuTier(BoundedTierConformance):
    cpu: CpuTier

    def open_tier(self, setup: TierSetup) -> Tier:
        self.cpu = CpuTier.open(setup)
        return self.cpu

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        if ref not in self.cpu._labels:
            return None
        return self.cpu._pool.slot(self.cpu._labels.index(ref))[: self.layout.payload_bytes(ref.num_blocks)].tobytes()

    def raw_used_bytes(self) -> int:
        return sum(label is not None for label in self.cpu._labels) * self.cpu._pool.slot_bytes
