"""Plays vLLM around a `StoreScheduler` and real `StoreWorker`s, without vLLM: its clients, its scheduler, its runner.

The KV of a token is a hash over all tokens up to it, written into real tensors; `fake_runner.py` checks it. Modelled,
because it is what goes wrong: blocks shared by prefix before they are loaded, freed blocks filled with garbage, steps
planned before the last one's report, rejected drafts, preemption, aborts, new weights.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvstore.adapters.vllm.requests.params import NO_PARAMS, Handover, RequestParams
from kvstore.keys import KeyExtras
from support.fake_parts import BLOCK, FakeRequest, Scheduled, Setup, Step
from support.fake_runner import FakeRunner


class FakeVllm(FakeRunner):
    """One engine: scheduler side, `ranks` workers, and everything of vLLM between them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.preempted = False  # somebody, since the last step
        self.loaded_tokens: dict[str, int] = {}
        self.take: Callable[[int], int] = lambda offered: offered  # how many external tokens vLLM makes use of
        self.recovered = 0  # requests set back by failed loads

    # -- what a client does -----------------------------------------------------------------------------------------

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
        """A new request."""
        request = FakeRequest(name, list(tokens), max_tokens, salt, priority=priority)
        self.scheduler.add_request(request, KeyExtras(cache_salt=salt, tags=params.tags), params, handover)
        self.waiting.append(request)
        if not params.tags:
            self._shareable.append(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        """The client went away."""
        if request.state != "finished":
            self._finish(request)

    def run(self, *, max_steps: int = 400) -> None:
        """Work until nothing is left to do."""
        for _ in range(max_steps):
            if not (self.waiting or self.running or self.kept or self.loading or self.in_flight):
                return
            if not self.step() and (self.loading or self.kept):
                time.sleep(0.002)  # as vLLM does while nothing runs but transfers
                self._let_time_pass()
        raise AssertionError(f"not done after {max_steps} steps: {self.waiting} {self.running} {self.kept}")

    def ask(self, name: str, tokens: Iterable[int], **how: Any) -> FakeRequest:
        """Add a request and work until all are done."""
        request = self.add(name, tokens, **how)
        self.run()
        return request

    def reset(self, *, preempt: bool) -> None:
        """Change the weights, and forget all KV; refused, as by vLLM, while requests wait for their loads."""
        if any(request.blocks for request in self.waiting) or self.loading:
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
        """Sleep and wake up as vLLM 0.33 does at level 1 and 2: what the device held is gone, its addresses stay."""
        while self.in_flight:
            self._process(self.in_flight.popleft())
        if self.loading or any(request.blocks for request in self.waiting):
            return  # a reset would be refused
        self.reset(preempt=True)
        for worker, layers in zip(self.workers, self.caches, strict=True):
            assert worker.drain(10)
            for layer in layers:
                layer[:] = 0x5A
            worker.restore()

    def settle(self) -> None:
        """Work until idle, with every write reported."""
        self.run()
        for _ in range(2):  # the second takes along removals that the first one's report brought up
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

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan and carry out one step; take in a report once enough are under way. False if nothing was computed."""
        self.in_flight.append(self._schedule())
        self._execute(self.in_flight[-1])
        idle = not self.in_flight[-1].work
        while self.in_flight and (len(self.in_flight) > self.setup.run_ahead or idle):
            self._process(self.in_flight.popleft())
        return not idle

    def _schedule(self) -> Step:
        work, preempted = self._schedule_running()
        has_loads = not preempted and self._schedule_waiting(work)
        blocks = {part.request.request_id: part.request.blocks for part in work}
        counts = {part.request.request_id: part.count for part in work}
        plan = self.scheduler.plan_step(counts, lambda name: [blocks[name]], preempts=self.preempted)
        self.preempted = False
        for part in work:
            self._after_schedule(part)
        self.planned += 1
        return Step(copy.deepcopy(plan), work, has_loads)

    def _schedule_running(self) -> tuple[list[Scheduled], bool]:
        """The parts of the requests that run, and whether any had to be preempted."""
        work: list[Scheduled] = []
        budget = self.setup.budget
        preempted = False
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            drafts = min(self._drafts(request), budget - 1)
            count = min(request.num_tokens + request.placeholders - request.num_computed_tokens + drafts, budget)
            if request.placeholders and request.num_outputs + request.placeholders >= request.max_tokens:
                continue  # vLLM sees that this request will have all its tokens
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

    def _schedule_waiting(self, work: list[Scheduled]) -> bool:
        """Add the parts of requests that wait, as far as there is room; whether any of them loads in this step."""
        budget = self.setup.budget - sum(part.count for part in work)
        has_loads = False
        skipped: list[FakeRequest] = []
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.blocks))  # first those that hold some
        while self.waiting and budget > 0 and len(self.running) < self.setup.max_running:
            request = self.waiting.popleft()
            if (request.stale and not request.drop_stale) or (request.state == "loading" and not request.loaded):
                skipped.append(request)
                continue
            if request.state == "loading":
                self._end_loading(request)
            if request.num_computed_tokens:
                if not self._admit_loaded(request, work, budget):
                    self.waiting.appendleft(request)
                    break
                budget -= work[-1].count
                continue
            local = self._local_hit(request)
            external = self.scheduler.num_new_matched_tokens(request, len(local) * BLOCK)
            if external is None:
                skipped.append(request)
                time.sleep(0.005)  # a real step takes at least as long, and a remote tier answers meanwhile
                continue
            assert external == 0 or self.setup.loads
            least, most = self.setup.min_retrieve_tokens, self.setup.max_tokens_per_load
            assert external in (0, most // BLOCK * BLOCK) or (external >= least and (not most or external <= most))
            assert external <= max(0, request.num_tokens - self.setup.skip_last_tokens - len(local) * BLOCK)
            external = self.take(external)
            known = len(local) * BLOCK + external
            assert known < request.num_tokens
            async_load = external > 0 and self.scheduler.is_async_load(request.request_id)
            count = 0 if async_load else min(request.num_tokens - known, budget)
            request.blocks = list(local)
            for block in local:
                self._use(block)
            if (async_load and not self._fits_wholly(request)) or not self._grow(request, known + count):
                self._free_request(request)
                self.waiting.appendleft(request)
                break
            if local and self.setup.copies and self.random.random() < 0.5:
                self._copy_block(request, len(local) - 1)
            self.scheduler.allocated(request.request_id, [request.blocks], external)
            split = self.scheduler.hit_split(request.request_id)
            assert sum(split) == external
            assert min(split) >= 0
            self.loaded_tokens[request.request_id] = external
            if async_load:
                request.state, request.loaded = "loading", False
                request.num_computed_tokens = request.on_gpu = known
                self.loading[request.request_id] = (request, len(self.workers))
                skipped.append(request)
                continue
            has_loads |= external > 0
            request.state = "running"
            request.num_computed_tokens = request.on_gpu = known
            self.running.append(request)
            work.append(self._part(request, count, 0))
            budget -= count
        self.waiting.extendleft(reversed(skipped))
        return has_loads

    def _fits_wholly(self, request: FakeRequest) -> bool:
        """Whether there will be blocks for the rest of a request, and of those that hold blocks and wait."""
        holding = [request, *(waiting for waiting, _ in self.loading.values())]
        holding += [waiting for waiting in self.waiting if waiting.blocks and waiting not in holding]
        missing = [-(-waiting.num_tokens // BLOCK) - len(waiting.blocks) for waiting in holding]
        return sum(missing) <= len(self.free)

    def _end_loading(self, request: FakeRequest) -> None:
        """What has been loaded for a request may be shared from now on."""
        request.state, request.loaded = "waiting", False
        if request.num_computed_tokens == 0:
            self._free_request(request)
            return
        for number in range(request.num_computed_tokens // BLOCK):
            self._cache(request, number)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.on_gpu = request.num_computed_tokens

    def _admit_loaded(self, request: FakeRequest, work: list[Scheduled], budget: int) -> bool:
        """Let a request run whose load is over."""
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        if not self._grow(request, request.num_computed_tokens + count):
            return False
        self.scheduler.allocated(request.request_id, [request.blocks], 0)
        request.state = "running"
        self.running.append(request)
        work.append(self._part(request, count, 0))
        return True

    def _drafts(self, request: FakeRequest) -> int:
        decodes = request.num_tokens + request.placeholders - request.num_computed_tokens == 1
        return self.random.randint(0, self.setup.drafts) if decodes and request.num_outputs else 0

    def _part(self, request: FakeRequest, count: int, drafts: int) -> Scheduled:
        samples = request.num_computed_tokens + count >= request.num_tokens + request.placeholders
        for number in range(
            0 if request.mixed else min(request.num_tokens, request.num_computed_tokens + count) // BLOCK
        ):
            self._cache(request, number)
        return Scheduled(request, request.num_computed_tokens, count, drafts, list(request.blocks), samples)

    def _after_schedule(self, part: Scheduled) -> None:
        request = part.request
        request.num_computed_tokens += part.count
        request.in_flight += 1
        if part.samples:
            request.placeholders += 1 + part.drafts

    def _process(self, step: Step) -> None:
        """Take in a step's outputs and report, in vLLM's order."""
        self.processed += 1
        self._drain_deferred_frees()
        failed = self._set_back(step.failed_blocks, {part.request.request_id: part.count for part in step.work})
        for part in step.work:
            request = part.request
            request.in_flight -= 1
            stale = request.stale > 0
            request.stale -= stale
            if request.state == "finished" or request in failed or (stale and request.drop_stale):
                continue
            self._deliver(step, request, stale=stale)
        if step.failed_blocks:
            for block in self.scheduler.spoilt_blocks(step.failed_blocks):
                self._uncache(block)
        if step.report is not None:
            self.scheduler.complete(step.report)
        for req_id in step.fetched:
            request, ranks_left = self.loading.pop(req_id)
            assert ranks_left == 0
            if request.state == "finished":
                self._free_request(request)
            else:
                request.loaded = True
        self.heard.hear(self.scheduler.take_events())
        for req_id in step.ended:
            request, ranks_left = self.kept.pop(req_id)
            assert ranks_left == 0
            self._free_request(request)

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

    def _set_back(self, failed_blocks: set[int], scheduled: dict[str, int]) -> list[FakeRequest]:
        """Let requests compute again what could not be loaded for them."""
        failed: list[FakeRequest] = []
        marked: set[int] = set()
        for request, _ in self.loading.values() if failed_blocks else ():
            hits = [number for number, block in enumerate(request.blocks) if block in failed_blocks]
            request.num_computed_tokens = min(request.num_computed_tokens, min(hits, default=1 << 30) * BLOCK)
            request.on_gpu = request.num_computed_tokens
            self.recovered += bool(hits)
        for request in self.running if failed_blocks else ():
            computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            blocks = request.blocks[: -(-computed // BLOCK)]
            hits = [number for number, block in enumerate(blocks) if block in failed_blocks]
            if not hits:
                continue
            first = next((number for number in hits if blocks[number] not in marked), None)
            marked |= {blocks[number] for number in hits}
            request.num_computed_tokens = computed if first is None else first * BLOCK
            request.on_gpu = request.num_computed_tokens
            # vLLM 0.32 does without these two: where it runs ahead, it delivers a token made from garbage.
            request.placeholders = 0
            request.stale, request.drop_stale = request.in_flight, True
            failed.append(request)
        self.recovered += len(failed)
        return failed

    def _finish(self, request: FakeRequest) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        computed = request.blocks[: -(-request.num_computed_tokens // BLOCK)]
        loading = request.request_id in self.loading
        request.state = "finished"
        first_token = request.all_token_ids[request.num_prompt_tokens] if request.num_outputs else None
        request.answer = self.scheduler.answer(request.request_id, first_token=first_token)
        if self.scheduler.finish_request(request.request_id, [computed]):
            assert not loading, "its blocks would be freed twice"
            self.kept[request.request_id] = (request, len(self.workers))
        elif not loading:
            self._free_request(request)


@contextmanager
def one_after_the_other(plain: Setup) -> Iterator[Callable[..., FakeVllm]]:
    """Makes engines like ``plain`` but for the fields named; a new one ends the one before."""
    engines: list[FakeVllm] = []

    def build(**changes: Any) -> FakeVllm:
        if engines:
            engines[-1].close()
        engines.append(FakeVllm(replace(plain, **changes)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
