"""Tests of a model with windows in all layers, for which vLLM frees blocks during a request and at its own hits.

vLLM's null block stands in their place, and must be neither stored nor loaded.

The control has the same weights, and full attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.vllm_engine import Completion, Engine, StoreSetup, assert_same_outputs, make_prompts, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

WINDOW = 96
LONG = next(prompt for prompt in make_prompts() if len(prompt) == 1000)
SHARED = 600  # tokens, so that prompts diverge inside a chunk
OTHER = [*LONG[:SHARED], *make_prompts(seed=1)[9]]
PROMPTS = [LONG, OTHER, *make_prompts()[:20:3]]


@pytest.fixture(scope="module", params=[WINDOW, pytest.param(None, marks=pytest.mark.sweep)], ids=["window", "full"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Mistral, which is a Llama with an optional window."""
    from kvstore.tools.models import TINY, build_llama

    folder = build_llama(tmp_path_factory.mktemp("models") / "mistral", TINY)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": request.param}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Completion]:
    """Return the answers of vLLM without any cache."""
    with Engine(model, enable_prefix_caching=False) as engine:
        return engine.generate(PROMPTS, logprobs=2)


def group_of(engine: Engine) -> str:
    (group,) = engine.core_scheduler.kv_cache_config.kv_cache_groups
    return type(group.kv_cache_spec).__name__


@pytest.mark.sweep
def test_a_prefix_that_vllm_has_itself_is_not_stored_from_its_null_block(model: Path, plain: list[Completion]) -> None:
    with Engine(model, StoreSetup()) as engine:
        assert_same_outputs(plain[:1], engine.generate([LONG], asks={"kvstore.skip_save": True}))
        (again,) = engine.generate([LONG])  # vLLM has it, so the store reads from its table
        assert_same_outputs(plain[:1], [again])
        assert again.cached_tokens == whole_blocks(len(LONG))
        engine.forget_local()
        (shared,) = engine.generate([OTHER])
        assert_same_outputs(plain[1:2], [shared])
        has_window = group_of(engine) == "SlidingWindowSpec"
        assert has_window or group_of(engine) == "FullAttentionSpec"
        assert shared.cached_tokens == (0 if has_window else SHARED - SHARED % 32)
        engine.assert_idle()


def test_hits_from_memory_and_disk(model: Path, plain: list[Completion], tmp_path: Path) -> None:
    store = StoreSetup(tmp_path / "disk", extra={"kvstore.enable_async_saving": True})
    with Engine(model, store) as engine:
        for prompt, expected in zip(PROMPTS, plain, strict=True):  # one at a time, so that a step computes two chunks
            assert_same_outputs([expected], engine.generate([prompt]))
        engine.forget_local()
        from_memory = engine.generate_one_by_one(PROMPTS)
        assert_same_outputs(plain, from_memory)
        assert [hit.cached_tokens for hit in from_memory] == [whole_blocks(len(prompt)) for prompt in PROMPTS]
        engine.forget_local()
        assert_same_outputs(plain, engine.generate(PROMPTS))
        engine.assert_idle()
    with Engine(model, store) as engine:
        assert_same_outputs(plain, engine.generate(PROMPTS))
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()


@pytest.mark.sweep
def test_a_load_that_fails_is_computed_anew(model: Path, plain: list[Completion], tmp_path: Path) -> None:
    """It is recomputed from the beginning, because the earlier blocks have been freed."""
    with Engine(model, StoreSetup(tmp_path / "disk", extra={"kvstore.local_cpu": False})) as engine:
        assert_same_outputs(plain[:1], engine.generate([LONG]))
        engine.settle()
        files = sorted(path for path in (tmp_path / "disk").rglob("*.safetensors") if path.parent.name != ".free")
        assert len(files) == 4
        for path in files:
            path.write_bytes(b"")
        engine.forget_local()
        (found,) = engine.generate([LONG])
        assert_same_outputs(plain[:1], [found])
        assert engine.store_scheduler.index.counters.failed_loads > 0
        engine.assert_idle()
