"""The pool is made for its device, and the log tells the memory of a GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.engine import opening
from kvstore.engine.opening import log_device_bytes, open_tiers
from kvstore.engine.options import EngineOptions
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.paged.binding import bind_groups, bind_paged_kv
from kvstore.paged.streams import Streams

LAYOUT = KVLayout((65_536,) * 32, 1, 16, 256)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (torch.device("cuda", 1), ["using 355.0 MiB of cuda:1: staging 288.0 MiB", "GPU tier 64.0 MiB"]),
        (torch.device("cpu"), []),
    ],
)
def test_the_start_tells_what_it_takes_of_a_gpu(
    device: torch.device, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    paged: Any = SimpleNamespace(device=device, layout=LAYOUT)
    with caplog.at_level(logging.INFO, "kvstore"):
        tiers: Any = SimpleNamespace(hot=SimpleNamespace(size_bytes=64 << 20))
        log_device_bytes(paged, tiers, threads=3)
    assert len(caplog.records) == bool(said)
    assert all(part in caplog.text for part in said)


@pytest.mark.parametrize("in_background", [False, True])
def test_the_pool_is_made_for_the_device_of_the_cache(in_background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Pool:
        num_slots = 1

        def __init__(self, num_slots: int, slot_bytes: int, device: torch.device, *, pin_in_background: bool) -> None:
            asked.append((num_slots, slot_bytes, device, pin_in_background))

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr(opening, "SlabPool", Pool)
    paged: Any = SimpleNamespace(device=torch.device("cuda", 1), layout=LAYOUT, streams=Streams(torch.device("cpu")))
    options = EngineOptions(64 << 20, pin_in_background=in_background)
    open_tiers(paged, Namespace({"model": "one"}), options).close()
    assert asked == [(2, LAYOUT.slot_bytes, torch.device("cuda", 1), in_background), "closed"]


def test_copies_on_a_gpu_of_several_groups_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """They would take memory and never be loaded from."""
    layers = [{f"{group}.{n}": torch.zeros((8, 32), dtype=torch.uint8) for n in range(2)} for group in range(2)]
    groups = [bind_paged_kv(caches, num_blocks=8, block_tokens=16, chunk_tokens=32) for caches in layers]
    paged = bind_groups(groups, [0], block_tokens=16, chunk_tokens=32)
    tiers = open_tiers(paged, Namespace({"model": "one"}), EngineOptions(1 << 20, max_local_gpu_bytes=1 << 20))
    tiers.close()
    assert tiers.hot is None
    assert "max_local_gpu_size is ignored" in caplog.text
