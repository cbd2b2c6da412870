"""Prometheus metrics of a proxy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvstore.tools.proxy.engines import Engine

_NAME = "kvstore_proxy"
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMeters:
    """Metrics of one proxy, for use on its event loop."""

    def __init__(self) -> None:
        all_ = self._registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAME, registry=all_)
        self.requests = counter("requests", "Requests answered, by path and status.", ("path", "status"))
        self.fallbacks = counter("fallbacks", "Requests that took another way than planned, and why.", ("reason",))
        self.errors = counter("errors", "Requests that the proxy ended with an error, and why.", ("reason",))
        self.first_tokens = counter("first_tokens", "Streams that began with the prefill engine's token.")
        self.prefill_seconds = Histogram(
            f"{_NAME}_prefill_seconds", "Time of a prefill that was answered.", buckets=_BUCKETS_S, registry=all_
        )
        gauge = partial(Gauge, namespace=_NAME, registry=all_)
        self.in_flight = gauge("in_flight", "Requests under way.")
        self._healthy = gauge("engine_healthy", "Whether an engine answers.", ("role", "engine"))
        self._load = gauge("engine_requests", "Requests that an engine has from this proxy.", ("role", "engine"))
        self._outdated = gauge("engines_file_outdated", "Whether the engines' file cannot be used as it is now.")

    def exposition(self, engines: Iterable[Engine], *, is_outdated: bool) -> bytes:
        """Return all metrics in Prometheus's text format."""
        for family in (self._healthy, self._load):
            family.clear()  # engines may have been removed
        for engine in engines:
            self._healthy.labels(engine.role, engine.url).set(engine.is_well)
            self._load.labels(engine.role, engine.url).set(engine.load)
        self._outdated.set(is_outdated)
        return generate_latest(self._registry)
