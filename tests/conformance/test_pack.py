"""Tests of the pack tier's read half of the contract: the suite writes to a folder, and reads the pack made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.format.pack import open_pack
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.testing.buffers import BufferTests
from kvstore.testing.contents import ContentTests
from kvstore.testing.damage import DamageTests
from kvstore.testing.harness import MINE, make_ref, make_transfer
from kvstore.testing.partial_reads import LayerTests
from kvstore.tiers.base import Tier, TierCounters, TierSetup, Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.pack import PackTier
from kvstore.tools.pack import Source, export

_ROOM_BYTES = 64 << 20


class Repacked(Tier):
    """Tier that writes to a folder, and reads from a pack, which is made again after every write."""

    name = "repacked"

    def __init__(self, folder: Path, setup: TierSetup) -> None:
        self._folder = folder
        self._setup = setup
        self._disk = DiskTier(folder / "disk", setup.namespace, setup.layout, _ROOM_BYTES)
        self.counters = TierCounters()
        self._tier: PackTier | None = None
        self._disk.scan()

    @property
    def path(self) -> Path:
        return self._folder / "chunks.kvpack"

    @property
    def pack(self) -> PackTier:
        if self._tier is None:
            export(Source(self._folder / "disk", self._setup.namespace.id.hex()), self.path)
            url = f"pack://{self.path}"
            options = {"url": url, "timeout_s": 1.0, "connections": 8}
            setup = self._setup
            self._tier = PackTier.open(TierSetup(setup.namespace, setup.layout, setup.capacity_bytes, options))
            self._tier.counters = self.counters
        return self._tier

    def _wrote(self) -> None:
        if self._tier is not None:
            self._tier.close()
        self._tier = None

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        return self.pack.contains(refs)

    @property
    def keeps_trails(self) -> bool:
        return self.pack.keeps_trails

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        return self.pack.nearest(trails)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        outcomes = self.pack.get(transfers)
        self._disk.remove([t.ref for t, o in zip(transfers, outcomes, strict=True) if o is Outcome.CORRUPT])
        return outcomes

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        outcomes = self._disk.put(transfers)
        self._wrote()
        for outcome in outcomes:
            self.counters.count(outcome, 0)
        return outcomes

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        refs = list(refs)
        self.pack.remove(refs)
        self._disk.remove(refs)

    def clear(self) -> None:
        self.pack.clear()
        self._disk.clear()

    def reset(self, namespace: Namespace) -> None:
        self.pack.reset(namespace)
        self._disk.reset(namespace)
        self._setup = replace(self._setup, namespace=namespace)

    def close(self) -> None:
        self._wrote()
        self._disk.close()


class TestPackTier(ContentTests, BufferTests, DamageTests, LayerTests):
    """Tests without those of bounds and restarts, because a pack is read-only and does not change."""

    checks_bytes = True
    keeps_trails = True
    exact_sizes = False

    def open_tier(self, setup: TierSetup) -> Tier:
        return Repacked(self.folder, setup)

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        tier = self.pack
        extent = tier._chunks.get(ref)
        return None if extent is None else tier._pack.read(extent).tobytes()  # type: ignore[union-attr]

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        extent = self.pack._chunks[ref]
        path = self.repacked.path
        with path.open("r+b") as file:
            file.seek(extent.offset)
            file.write(value[: extent.size_bytes].ljust(extent.size_bytes, b"\0"))

    def raw_remove(self, ref: ChunkRef) -> None:
        del self.pack._chunks[ref]

    def raw_used_bytes(self) -> int:
        return sum(extent.size_bytes for extent in self.pack._chunks.values())

    @property
    def repacked(self) -> Repacked:
        assert isinstance(self.tier, Repacked)
        return self.tier

    @property
    def pack(self) -> PackTier:
        return self.repacked.pack

    def test_a_value_that_has_grown(self) -> None:
        pytest.skip("the index says how long a chunk is")

    def test_the_storage_is_never_written_to(self) -> None:
        """Puts are answered with FULL, and removals hide chunks but leave the file unchanged."""
        self.start()
        self.put(make_ref(1), make_ref(2))
        assert self.pack.contains([make_ref(1), make_ref(2)]) == [True, True]
        before = self.repacked.path.read_bytes()
        assert self.pack.put([make_transfer(self.layout, make_ref(3))]) == [Outcome.FULL]
        self.pack.remove([make_ref(1)])
        assert self.pack.contains([make_ref(1), make_ref(2)]) == [False, True]
        self.pack.clear()
        assert self.pack.contains([make_ref(2)]) == [False]
        assert self.repacked.path.read_bytes() == before
        with open_pack(self.repacked.path) as pack:
            assert PackTier(pack, MINE, self.layout).contains([make_ref(1)]) == [True]
