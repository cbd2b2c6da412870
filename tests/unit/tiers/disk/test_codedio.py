"""Layers that are decoded on other threads while the rest of their chunk arrives."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, put
from support.few_threads import refuse_threads
from support.gate import Gate

from kvstore.format.coding import Image
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.tiers.disk.tier import DiskTier


def test_a_layer_for_which_there_is_no_thread_is_decoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """And never again: the buffer may be another chunk's by then."""
    monkeypatch.setattr("kvstore.tiers.disk.codedio.PIECE_BYTES", 4096)
    tier = DiskTier(tmp_path, MINE, EVEN, 1 << 20, codec="lz4")
    assert put(tier, make_ref(1)) == [Outcome.STORED]
    refuse_threads(monkeypatch, "kvstore-sum_1")
    decoded: list[int] = []
    decode = Image.decode

    def noting(image: Image, layer: int, array: ByteArray) -> object:
        if threading.current_thread().name.startswith("kvstore-sum"):
            gate()
        decoded.append(layer)
        return decode(image, layer, array)

    monkeypatch.setattr(Image, "decode", noting)
    threading.Timer(0.1, gate.open).start()
    assert get(tier, make_ref(1)) is Outcome.HIT
    tier.close()
    assert sorted(decoded) == list(range(EVEN.num_layers))
