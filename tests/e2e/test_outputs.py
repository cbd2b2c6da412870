"""Outputs equal plain vLLM's, token by token in float32, wherever the KV comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.modes import ONE_MODE_AND_SOAK
from support.runner import run_elsewhere
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


def assert_all_from_store(prompts: Sequence[Prompt], outputs: Sequence[Completion]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.cached_tokens >= whole_blocks(len(prompt)), len(prompt)


def test_one_process(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    tmp_path: Path,
    mode: dict[str, Any],
) -> None:
    """Chunked prefill (512 tokens a step), cold, then from CPU memory, then from disk after a restart."""
    store = StoreSetup(tmp_path / "disk", extra=mode)
    with Engine(tiny_model, store) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.forget_local()
        from_cpu = engine.generate(prompts)
        engine.assert_idle()
    assert_same_outputs(plain_outputs, from_cpu)
    assert_all_from_store(prompts, from_cpu)
    with Engine(tiny_model, store) as engine:
        from_disk = engine.generate(prompts)
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()
    assert_same_outputs(plain_outputs, from_disk)
    assert_all_from_store(prompts, from_disk)


def test_two_processes_and_a_restart(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """Scheduler and worker apart from the caller, found by module path; then a new process answers from disk."""
    engine = {
        "store": {"disk": str(tmp_path / "disk"), "by_module_path": True},
        "rounds": ["cold", "from CPU"],
        "prompts": prompts,
    }
    job = {"model": str(tiny_model), "two_processes": True, "max_tokens": 12, "engines": [engine]}
    ((cold, from_cpu),) = run_elsewhere(job)
    assert_same_outputs(plain_outputs, cold)
    assert_same_outputs(plain_outputs, from_cpu)
    assert_all_from_store(prompts, from_cpu)
    ((from_disk,),) = run_elsewhere(job | {"engines": [engine | {"rounds": ["from disk"]}]})
    assert_same_outputs(plain_outputs, from_disk)
    assert_all_from_store(prompts, from_disk)


@ONE_MODE_AND_SOAK
def test_preemption(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]) -> None:
    """Too few blocks for all requests: preempted ones come back, partly from the store."""
    from vllm.v1.core.sched.scheduler import Scheduler

    few_blocks = {"num_gpu_blocks_override": 48, "max_model_len": 768}
    prompts = [prompt[:300] for prompt in make_prompts(seed=1) if len(prompt) >= 250][:16]
    with Engine(tiny_model) as engine:
        plain = engine.generate(prompts, max_tokens=80, logprobs=2)
    preempted = 0
    original = Scheduler._preempt_request

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    for extra in ({}, {"kvstore.save_decode_cache": True}):
        store = StoreSetup(tmp_path / f"disk{len(extra)}", extra=extra | mode)
        with Engine(tiny_model, store, **few_blocks) as engine:
            for _ in ("cold", "warm"):
                preempted = 0
                assert_same_outputs(plain, engine.generate(prompts, max_tokens=80))
                assert preempted > 0
                engine.forget_local()
            engine.assert_idle()


@ONE_MODE_AND_SOAK
def test_aborted_requests(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path, mode: dict[str, Any]
) -> None:
    """Aborted while waiting, in the middle of prefill and while decoding: others are right, and nothing leaks."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    long = [prompt for prompt in prompts if len(prompt) >= 500]
    for extra in ({}, {"kvstore.save_decode_cache": True}):
        store = StoreSetup(tmp_path / f"disk{len(extra)}", extra=extra | mode)
        with Engine(tiny_model, store) as engine:
            low_level = engine.llm.llm_engine
            for steps in (0, 1, 2, 5):
                for number, prompt in enumerate(long):
                    low_level.add_request(f"{steps}-{number}", {"prompt_token_ids": prompt}, params)
                for _ in range(steps):
                    low_level.step()
                low_level.abort_request([f"{steps}-{number}" for number in range(len(long))])
                assert not low_level.has_unfinished_requests()
                engine.settle()  # blocks kept for a last store, or for a load under way, come back with coming steps
                engine.forget_local()
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            engine.assert_idle()


@ONE_MODE_AND_SOAK
def test_without_vllms_prefix_cache(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path, mode: dict[str, Any]
) -> None:
    """All reuse is ours."""
    store = StoreSetup(tmp_path / "disk", extra=mode)
    with Engine(tiny_model, store, enable_prefix_caching=False) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        # A full chunk supersedes the tails inside it, also those that shorter prompts would have found.
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        again = engine.generate(prompts)
        assert_same_outputs(plain_outputs, again)
        assert_all_from_store(prompts, again)
        engine.assert_idle()


def test_small_pools(tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path) -> None:
    """Pools smaller than the longest request: evictions everywhere, fewer hits, right outputs."""
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


def test_memory_as_passage_only(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """``local_cpu: false``: chunks pass through memory to disk and back."""
    store = StoreSetup(tmp_path / "disk", extra={"kvstore.local_cpu": False})
    with Engine(tiny_model, store) as engine:
        engine.generate(prompts)
        engine.settle()
        assert engine.store_scheduler.index.slots_in_use == 0
        engine.forget_local()
        again = engine.generate(prompts)
        assert_same_outputs(plain_outputs, again)
        assert_all_from_store(prompts, again)
        engine.assert_idle()


@ONE_MODE_AND_SOAK
def test_three_turns_of_many_chats(tiny_model: Path, tmp_path: Path, mode: dict[str, Any]) -> None:
    """``save_decode_cache``: every turn finds the answers before it, for 16 chats at once that begin alike."""
    system = make_prompts()[19][:300]
    chats = [system + [8 + number] * 40 for number in range(16)]

    def turns(engine: Engine, answers: list[list[Completion]]) -> list[list[Completion]]:
        """Each turn's outputs; every prompt goes on from the plain answers, should one of ours be a tie."""
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
