"""Test of a real ``vllm serve`` that is idle while a client's tool runs, and brings the conversation back to memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_server import wait_for
from support.vllm_engine import Engine, whole_blocks

from kvstore.tools.demo.pair import EngineServer
from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

OUTPUT_TOKENS = 12
TIERS = ("memory", "disk")
AWAY_S = 50.0  # less than the time that an idle engine looks ahead, and more than the others take
LINES = """
local_disk: {folder}
max_local_disk_size: 0.5
max_local_cpu_size: 0.01
load_only_if_faster: false
request_fields: prefetch
internal_api_server_enabled: true
internal_api_server_port_start: {admin}
"""
TURN = random_tokens(700, vocab=TINY.vocab, seed=1)
NEXT_TURN = [*TURN, *random_tokens(60, vocab=TINY.vocab, seed=2)]
OTHERS = [random_tokens(700, vocab=TINY.vocab, seed=seed) for seed in range(10, 20)]


def test_an_idle_engine_brings_a_conversation_back(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model) as plain:
        (expected,) = plain.generate([NEXT_TURN], max_tokens=OUTPUT_TOKENS, logprobs=2)
    config, admin = tmp_path / "kvstore.yaml", free_port()
    config.write_text(LINES.format(folder=tmp_path / "kv", admin=admin), encoding="utf-8")
    uncached = ("--no-enable-prefix-caching",)
    server = EngineServer(tiny_model, config, tmp_path / "serve.log", drains=False, cores="0|1", arguments=uncached)
    with server, httpx.Client(trust_env=False, timeout=120) as client:

        def ask(prompt: list[int], **fields: object) -> list[int]:
            body = {"model": str(tiny_model), "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
            asked = {**body, "ignore_eos": True, "return_token_ids": True, "kv_transfer_params": fields}
            answer = client.post(f"{server.url}/v1/completions", json=asked).raise_for_status().json()
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

        def in_memory() -> int:
            """Return the tokens of the first turn in memory, for which vLLM plans nothing."""
            found: dict[str, Any] = client.post(f"http://127.0.0.1:{admin}/kv", json={"tokens": TURN}).json()
            return int(found["tiers"]["memory"])

        def hits() -> list[int]:
            return [read_counter(server.url, "vllm:kvstore_hit_tokens_total", {"tier": tier}) for tier in TIERS]

        ask(TURN, **{"kvstore.prefetch": AWAY_S})
        for other in OTHERS * 2:
            ask(other)
        wait_for("its chunks are in memory", lambda: in_memory() == whole_blocks(len(TURN)))
        before = hits()
        tokens = ask(NEXT_TURN)
        assert tokens[: expected.tie_at] == expected.token_ids[: expected.tie_at]
        assert read_counter(server.url, "vllm:kvstore_prefetched_chunks_total") >= 1
        assert hits() == [before[0] + whole_blocks(len(TURN)), before[1]], "none from disk"
