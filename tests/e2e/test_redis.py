"""Tests of two real vLLMs that share one Redis: each loads the other's KV, and a Redis that dies costs only time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import RedisServer, running
from support.redis_tiers import values
from support.runner import generated_elsewhere
from support.vllm_engine import (
    ONE_MODE_AND_SOAK,
    Completion,
    Engine,
    Prompt,
    assert_same_outputs,
    check_ends,
    hits_again,
    is_all_cached,
    through_memory,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    with running(server):
        yield server


@pytest.mark.soak
def test_two_processes_share_a_redis_that_dies_and_comes_back(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: RedisServer
) -> None:
    store = through_memory(f"redis://127.0.0.1:{server.port}")
    assert_same_outputs(plain_outputs, generated_elsewhere(tiny_model, store, prompts, two_processes=True))
    with Engine(tiny_model, store) as engine:
        shared = engine.generate(prompts)
        assert_same_outputs(plain_outputs, shared)
        assert is_all_cached(prompts, shared)
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()

        server.kill()
        engine.forget_local()
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.assert_idle()

        server.start()
        assert_same_outputs(plain_outputs, hits_again(engine, prompts))
        engine.assert_idle()


@ONE_MODE_AND_SOAK
def test_every_way_to_move_kv(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: RedisServer, mode: dict[str, Any]
) -> None:
    store = through_memory(f"redis://127.0.0.1:{server.port}")
    store.extra.update(mode)
    with Engine(tiny_model, store) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.settle()
        assert_same_outputs(plain_outputs, hits_again(engine, prompts))
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()


@pytest.mark.sweep
def test_a_time_to_live_reaches_who_loads_the_chunks(tiny_model: Path, server: RedisServer) -> None:
    prompt = [number % 900 + 7 for number in range(200)]
    with Engine(tiny_model) as engine:
        plain = engine.generate([prompt], logprobs=2)
    store = through_memory(f"redis://127.0.0.1:{server.port}")
    store.extra["kvstore.local_cpu"] = True
    with Engine(tiny_model, store) as engine:
        engine.generate([prompt], asks={"kvstore.ttl": 3600})
        engine.settle()
    admin = server.admin()
    sent = values(server)
    assert sent
    assert all(0 < admin.ttl(key) <= 3600 for key in sent)
    with Engine(tiny_model, store) as engine:
        for key in sent:
            admin.expire(key, 10)
        check_ends(engine, prompt, plain, time.monotonic() + 10)
