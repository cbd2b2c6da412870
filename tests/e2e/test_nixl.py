"""Tests of two real vLLMs: the decode engine reads KV from the prefill engine's buffer, and either of them dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from support.disaggregated import Disaggregation, Work, unshared
from support.redis_server import wait_for
from support.vllm_engine import Engine, Prompt, whole_blocks

from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import read_counter

pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)
pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(1200)]

OUTPUT_TOKENS = 12
LENGTHS = (700, 1500, 257, 900, 1100)
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
LINES = f"""
enable_pd: true
transfer_channel: nixl
pd_buffer_size: {128 << 20}
pd_timeout_ms: 60000
blocking_timeout_secs: 30
lookup_timeout_ms: 30000
max_local_cpu_size: 0.25
load_only_if_faster: false
"""


class Turn(NamedTuple):
    """A prompt, and the words of plain vLLM's answer up to the first tie."""

    prompt: Prompt
    words: list[str]


@pytest.fixture(scope="module")
def turns(tiny_model: Path) -> list[Turn]:
    prompts = [random_tokens(length, vocab=TINY.vocab, seed=length) for length in LENGTHS]
    with Engine(tiny_model) as engine:
        outputs = engine.generate(prompts, max_tokens=OUTPUT_TOKENS, logprobs=2)
        decode = engine.llm.get_tokenizer().decode
        words = [decode(output.token_ids[: output.tie_at]).split() for output in outputs]
    return list(map(Turn, prompts, words))


@pytest.fixture
def running(tiny_model: Path, tmp_path: Path) -> Iterator[Disaggregation]:
    port = free_port()
    place = f"127.0.0.1:{port}"
    with Disaggregation(
        tiny_model,
        tmp_path,
        prefill=f"{LINES}pd_allowed_hosts: {place}\n",
        decode=f"{LINES}pd_peer_init_port: {port}\n",
        options=["--decode-kv", f"kvs://{place}"],
    ) as running:
        yield running


def ask(running: Disaggregation, turn: Turn) -> None:
    answer = running.ask("/v1/completions", {"prompt": turn.prompt, "max_tokens": OUTPUT_TOKENS})
    assert answer["choices"][0]["text"].split()[: len(turn.words)] == turn.words


def read_bytes(running: Disaggregation) -> int:
    """Return the bytes read from the prefill engine's buffer since its start, which it reports with its next step."""
    with httpx.Client(trust_env=False, timeout=60) as client:
        client.post(
            f"{running.prefill.url}/v1/completions", json={"model": running.model, "prompt": [1, 2], "max_tokens": 1}
        )
    return read_counter(running.prefill.url, "vllm:kvstore_channel_bytes_total")


def hand_over(running: Disaggregation, turn: Turn) -> None:
    """Check that all of a prompt is sent by NIXL, and that none of it is computed twice."""
    before, decode = read_bytes(running), Work(running.decode)
    ask(running, turn)
    assert decode.of(turn.prompt) <= unshared(turn.prompt)
    expected_bytes = before + whole_blocks(len(turn.prompt)) * TOKEN_BYTES
    wait_for("all of it was read", lambda: read_bytes(running) == expected_bytes)


@pytest.mark.sweep
def test_the_prefill_engine_dies(running: Disaggregation, turns: list[Turn]) -> None:
    first, second, third, fourth, _ = turns
    hand_over(running, first)
    hand_over(running, second)
    counted = read_counter(running.prefill.url, "vllm:kvstore_channel_bytes_total")
    assert counted >= whole_blocks(len(first.prompt)) * TOKEN_BYTES  # later bytes count with the next step
    running.prefill.kill()
    ask(running, third)  # computed by the decode engine
    running.prefill.start()
    settle(running)
    hand_over(running, fourth)


@pytest.mark.soak
def test_the_decode_engine_is_started_again(running: Disaggregation, turns: list[Turn]) -> None:
    first, _, _, _, last = turns
    hand_over(running, first)
    running.decode.kill()
    running.decode.start()
    settle(running)
    hand_over(running, last)


def settle(running: Disaggregation) -> None:
    """Wait until the proxy and the prefill engine detect that a process is back."""
    time.sleep(11)
    with httpx.Client(trust_env=False, timeout=30) as client:
        assert client.get(f"{running.proxy.url}/health").status_code == 200
