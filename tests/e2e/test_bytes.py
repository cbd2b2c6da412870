"""Tests of stored bytes: they are unchanged, even if outputs would not show it, and wrong bytes change outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.vllm_engine import (
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    make_prompts,
    whole_blocks,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def computed_blocks(engine: Engine, prompt: Prompt) -> Any:
    """Return the bytes of a prompt's whole blocks, read from vLLM's tensors: ``[blocks, layers x bytes]``."""
    worker = engine.store_worker
    paged = worker._mover.paged
    recorded: list[int] = []
    original = engine.core_scheduler.connector.request_finished_all_groups

    def recording(request: Any, block_ids: tuple[list[int], ...]) -> Any:
        recorded.extend(*block_ids)
        return original(request, block_ids)

    engine.core_scheduler.connector.request_finished_all_groups = recording
    completion = engine.generate([prompt], max_tokens=1)[0]
    engine.core_scheduler.connector.request_finished_all_groups = original
    whole = len(prompt) // 32
    blocks = []
    for block_id in recorded[:whole]:
        payload = np.zeros(paged.layout.slot_bytes, np.uint8)
        paged.gather(np.array([block_id]), payload)
        blocks.append(payload[: paged.layout.block_bytes])
    return np.stack(blocks), completion


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.soak)])
def test_low_precision(tiny_model: Path, tmp_path: Path, kv_cache_dtype: str) -> None:
    """In bf16 and fp8, bytes read equal bytes stored, and outputs equal those of vLLM's own hit of the same length."""
    if kv_cache_dtype == "fp8" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("vLLM's CPU backend keeps fp8 KV only with AVX-512")
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    prompts = [prompt for prompt in make_prompts(seed=3) if len(prompt) in {65, 257, 320, 512}]
    store = StoreSetup(tmp_path / "disk")
    with Engine(tiny_model, **settings) as engine:
        engine.generate_one_by_one(prompts)
        own_hits = engine.generate_one_by_one(prompts)
    with Engine(tiny_model, store, **settings) as engine:
        computed = [computed_blocks(engine, prompt)[0] for prompt in prompts]
        engine.settle()
    with Engine(tiny_model, store, **settings) as engine:
        for prompt, bytes_before, own_hit in zip(prompts, computed, own_hits, strict=True):
            bytes_after, completion = computed_blocks(engine, prompt)
            assert completion.cached_tokens == whole_blocks(len(prompt))
            boundary = completion.cached_tokens // 32  # a recomputed token may round differently
            assert np.array_equal(bytes_before[:boundary], bytes_after[:boundary])
            engine.forget_local()
            if completion.cached_tokens == own_hit.cached_tokens:
                assert engine.generate([prompt])[0].token_ids == own_hit.token_ids
                engine.forget_local()


def test_the_check_has_teeth(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """KV corrupted in memory, where no checksum is, changes outputs, so equal outputs prove right KV."""
    with Engine(tiny_model, StoreSetup(tmp_path / "disk")) as engine:
        engine.generate(prompts)
        engine.settle()
        engine.forget_local()
        cpu = engine.store_worker._tiers.cpu
        for slot in range(cpu.num_slots):
            payload = cpu._pool.slot(slot).view(np.float32)
            np.negative(payload, out=payload)
        changed = engine.generate(prompts)
    hit = [number for number, prompt in enumerate(prompts) if len(prompt) > 64]
    different = [n for n in hit if changed[n].token_ids != plain_outputs[n].token_ids]
    assert len(different) > 0.9 * len(hit)


@pytest.mark.soak
def test_teeth_on_disk(
    tiny_model: Path, prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrupted files change outputs without verification, and outputs are right with it."""
    store = StoreSetup(tmp_path / "disk")
    prompt = prompts[20]
    with Engine(tiny_model, store) as engine:
        plain = engine.generate([prompt])
    for path in (tmp_path / "disk").rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[4096:] = bytes(255 - byte for byte in raw[4096:])
        path.write_bytes(raw)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.format.chunkfile.compare", lambda *args, **kwargs: None)
        with Engine(tiny_model, store) as engine:
            wrong = engine.generate([prompt])
            assert wrong[0].cached_tokens > 0
    assert wrong[0].token_ids != plain[0].token_ids
    with Engine(tiny_model, store) as engine:
        right = engine.generate([prompt])
        assert engine.store_worker._tiers.disk.counters.corrupt > 0
        engine.assert_idle()
    assert_same_outputs(plain, right)
