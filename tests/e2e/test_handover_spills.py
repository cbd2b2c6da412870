"""Test of two real vLLMs with a shared cache server, where a full decode engine reads the rest of the chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cache_server import serving_tcp
from support.disaggregated import PATIENT, Disaggregation, Work, unshared
from support.vllm_engine import Engine, Prompt

from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

OUTPUT_TOKENS = 24
CHUNK_TOKENS = 64
NUM_CHUNKS = 8
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
LENGTHS = (300, 1100, 1500)
TRIES = 3  # on a busy machine the rest may come later than the half second for which a decode engine waits
PROMPTS = [[random_tokens(length, vocab=TINY.vocab, seed=length + k) for k in range(TRIES)] for length in LENGTHS]
LINES = f"""
enable_pd: true
pd_timeout_ms: 600000
max_local_cpu_size: 0.25
load_only_if_faster: false
chunk_size: {CHUNK_TOKENS}
{PATIENT}"""


@pytest.mark.sweep
def test_a_decode_engine_that_is_full_reads_the_rest_where_both_share(tiny_model: Path, tmp_path: Path) -> None:
    """A wait for the deadline of ten minutes would exceed this test's time limit."""
    with Engine(tiny_model) as engine:
        expected = [engine.generate(tries, max_tokens=OUTPUT_TOKENS, logprobs=2) for tries in PROMPTS]
    port = free_port()
    with serving_tcp() as server:
        shared = f"{LINES}remote_url: {server.url}\n"
        prefill = f"{shared}pd_buffer_size: {128 << 20}\n"
        room = f"pd_peer_init_port: {port}\npd_buffer_size: {NUM_CHUNKS * CHUNK_TOKENS * TOKEN_BYTES}\n"
        options = ["--decode-kv", f"kvs://127.0.0.1:{port}"]
        with Disaggregation(
            tiny_model, tmp_path, prefill=prefill, decode=f"{shared}{room}", options=options
        ) as running:
            work = Work(running.decode)
            for tries, plains in zip(PROMPTS, expected, strict=True):
                for prompt, plain in zip(tries, plains, strict=True):
                    asked = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "return_token_ids": True}
                    told: Prompt = running.ask("/v1/completions", asked)["choices"][0]["token_ids"]
                    assert told[: plain.tie_at] == plain.token_ids[: plain.tie_at]
                    if (computed := work.of(prompt)) <= unshared(prompt):
                        break
                assert computed <= unshared(prompt)
            assert sum(space["counters"]["read_chunks"] for space in server.hub.snapshot(5)["namespaces"]) > 0
            assert read_counter(running.decode.url, "vllm:kvstore_handover_timeouts_total") == 0
