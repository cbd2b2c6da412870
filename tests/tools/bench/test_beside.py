"""The comparison with LMCache, with another kvstore in LMCache's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from kvstore.options import EngineOptions
from kvstore.tools.bench.samples import BenchError
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.dev.beside import __main__ as beside
from kvstore.tools.dev.beside.systems import Kvstore

POOL_BYTES = 2 * beside.GEOMETRY.chunk_bytes


@pytest.fixture
def workbench(monkeypatch: pytest.MonkeyPatch) -> Workbench:
    monkeypatch.setattr(beside, "HOLD_S", 0.0)
    made = Workbench(beside.GEOMETRY, 1, split=True)
    assert {cache.shape for cache in made.caches} == {(2, made.paged.num_blocks, 16, 8, 128)}, "as LMCache reads them"
    return made


def test_both_are_measured_and_shown(workbench: Workbench) -> None:
    systems: dict[str, Any] = {name: Kvstore(workbench, EngineOptions(POOL_BYTES)) for name in ("kvstore", "LMCache")}
    samples = beside.measure(systems, workbench, 2)
    for system in systems.values():
        system.close()
    assert {name: [len(part) for part in found] for name, found in samples.items()} == {
        "kvstore": [2, 2, 2],
        "LMCache": [2, 2, 2],
        "memcpy": [2, 0, 0],
    }
    console = Console(width=100, record=True)
    console.print(beside.table(samples, workbench.batch_bytes, "memory"))
    assert "GB/s" in console.export_text()


def test_one_wrong_byte_ends_it(workbench: Workbench) -> None:
    slots = workbench.new_batch()
    block_tokens = workbench.geometry.block_tokens
    stored = [cache[:, slots[::block_tokens] // block_tokens] for cache in workbench.caches]
    blocks, _ = workbench.destination()
    for cache, kv in zip(workbench.caches, stored, strict=True):
        cache[:, blocks] = kv
    workbench.check(blocks)
    workbench.caches[7].view(torch.int16)[1, blocks[3], 2, 1, 0] ^= 1
    with pytest.raises(BenchError, match="layer 7"):
        workbench.check(blocks)


def test_what_is_not_found_ends_it(workbench: Workbench) -> None:
    workbench.new_batch()
    ours = Kvstore(workbench, EngineOptions(POOL_BYTES))
    with pytest.raises(BenchError, match="kvstore found 0 of 256 tokens"):
        beside.looked_up_s("kvstore", ours, workbench)
    ours.close()
