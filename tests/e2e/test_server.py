"""Real vLLMs share one cache server: what one has computed the other loads, and a server that dies costs only time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cache_server import ServerProcess, short_folder
from support.runner import run_elsewhere
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, assert_same_outputs, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

POOL_NAME = "memfd:kvstore-pool"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with short_folder() as folder:
        server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: 1\n")
        try:
            yield server.start()
        finally:
            server.kill()


def setup_of(server: ServerProcess) -> StoreSetup:
    """Memory is a mere passage, so that all hits come from the server."""
    return StoreSetup(
        extra={
            "kvstore.remote_url": server.url,
            "kvstore.local_cpu": False,
            "kvstore.max_remote_queue": 100_000,
            "kvstore.lookup_timeout_ms": 5000,
            "kvstore.remote_lookup_cache_secs": 0.5,
        }
    )


@pytest.mark.soak
def test_two_processes_share_a_server_that_dies_and_comes_back(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    server: ServerProcess,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = setup_of(server)
    job = {"model": str(tiny_model), "two_processes": True, "max_tokens": 12}
    first = {"store": vars(store) | {"disk": None}, "rounds": ["cold"], "prompts": prompts}
    ((cold,),) = run_elsewhere(job | {"engines": [first]})
    assert_same_outputs(plain_outputs, cold)
    assert server.terminate() == 0
    server.start()  # all it knows now is on its disk
    with Engine(tiny_model, store) as engine:
        shared = engine.generate(prompts)
        assert_same_outputs(plain_outputs, shared)
        assert all(got.cached_tokens >= whole_blocks(len(prompt)) for prompt, got in zip(prompts, shared, strict=True))
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()

        for delay_s in (0.05, 0.5):
            engine.forget_local()
            killer = threading.Timer(delay_s, server.kill)
            killer.start()
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            killer.join()
            engine.assert_idle()
            server.start()
            assert_same_outputs(plain_outputs, hits_again(engine, prompts))
            engine.assert_idle()
        server.kill()
    caplog.clear()  # what is logged names errors, and these their frames
    gc.collect()
    if POOL_NAME in Path("/proc/self/maps").read_text():
        pytest.xfail("the pool of a server that was killed stays mapped in this process, although the tier is gone")


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
