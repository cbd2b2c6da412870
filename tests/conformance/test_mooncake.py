"""Tests of the mooncake tier's contract with a real master and two owners of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from support.key_files import write_keys
from support.mooncake_store import Store, a_store

from kvstore.config import load_config
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.testing import MINE, TierConformance
from kvstore.testing.harness import make_ref
from kvstore.tiers import open_tier
from kvstore.tiers.base import Tier, TierSetup
from kvstore.tools.doctor.remote import elsewhere
from kvstore.tools.inspection import inspect_target

_PATIENCE_S = 30  # a busy machine may be slow, and a call that is late is ``FAILED``


class TestMooncake(TierConformance):
    """Chunks as they are."""

    persistent = True
    checks_bytes = True
    empty_is_absent = True  # Mooncake has no empty objects
    store: ClassVar[Store]
    _last_folder: Path | None = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _store(cls) -> Iterator[None]:
        with a_store(lease_s=_PATIENCE_S) as cls.store:
            yield

    def open_tier(self, setup: TierSetup) -> Tier:
        if self.folder != self._last_folder:  # a new harness begins with an empty storage
            self.store.admin.call("remove_all")
            self._last_folder = self.folder
        options = {"url": self.store.master.url, "staging_mib": 4, "timeout_s": float(_PATIENCE_S)}
        return open_tier("mooncake", self.with_options(setup, **options))

    def key(self, ref: ChunkRef) -> str:
        epoch = self.store.admin.get(f"kvs:{MINE.id.hex()}:epoch").decode()
        return f"kvs:{MINE.id.hex()}:{epoch}:{ref.prefix_key.hex()}-{ref.num_blocks}"

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        return self.store.admin.get(self.key(ref)) or None

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        if value:
            assert self.store.admin.call("upsert", self.key(ref), value) == 0
        else:
            self.raw_remove(ref)

    def raw_remove(self, ref: ChunkRef) -> None:
        self.store.admin.call("remove", self.key(ref))

    def raw_used_bytes(self) -> int:
        """Sum up the bytes of all namespaces, because after a reset the tier is in another one."""
        return sum(self.store.admin.call("get_size", key) for key in self.store.chunk_keys())

    def test_tools(self) -> None:
        """``kvstore doctor`` and ``kvstore inspect`` show the memory and the chunks."""
        self.start()
        self.put(make_ref(1), make_ref(2))
        url = self.store.master.url
        tree = inspect_target(url)
        assert [one["chunks"] for one in tree["namespaces"]] == [2]
        assert [one["capacity_bytes"] for one in tree["segments"]] == [128 << 20] * 2
        found = list(elsewhere(load_config({"kvstore.remote_url": url}).config))
        assert [(one.topic, one.state) for one in found] == [("Mooncake", "ok"), ("Mooncake segments", "ok")]
        assert "2 hosts give 256.0 MiB" in found[1].found

    def test_tools_without_a_master(self) -> None:
        (found,) = elsewhere(load_config({"kvstore.remote_url": "mooncake://127.0.0.1:1"}).config)
        assert (found.topic, found.state) == ("Mooncake", "warning")
        with pytest.raises(TierError, match="set http_port in the URL"):
            inspect_target("mooncake://127.0.0.1:1?http_port=1")


@pytest.mark.sweep
class TestMooncakeWithACodec(TestMooncake):
    """Chunks that are compressed and encrypted."""

    exact_sizes = False
    equal_bytes = False

    def open_tier(self, setup: TierSetup) -> Tier:
        keys = write_keys(self.folder / "keys", "one")
        return super().open_tier(self.with_options(setup, codec="lz4", encryption_keys=keys))
