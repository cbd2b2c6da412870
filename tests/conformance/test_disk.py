"""The disk tier keeps the contract, also with codecs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from support.payloads import let_some_shrink

from kvstore.chunks import ChunkRef
from kvstore.testing import BoundedTierConformance
from kvstore.testing.harness import MINE
from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.disk import folder
from kvstore.tiers.disk.tier import DiskTier

NOT_COUNTED = {".lock", "namespace.json", "layout.json"}


class TestDiskTier(BoundedTierConformance):
    persistent = True
    checks_bytes = True

    def open_tier(self, setup: TierSetup) -> Tier:
        return DiskTier(self.folder, setup.namespace, setup.layout, setup.capacity_bytes)

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


class TestDiskTierWithLz4(TestDiskTier):
    codec: ClassVar[str] = "lz4"

    def open_tier(self, setup: TierSetup) -> Tier:
        layout = replace(setup.layout, element="bf16")
        return DiskTier(self.folder, setup.namespace, layout, setup.capacity_bytes, codec=self.codec)


class TestDiskTierWithSplit(TestDiskTierWithLz4):
    codec = "split"


class TestLz4OfPayloadsThatShrink(TestDiskTierWithLz4):
    """Some chunks shrink to a fraction, others not at all."""

    exact_sizes = False

    @pytest.fixture(autouse=True)
    def _payloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        let_some_shrink(monkeypatch)


class TestSplitOfPayloadsThatShrink(TestLz4OfPayloadsThatShrink):
    codec = "split"
