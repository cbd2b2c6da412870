"""The metrics of a proxy, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvstore.tools.proxy.engines import Engine

_NAME = "kvstore_proxy"
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMeters:
    """The metrics of one proxy. Belongs to its event loop."""

    def __init__(self) -> None:
        all_ = self._registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAME, registry=all_)
        self.requests = counter("requests", "Requests answered, by path and status.", ("path", "status"))
        self.fallbacks = counter("fallbacks", "Requests that took another way than planned, and why.", ("reason",))
        self.errors = counter("errors", "Requests that the proxy ended with an error, and why.", ("reason",))
        self.prefill_seconds = Histogram(
            f"{_NAME}_prefill_seconds", "Time of a prefill that was answered.", buckets=_BUCKETS_S, registry=all_
        )
        gauge = partial(Gauge, namespace=_NAME, registry=all_)
        self.in_flight = gauge("in_flight", "Requests under way.")
        self._healthy = gauge("engine_healthy", "Whether an engine answers.", ("role", "engine"))

    def exposition(self, engines: Iterable[Engine]) -> bytes:
        """All metrics in Prometheus's text format."""
        for engine in engines:
            self._healthy.labels(engine.role, engine.url).set(engine.is_well)
        return generate_latest(self._registry)
