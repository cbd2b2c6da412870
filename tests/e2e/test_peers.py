"""Test of a real vLLM that reads the KV computed by another one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from support.runner import staying_elsewhere
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, assert_same_outputs, whole_blocks

from kvstore.tools.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


@pytest.mark.parametrize(
    ("first", "min_chunks"), [(-3, 3), pytest.param(0, 51, marks=pytest.mark.soak)], ids=["a few", "all"]
)
def test_one_computes_and_the_other_reads_until_the_first_has_gone(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    first: int,
    min_chunks: int,
) -> None:
    prompts, plain_outputs = prompts[first:], plain_outputs[first:]
    port = free_port()
    serves = {
        "kvstore.enable_pd": True,
        "kvstore.pd_peer_init_port": port,
        "kvstore.pd_buffer_size": 512 << 20,
        "kvstore.max_remote_queue": 100_000,
    }
    reads = StoreSetup(
        extra={
            "kvstore.peers": f"kvs://127.0.0.1:{port}",
            "kvstore.local_cpu": False,  # every hit is pulled
            "kvstore.lookup_timeout_ms": 5000,
            "kvstore.remote_lookup_cache_secs": 0.5,
        }
    )
    engine = {"prompts": prompts, "rounds": ["cold"], "store": {"extra": serves}}
    job = {"model": str(tiny_model), "max_tokens": 12, "engines": [engine]}
    with ExitStack() as opened:
        (cold,) = opened.enter_context(staying_elsewhere(job))
        assert_same_outputs(plain_outputs, cold)
        with Engine(tiny_model, reads) as reader:
            pulled = reader.generate(prompts)
            assert_same_outputs(plain_outputs, pulled)
            for prompt, got in zip(prompts, pulled, strict=True):
                assert got.cached_tokens >= whole_blocks(len(prompt)), len(prompt)
            assert reader.moved.chunks_loaded_from_remote >= min_chunks
            reader.assert_idle()
            opened.close()
            reader.forget_local()
            assert_same_outputs(plain_outputs, reader.generate(prompts))
            reader.assert_idle()
