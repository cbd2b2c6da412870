"""Tests of settings that change the meaning of stored bytes, which an engine with another setting does not find."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hybrid_engines import Hybrid, cached, words
from support.hybrid_models import MAKERS, longrope
from support.vllm_engine import Completion, Engine, StoreSetup, assert_same_outputs, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.soak]

ORIGINAL = 512  # tokens, of the model with LongRoPE
PROMPTS = [words(seed, 420) for seed in range(3)]


def test_an_engine_with_longropes_other_factors_finds_nothing(tmp_path: Path) -> None:
    """A longer ``--max-model-len`` makes vLLM use the other factors."""
    model, disk = longrope(tmp_path / "model", ORIGINAL), tmp_path / "disk"

    def run(length: int, store: StoreSetup | None = None) -> list[Completion]:
        with Engine(model, store, max_model_len=length) as engine:
            return engine.generate_one_by_one(PROMPTS)

    plain = run(4 * ORIGINAL)
    assert cached(run(ORIGINAL, StoreSetup(disk))) == [0] * len(PROMPTS)
    first = run(4 * ORIGINAL, StoreSetup(disk))
    assert_same_outputs(plain, first)
    assert cached(first) == [0] * len(PROMPTS)
    again = run(2 * ORIGINAL, StoreSetup(disk))  # another length with the same factors
    assert_same_outputs(plain, again)
    assert cached(again) == [whole_blocks(len(prompt)) for prompt in PROMPTS]


def test_an_engine_whose_states_have_another_type_finds_nothing(tmp_path: Path) -> None:
    from kvstore.tools.dev.mamba2 import end_steps_at_states

    end_steps_at_states()
    model = Hybrid("granite4", MAKERS["granite4"](tmp_path / "model"))

    def run(dtype: str, store: StoreSetup | None = None) -> list[Completion]:
        with model.engine(store, mamba_cache_dtype=dtype, mamba_ssm_cache_dtype=dtype) as engine:
            return engine.generate_one_by_one(PROMPTS)

    disk = model.store(tmp_path / "disk")
    plain = run("float16")
    assert cached(run("bfloat16", disk)) == [0] * len(PROMPTS)
    first = run("float16", disk)
    assert_same_outputs(plain, first)
    assert cached(first) == [0] * len(PROMPTS)
    again = run("float16", disk)
    assert_same_outputs(plain, again)
    assert all(cached(again))
