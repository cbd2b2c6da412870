"""Real prefill and decode engines, of which one and then the other drains while requests go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.disaggregated import PATIENT, Disaggregation
from support.redis_server import wait_for
from support.vllm_engine import Engine

from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

PROMPTS = [random_tokens(700 + 61 * number, vocab=TINY.vocab, seed=number) for number in range(12)]
OUTPUT_TOKENS = 8
TOKEN = "a-token-of-an-operator"
LINES = f"""
enable_pd: true
pd_buffer_size: {128 << 20}
pd_timeout_ms: 20000
max_local_cpu_size: 0.25
load_only_if_faster: false
internal_api_server_enabled: true
{PATIENT}"""


def drain(admin: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"http://127.0.0.1:{admin}/drain", headers=headers, trust_env=False, timeout=30)
    tree: dict[str, Any] = answer.raise_for_status().json()
    return tree


def test_requests_go_on_while_engines_drain(tiny_model: Path, tmp_path: Path) -> None:
    """No request fails, answers are those of plain vLLM, and all that was stored is on disk."""
    with Engine(tiny_model) as engine:
        expected = engine.generate(PROMPTS, max_tokens=OUTPUT_TOKENS, logprobs=2)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    port, of_prefill, of_decode = free_port(), free_port(), free_port()
    lines = f"{LINES}internal_api_server_token_file: {token}\n"
    disk = f"local_disk: {tmp_path / 'disk'}\nmax_local_disk_size: 1.0\n"
    prefill = f"{lines}{disk}internal_api_server_port_start: {of_prefill}\npd_allowed_hosts: 127.0.0.1:{port}\n"
    decode = f"{lines}internal_api_server_port_start: {of_decode}\npd_peer_init_port: {port}\n"
    options = ["--decode-kv", f"kvs://127.0.0.1:{port}"]
    with Disaggregation(tiny_model, tmp_path, prefill=prefill, decode=decode, options=options) as pair:

        def ask(number: int) -> list[int]:
            body = {"prompt": list(PROMPTS[number]), "max_tokens": OUTPUT_TOKENS, "return_token_ids": True}
            answer = pair.ask("/v1/completions", body)
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

        with ThreadPoolExecutor(2) as users:
            answers = [users.submit(ask, number) for number in range(len(PROMPTS))]
            for end, admin in ((3, of_decode), (7, of_prefill)):
                answers[end].result()
                assert drain(admin)["status"] == "closing"
            told = [answer.result() for answer in answers]
        wait_for("all is written", lambda: drain(of_prefill)["unwritten"] == 0)
        stats = httpx.get(
            f"http://127.0.0.1:{of_prefill}/stats", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
        ).json()
    for number, (tokens, plain) in enumerate(zip(told, expected, strict=True)):
        sure = plain.token_ids[: plain.tie_at]
        assert tokens[: len(sure)] == sure, number
    assert len([*(tmp_path / "disk").rglob("*.safetensors")]) >= stats["stored_chunks"] > 0
