"""Two real vLLMs share one Redis: what one has computed the other loads, and a Redis that dies costs only time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.modes import ONE_MODE_AND_SOAK
from support.redis_server import RedisServer, running
from support.runner import run_elsewhere
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, assert_same_outputs, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    with running(server):
        yield server


def setup_of(server: RedisServer) -> StoreSetup:
    """Memory is a mere passage, so that all hits come from Redis."""
    return StoreSetup(
        extra={
            "kvstore.remote_url": f"redis://127.0.0.1:{server.port}",
            "kvstore.local_cpu": False,
            "kvstore.max_remote_queue": 100_000,
            "kvstore.lookup_timeout_ms": 5000,
            "kvstore.remote_lookup_cache_secs": 0.5,
        }
    )


def test_two_processes_share_a_redis_that_dies_and_comes_back(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: RedisServer
) -> None:
    store = setup_of(server)
    job = {"model": str(tiny_model), "two_processes": True, "max_tokens": 12}
    first = {"store": vars(store) | {"disk": None}, "rounds": ["cold"], "prompts": prompts}
    ((cold,),) = run_elsewhere(job | {"engines": [first]})
    assert_same_outputs(plain_outputs, cold)
    with Engine(tiny_model, store) as engine:
        shared = engine.generate(prompts)
        assert_same_outputs(plain_outputs, shared)
        assert all(got.cached_tokens >= whole_blocks(len(prompt)) for prompt, got in zip(prompts, shared, strict=True))
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()

        server.kill()
        engine.forget_local()
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.assert_idle()

        server.start()
        assert_same_outputs(plain_outputs, hits_again(engine, prompts))
        engine.assert_idle()


def hits_again(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    """Ask until the answers come from the store: first it must be found to be back, and filled."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        engine.forget_local()
        outputs = engine.generate(prompts)
        if all(got.cached_tokens >= whole_blocks(len(prompt)) for prompt, got in zip(prompts, outputs, strict=True)):
            return outputs
        engine.settle()
    pytest.fail("no hits, although the server is back")


@ONE_MODE_AND_SOAK
def test_every_way_to_move_kv(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: RedisServer, mode: dict[str, Any]
) -> None:
    store = setup_of(server)
    store.extra.update(mode)
    with Engine(tiny_model, store) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.settle()
        assert_same_outputs(plain_outputs, hits_again(engine, prompts))
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()
