"""Fixtures of the disk tier's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.diskwork import CAPACITY_BYTES, EVEN, MINE, Open

from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.tier import DiskTier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_tier(folder: Path) -> Iterator[Open]:
    """Yield a function that opens tiers in one folder and closes the last one; opening again is a restart."""
    opened: list[DiskTier] = []

    def open_(
        namespace: Namespace = MINE,
        layout: KVLayout = EVEN,
        capacity_bytes: int = CAPACITY_BYTES,
        direct: bool | None = None,
    ) -> DiskTier:
        if opened:
            opened[-1].close()
        opened.append(DiskTier(folder, namespace, layout, capacity_bytes, direct=direct))
        opened[-1].scan()
        return opened[-1]

    yield open_
    if opened:
        opened[-1].close()
