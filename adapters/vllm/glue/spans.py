"""OpenTelemetry spans of requests that came with trace headers: lookup, load, store and hand-over.

vLLM passes the headers on only if it exports traces itself (``--otlp-traces-endpoint``), and its exporter takes these
spans, too. Loads and stores begin with the step that plans them, and end when the last rank has reported them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvstore.index.plans import Place
from kvstore.model.keys import PrefixKey

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from vllm.v1.request import Request

    from kvstore.adapters.vllm.plan import ReqMeta, StepPlan, StepReport
    from kvstore.transfer.mover import LoadJob, StoreJob

_MOST_REQUESTS: Final = 4096
_MOST_OPEN: Final = 16_384
_KINDS: Final = {"fetch": "load", "push": "handover"}

Name = tuple[str, str | int, str | int]
"""Kind of work, its number or request, and for work of a step the request."""


@dataclass
class _Open:
    span: Span
    num_left: int  # parts that ranks have yet to report
    keys: frozenset[PrefixKey]
    has_all: bool = True  # no more parts follow


class Spans:
    """Spans of the requests of one engine. Belongs to the scheduler's thread. Costs nothing without trace headers."""

    def __init__(self) -> None:
        self._parents: OrderedDict[str, Context] = OrderedDict()  # of traced requests, by id
        self._ended: list[str] = []  # requests of which the next plan may still store something
        self._open: OrderedDict[Name, _Open] = OrderedDict()

    def asked(self, request: Request, num_local_tokens: int) -> None:
        """Begin the lookup of a request, when it is asked for the first time."""
        request_id = request.request_id
        if not request.trace_headers or request_id in self._parents:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._parents[request_id] = TraceContextTextMapPropagator().extract(request.trace_headers)
        if len(self._parents) > _MOST_REQUESTS:
            self._parents.popitem(last=False)
        tokens = {"kvstore.prompt_tokens": request.num_prompt_tokens, "kvstore.local_tokens": num_local_tokens}
        self._begin(("lookup", request_id, ""), request_id, 1, tokens)

    def allocated(self, request_id: str, hit: Mapping[Place, int]) -> None:
        """End the lookup of a request, which is scheduled now."""
        entry = self._open.pop(("lookup", request_id, ""), None)
        if entry is not None:
            entry.span.set_attributes({f"kvstore.hit_tokens.{place.value}": tokens for place, tokens in hit.items()})
            entry.span.end()

    def planned(self, plan: StepPlan, num_ranks: int) -> None:
        """Begin what a step and its fetches do for traced requests."""
        if not (self._parents or self._open):
            return
        for meta in plan.requests:
            if meta.req_id in self._parents:
                self._plan_step(plan.number, meta, num_ranks)
        for fetch in plan.fetches:
            if fetch.req_id in self._parents:
                self._begin_jobs(("fetch", fetch.number, ""), fetch.req_id, num_ranks, fetch.loads)
        for number in plan.ended_handovers:
            self._settle(("push", number, ""), 0, is_last=True)
        for request_id in self._ended:
            self._parents.pop(request_id, None)
        self._ended.clear()

    def _plan_step(self, number: int, meta: ReqMeta, num_ranks: int) -> None:
        self._begin_jobs(("load", number, meta.req_id), meta.req_id, num_ranks, meta.loads)
        self._begin_jobs(("store", number, meta.req_id), meta.req_id, num_ranks, meta.stores)
        for job in meta.pushes:
            name: Name = ("push", job.handover, "")
            if name not in self._open:
                self._begin(name, meta.req_id, 0)
                self._open[name].has_all = False
            self._open[name].num_left += num_ranks

    def completed(self, report: StepReport) -> None:
        """End what the workers have done."""
        if not self._open:
            return
        for name in [name for name in self._open if name[1] in report.steps]:
            result = report.steps[int(name[1])]
            if name[0] == "load":
                self._settle(name, result.ranks_loaded, result.failed_loads)
            elif name[0] == "store":
                self._settle(name, result.ranks_ended, result.failed_stores)
        for number, fetched in report.fetches.items():
            self._settle(("fetch", number, ""), fetched.ranks_ended, fetched.failed_loads)
        for (number, _), count in report.settled.arrived.items():
            self._settle(("push", number, ""), count)
        for number in report.settled.lost:
            entry = self._open.pop(("push", number, ""), None)
            if entry is not None:
                entry.span.set_attribute("kvstore.is_incomplete", value=True)
                entry.span.end()

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended, after the next plan."""
        if request_id in self._parents:
            self._ended.append(request_id)
            lookup = self._open.pop(("lookup", request_id, ""), None)
            if lookup is not None:
                lookup.span.end()

    def close(self) -> None:
        """End all spans."""
        for entry in self._open.values():
            entry.span.end()
        self._open.clear()
        self._parents.clear()

    def _begin_jobs(self, name: Name, request_id: str, num_ranks: int, jobs: Sequence[LoadJob | StoreJob]) -> None:
        if jobs:
            attributes = {"kvstore.chunks": len(jobs), "kvstore.is_async": name[0] == "fetch"}
            keys = frozenset(job.step.ref.prefix_key for job in jobs)
            self._begin(name, request_id, num_ranks, attributes, keys)

    def _begin(
        self,
        name: Name,
        request_id: str,
        num_left: int,
        attributes: Mapping[str, int] = MappingProxyType({}),
        keys: frozenset[PrefixKey] = frozenset(),
    ) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - vLLM brings it along

        kind = _KINDS.get(name[0], name[0])
        parent = self._parents[request_id]
        span = trace.get_tracer("kvstore").start_span(f"kvstore.{kind}", parent, attributes=attributes)
        self._open[name] = _Open(span, num_left, keys)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].span.end()

    def _settle(
        self, name: Name, num_done: int, failed: AbstractSet[PrefixKey] = frozenset(), *, is_last: bool = False
    ) -> None:
        """Note that parts of some work are done, and end it with the last one."""
        entry = self._open.get(name)
        if entry is None:
            return
        if failed & entry.keys:
            entry.span.set_attribute("kvstore.failed_chunks", len(failed & entry.keys))
        entry.num_left -= num_done
        entry.has_all = entry.has_all or is_last
        if entry.num_left <= 0 and entry.has_all:
            del self._open[name]
            entry.span.end()
