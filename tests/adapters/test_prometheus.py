"""Metrics through vLLM's hooks: they survive its wire, add up over time, and are exported under their names."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvstore.adapters.vllm.connector import KVStoreConnector
from kvstore.adapters.vllm.telemetry.prometheus import BUCKETS_S, PREFIX, StoreStats
from kvstore.ops import metrics
from kvstore.ops.metrics import METRICS, MetricKind, Tally

pytestmark = pytest.mark.vllm


def tally_of(number: int) -> Tally:
    tally = Tally()
    tally.count(metrics.HIT_TOKENS.key("disk"), number)
    tally.observe(metrics.TIER_CALL_SECONDS.key("disk", "load"), [0.001, 0.5])
    tally.show(metrics.DISK_USED_BYTES.key(), number, "one rank")
    tally.show(metrics.DISK_USED_BYTES.key(), number, "the other")
    return tally


def over_the_wire(stats: StoreStats) -> Any:
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    return KVStoreConnector.build_kv_connector_stats(data)


def observed(registry: CollectorRegistry, *tallies: Tally, **keys: str) -> None:
    kinds: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    extra = {f"kvstore.{key}": value for key, value in keys.items()}
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    ours = KVStoreConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    assert ours is not None
    for tally in tallies:
        ours.observe(over_the_wire(StoreStats.of(tally)).to_dict(), 1)


def test_values_come_out_under_their_names() -> None:
    registry = CollectorRegistry()
    observed(registry, tally_of(3), tally_of(4))

    def value(name: str, engine: str = "1", **labels: str) -> float | None:
        return registry.get_sample_value(PREFIX + name, {"model_name": "m", "engine": engine, **labels})

    assert value("hit_tokens_total", tier="disk") == 7
    assert value("hit_tokens_total", tier="memory") == 0
    assert value("hit_tokens_total", engine="0", tier="disk") == 0
    assert value("disk_used_bytes") == 8, "the last of each rank, added up"
    assert value("enabled") is None, "a level that nobody has seen is not 0"
    calls = {"tier": "disk", "direction": "load"}
    assert value("tier_call_seconds_count", **calls) == 4
    assert value("tier_call_seconds_sum", **calls) == pytest.approx(1.002)
    assert value("tier_call_seconds_bucket", le=repr(BUCKETS_S[3]), **calls) == 2


def series_of(registry: CollectorRegistry, name: str) -> set[tuple[str, ...]]:
    return {
        (sample.labels["engine"], sample.labels["quota"], sample.labels.get("tier", ""))
        for family in registry.collect()
        for sample in family.samples
        if sample.name == PREFIX + name
    }


def test_each_quota_has_its_series_before_anything_is_counted() -> None:
    registry = CollectorRegistry()
    observed(registry, quota_by="tag:team", local_cpu_quotas="red=1, *=2")
    names = ("red", "other")
    for name in ("asked_tokens", "hit_tokens", "stored_chunks", "refused_chunks"):
        assert series_of(registry, f"quota_{name}_total") == {(engine, of, "") for engine in "01" for of in names}
    tiers = {(engine, of, tier) for engine in "01" for of in names for tier in ("memory", "disk")}
    assert series_of(registry, "quota_evicted_chunks_total") == tiers
    labels = {"model_name": "m", "engine": "0", "quota": "red"}
    assert registry.get_sample_value(f"{PREFIX}quota_refused_chunks_total", labels) == 0


@pytest.mark.parametrize("keys", [{}, {"local_cpu_quotas": "no salt=1"}], ids=["none", "another host's"])
def test_without_known_quotas_none_has_a_series(keys: dict[str, str]) -> None:
    registry = CollectorRegistry()
    observed(registry, **keys)
    assert not series_of(registry, "quota_refused_chunks_total")
    tally = Tally()
    tally.count(metrics.QUOTA_REFUSED_CHUNKS.key("red"), 1)
    registry = CollectorRegistry()
    observed(registry, tally, **keys)
    assert series_of(registry, "quota_refused_chunks_total") == {("1", "red", "")}


def test_every_metric_is_there_once() -> None:
    registry = CollectorRegistry()
    observed(registry)
    assert {family.name for family in registry.collect()} == {PREFIX + name for name in METRICS}


def test_what_vllm_logs_adds_up() -> None:
    sums = over_the_wire(StoreStats.of(tally_of(3))).aggregate(over_the_wire(StoreStats.of(tally_of(4))))
    assert not sums.is_empty()
    assert sums.reduce()["disk hit tokens"] == 7
    assert sums.data["gauges"] == {"disk_used_bytes": 8}
    sums.reset()
    assert sums.is_empty()


def test_buckets_are_bounds_of_what_is_measured() -> None:
    counted = [metric for metric in METRICS.values() if metric.kind is not MetricKind.GAUGE and metric.labels]
    assert all(metric.values or "quota" in metric.labels for metric in counted)  # whose names are configured
    assert BUCKETS_S[0] < 1e-4
    assert BUCKETS_S[-1] > 100
