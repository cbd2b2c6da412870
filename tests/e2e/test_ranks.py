"""Tests of two ranks on real vLLM: each stores its heads, and both recompute chunks that one has lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.hybrid_engines import PROMPTS as HYBRID_PROMPTS
from support.hybrid_models import MAKERS
from support.runner import run_elsewhere
from support.vllm_engine import BLOCK_TOKENS, Completion, Engine, Prompt, assert_same_outputs, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

OVERRIDES = {"tensor_parallel_size": 2, "async_scheduling": False}


@pytest.fixture(autouse=True)
def _a_core_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def assert_all_from_store(prompts: Sequence[Prompt], outputs: Sequence[Completion]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.cached_tokens >= whole_blocks(len(prompt)), len(prompt)


def test_tensor_parallelism(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """Outputs are right cold, from memory, from disk after a restart, and with a third of one rank's files missing."""
    folder = tmp_path / "disk"
    some = [number for number in range(len(prompts)) if number % 3]  # both ranks wait by spinning
    prompts, plain_outputs = [prompts[number] for number in some], [plain_outputs[number] for number in some]
    job: dict[str, Any] = {"model": str(tiny_model), "two_processes": True, "max_tokens": 12}
    engine = {
        "prompts": prompts,
        "overrides": OVERRIDES,
        "store": {"disk": str(folder)},
        "rounds": ["cold", "warm"],
    }
    ((cold, warm),) = run_elsewhere(job | {"engines": [engine]})
    assert_same_outputs(plain_outputs, cold)
    assert_same_outputs(plain_outputs, warm)
    assert_all_from_store(prompts, warm)

    files = [sorted((folder / f"rank-{rank}-of-2").rglob("*.safetensors")) for rank in range(2)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    missing = [str(path) for path in files[1][::3]]
    assert len(missing) > 10
    restarted = {
        "store": {"disk": str(folder), "extra": {"kvstore.local_cpu": False}},  # every hit reads a file
        "rounds": ["from disk", "files missing", "stored anew"],
        "unlink": {1: missing},
    }
    ((from_disk, spoilt, again),) = run_elsewhere(job | {"engines": [engine | restarted]})
    for outputs in (from_disk, spoilt, again):
        assert_same_outputs(plain_outputs, outputs)
    assert_all_from_store(prompts, from_disk)
    assert_all_from_store(prompts, again)


@pytest.mark.soak
def test_tensor_parallelism_with_windows(tmp_path: Path) -> None:
    """Ranks agree on the parts of checkpoints. If one of them has lost a part, both recompute."""
    model = MAKERS["gemma3"](tmp_path / "gemma3")
    folder = tmp_path / "disk"
    job: dict[str, Any] = {"model": str(model), "two_processes": True, "max_tokens": 12}
    with Engine(model, enable_prefix_caching=False) as engine:
        expected = engine.generate(HYBRID_PROMPTS, logprobs=2)
    ranks: dict[str, Any] = {"prompts": HYBRID_PROMPTS, "overrides": OVERRIDES}
    store = {"disk": str(folder), "extra": {"kvstore.chunk_size": 64}}
    ((cold, warm),) = run_elsewhere(job | {"engines": [ranks | {"store": store, "rounds": ["cold", "warm"]}]})
    assert_same_outputs(expected, cold)
    assert_same_outputs(expected, warm)
    hits = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in HYBRID_PROMPTS]
    assert [output.cached_tokens for output in warm] == hits

    files = [sorted((folder / f"rank-{rank}-of-2").rglob("*.safetensors")) for rank in range(2)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    restarted = {
        "store": {"disk": str(folder), "extra": {"kvstore.chunk_size": 64, "kvstore.local_cpu": False}},
        "rounds": ["from disk", "files missing"],
        "unlink": {1: [str(path) for path in files[1][::3]]},
    }
    ((from_disk, spoilt),) = run_elsewhere(job | {"engines": [ranks | restarted]})
    assert [output.cached_tokens for output in from_disk] == hits
    for outputs in (from_disk, spoilt):
        assert_same_outputs(expected, outputs)
