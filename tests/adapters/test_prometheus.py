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


def observed(registry: CollectorRegistry, *tallies: Tally) -> None:
    kinds: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
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
