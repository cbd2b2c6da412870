"""Tests of outputs under little room, which equal plain vLLM's: few blocks, small pools, many and aborted requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import (
    ONE_MODE_AND_SOAK,
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    counted_preemptions,
    make_prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


@ONE_MODE_AND_SOAK
@pytest.mark.sweep
def test_preemption(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]) -> None:
    """With too few blocks for all requests, preempted ones are resumed, partly from the store."""
    few_blocks = {"num_gpu_blocks_override": 48, "max_model_len": 768}
    prompts = [prompt[:300] for prompt in make_prompts(seed=1) if len(prompt) >= 250][:16]
    with Engine(tiny_model) as engine:
        plain = engine.generate(prompts, max_tokens=80, logprobs=2)
    preemptions = counted_preemptions(monkeypatch)
    for extra in ({}, {"kvstore.save_decode_cache": True}):
        store = StoreSetup(tmp_path / f"disk{len(extra)}", extra=extra | mode)
        with Engine(tiny_model, store, **few_blocks) as engine:
            for _ in ("cold", "warm"):
                preemptions.clear()
                assert_same_outputs(plain, engine.generate(prompts, max_tokens=80))
                assert preemptions
                engine.settle()  # saves under way keep their blocks until then
                engine.forget_local()
            engine.assert_idle()


@ONE_MODE_AND_SOAK
@pytest.mark.sweep
def test_aborted_requests(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path, mode: dict[str, Any]
) -> None:
    """After aborts of waiting, prefilling and decoding requests, the others are right, and nothing leaks."""
    long = [prompt for prompt in prompts if len(prompt) >= 500]
    for extra in ({}, {"kvstore.save_decode_cache": True}):
        store = StoreSetup(tmp_path / f"disk{len(extra)}", extra=extra | mode)
        with Engine(tiny_model, store) as engine:
            for steps in (0, 1, 2, 5):
                engine.abort_after(steps, long)
                engine.settle()  # blocks kept for a last store, or for a load under way, are freed by later steps
                engine.forget_local()
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            engine.assert_idle()


@pytest.mark.sweep
def test_small_pools(tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path) -> None:
    """Pools smaller than the longest request lead to evictions and fewer hits, and outputs stay right."""
    chunk_gib = 256 * 4 * 2 * 2 * 64 * 4 / 2**30  # tokens, layers, K and V, heads, head size, float32
    store = StoreSetup(tmp_path / "disk", cpu_gib=4.5 * chunk_gib, disk_gib=12 * chunk_gib)
    with Engine(tiny_model, store) as engine:
        for _ in range(3):
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            engine.forget_local()
        counters = engine.store_scheduler.index.counters
        assert counters.evicted_memory > 20
        assert counters.evicted_disk > 20
        engine.assert_idle()


@ONE_MODE_AND_SOAK
@pytest.mark.sweep
def test_three_turns_of_many_chats(tiny_model: Path, tmp_path: Path, mode: dict[str, Any]) -> None:
    """With ``save_decode_cache`` every turn finds the earlier answers, in 16 concurrent chats with a common prefix."""
    system = make_prompts()[19][:300]
    chats = [system + [8 + number] * 40 for number in range(16)]

    def turns(engine: Engine, answers: list[list[Completion]]) -> list[list[Completion]]:
        """Return each turn's outputs; every prompt continues the plain answers, because another one may be a tie."""
        prompts, outputs = chats, []
        for turn in range(3):
            outputs.append(engine.generate(prompts, max_tokens=40, logprobs=2))
            said = answers[turn] if answers else outputs[turn]
            prompts = [prompt + answer.token_ids + [900 + turn] for prompt, answer in zip(prompts, said, strict=True)]
            if answers:
                engine.settle()
                engine.forget_local()
        return outputs

    with Engine(tiny_model, max_num_seqs=16) as engine:
        plain = turns(engine, [])
    store = StoreSetup(tmp_path / "disk", extra={"kvstore.save_decode_cache": True} | mode)
    with Engine(tiny_model, store, max_num_seqs=16) as engine:
        ours = turns(engine, plain)
        for expected, got in zip(plain, ours, strict=True):
            assert_same_outputs(expected, got)
        # The last sampled token was never computed; all whole blocks before it are found.
        equal = [
            number
            for number in range(16)
            if all(a[number].token_ids == b[number].token_ids for a, b in zip(plain, ours, strict=True))
        ]
        assert len(equal) > 8
        assert all(ours[2][number].cached_tokens == (340 + 40 + 1 + 40 - 1) // 32 * 32 for number in equal)
        engine.assert_idle()
