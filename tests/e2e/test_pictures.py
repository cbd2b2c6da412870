"""Test of pictures, which vLLM names by a counter that restarts in every process; their content decides hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vision_model import IMAGE_TOKEN, build_idefics3, picture
from support.vllm_engine import BLOCK_TOKENS, Completion, Engine, StoreSetup, _completion, assert_same_outputs

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.soak]

COUNTING: dict[str, Any] = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
TEXT = list(range(20, 130))


def ask(engine: Engine, seed: int) -> list[Completion]:
    """Return vLLM's answers to a picture, and to the same with processor arguments, which change its name only."""
    from vllm import SamplingParams

    plain: dict[str, Any] = {
        "prompt_token_ids": [5, IMAGE_TOKEN, *TEXT], "multi_modal_data": {"image": picture(seed)},
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    requests: list[Any] = [plain, {**plain, "mm_processor_kwargs": {"do_image_splitting": False}}]
    return [_completion(engine.llm.generate([request], params, use_tqdm=False)[0]) for request in requests]


def test_another_picture_after_a_restart(tmp_path: Path) -> None:
    model = build_idefics3(tmp_path / "model")
    with Engine(model, **COUNTING) as engine:
        first, second = ask(engine, 0), ask(engine, 1)
    assert first[0].token_ids != second[0].token_ids
    store = StoreSetup(disk=tmp_path / "disk", extra={"kvstore.chunk_size": 2 * BLOCK_TOKENS})
    with Engine(model, store, **COUNTING) as engine:
        assert_same_outputs(first, ask(engine, 0))
        engine.settle()
    with Engine(model, store, **COUNTING) as engine:
        assert_same_outputs(second, ask(engine, 1))
        again = ask(engine, 0)
        assert_same_outputs(first, again)
        assert all(answer.cached_tokens >= 4 * BLOCK_TOKENS for answer in again)
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()
