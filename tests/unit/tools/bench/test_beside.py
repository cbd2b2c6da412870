"""The comparison with LMCache, without LMCache: ours beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from kvstore.options import EngineOptions
from kvstore.tools.dev.beside import __main__ as beside
from kvstore.tools.dev.beside import prompts as shapes
from kvstore.tools.dev.beside.prompts import BLOCK_TOKENS, CHUNK_TOKENS, TOKEN_BYTES, Prompts
from kvstore.tools.dev.beside.systems import Kvstore

POOL_BYTES = 2 * CHUNK_TOKENS * TOKEN_BYTES


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Prompts:
    monkeypatch.setattr(beside, "HOLD_S", 0.0)
    assert shapes.LAYERS * shapes.HEADS * shapes.HEAD_SIZE * 4 == TOKEN_BYTES
    return Prompts(CHUNK_TOKENS)


def test_both_are_measured_and_shown(prompts: Prompts) -> None:
    systems: dict[str, Any] = {name: Kvstore(prompts, EngineOptions(POOL_BYTES)) for name in ("kvstore", "LMCache")}
    samples = beside.measure(systems, prompts, 2)
    for system in systems.values():
        system.close()
    assert {name: [len(part) for part in found] for name, found in samples.items()} == {
        "kvstore": [2, 2, 2],
        "LMCache": [2, 2, 2],
        "memcpy": [2, 0, 0],
    }
    console = Console(width=100, record=True)
    console.print(beside.table(samples, prompts.num_bytes, "memory"))
    assert "GB/s" in console.export_text()


def test_one_wrong_byte_ends_it(prompts: Prompts) -> None:
    slots = prompts.new()
    blocks, _ = prompts.destination()
    for cache in prompts.caches:
        here = slots[::BLOCK_TOKENS] // BLOCK_TOKENS
        cache[:, torch.from_numpy(blocks)] = cache[:, here]
    prompts.check(blocks)
    prompts.caches[7].view(torch.int16)[1, blocks[3], 2, 1, 0] ^= 1
    with pytest.raises(SystemExit, match="layer 7"):
        prompts.check(blocks)


def test_what_is_not_found_ends_it(prompts: Prompts) -> None:
    prompts.new()
    ours = Kvstore(prompts, EngineOptions(POOL_BYTES))
    with pytest.raises(SystemExit, match="kvstore found 0 of 256 tokens"):
        beside.looked_up_s("kvstore", ours, prompts)
    ours.close()
