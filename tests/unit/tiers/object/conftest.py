"""Engines that share a folder, each as if in a process of its own, and hurry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.diskwork import EVEN, MINE
from support.object_ends import (
    Open,
    WatchedStore,
)

from kvstore.tiers.object import log
from kvstore.tiers.object import sweep as sweeping
from kvstore.tiers.object.tier import ObjectTier


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    monkeypatch.setattr(sweeping, "_LATE_S", -2.0)
    monkeypatch.setattr(sweeping, "MANIFESTS_STAY_S", -2.0)
    monkeypatch.setattr(log, "EVERY_S", 0.02)
    monkeypatch.setattr(log.Log, "_others", lambda _: [])  # as if each were in a process of its own


@pytest.fixture
def store(tmp_path: Path, hurry: None) -> WatchedStore:
    return WatchedStore(tmp_path / "kv")


@pytest.fixture
def open_tier(store: WatchedStore) -> Iterator[Open]:
    opened: list[ObjectTier] = []

    def open_one() -> ObjectTier:
        own = WatchedStore(store._root)
        own.on_read = store.on_read
        opened.append(ObjectTier(own, MINE, EVEN, 2.0))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()
