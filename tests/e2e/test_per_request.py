"""Tests of per-request options and of roles on real vLLM, and of this connector as the first of several."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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

PROMPT = make_prompts()[18]  # 513 tokens
LATER = [3, *PROMPT]


def hit(engine: Engine, asks: dict[str, object] | None = None) -> bool:
    """Tell if the prompt is loaded from the store."""
    engine.forget_local()
    return engine.generate([PROMPT], asks=asks)[0].cached_tokens >= whole_blocks(len(PROMPT))


def test_what_a_client_asks(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tiny_model) as engine:
        plain = engine.generate([PROMPT], logprobs=2)
    # So that it does not join vLLM's logger, which caplog cannot see.
    logging.getLogger("kvstore").addHandler(logging.NullHandler())
    every = {"kvstore.request_fields": "skip_save, skip_load, max_save_tokens, ttl, tag, pin"}
    with Engine(tiny_model, StoreSetup(tmp_path / "disk", extra=every)) as engine:
        counters = engine.store_scheduler.index.counters
        assert not hit(engine, {"kvstore.skip_save": True})
        malformed = engine.generate([PROMPT], asks={"kvstore.ttl": ["secret"], "kvstore.skip_save": False})
        assert_same_outputs(plain, malformed)
        assert counters.stored == 0
        assert "kvstore.ttl" in caplog.text
        assert "secret" not in caplog.text

        assert not hit(engine, {"kvstore.ttl": 1})
        assert counters.stored == 2
        time.sleep(1.1)
        assert not hit(engine, {"lmcache.tag.team": "red", "kvstore.pin": True})
        assert counters.expired == 2
        assert not hit(engine, {"kvstore.tag.team": "blue"})
        assert not hit(engine, {"lmcache.tag.team": "red", "kvstore.skip_load": True})
        assert hit(engine, {"kvstore.tag.team": "red"})

        engine.generate([PROMPT], asks={"kvstore.tag.team": "first", "kvstore.max_save_tokens": 100})
        engine.forget_local()
        assert engine.generate([PROMPT], asks={"kvstore.tag.team": "first"})[0].cached_tokens == 96

        assert engine.store_scheduler.index.leases == 1
        engine.generate([PROMPT], asks={"kvstore.tag.team": "red", "kvstore.pin": False})
        engine.assert_idle()


@pytest.mark.sweep
def test_a_retained_prompt_outlives_others_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    """Memory and disk hold far less than what other clients ask for; the answer stays plain vLLM's."""
    others = make_prompts()[19:40]
    with Engine(tiny_model) as engine:
        plain = engine.generate([PROMPT], logprobs=2)
    every = {"kvstore.request_fields": "retain", "kvstore.retain_share": 0.5, "kvstore.cache_policy": "LRU"}
    setup = StoreSetup(tmp_path / "disk", cpu_gib=0.01, disk_gib=0.02, extra=every)
    with Engine(tiny_model, setup) as engine:
        engine.generate([PROMPT], asks={"kvstore.retain": 3600})
        for _ in range(3):
            engine.generate(others)
            engine.settle()
        index = engine.store_scheduler.index
        assert index.counters.evicted_disk > 10
        assert index.retained == 2
        engine.forget_local()
        loaded = engine.generate([PROMPT], logprobs=2)
        assert loaded[0].cached_tokens >= whole_blocks(len(PROMPT))
        assert_same_outputs(plain, loaded)
        engine.generate([LATER], asks={"kvstore.retain": 3600})
        engine.settle()
    with Engine(tiny_model, setup) as engine:
        assert engine.store_scheduler.index.retained == 4
        for _ in range(3):
            engine.generate(others)
            engine.settle()
        engine.forget_local()
        for prompt in (PROMPT, LATER):
            assert engine.generate([prompt])[0].cached_tokens >= whole_blocks(len(prompt))
        engine.assert_idle()


@pytest.mark.sweep
def test_a_time_to_live_outlasts_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model) as engine:
        plain = engine.generate([PROMPT], logprobs=2)
    setup = StoreSetup(tmp_path / "disk")
    with Engine(tiny_model, setup) as engine:
        engine.generate([PROMPT], asks={"kvstore.ttl": 3600})
        engine.generate([LATER], asks={"kvstore.ttl": 1})
        engine.settle()
        assert engine.store_scheduler.index.disk_used_bytes
    time.sleep(2.1)  # names have whole seconds
    with Engine(tiny_model, setup) as engine:
        assert engine.store_scheduler.index.counters.expired == 2
        assert not engine.generate([LATER], asks={"kvstore.skip_save": True})[0].cached_tokens
        loaded = engine.generate([PROMPT], logprobs=2)
        assert loaded[0].cached_tokens >= whole_blocks(len(PROMPT))
        assert_same_outputs(plain, loaded)
        engine.assert_idle()


@pytest.mark.sweep
def test_roles(tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path) -> None:
    """A producer saves and loads nothing; a later consumer loads from it and saves nothing."""
    store = StoreSetup(tmp_path / "disk")
    with Engine(tiny_model, replace(store, role="kv_producer", policy="fail")) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts)
            assert_same_outputs(plain_outputs, outputs)
            engine.settle()
            engine.forget_local()
        stored = engine.store_scheduler.index.counters.stored
        assert stored > 50
        assert engine.moved.chunks_loaded == 0
    with Engine(tiny_model, replace(store, role="kv_consumer")) as engine:
        outputs = engine.generate([*prompts, [9] * 600])
        assert_same_outputs(plain_outputs, outputs[:-1])
        for prompt, output in zip(prompts, outputs, strict=False):
            assert output.cached_tokens >= whole_blocks(len(prompt))
        assert engine.store_scheduler.index.counters.stored == 0
        engine.assert_idle()


@pytest.mark.soak
def test_first_of_several_connectors(tiny_model: Path, tmp_path: Path) -> None:
    """With vLLM's example connector as the second one, hits load from the first, and both save."""
    behind = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    prompts = [prompt for prompt in make_prompts()[:22] if len(prompt) > 200]  # the example mixes up shared prefixes
    settings: dict[str, Any] = {"max_num_batched_tokens": 2048}
    with Engine(tiny_model, **settings) as engine:
        plain = [engine.generate([prompt], logprobs=2)[0] for prompt in prompts]
    store = StoreSetup(tmp_path / "disk", behind=behind)
    for start in ("cold", "restarted"):
        with Engine(tiny_model, store, **settings) as engine:
            if start == "cold":
                assert_same_outputs(plain, engine.generate_one_by_one(prompts))
                engine.forget_local()
            hits = engine.generate_one_by_one(prompts)
            assert_same_outputs(plain, hits)
            for prompt, output in zip(prompts, hits, strict=True):
                assert output.cached_tokens >= whole_blocks(len(prompt))
            assert engine.moved.chunks_loaded > 20
            engine.assert_idle()
    assert any((tmp_path / "example").iterdir()), "the other one saved, too"
