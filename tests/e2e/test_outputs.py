"""Outputs equal plain vLLM's, token by token in float32, wherever the KV comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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


MODES: dict[str, dict[str, Any]] = {
    "within": {"kvstore.enable_async_loading": False, "kvstore.enable_async_saving": False},
    "layerwise": {"kvstore.enable_async_loading": False, "kvstore.use_layerwise": True},
    "beside": {"kvstore.enable_async_loading": True, "kvstore.enable_async_saving": True},
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How KV is moved: within a step, with its layers, or beside the steps."""
    return MODES[request.param]


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


def test_preemption(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        store = StoreSetup(tmp_path / f"disk{len(extra)}", extra=extra)
        with Engine(tiny_model, store, **few_blocks) as engine:
            for _ in ("cold", "warm"):
                preempted = 0
                assert_same_outputs(plain, engine.generate(prompts, max_tokens=80))
                assert preempted > 0
                engine.forget_local()
            engine.assert_idle()


def test_aborted_requests(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """Aborted while waiting, in the middle of prefill and while decoding: others are right, and nothing leaks."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    long = [prompt for prompt in prompts if len(prompt) >= 500]
    for extra in ({}, {"kvstore.save_decode_cache": True}):
        with Engine(tiny_model, StoreSetup(tmp_path / f"disk{len(extra)}", extra=extra)) as engine:
            low_level = engine.llm.llm_engine
            for steps in (0, 1, 2, 5):
                for number, prompt in enumerate(long):
                    low_level.add_request(f"{steps}-{number}", {"prompt_token_ids": prompt}, params)
                for _ in range(steps):
                    low_level.step()
                low_level.abort_request([f"{steps}-{number}" for number in range(len(long))])
                low_level.step()  # blocks kept for a last store come back with the next step
                assert not low_level.has_unfinished_requests()
                engine.forget_local()
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            engine.assert_idle()


def test_without_vllms_prefix_cache(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """All reuse is ours."""
    with Engine(tiny_model, StoreSetup(tmp_path / "disk"), enable_prefix_caching=False) as engine:
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


def test_decoded_tokens_are_saved_on_demand(tiny_model: Path, tmp_path: Path) -> None:
    """``save_decode_cache``: the next turn of a conversation finds the answer of the last one."""
    prompt = make_prompts()[19]  # 700 tokens
    with Engine(tiny_model) as engine:
        answer = engine.generate([prompt], max_tokens=100)[0].token_ids
        turn = prompt + answer + [7, 8, 9]
        plain = engine.generate([turn], logprobs=2)
    with Engine(tiny_model, StoreSetup(tmp_path / "disk", extra={"kvstore.save_decode_cache": True})) as engine:
        assert engine.generate([prompt], max_tokens=100)[0].token_ids == answer
        engine.settle()
        engine.forget_local()
        ours = engine.generate([turn])
        assert_same_outputs(plain, ours)
        # The last sampled token was never computed; all whole blocks before it are found.
        assert ours[0].cached_tokens == (len(prompt) + len(answer) - 1) // 32 * 32
        engine.assert_idle()
