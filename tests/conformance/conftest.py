"""Fixtures for the tests that read layer by layer."""

from __future__ import annotations

import pytest

from kvstore.transfer import layerwise


@pytest.fixture(params=[1, 1 << 20], ids=["a layer a read", "all layers in one read"])
def read_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size_bytes: int = request.param
    monkeypatch.setattr(layerwise, "READ_BYTES", size_bytes)
    return size_bytes


@pytest.fixture
def layer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every layer with a separate read."""
    monkeypatch.setattr(layerwise, "READ_BYTES", 1)
