"""Spans of traced requests, from plans and reports of steps."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk, which vLLM brings along")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from kvstore.adapters.vllm.glue.spans import Spans  # noqa: E402
from kvstore.adapters.vllm.plan import Fetch, FetchResult, ReqMeta, StepPlan, StepReport, StepResult  # noqa: E402
from kvstore.handover.tracker import PushJob, Settled  # noqa: E402
from kvstore.index.plans import LoadStep, Place, StoreStep  # noqa: E402
from kvstore.testing.harness import make_ref  # noqa: E402
from kvstore.transfer.mover import (  # noqa: E402
    LoadJob,
    StoreJob,
    as_block_ids,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
REFS = [make_ref(number) for number in range(3)]
LOADS = [LoadJob(LoadStep(ref, 0, Place.MEMORY), as_block_ids([1]), 0) for ref in REFS]
STORES = [StoreJob(StoreStep(ref, 0, ()), as_block_ids([1])) for ref in REFS]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def spans(exported: InMemorySpanExporter) -> Spans:
    return Spans()


def request(name: str, headers: dict[str, str] | None = HEADERS) -> Any:
    return SimpleNamespace(request_id=name, trace_headers=headers, num_prompt_tokens=100)


def attributes_of_last(exported: InMemorySpanExporter) -> dict[str, object]:
    return dict(exported.get_finished_spans()[-1].attributes or {})


def ended(exported: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exported.get_finished_spans()]


def test_a_step_of_two_ranks(spans: Spans, exported: InMemorySpanExporter) -> None:
    spans.asked(request("a"), 32)
    spans.asked(request("a"), 32)
    spans.allocated("a", {Place.MEMORY: 64, Place.DISK: 0})
    (lookup,) = exported.get_finished_spans()
    assert lookup.name == "kvstore.lookup"
    assert f"{lookup.context.trace_id:032x}" == TRACE
    assert lookup.parent is not None
    assert f"{lookup.parent.span_id:016x}" == PARENT
    assert lookup.attributes == {
        "kvstore.prompt_tokens": 100,
        "kvstore.local_tokens": 32,
        "kvstore.hit_tokens.memory": 64,
        "kvstore.hit_tokens.disk": 0,
    }
    metas = [ReqMeta("a", loads=LOADS, stores=STORES), ReqMeta("untraced", loads=LOADS)]
    spans.planned(StepPlan(1, 0, requests=metas), 2)
    spans.finished("a")
    lost = {REFS[0].prefix_key, make_ref(9).prefix_key}
    spans.completed(StepReport(steps={1: StepResult(ranks_loaded=1, failed_loads=lost)}))
    assert ended(exported) == ["kvstore.lookup"]
    spans.completed(StepReport(steps={1: StepResult(ranks_loaded=1), 2: StepResult(ranks_ended=2)}))
    assert ended(exported) == ["kvstore.lookup", "kvstore.load"]
    assert attributes_of_last(exported) == {"kvstore.chunks": 3, "kvstore.is_async": False, "kvstore.failed_chunks": 1}
    spans.completed(StepReport(steps={1: StepResult(ranks_ended=2)}))
    assert ended(exported)[-1] == "kvstore.store"
    assert not spans._open


def test_the_last_store_of_a_request_that_has_ended(spans: Spans, exported: InMemorySpanExporter) -> None:
    spans.asked(request("a"), 0)
    spans.finished("a")
    spans.planned(StepPlan(7, 0, requests=[ReqMeta("a", stores=STORES, finished=True)]), 1)
    spans.planned(StepPlan(8, 0, requests=[ReqMeta("a", stores=STORES)]), 1)
    spans.completed(StepReport(steps={7: StepResult(ranks_ended=1)}))
    assert ended(exported) == ["kvstore.lookup", "kvstore.store"]
    assert not spans._open
    assert not spans._parents


def test_a_load_for_which_no_step_waits(spans: Spans, exported: InMemorySpanExporter) -> None:
    spans.asked(request("a"), 0)
    spans.allocated("a", {})
    spans.planned(StepPlan(1, 0, fetches=[Fetch(4, "a", LOADS), Fetch(5, "", LOADS)]), 2)
    spans.completed(StepReport(fetches={4: FetchResult(ranks_ended=1), 5: FetchResult(ranks_ended=1)}))
    assert ended(exported) == ["kvstore.lookup"]
    spans.completed(StepReport(fetches={4: FetchResult(ranks_ended=1)}))
    assert ended(exported) == ["kvstore.lookup", "kvstore.load"]
    assert attributes_of_last(exported)["kvstore.is_async"]


@pytest.mark.parametrize("how", ["arrived", "arrived before its end", "lost"])
def test_a_hand_over_ends_with_its_last_chunk(spans: Spans, exported: InMemorySpanExporter, how: str) -> None:
    spans.asked(request("a"), 0)
    spans.allocated("a", {})
    for number in range(2):
        job = PushJob(REFS[number], as_block_ids([1]), handover=3, begin_tokens=64 * number)
        spans.planned(StepPlan(number + 1, 0, requests=[ReqMeta("a", pushes=[job])]), 2)
    spans.completed(StepReport(settled=Settled(arrived=Counter({(3, 0): 2, (3, 64): 1}))))
    assert ended(exported) == ["kvstore.lookup"]
    spans.finished("a")
    spans.planned(StepPlan(9, 0), 2)
    last = StepReport(settled=Settled(arrived=Counter({(3, 64): 1})))
    if how == "lost":
        spans.completed(StepReport(settled=Settled(lost={3: 64})))
        assert attributes_of_last(exported)["kvstore.is_incomplete"]
    elif how == "arrived":
        spans.planned(StepPlan(3, 0, ended_handovers=[3]), 2)
        spans.completed(last)
    else:
        spans.completed(last)
        assert ended(exported) == ["kvstore.lookup"]
        spans.planned(StepPlan(3, 0, ended_handovers=[3]), 2)
    assert ended(exported) == ["kvstore.lookup", "kvstore.handover"]
    assert not spans._open


def test_requests_without_headers_cost_nothing(spans: Spans, exported: InMemorySpanExporter) -> None:
    spans.asked(request("a", None), 0)
    spans.allocated("a", {Place.MEMORY: 1})
    spans.planned(StepPlan(1, 0, requests=[ReqMeta("a", loads=LOADS)]), 1)
    spans.completed(StepReport(steps={1: StepResult(ranks_loaded=1)}))
    spans.finished("a")
    assert not exported.get_finished_spans()
    assert not (spans._open)
    assert not (spans._parents)
    assert not (spans._ended)


def test_nothing_grows_without_bound(spans: Spans, exported: InMemorySpanExporter) -> None:
    for number in range(5000):
        spans.asked(request(str(number), {"traceparent": "nonsense"}), 0)
    assert len(spans._parents) == 4096
    for number in range(20_000):
        spans.planned(StepPlan(number, 0, requests=[ReqMeta("4999", stores=STORES[:1])]), 1)
    assert len(spans._open) == 16_384
    spans.close()
    assert len(exported.get_finished_spans()) == 25_000
    assert not (spans._open)
    assert not (spans._parents)
