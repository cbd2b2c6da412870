"""Tests of outputs, which equal plain vLLM's token by token in float32, with KV from every tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.runner import run_elsewhere
from support.vllm_engine import (
    ONE_MODE_AND_SOAK,
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
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
    """Outputs are right under chunked prefill (512 tokens a step), cold, from CPU memory, and from disk."""
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
    """Scheduler and worker run outside the caller, found by module path; then a new process answers from disk."""
    prompts, plain_outputs = prompts[::2], plain_outputs[::2]
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
@pytest.mark.sweep
def test_without_vllms_prefix_cache(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path, mode: dict[str, Any]
) -> None:
    """All reuse comes from the store."""
    store = StoreSetup(tmp_path / "disk", extra=mode)
    with Engine(tiny_model, store, enable_prefix_caching=False) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        again = engine.generate(prompts)
        assert_same_outputs(plain_outputs, again)
        assert_all_from_store(prompts, again)
        engine.assert_idle()


@pytest.mark.sweep
def test_memory_as_passage_only(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """With ``local_cpu: false``, chunks only pass through memory to disk and back."""
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
