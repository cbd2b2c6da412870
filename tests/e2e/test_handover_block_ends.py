"""Test of two real vLLMs: a prompt that diverges inside a chunk handed over is computed from this point on only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.disaggregated import PATIENT, Disaggregation, Work
from support.redis_server import wait_for
from support.vllm_engine import BLOCK_TOKENS, CHUNK_TOKENS, Engine, Prompt

from kvstore.tools.demo.pair import EngineServer
from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

LINES = f"""
enable_pd: true
pd_buffer_size: {64 << 20}
max_local_cpu_size: 0.25
load_only_if_faster: false
{PATIENT}"""
HEAD = random_tokens(2 * CHUNK_TOKENS + 3 * BLOCK_TOKENS + 1, vocab=TINY.vocab, seed=1)
NUM_CHUNKS = 3
INSIDE = (CHUNK_TOKENS + 5 * BLOCK_TOKENS + 7, 2 * CHUNK_TOKENS + 2 * BLOCK_TOKENS + 7)  # a whole chunk, and a tail


def ask(engine: EngineServer, model: Path, prompt: Prompt, max_tokens: int, **fields: Any) -> list[int]:
    """Return the greedy answer of an engine, without the proxy."""
    body = {"model": str(model), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=300) as client:
        answer = client.post(f"{engine.url}/v1/completions", json={**body, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def pushed_chunks(engine: EngineServer, model: Path) -> int:
    """Return the chunks that an engine has pushed; it updates the count when it computes a step."""
    ask(engine, model, HEAD[-2:], 1)
    return read_counter(engine.url, "vllm:kvstore_pushed_chunks_total", {"result": "sent"})


@pytest.mark.sweep
def test_a_prompt_that_parts_inside_a_chunk_that_was_handed_over(tiny_model: Path, tmp_path: Path) -> None:
    """The receiver has not read the chunk, and knows its block ends only from the sender."""
    others = [[*HEAD[:shared], *random_tokens(100, vocab=TINY.vocab, seed=shared)] for shared in INSIDE]
    with Engine(tiny_model) as plain:
        expected = plain.generate(others, logprobs=2)
    port = free_port()
    decode = f"{LINES}pd_peer_host: 127.0.0.1\npd_peer_init_port: {port}\n"
    prefill = f"{LINES}pd_allowed_hosts: 127.0.0.1:{port}\n"
    with Disaggregation(tiny_model, tmp_path, prefill=prefill, decode=decode) as running:
        spec = {"req_id": "one", "receiver_host": "127.0.0.1", "receiver_init_port": port, "receiver_alloc_port": port}
        ask(running.prefill, tiny_model, HEAD, 1, kv_transfer_params={"disagg_spec": spec})
        wait_for("all is sent", lambda: pushed_chunks(running.prefill, tiny_model) >= NUM_CHUNKS)
        work = Work(running.decode)
        for prompt, shared, plain_answer in zip(others, INSIDE, expected, strict=True):
            tokens = ask(running.decode, tiny_model, prompt, len(plain_answer.token_ids))
            assert tokens[: plain_answer.tie_at] == plain_answer.token_ids[: plain_answer.tie_at]
            assert work.of(prompt) == len(prompt) - shared // BLOCK_TOKENS * BLOCK_TOKENS
