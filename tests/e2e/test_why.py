"""``kvstore why`` over traces of real engines: the eviction, the refusal and the failed put behind a miss are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.vllm_engine import CHUNK_TOKENS, VOCAB, Engine, Prompt, StoreSetup
from typer.testing import CliRunner

from kvstore.tools.cli import app
from kvstore.tools.demo.server import VllmServer
from kvstore.tools.models import random_tokens
from kvstore.tools.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

CHUNK_GIB = CHUNK_TOKENS * 4 * 2 * 2 * 64 * 4 / 2**30  # tokens, layers, K and V, heads, head size, float32


def why(*words: object) -> Any:
    result = CliRunner().invoke(app, ["why", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def prompt(seed: int, num_chunks: int = 2) -> Prompt:
    return random_tokens(num_chunks * CHUNK_TOKENS + 8, vocab=VOCAB, seed=seed)


@pytest.fixture
def ask_again(tiny_model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that asks prompts in order, and returns what is said about the last one."""

    def ask(prompts: list[Prompt], slots: int, *, asks: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
        trace = tmp_path / "trace.jsonl"
        store = StoreSetup(cpu_gib=(slots + 0.5) * CHUNK_GIB, extra={"kvstore.record_trace": str(trace)}, **how)
        with Engine(tiny_model, store) as engine:
            for number, tokens in enumerate(prompts):
                engine.generate([tokens], max_tokens=2, asks=asks if number == 0 else None)
                engine.settle()
                engine.forget_local()
            engine.assert_idle()
        *_, last = why(trace)["misses"]
        told: dict[str, Any] = why(last["request"], trace)
        assert told["request"] == last["request"]
        return told

    return ask


def test_the_eviction_is_named(ask_again: Any) -> None:
    told = ask_again([prompt(1), prompt(2), prompt(3), prompt(1)], slots=4)
    assert told["reason"] == "evicted"
    assert "evicted from memory in favour of a chunk of request" in told["because"]
    assert "raise max_local_cpu_size from" in told["advice"]
    assert "stored in memory" in told["history"][0]


def test_the_refusal_is_named(ask_again: Any) -> None:
    """The pool is smaller than the prompt, whose end finds no slot."""
    told = ask_again([prompt(1, 4), prompt(1, 4)], slots=2)
    assert (told["reason"], told["found_tokens"]) == ("refused", 2 * CHUNK_TOKENS)
    assert "every slot of memory was in use" in told["because"]


def test_a_request_that_was_not_to_be_stored_is_named(ask_again: Any) -> None:
    told = ask_again([prompt(1), prompt(1)], slots=8, asks={"kvstore.skip_save": True})
    assert told["reason"] == "not_stored"
    assert "skip_save" in told["because"]


def test_the_failed_put_is_named(ask_again: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.model.errors import TierError
    from kvstore.tiers.disk.tier import DiskTier

    def fail(*_: object) -> None:
        raise TierError("broken on purpose")

    monkeypatch.setattr(DiskTier, "put", fail)
    told = ask_again([prompt(1), prompt(2), prompt(3), prompt(1)], slots=4, disk=tmp_path / "disk")
    assert told["reason"] == "evicted"
    assert "could not be written to the disk: the tier failed" in told["because"]
    assert any("failed to be written to the disk" in line for line in told["history"])


def test_a_client_finds_its_request_in_a_server_that_runs(tiny_model: Path, tmp_path: Path) -> None:
    """It names the id that it has chosen. What the file has so far is enough."""
    config = tmp_path / "kvstore.yaml"
    config.write_text(f"max_local_cpu_size: 0.25\nrecord_trace: {tmp_path / 'trace.jsonl'}\n")
    with (
        VllmServer(tiny_model, config, tmp_path / "serve.log", drains=False) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        for number in range(2):
            tokens = prompt(1)[: (2 - number) * CHUNK_TOKENS] + prompt(number)[:CHUNK_TOKENS]
            body = {"model": str(tiny_model), "prompt": tokens, "max_tokens": 1}
            client.post("/v1/completions", json=body, headers={"X-Request-Id": f"turn-{number}"}).raise_for_status()

        def is_told() -> bool:
            return len(why(tmp_path / "trace.jsonl")["misses"]) == 2

        def has_ended() -> bool:  # its keys are in the trace from then on
            return "nearest" in why("turn-1", "--config", config)["because"]

        assert wait_until(is_told, 30, every_s=0.1)
        assert wait_until(has_ended, 30, every_s=0.1)
        told = why("turn-1", "--config", config)
        assert told["request"].startswith("cmpl-turn-1")
        assert told["reason"] == "never_stored"
        assert "The nearest, cmpl-turn-0" in told["because"]
