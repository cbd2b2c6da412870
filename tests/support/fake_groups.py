"""Plays vLLM for models of several groups, around a `StoreScheduler` and real `StoreWorker`s: clients and scheduler.

As `fake_vllm.py`: steps planned before the last one's report, preemption, aborts, new weights. A step with states ends
where one is to be kept, and `fake_group_runner.py` checks what it computes.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterable

from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.checkpoints.groups import Kind
from kvstore.keys import KeyExtras
from support.fake_group_runner import GroupRunner, GroupSetup, Part, Step
from support.fake_tables import GroupRequest


class FakeGroups(GroupRunner):
    """One engine: scheduler side, workers, and everything of vLLM between them."""

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        self.waiting: deque[GroupRequest] = deque()
        self.running: list[GroupRequest] = []
        self.in_flight: deque[Step] = deque()
        self.preempted = False  # somebody, since the last step
        self.loads = 0  # requests that have waited for one
        self.failures = 0  # of these

    # -- what a client does -----------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        tokens: Iterable[int],
        *,
        max_tokens: int = 1,
        salt: str = "",
        params: RequestParams = NO_PARAMS,
    ) -> GroupRequest:
        """A new request."""
        request = GroupRequest(name, list(tokens), max_tokens, salt, tables=[[] for _ in self.groups])
        self.scheduler.add_request(request, KeyExtras(cache_salt=salt, tags=params.tags), params)
        self.waiting.append(request)
        return request

    def ask(self, name: str, tokens: Iterable[int], **how: object) -> GroupRequest:
        """Add a request and work until all are done."""
        request = self.add(name, tokens, **how)  # type: ignore[arg-type] # as `add` takes them
        self.run()
        return request

    def abort(self, request: GroupRequest) -> None:
        """The client went away."""
        if request.state != "finished":
            self._finish(request)

    def run(self, *, max_steps: int = 600) -> None:
        """Work until nothing is left to do."""
        for _ in range(max_steps):
            if not (self.waiting or self.running or self.kept or self.loading or self.in_flight):
                return
            if not self.step():
                time.sleep(0.001)
                self._let_time_pass()
        raise AssertionError(f"not done after {max_steps} steps: {self.waiting} {self.running} {self.kept}")

    def settle(self) -> None:
        """Work until idle, with every write reported."""
        self.run()
        for _ in range(3):  # the later ones take along removals that the first one's report brought up
            for worker in self.workers:
                worker._background.finish_saves()
                assert not worker._mover.flush(10).pending
            self.step()
            self.run()

    def preempt(self, request: GroupRequest, *, drop_stale: bool = False) -> None:
        """Take a running request's blocks away; its outputs on their way still count, unless dropped."""
        self.running.remove(request)
        self.preempted = True
        self._free_request(request)
        request.state = "preempted"
        request.num_computed_tokens = request.placeholders = 0
        request.drop_stale = drop_stale or (request.drop_stale and request.stale > 0)
        request.stale = request.in_flight
        self.waiting.appendleft(request)

    def reset(self) -> None:
        """New weights; refused, as by vLLM, while requests wait for their loads or hold what was loaded."""
        if self.loading or any(request.holds_blocks for request in self.waiting):
            return
        self.weights += 1
        for request in reversed(list(self.running)):
            self.preempt(request, drop_stale=True)
        self.forget_local()
        self.scheduler.reset_cache()

    def sleep(self) -> None:
        """Sleep and wake up as vLLM 0.33 does at level 1 and 2: what the device held is gone, its addresses stay."""
        while self.in_flight:
            self._process(self.in_flight.popleft())
        weights = self.weights
        self.reset()
        if self.weights == weights:
            return  # it was refused
        for worker, pages in zip(self.workers, self.pages, strict=True):
            assert worker.drain(10)
            for page in pages:
                page[1:] = 0x5A
            worker.restore()

    # -- planning ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan and carry out one step; take in a report once enough are under way. False if nothing was computed."""
        step = self._schedule()
        self.in_flight.append(step)
        self.execute(step)
        while self.in_flight and (len(self.in_flight) > self.setup.run_ahead or not step.work):
            self._process(self.in_flight.popleft())
        return bool(step.work)

    def _schedule(self) -> Step:
        work = self._schedule_running()
        if not self.preempted:
            self._schedule_waiting(work)
        tables = {part.request.request_id: part.request.tables for part in work}
        offers, self.offers = self.offers, {}
        plan = self.scheduler.plan_step(
            {part.request.request_id: part.count for part in work},
            lambda name: tables[name],
            preempts=True,  # blocks may leave a window in any step
            states_of=lambda name: {(group, tokens): block for group, block, tokens in offers.get(name, ())},
        )
        self.check_plan(plan)
        self.preempted = False
        for part in work:
            request = part.request
            request.num_computed_tokens += part.count
            request.in_flight += 1
            request.in_flight_tokens += part.count
            request.placeholders += part.samples
        self.planned += 1
        return Step(copy.deepcopy(plan), work)

    def _schedule_running(self) -> list[Part]:
        work: list[Part] = []
        budget = self.setup.budget
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            if request.placeholders and request.num_outputs + request.placeholders >= request.max_tokens:
                continue  # it will have all its tokens
            count = self._count(request, request.num_computed_tokens, budget)
            if count <= 0:
                continue
            while not (fits := self._grow(request, request.num_computed_tokens + count)):
                victim = self.running[-1]
                if victim.in_flight:
                    break  # its blocks would come too late
                self.preempt(victim)
                if victim is request:
                    break
            if not fits:
                break
            work.append(self._part(request, count))
            budget -= count
        return work

    def _count(self, request: GroupRequest, start: int, budget: int) -> int:
        """How many tokens of a request a step takes: with states, a prefill stops where one is to be kept."""
        count = min(request.num_tokens + request.placeholders - start, budget)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        blocks = [group.block for group in self.groups if group.kind is Kind.STATE]
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

    def _schedule_waiting(self, work: list[Part]) -> None:
        budget = self.setup.budget - sum(part.count for part in work)
        skipped: list[GroupRequest] = []
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.holds_blocks))
        while self.waiting and budget > 0:
            request = self.waiting.popleft()
            if (request.stale and not request.drop_stale) or (request.state == "loading" and not request.loaded):
                skipped.append(request)
                continue
            if request.state == "loading":
                self._end_loading(request)
            if not request.num_computed_tokens:
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
                if known == request.local:  # or it holds what was loaded
                    self._free_request(request)
                    request.num_computed_tokens = 0
                self.waiting.appendleft(request)
                break
            self.scheduler.allocated(request.request_id, request.tables, 0)
            request.state = "running"
            request.on_gpu = known
            self.running.append(request)
            work.append(self._part(request, count))
            budget -= count
        self.waiting.extendleft(reversed(skipped))

    def _look_up(self, request: GroupRequest) -> bool | None:
        """Admit a request, or begin its load; None to ask again, False if there is no room."""
        local = self._local_hit(request)
        external = self.scheduler.num_new_matched_tokens(request, local[0])
        if external is None:
            time.sleep(0.002)  # a real step takes at least as long, and a remote tier answers meanwhile
            return None
        most, least = self.setup.max_tokens_per_load, self.setup.min_retrieve_tokens
        assert external == 0 or (external >= least and (not most or external <= most))
        assert external % self.align == 0
        assert local[0] + external < request.num_tokens
        assert not (external and request.failed), "a failed load is tried again, and again"
        assert self.scheduler.is_async_load(request.request_id) or not external
        if not self._admit(request, local, external):
            return False
        if external and self._missing(request) > len(self.free):
            self._free_request(request)
            return False
        if self.setup.copies and self.random.random() < 0.5:
            self._copy_shared(request, self.random.randrange(len(self.groups)))
        known = local[0] + external
        request.num_computed_tokens = request.on_gpu = known
        request.hit = external
        if external:
            self.scheduler.allocated(request.request_id, request.tables, external)
            assert sum(self.scheduler.hit_split(request.request_id)) == external
            request.state, request.loaded = "loading", False
            self.loading[request.request_id] = (request, len(self.workers))
            self.loads += 1
        return True

    def _missing(self, request: GroupRequest) -> int:
        """Blocks that this request, and those that hold blocks and wait, may still need."""
        holding = [request, *(waiting for waiting, _ in self.loading.values())]
        holding += [waiting for waiting in self.waiting if waiting.holds_blocks and waiting not in holding]
        return sum(
            -(-waiting.num_tokens // group.block) - len(table)
            for waiting in holding
            for group, table in zip(self.groups, waiting.tables, strict=True)
        )

    def _end_loading(self, request: GroupRequest) -> None:
        request.state, request.loaded = "waiting", False
        if request.num_computed_tokens == 0:  # it failed
            self._free_request(request)
            return
        self._cache(request, request.num_computed_tokens)

    def _part(self, request: GroupRequest, count: int) -> Part:
        end = request.num_computed_tokens + count
        self._cache(request, min(request.num_tokens, end))
        samples = end >= request.num_tokens + request.placeholders
        return Part(request, count, samples, [list(table) for table in request.tables])

    # -- taking in --------------------------------------------------------------------------------------------------

    def _process(self, step: Step) -> None:
        self.processed += 1
        self._drain_deferred_frees()
        for req_id in step.failed:
            self.loading[req_id][0].num_computed_tokens = 0
            self.loading[req_id][0].failed = True
            self.failures += 1
        for part in step.work:
            request = part.request
            request.in_flight -= 1
            request.in_flight_tokens -= part.count
            stale = request.stale > 0
            request.stale -= stale
            if request.state != "finished" and part.samples and not (stale and request.drop_stale):
                request.placeholders -= not stale
                request.all_token_ids.append(step.outputs[request.request_id])
                if request.num_outputs >= request.max_tokens:
                    self._finish(request)
        if step.report is not None:
            self.scheduler.complete(step.report)
        for req_id in step.fetched:
            request = self.loading.pop(req_id)[0]
            if request.state == "finished":
                self._free_request(request)
            else:
                request.loaded = True
        for req_id in step.ended:
            self._free_request(self.kept.pop(req_id)[0])

    def _finish(self, request: GroupRequest) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._leave_windows(request)
        computed = [
            table[: -(-request.num_computed_tokens // group.block)]
            for group, table in zip(self.groups, request.tables, strict=True)
        ]
        is_loading = request.request_id in self.loading
        request.state = "finished"
        if self.scheduler.finish_request(request.request_id, computed):
            assert not is_loading, "its blocks would be freed twice"
            self.kept[request.request_id] = (request, len(self.workers))
        elif not is_loading:
            self._free_request(request)
