"""Tests of the separation of KV on real vLLM: requests that must not share it do not, and others do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm_engine import Engine, StoreSetup, assert_same_outputs, make_prompts, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

PROMPT = make_prompts()[18]  # 513 tokens


@pytest.mark.sweep
def test_salts(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, StoreSetup(tmp_path / "disk")) as engine:
        engine.generate([PROMPT], salts=["tenant a"])
        for salt, shares in (("tenant b", False), (None, False), ("tenant a", True)):
            engine.forget_local()
            output = engine.generate([PROMPT], salts=[salt])[0]
            assert (output.cached_tokens >= whole_blocks(len(PROMPT))) == shares, salt


def test_lora_files_behind_one_name(tiny_model: Path, tmp_path: Path) -> None:
    """An adapter whose files were replaced between two starts has other KV under the same name and path."""
    from support.lora import build_lora
    from vllm.lora.request import LoRARequest

    from kvstore.tools.models import TINY

    adapter = tmp_path / "adapter"
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    outputs = []
    for seed, cached in ((1, False), (1, True), (2, False)):
        if not cached:
            shutil.rmtree(adapter, ignore_errors=True)
            build_lora(adapter, TINY, model_folder=tiny_model, seed=seed)
        request = LoRARequest("tenant", 1, str(adapter))
        with Engine(tiny_model, StoreSetup(tmp_path / "disk"), **settings) as engine:
            with_adapter = engine.generate([PROMPT], lora=request)[0]
            assert (with_adapter.cached_tokens > 0) == cached, seed
            engine.forget_local()
            outputs.append(engine.generate([PROMPT], lora=request)[0].token_ids)
            base = engine.generate([PROMPT])[0].token_ids
            assert base != outputs[-1]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.soak
def test_lora_files_replaced_after_they_were_loaded(tiny_model: Path, tmp_path: Path) -> None:
    """A loaded adapter keeps answering, and its KV is never found under the key of the new files."""
    from support.lora import build_lora
    from vllm.lora.request import LoRARequest

    from kvstore.tools.models import TINY

    adapter = build_lora(tmp_path / "adapter", TINY, model_folder=tiny_model, seed=1)
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    request = LoRARequest("tenant", 1, str(adapter))
    with Engine(tiny_model, StoreSetup(tmp_path / "disk"), **settings) as engine:
        engine.llm.llm_engine.add_lora(request)
        build_lora(adapter, TINY, model_folder=tiny_model, seed=2)
        old = engine.generate([PROMPT], lora=request)[0]
        engine.settle()
        engine.forget_local()
        assert engine.generate([PROMPT], lora=request)[0].cached_tokens == 0
    with Engine(tiny_model, **settings) as engine:
        new = engine.generate([PROMPT], lora=request)[0]
    assert old.token_ids != new.token_ids
    with Engine(tiny_model, StoreSetup(tmp_path / "disk"), **settings) as engine:
        engine.llm.llm_engine.add_lora(request)
        assert engine.generate([PROMPT], lora=request)[0].token_ids == new.token_ids
        engine.settle()
        engine.forget_local()
        again = engine.generate([PROMPT], lora=request)[0]
        assert again.token_ids == new.token_ids
        assert again.cached_tokens > 0


@pytest.mark.sweep
def test_prompt_embeddings_are_passed_by(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing is stored for two different prompt embeddings, which vLLM both shows as zero tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    embeddings = [torch.randn(300, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]

    def outputs(engine: Engine) -> list[list[int]]:
        found = []
        for embedding in embeddings:
            output: Any = engine.llm.generate([{"prompt_embeds": embedding}], params, use_tqdm=False)[0]
            found.append(list(output.outputs[0].token_ids))
            engine.forget_local()
        return found

    with Engine(tiny_model, enable_prompt_embeds=True) as engine:
        plain = outputs(engine)
    with Engine(tiny_model, StoreSetup(tmp_path / "disk"), enable_prompt_embeds=True) as engine:
        assert outputs(engine) == plain
        assert outputs(engine) == plain
        assert engine.store_scheduler.index.counters.stored == 0
    assert plain[0] != plain[1]


@pytest.mark.soak
def test_weights_replaced_in_the_same_folder(tmp_path: Path) -> None:
    """A new model under an old path finds nothing; the old model's chunks are evicted when room is needed."""
    from kvstore.tools.models import TINY, build_llama

    model = tmp_path / "model"
    for seed in (1, 2):
        build_llama(model, TINY, seed=seed)
        with Engine(model) as engine:
            plain = engine.generate([PROMPT], logprobs=2)
        with Engine(model, StoreSetup(tmp_path / "disk")) as engine:
            cold = engine.generate([PROMPT])
            assert cold[0].cached_tokens == 0
            assert_same_outputs(plain, cold)
        with Engine(model, StoreSetup(tmp_path / "disk")) as engine:
            warm = engine.generate([PROMPT])
            assert warm[0].cached_tokens == whole_blocks(len(PROMPT))
            assert_same_outputs(plain, warm)


def test_weights_changed_while_running(tiny_model: Path, tmp_path: Path) -> None:
    """``reset_cache``, which weight updates call, makes older chunks unreachable at once and after a restart."""
    store = StoreSetup(tmp_path / "disk")
    with Engine(tiny_model, store) as engine:
        engine.generate([PROMPT])
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.generate([PROMPT])[0].cached_tokens == 0
        engine.settle()
        engine.llm.reset_prefix_cache()
        assert engine.generate([PROMPT])[0].cached_tokens == whole_blocks(len(PROMPT)), "the new epoch's own"
        engine.llm.collective_rpc("reload_weights")  # of which vLLM tells nobody
        engine.forget_local()
        assert engine.generate([PROMPT])[0].cached_tokens == 0
        engine.settle()
    with Engine(tiny_model, store) as engine:
        assert engine.generate([PROMPT])[0].cached_tokens == 0
