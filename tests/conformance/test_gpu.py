"""The GPU tier keeps the contract, on a CPU device and, where there is one, on a real GPU."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvstore.chunks import ChunkRef
from kvstore.testing import BoundedTierConformance
from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.gpu.tier import GpuTier


class TestGpuTierOnCpu(BoundedTierConformance):
    gpu: GpuTier
    device: ClassVar[str] = "cpu"

    def open_tier(self, setup: TierSetup) -> Tier:
        self.gpu = GpuTier.open(self.with_options(setup, device=self.device))
        return self.gpu

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        slot = self.gpu._ledger._slots.get(ref)
        if slot is None:
            return None
        assert self.gpu._pool is not None
        return self.gpu._pool[slot, : self.layout.payload_bytes(ref.num_blocks)].cpu().numpy().tobytes()

    def raw_used_bytes(self) -> int:
        return len(set(self.gpu._ledger._slots.values())) * self.layout.slot_bytes


@pytest.mark.gpu
class TestGpuTier(TestGpuTierOnCpu):
    device = "cuda"
