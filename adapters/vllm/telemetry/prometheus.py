"""Our metrics in vLLM's log and under its ``/metrics``, through vLLM's own hooks for connectors.

The scheduler side has them all, the workers' included, and passes them on after each step. vLLM sends them to its front
end, which keeps the metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.model.quotas import OTHERS
from kvstore.ops import metrics
from kvstore.ops.metrics import METRICS, Metric, MetricKind, Tally, split_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX: Final = "vllm:kvstore_"
BUCKETS_S: Final = tuple(1e-5 * 4**power for power in range(1, 13))  # from 40 us to 168 s
_EXTRAS: Final[dict[MetricKind, dict[str, Any]]] = {
    MetricKind.GAUGE: {"multiprocess_mode": "mostrecent"},  # one of vLLM's front ends at a time receives a step
    MetricKind.HISTOGRAM: {"buckets": BUCKETS_S},
}


@dataclass
class StoreStats(KVConnectorStats):
    """Counts of one step, as plain dictionaries that vLLM can send: see ``Tally``, whose gauges are folded."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, tally: Tally) -> StoreStats:
        """Convert a tally to numbers that can be sent."""
        return cls({"counters": tally.counters, "samples": tally.samples, "gauges": tally.levels()})

    def reset(self) -> None:
        """Discard all numbers."""
        self.data: dict[str, Any] = {"counters": {}, "samples": {}, "gauges": {}}

    def is_empty(self) -> bool:
        """Tell if nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later statistics."""
        sums = Tally(self.data["counters"], self.data["samples"])
        sums.add(Tally(other.data["counters"], other.data["samples"]))
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers that vLLM logs every few seconds."""
        counters = self.data["counters"]
        moved = {key: number for key, number in counters.items() if split_key(key)[0] is metrics.MOVED_BYTES}
        return {
            "asked tokens": int(counters.get(metrics.ASKED_TOKENS.key(), 0)),
            **{
                f"{tier} hit tokens": int(counters.get(metrics.HIT_TOKENS.key(tier), 0))
                for (tier,) in metrics.HIT_TOKENS.values
            },
            "stored chunks": int(counters.get(metrics.STORED_CHUNKS.key(), 0)),
            "moved GB": round(sum(moved.values()) / 1e9, 3),
        }


class StoreMetrics(KVConnectorPromMetrics):
    """The metrics of ``kvstore.ops.metrics`` in vLLM's registry, with vLLM's labels before our own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge, MetricKind.HISTOGRAM: Histogram}
        self._families: dict[str, Any] = {}
        names = _quota_names(vllm_config)
        for metric in METRICS.values():
            self._families[metric.name] = metric_types[kinds[metric.kind]](
                name=PREFIX + metric.name,
                documentation=metric.meaning + ".",
                labelnames=[*labelnames, *metric.labels],
                **_EXTRAS.get(metric.kind, {}),
            )
            for engine in per_engine_labelvalues if metric.kind is not MetricKind.GAUGE else ():
                for values in metric.known_values(names):  # so that they exist, as 0, before anything happens
                    self._series(engine, metric, values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the numbers of one step of one engine."""
        for key, number in transfer_stats_data["counters"].items():
            self._series(engine_idx, *split_key(key)).inc(number)
        for key, value in transfer_stats_data["gauges"].items():
            self._series(engine_idx, *split_key(key)).set(value)
        for key, times_s in transfer_stats_data["samples"].items():
            series = self._series(engine_idx, *split_key(key))
            for time_s in times_s:
                series.observe(time_s)

    def _series(self, engine: int, metric: Metric, values: tuple[str, ...]) -> Any:  # noqa: ANN401 - vLLM may wrap it
        return self._families[metric.name].labels(*self.per_engine_labelvalues[engine], *values)


def _quota_names(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Return the names that have quotas; none where the configuration of the engine, on another host, is not known."""
    try:
        loaded = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config, log_warnings=False)
    except ConfigError:
        return ()
    quotas = loaded.config.quotas
    return (*quotas.names, OTHERS) if quotas else ()
