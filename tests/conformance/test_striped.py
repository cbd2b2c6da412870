"""Tests of the contract of several folders as one disk tier, bare and guarded."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.format.chunkfile import chunk_name
from kvstore.model.chunks import ChunkRef
from kvstore.testing import BoundedTierConformance
from kvstore.testing.harness import MINE
from kvstore.tiers.base import BoundedTier, Tier, TierSetup
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.guards import GuardOptions, guarded

NOT_COUNTED = {".lock", "namespace.json", "layout.json", "trails"}
HANG_GUARD_S = 60.0


class TestTwoFolders(BoundedTierConformance):
    persistent = True
    checks_bytes = True
    num_folders: ClassVar[int] = 2

    def wrap(self, tier: BoundedTier) -> BoundedTier:
        return tier

    def open_tier(self, setup: TierSetup) -> Tier:
        return open_folders(self.folders(), setup.namespace, setup.layout, setup.capacity_bytes, wrap=self.wrap)

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        paths = self.paths(ref)
        assert len(paths) <= 1, "one chunk in several folders"
        return paths[0].read_bytes() if paths else None

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        self.paths(ref)[0].write_bytes(value)

    def raw_remove(self, ref: ChunkRef) -> None:
        self.paths(ref)[0].unlink()

    def raw_used_bytes(self) -> int:
        files = (path for path in self.folder.rglob("*") if path.is_file() and path.name not in NOT_COUNTED)
        return sum(path.stat().st_size for path in files)

    def folders(self) -> list[Path]:
        return [self.folder / f"disk{number}" for number in range(self.num_folders)]

    def paths(self, ref: ChunkRef) -> list[Path]:
        paths = (folder / MINE.id.hex() / chunk_name(ref) for folder in self.folders())
        return [path for path in paths if path.exists()]


@pytest.mark.sweep
class TestThreeFolders(TestTwoFolders):
    num_folders = 3


class TestGuardedFolders(TestThreeFolders):
    def wrap(self, tier: BoundedTier) -> BoundedTier:
        return guarded(tier, GuardOptions(timeout_s=HANG_GUARD_S))
