"""Simulates vLLM around a `StoreScheduler` and real `StoreWorker`s, for any model: its clients and its scheduler.

It models what often fails: blocks shared by prefix before they are loaded, freed blocks filled with garbage, steps
planned before the last one's report, rejected drafts, preemption, aborts, new weights. A step with states ends where
one is to be kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvstore.adapters.vllm.plan import StepPlan
from kvstore.adapters.vllm.requests.params import NO_PARAMS, Handover, RequestParams
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.model.groups import GroupKind
from kvstore.model.keys import KeyExtras
from support.fake_host import Cache, FakeHost, over_a_wire
from support.fake_parts import CommonSetup, FakeRequest, Scheduled, Step
from support.fake_tables import FakeGroup
from support.gate import HANG_GUARD_S

Engine = TypeVar("Engine", bound="FakeScheduler")


class FakeScheduler(FakeHost):
    """One engine without its runner."""

    frees_blocks = False  # of running requests

    def __init__(
        self,
        setup: CommonSetup,
        groups: Sequence[FakeGroup],
        caches: list[list[Cache]],
        options: SchedulerOptions,
    ) -> None:
        super().__init__(setup, groups, caches, options)
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.preempted = False  # any request, since the last step
        self.take: Callable[[int], int] = lambda offered: offered  # how many external tokens vLLM uses
        self.loaded_tokens: dict[str, int] = {}
        self.loads = 0  # requests that have waited for one

    def _execute(self, step: Step) -> None:
        """Carry out a step on all ranks."""
        raise NotImplementedError

    def _check_offer(self, request: FakeRequest, num_local: int, external: int) -> None:
        """Check how many tokens are offered to a request."""
        raise NotImplementedError

    def _check_plan(self, plan: StepPlan) -> None:
        """Check the contents of a plan."""

    def _set_back(self, step: Step) -> list[FakeRequest]:
        """Let requests recompute what could not be loaded for them; returns those that run."""
        raise NotImplementedError

    # -- actions of a client ----------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        tokens: Iterable[int],
        *,
        max_tokens: int = 1,
        salt: str = "",
        priority: int = 0,
        params: RequestParams = NO_PARAMS,
        handover: Handover | None = None,
    ) -> FakeRequest:
        """Add a request."""
        tables: list[list[int]] = [[] for _ in self.groups]
        request = FakeRequest(name, list(tokens), max_tokens, salt, priority=priority, tables=tables)
        self.scheduler.add_request(request, KeyExtras(cache_salt=salt, tags=params.tags), params, handover)
        self.waiting.append(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        """Abort a request, as after its client has disconnected."""
        if request.state != "finished":
            self._finish(request)

    def run(self, *, max_steps: int = 400) -> None:
        """Run steps until nothing is left to do. Those that only wait for transfers do not count."""
        steps, end_s = 0, time.monotonic() + HANG_GUARD_S
        while steps < max_steps and time.monotonic() < end_s:
            has_work = self.scheduler.has_work
            if not (self.waiting or self.running or self.kept or self.loading or self.in_flight or has_work):
                return
            if not self.step() and (self.loading or self.kept or has_work):
                time.sleep(0.002)  # as vLLM does while nothing runs but transfers
                self._let_time_pass()
            else:
                steps += 1
        raise AssertionError(
            f"not done after {steps} steps, or {HANG_GUARD_S:.0f} s: {self.waiting} {self.running} {self.kept}"
        )

    def ask(self, name: str, tokens: Iterable[int], **how: Any) -> FakeRequest:
        """Add a request and run until all are done."""
        request = self.add(name, tokens, **how)
        self.run()
        return request

    def settle(self) -> None:
        """Run until idle, with every write reported."""
        self.run()
        for _ in range(3):  # the later ones take along removals that the first one's report caused
            for worker in self.workers:
                worker._background.finish_saves()
                assert not worker._mover.flush(10).pending
            self.step()
            self.run()

    def preempt(self, request: FakeRequest, *, drop_stale: bool = False) -> None:
        """Take a running request's blocks away; its outputs on their way still count, unless dropped."""
        self.running.remove(request)
        self.preempted = True
        self._free_request(request)
        request.state = "preempted"
        request.num_computed_tokens = request.placeholders = 0
        request.drop_stale = drop_stale or (request.drop_stale and request.stale > 0)
        request.stale = request.in_flight
        self.waiting.appendleft(request)

    def reset(self, *, preempt: bool = True) -> None:
        """Change the weights, and forget all KV; refused, as by vLLM, while requests wait for their loads."""
        if self.loading or any(request.holds_blocks for request in self.waiting):
            return
        self.weights += 1
        for request in reversed(list(self.running)):
            request.mixed |= not preempt and request.num_computed_tokens > 0
            if preempt:
                self.preempt(request, drop_stale=True)
        self.forget_local()
        self.scheduler.reset_cache()
        self.epochs[self.weights] = self.scheduler._epoch

    def sleep(self) -> None:
        """Sleep and wake up as vLLM 0.33 does at levels 1 and 2: the device loses its contents and keeps its layout."""
        while self.in_flight:
            self._process(self.in_flight.popleft())
        weights = self.weights
        self.reset()
        if self.weights == weights:
            return  # it was refused
        for worker, layers in zip(self.workers, self.caches, strict=True):
            assert worker.drain(10)
            for layer in layers:
                layer[1:] = 0x5A
            worker.restore()

    # -- planning ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan and carry out one step; take in a report once enough are under way. False if nothing was computed."""
        step = self._schedule()
        self.in_flight.append(step)
        self._execute(step)
        while self.in_flight and (len(self.in_flight) > self.setup.run_ahead or not step.work):
            self._process(self.in_flight.popleft())
        return bool(step.work)

    def _schedule(self) -> Step:
        work, preempted = self._schedule_running()
        has_loads = not preempted and self._schedule_waiting(work)
        tables = {part.request.request_id: part.request.tables for part in work}
        offers, self.offers = self.offers, {}
        plan = self.scheduler.plan_step(
            {part.request.request_id: part.count for part in work},
            lambda name: tables[name],
            preempts=self.frees_blocks or self.preempted,
            states_of=lambda name: {(group, tokens): block for group, block, tokens in offers.get(name, ())},
        )
        self._check_plan(plan)
        self.preempted = False
        for part in work:
            request = part.request
            request.num_computed_tokens += part.count
            request.in_flight += 1
            request.in_flight_tokens += part.count
            request.placeholders += 1 + part.drafts if part.samples else 0
        self.planned += 1
        return Step(over_a_wire(plan), work, has_loads)

    def _schedule_running(self) -> tuple[list[Scheduled], bool]:
        """Return the parts of the requests that run, and True if any had to be preempted."""
        work: list[Scheduled] = []
        budget = self.setup.budget
        preempted = False
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            if request.placeholders and request.num_outputs + request.placeholders >= request.max_tokens:
                continue  # vLLM knows that this request will have all its tokens
            drafts = min(self._drafts(request), budget - 1)
            count = self._count(request, request.num_computed_tokens, budget) + drafts
            if count <= 0:
                continue
            while not (fits := self._grow(request, request.num_computed_tokens + count)):
                victim = self.running[-1]
                if victim.in_flight:
                    break  # its blocks would come too late
                preempted = True
                self.preempt(victim)
                if victim is request:
                    break
            if not fits:
                break
            work.append(self._part(request, count, drafts))
            budget -= count
        return work, preempted

    def _drafts(self, request: FakeRequest) -> int:
        decodes = request.num_tokens + request.placeholders - request.num_computed_tokens == 1
        return self.random.randint(0, self.setup.drafts) if decodes and request.num_outputs else 0

    def _count(self, request: FakeRequest, start: int, budget: int) -> int:
        """Return the tokens of a request that a step takes: with states, a prefill stops where one is to be kept."""
        count = min(request.num_tokens + request.placeholders - start, budget)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        blocks = [group.block for group in self.groups if group.kind is GroupKind.STATE]
        if not blocks or start >= prefill_end:
            return count
        block, end = blocks[0], start + count
        if end < prefill_end:
            whole_end = end - end % block
            if whole_end > start or block <= self.setup.budget:
                end = whole_end
        stops = [(request.num_tokens - 1) // block * block]
        if start % block:
            stops.append((start // block + 1) * block)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def _part(self, request: FakeRequest, count: int, drafts: int) -> Scheduled:
        end = request.num_computed_tokens + count
        if not request.mixed:
            self._cache(request, min(request.num_tokens, end))
        samples = end >= request.num_tokens + request.placeholders
        return Scheduled(request, count, drafts, samples, [list(table) for table in request.tables])

    def _schedule_waiting(self, work: list[Scheduled]) -> bool:
        """Add the parts of waiting requests, as far as there is room; True if any of them loads in this step."""
        budget = self.setup.budget - sum(part.count for part in work)
        has_loads = False
        skipped: list[FakeRequest] = []
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.holds_blocks))
        while self.waiting and budget > 0 and len(self.running) < self.setup.max_running:
            request = self.waiting.popleft()
            if (request.stale and not request.drop_stale) or (request.state == "loading" and not request.loaded):
                skipped.append(request)
                continue
            if request.state == "loading":
                self._end_loading(request)
            is_new = not request.num_computed_tokens
            if is_new:
                admitted = self._look_up(request)
                if admitted is None or request.state == "loading":
                    skipped.append(request)
                    continue
                if not admitted:
                    self.waiting.appendleft(request)
                    break
            known = request.num_computed_tokens
            count = self._count(request, known, budget)
            if count <= 0 or not self._grow(request, known + count):
                if is_new:  # otherwise it holds what was loaded
                    self._free_request(request)
                    request.num_computed_tokens = 0
                self.waiting.appendleft(request)
                break
            if is_new:
                self._copy_some(request)
            within = request.hit if is_new else 0
            self._allocated(request, within)
            has_loads |= within > 0
            request.state = "running"
            request.on_gpu = known
            self.running.append(request)
            work.append(self._part(request, count, 0))
            budget -= count
        self.waiting.extendleft(reversed(skipped))
        return has_loads

    def _look_up(self, request: FakeRequest) -> bool | None:
        """Admit a request, or begin its load; None to ask again, False without room."""
        local = self._local_hit(request)
        external = self.scheduler.num_new_matched_tokens(request, local[0])
        if external is None:
            time.sleep(0.005)  # a real step takes at least as long, and a remote tier answers meanwhile
            return None
        least, most = self.setup.min_retrieve_tokens, self.setup.max_tokens_per_load
        whole = most // self.align * self.align
        assert external in (0, whole) or (external >= least and (not most or external <= most))
        self._check_offer(request, local[0], external)
        external = self.take(external)
        known = local[0] + external
        assert known < request.num_tokens
        async_load = external > 0 and self.scheduler.is_async_load(request.request_id)
        if not self._admit(request, local, external):
            return False
        if async_load and self._missing(request) > len(self.free):
            self._free_request(request)
            return False
        request.num_computed_tokens = request.on_gpu = known
        self.loaded_tokens[request.request_id] = request.hit = external
        if async_load:
            self._copy_some(request)
            self._allocated(request, external)
            request.state, request.loaded = "loading", False
            self.loading[request.request_id] = (request, len(self.workers))
            self.loads += 1
        return True

    def _copy_some(self, request: FakeRequest) -> None:
        """Replace a shared block of a request by a copy, at random."""
        if self.setup.copies and self.random.random() < 0.5:
            self._copy_shared(request, self.random.randrange(len(self.groups)))

    def _allocated(self, request: FakeRequest, external: int) -> None:
        self.scheduler.allocated(request.request_id, request.tables, external)
        hit_tokens = self.scheduler.hit_tokens(request.request_id).values()
        assert sum(hit_tokens) == external
        assert min(hit_tokens) >= 0

    def _missing(self, request: FakeRequest) -> int:
        """Count the blocks that this request, and those that hold blocks and wait, may still need."""
        holding = [request, *(waiting for waiting, _ in self.loading.values())]
        holding += [waiting for waiting in self.waiting if waiting.holds_blocks and waiting not in holding]
        return sum(
            -(-waiting.num_tokens // group.block) - len(table)
            for waiting in holding
            for group, table in zip(self.groups, waiting.tables, strict=True)
        )

    def _end_loading(self, request: FakeRequest) -> None:
        """End a request's load, after which its blocks may be shared."""
        request.state, request.loaded = "waiting", False
        if request.num_computed_tokens == 0:  # it failed
            self._free_request(request)
            return
        self._cache(request, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.on_gpu = request.num_computed_tokens

    # -- taking in --------------------------------------------------------------------------------------------------

    def _process(self, step: Step) -> None:
        """Take in a step's outputs and report, in vLLM's order."""
        self.processed += 1
        self._drain_deferred_frees()
        self._take_outputs(step)
        if step.report is not None:
            self.scheduler.complete(step.report)
        for req_id in step.fetched:
            request, ranks_left = self.loading.pop(req_id)
            assert ranks_left == 0
            if request.state == "finished":
                self._free_request(request)
            else:
                request.loaded = True
        for req_id in step.ended:
            request, ranks_left = self.kept.pop(req_id)
            assert ranks_left == 0
            self._free_request(request)

    def _take_outputs(self, step: Step) -> None:
        failed = self._set_back(step)
        for part in step.work:
            request = part.request
            request.in_flight -= 1
            request.in_flight_tokens -= part.count
            stale = request.stale > 0
            request.stale -= stale
            if request.state != "finished" and request not in failed and not (stale and request.drop_stale):
                self._deliver(step, request, stale=stale)

    def _deliver(self, step: Step, request: FakeRequest, *, stale: bool) -> None:
        fresh = step.outputs.get(request.request_id, [])
        if fresh and not stale:
            request.num_computed_tokens -= step.rejected[request.request_id]
            request.placeholders -= step.rejected[request.request_id] + len(fresh)
            assert request.placeholders >= 0
        for token in fresh:
            request.all_token_ids.append(token)
            if request.num_outputs >= request.max_tokens:
                self._finish(request)
                break

    def _finish(self, request: FakeRequest) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._leave_windows(request)
        computed = [
            table[: -(-request.num_computed_tokens // group.block)]
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        loading = request.request_id in self.loading
        request.state = "finished"
        first_token = request.all_token_ids[request.num_prompt_tokens] if request.num_outputs else None
        request.answer = self.scheduler.answer(request.request_id, first_token=first_token)
        if self.scheduler.finish_request(request.request_id, computed):
            assert not loading, "its blocks would be freed twice"
            self.kept[request.request_id] = (request, len(self.workers))
        elif not loading:
            self._free_request(request)


@contextmanager
def one_at_a_time(make: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Make engines by ``make``; a new one closes the one before, so in the same folder it is a restart."""
    engines: list[Engine] = []

    def build(*how: Any, **changes: Any) -> Engine:
        if engines:
            engines[-1].close()
        engines.append(make(*how, **changes))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
