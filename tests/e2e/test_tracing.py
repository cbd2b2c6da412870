"""Spans of real engines, in the trace of the client that asked, as a collector receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.disaggregated import PATIENT, Disaggregation
from support.redis_server import wait_for
from support.vllm_engine import VOCAB

from kvstore.tools.models import random_tokens
from kvstore.tools.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """A collector that takes OTLP over HTTP.

    Attributes:
        spans: the spans that it has received.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def named(self, name: str) -> list[Any]:
        return [span for span in list(self.spans) if span.name == name]


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        assert isinstance(self.server, Collector)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_prompt_that_is_handed_over(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    lines = f"enable_pd: true\npd_buffer_size: {64 << 20}\nmax_local_cpu_size: 0.25\n{PATIENT}"
    lines += "load_only_if_faster: false\n"
    prompt = random_tokens(600, vocab=VOCAB, seed=7)
    with (
        collecting() as collector,
        Disaggregation(
            tiny_model,
            tmp_path,
            prefill=f"{lines}pd_allowed_hosts: 127.0.0.1:{port}\n",
            decode=f"{lines}pd_peer_host: 127.0.0.1\npd_peer_init_port: {port}\n",
            options=("--decode-kv", f"kvs://127.0.0.1:{port}"),
            arguments=("--otlp-traces-endpoint", collector.url),
            environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"},
        ) as engines,
        httpx.Client(base_url=engines.proxy.url, trust_env=False, timeout=300) as client,
    ):
        body = {"model": engines.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        for _ in range(2):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            client.post("/v1/completions", json=body, headers=headers).raise_for_status()

        def has_all() -> bool:
            """Ask once more, because workers report with a step, and look."""
            client.post("/v1/completions", json={**body, "prompt": prompt[:300]}).raise_for_status()
            counts = {"lookup": 4, "store": 1, "handover": 1, "load": 1}
            return all(len(collector.named(f"kvstore.{name}")) >= count for name, count in counts.items())

        wait_for("all kinds of spans are there", has_all)
        ours = [span for span in collector.spans if span.name.startswith("kvstore.")]
        assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in ours} == {(TRACE, PARENT)}
        assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in ours)
        lookups = [attributes(span) for span in collector.named("kvstore.lookup")]
        assert len(lookups) == 4, "requests without headers have no spans"
        assert {each["kvstore.prompt_tokens"] for each in lookups} == {600}
        assert not any(attributes(span).get("kvstore.failed_chunks") for span in ours)
