"""The scheduler side: owns the index, answers lookups, plans each step. No I/O, no tensors, no vLLM types."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.adapters.vllm.steps import ReqMeta, StepPlan, StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.tracker import LoadSpec, RequestTracker, RequestView, SaveRules, SaveSpec
from kvstore.engine import superseded_tails
from kvstore.index import ChunkIndex, LoadStep, StoreStep
from kvstore.keys import KeyExtras, PrefixHasher, PrefixKey
from kvstore.movers import LoadJob, StoreJob, as_block_ids
from kvstore.tiers.base import ChunkRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerOptions:
    """What the configuration says about lookups and plans."""

    rules: SaveRules
    loads: bool = True
    saves: bool = True
    local_cpu: bool = True
    min_retrieve_tokens: int = 0
    max_write_queue: int | None = None


class HitSplit(NamedTuple):
    """Where the tokens of a request's external hit come from."""

    memory_tokens: int
    disk_tokens: int


@dataclass
class _Step:
    """A plan under way."""

    acked: int
    loads: list[LoadStep] = field(default_factory=list)
    stores: list[tuple[PrefixHasher, list[StoreStep]]] = field(default_factory=list)


@dataclass
class _Write:
    """A write to disk that some ranks have not reported yet."""

    ranks_left: int
    stored: bool = True


class StoreScheduler:
    """One per engine. Called by vLLM's scheduler from one thread."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._rules = options.rules
        self._index: ChunkIndex | None = None  # until the workers have said what they own
        self._num_ranks = 0
        self._trackers: dict[str, RequestTracker] = {}
        self._ready: dict[str, ReqMeta] = {}  # loads, and stores of ended requests, for the next plan
        self._step = _Step(acked=0)  # what the next plan will hold
        self._in_flight: dict[int, _Step] = {}
        self._writes: dict[PrefixKey, _Write] = {}
        self._number = 0
        self._acked = 0
        self._last_poisoned = 0
        self._clear = False
        self._stray: list[ChunkRef] = []  # chunks that only some ranks hold

    @property
    def index(self) -> ChunkIndex | None:
        """The catalog, once the workers have reported."""
        return self._index

    def connect(self, facts: Sequence[WorkerFacts]) -> None:
        """Take in what the workers own. A chunk counts only if every rank holds its part."""
        first = facts[0]
        held = [{ref for ref, _ in rank.survivors} for rank in facts]
        complete = set.intersection(*held)
        index = ChunkIndex(
            min(rank.num_slots for rank in facts),
            keep_in_memory=self._options.local_cpu,
            disk_capacity_bytes=min(rank.disk_capacity_bytes for rank in facts),
            stored_bytes=lambda num_blocks: max(rank.stored_bytes[num_blocks - 1] for rank in facts),
            max_writes=self._options.max_write_queue,
        )
        index.adopt((ref, stored_bytes) for ref, stored_bytes in first.survivors if ref in complete)
        self._stray = list(set.union(*held) - complete)
        self._index = index
        self._num_ranks = len(facts)
        logger.info(
            "%d chunks known from disk; CPU pool %.2f GiB x %d workers, disk %.2f GiB x %d workers",
            len(index),
            first.num_slots * first.slot_bytes / 2**30,
            len(facts),
            first.disk_capacity_bytes / 2**30,
            len(facts),
        )

    # -- requests -------------------------------------------------------------------------------------------------------

    def add_request(self, request: RequestView, extras: KeyExtras) -> None:
        """Track a request whose KV may be shared. Requests never added are passed by."""
        self._trackers[request.request_id] = RequestTracker.start(request, extras, self._rules)

    def num_new_matched_tokens(self, request: RequestView, num_local_tokens: int) -> int:
        """How many tokens beyond vLLM's own ``num_local_tokens`` can be loaded; at least one is left to compute.

        Cheap, and without effect but to remember the answer: vLLM asks again while a request waits.
        """
        tracker = self._trackers.get(request.request_id)
        if tracker is None or self._index is None or not self._options.loads:
            return 0
        tracker.load = None
        tracker.hasher.update(request.all_token_ids)
        match = self._index.lookup(tracker.hasher)
        num_external_tokens = min(match.num_tokens, request.num_tokens - 1) - num_local_tokens
        if num_external_tokens <= 0 or num_external_tokens < self._options.min_retrieve_tokens:
            return 0
        tracker.load = LoadSpec(match, num_local_tokens, num_external_tokens)
        return num_external_tokens

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Plan the load of what vLLM took of the last answer: ``num_external_tokens``, possibly fewer, possibly 0."""
        tracker = self._trackers.get(request_id)
        if tracker is None or self._index is None or tracker.load is None or num_external_tokens == 0:
            return
        spec, tracker.load = tracker.load, None
        first_block = spec.num_local_tokens // self._rules.block_tokens
        end_block = -(-(spec.num_local_tokens + num_external_tokens) // self._rules.block_tokens)
        wanted = list(_overlapping(spec.match.refs, first_block, end_block))
        steps = self._index.prepare_load([ref for ref, _ in wanted])
        meta = self._ready.setdefault(request_id, ReqMeta(request_id))
        loaded_end = first_block
        for step, (ref, begin) in zip(steps, wanted, strict=False):
            start, stop = max(begin, first_block), min(begin + ref.num_blocks, end_block)
            meta.loads.append(LoadJob(step, as_block_ids(block_ids[start:stop]), start - begin))
            loaded_end = stop
        meta.lost_block_ids += block_ids[loaded_end:end_block]
        self._step.loads += steps

    def hit_split(self, request_id: str, num_external_tokens: int) -> HitSplit:
        """How the load just planned for a request divides over the tiers."""
        meta = self._ready.get(request_id)
        blocks = sum(len(job.block_ids) for job in meta.loads if job.step.from_disk) if meta else 0
        disk_tokens = min(num_external_tokens, blocks * self._rules.block_tokens)
        return HitSplit(num_external_tokens - disk_tokens, disk_tokens)

    def finish_request(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Stop tracking. True if vLLM must keep the blocks until the workers report the request's last store."""
        tracker = self._trackers.pop(request_id, None)
        if tracker is None or not block_ids or not self._options.saves:
            return False
        save = tracker.take_final_save()
        meta = ReqMeta(request_id, finished=True)
        if save is None or not self._plan_save(meta, tracker, save, block_ids):
            return False
        self._ready[request_id] = meta
        return True

    # -- steps ----------------------------------------------------------------------------------------------------------

    def plan_step(
        self, num_scheduled_tokens: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int]]
    ) -> StepPlan:
        """Make the plan of the step that computes ``num_scheduled_tokens`` per request."""
        if self._options.saves and self._index is not None:
            for req_id, num_tokens in num_scheduled_tokens.items():
                tracker = self._trackers.get(req_id)
                if tracker is None or tracker.is_saved:
                    continue
                save = tracker.take_save(num_tokens)
                if save is not None:
                    meta = self._ready.setdefault(req_id, ReqMeta(req_id))
                    self._plan_save(meta, tracker, save, block_ids_of(req_id))
        return self._emit()

    def _emit(self) -> StepPlan:
        self._number += 1
        removals = self._stray + (self._index.take_removals() if self._index else [])
        plan = StepPlan(self._number, self._acked, list(self._ready.values()), removals, self._clear)
        self._step.acked = self._acked
        if plan.requests:
            self._in_flight[plan.number] = self._step
        self._step = _Step(acked=0)
        self._ready, self._stray, self._clear = {}, [], False
        return plan

    def _plan_save(
        self, meta: ReqMeta, tracker: RequestTracker, save: SaveSpec, block_ids: Sequence[int]
    ) -> bool:
        """Add a request's new chunks to the next plan; False if all are known or there is no room."""
        if self._index is None:
            return False
        steps = self._index.prepare_store(save.refs, save.prefix)
        position = save.first_block
        begins = {}
        for ref in save.refs:
            begins[ref.prefix_key] = position
            position += ref.num_blocks
        for step in steps:
            begin = begins[step.ref.prefix_key]
            meta.stores.append(StoreJob(step, as_block_ids(block_ids[begin : begin + step.ref.num_blocks])))
            if step.write_behind:
                self._writes[step.ref.prefix_key] = _Write(self._num_ranks)
        if steps:
            self._step.stores.append((tracker.hasher, steps))
        return bool(steps)

    def complete(self, report: StepReport) -> None:
        """Take in what the workers, all ranks merged, did."""
        if self._index is None:
            return
        for number, result in sorted(report.steps.items()):
            step = self._in_flight.pop(number, None)
            if step is not None:
                self._complete_step(self._index, number, step, result)
            self._acked = max(self._acked, number)
        for ref, stored in report.writes:
            write = self._writes[ref.prefix_key]
            write.ranks_left -= 1
            write.stored &= stored
            if not write.ranks_left:
                del self._writes[ref.prefix_key]
                self._index.complete_write(ref.prefix_key, stored=write.stored)

    def _complete_step(self, index: ChunkIndex, number: int, step: _Step, result: StepResult) -> None:
        if result.is_poisoned:
            self._last_poisoned = number
        index.complete_load(step.loads, result.failed_loads)
        # A step planned before the failed load was known computed on its garbage too, on every rank.
        distrusted = step.acked < self._last_poisoned <= number
        for hasher, stores in step.stores:
            keys = {store.ref.prefix_key for store in stores}
            failed = keys if distrusted else keys & result.failed_stores
            index.complete_store(stores, failed)
            index.supersede(superseded_tails(hasher, keys - failed))
        if result.failed_stores or distrusted:
            self._restart_saving()

    def _restart_saving(self) -> None:
        for tracker in self._trackers.values():
            tracker.restart_saving()

    def reset_cache(self) -> None:
        """Forget everything: the weights have changed."""
        if self._index is not None:
            self._index.clear()
        self._clear = True
        self._restart_saving()


def _overlapping(refs: Iterable[ChunkRef], first_block: int, end_block: int) -> Iterable[tuple[ChunkRef, int]]:
    """The chunks of a prefix that hold any of the blocks ``[first_block, end_block)``, each with its first block."""
    begin = 0
    for ref in refs:
        if begin < end_block and begin + ref.num_blocks > first_block:
            yield ref, begin
        begin += ref.num_blocks
