"""Tests of the disk tier's contract, with and without codecs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from support.disk_files import DiskFiles, let_some_shrink
from support.key_files import write_keys

from kvstore.tiers.base import Tier, TierSetup
from kvstore.tiers.disk.tier import DiskTier


class TestDiskTier(DiskFiles):
    def open_tier(self, setup: TierSetup) -> Tier:
        return DiskTier(self.folder, setup.namespace, setup.layout, setup.capacity_bytes)


class TestDiskTierWithLz4(TestDiskTier):
    codec: ClassVar[str] = "lz4"

    def open_tier(self, setup: TierSetup) -> Tier:
        layout = replace(setup.layout, element="bf16")
        return DiskTier(self.folder, setup.namespace, layout, setup.capacity_bytes, codec=self.codec)


@pytest.mark.sweep
class TestDiskTierWithSplit(TestDiskTierWithLz4):
    codec = "split"


@pytest.mark.sweep
class TestLz4OfPayloadsThatShrink(TestDiskTierWithLz4):
    """Payloads of which some shrink to a fraction, and others not at all."""

    exact_sizes = False

    @pytest.fixture(autouse=True)
    def _payloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        let_some_shrink(monkeypatch)


@pytest.mark.sweep
class TestSplitOfPayloadsThatShrink(TestLz4OfPayloadsThatShrink):
    codec = "split"


class TestDiskTierEncrypted(TestDiskTier):
    """Encrypted files are larger than the payload by a tag for each layer."""

    equal_bytes = False
    exact_sizes = False

    def open_tier(self, setup: TierSetup) -> Tier:
        options = {"folder": self.folder, "encryption_keys": write_keys(self.folder.with_name("keys"), "one")}
        return DiskTier.open(replace(setup, options=options))


@pytest.mark.sweep
class TestDiskTierEncryptedAfterLz4(TestLz4OfPayloadsThatShrink):
    equal_bytes = False

    def open_tier(self, setup: TierSetup) -> Tier:
        keys = write_keys(self.folder.with_name("keys"), "one")
        options = {"folder": self.folder, "codec": self.codec, "encryption_keys": keys}
        return DiskTier.open(replace(setup, options=options))
