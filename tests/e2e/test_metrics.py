"""Tests of the metrics in vLLM's own registry: they add up, and agree with vLLM's counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.vllm_engine import CHUNK_TOKENS, Engine, Prompt, StoreSetup, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

ADMIN = {"kvstore.internal_api_server_enabled": True, "kvstore.internal_api_server_port_start": 0}
PREFIX = "vllm:kvstore_"


def counters(engine: Engine, name: str, label: str | None = None) -> dict[str, int]:
    """Return the values of a counter by one of its labels."""
    found: dict[str, int] = {}
    for metric in engine.llm.get_metrics():
        if metric.name == name:
            key = metric.labels[label] if label else ""
            found[key] = found.get(key, 0) + metric.value
    return found


def test_metrics_agree_with_vllm(tiny_model: Path, tmp_path: Path, prompts: list[Prompt]) -> None:
    long = [prompt for prompt in prompts if len(prompt) > CHUNK_TOKENS]
    store = StoreSetup(tmp_path / "disk", extra=ADMIN)
    with Engine(tiny_model, store, disable_log_stats=False) as engine:
        engine.generate(long)
        engine.settle()
    with Engine(tiny_model, store, disable_log_stats=False) as engine:
        engine.generate(long[:4])
        engine.forget_local()
        engine.generate(long)
        engine.settle()
        engine.generate([[1, 2, 3]], max_tokens=1)

        hits = counters(engine, f"{PREFIX}hit_tokens", "tier")
        assert hits["memory"] > 0
        assert hits["disk"] > 0
        assert hits["remote"] == 0
        assert sum(hits.values()) == counters(engine, "vllm:external_prefix_cache_hits")[""]
        assert counters(engine, f"{PREFIX}asked_tokens") == counters(engine, "vllm:external_prefix_cache_queries")
        from kvstore.adapters.vllm.glue.capabilities import FOUND, NAMES_HIT_SOURCES

        if FOUND[NAMES_HIT_SOURCES]:
            by_source = counters(engine, "vllm:prompt_tokens_cached_by_source", "source")
            assert {"host": hits["memory"], "disk": hits["disk"]}.items() <= by_source.items()
        assert sum(hits.values()) >= sum(whole_blocks(len(prompt)) for prompt in long[:4])
        assert counters(engine, f"{PREFIX}failed_loads") == {"": 0}
        assert counters(engine, f"{PREFIX}moved_bytes", "direction")["load"] > 0

        levels = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
        assert levels[f"{PREFIX}disk_used_bytes"] == engine.store_worker._tiers.disk.used_bytes
        (reads,) = [
            metric
            for metric in engine.llm.get_metrics()
            if metric.name == f"{PREFIX}tier_call_seconds"
            and metric.labels["direction"] == "load"
            and metric.labels["tier"] == "disk"
        ]
        assert reads.count == counters(engine, f"{PREFIX}loaded_chunks", "tier")["disk"] > 0
        assert reads.sum > 0
        _check_admin(engine, hits)


def _check_admin(engine: Engine, hits: dict[str, int]) -> None:
    """Check that the admin endpoint agrees with the metrics, and clear the cache through it."""
    connector: Any = engine.core_scheduler.connector
    with httpx.Client(base_url=f"http://127.0.0.1:{connector._admin.port}", trust_env=False, timeout=30) as client:
        assert client.get("/stats").json()["hit_tokens"] == hits
        assert client.get("/health").json()["status"] == "ok"
        assert client.post("/clear").status_code == 202, "nothing runs"
    engine.settle()
    assert len(engine.store_scheduler.index) == 0
    engine.assert_idle()
