"""A simulated vLLM for models of several groups: its runner, which checks every byte of every step.

All groups alias one pool of blocks, as in vLLM: a block holds what was last written to it, of whatever group. Before
each step every token that the model attends to must hold the right KV, and the block of the last token the right state,
by the definition of each kind. `fake_scheduler.py` simulates the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import numpy.typing as npt

from kvstore.adapters.vllm.plan import NO_REQUEST, StepPlan
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.index.plans import Place
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.keys import Namespace
from kvstore.paged.base import PagedKV
from kvstore.paged.binding import bind_groups
from kvstore.paged.grouped import GroupedPagedKV
from support.fake_host import Cache, scheduler_options
from support.fake_parts import GARBAGE, CommonSetup, FakeRequest, Scheduled, Step, kv_of
from support.fake_scheduler import FakeScheduler
from support.fake_tables import NULL, FakeGroup
from support.remote import REMOTE

STATE_WORDS = 2
_ROW_BITS = 32


@dataclass(frozen=True)
class GroupSetup(CommonSetup):
    """Options of a `FakeGroups`."""

    groups: tuple[FakeGroup, ...] = (FakeGroup(GroupKind.FULL, 4), FakeGroup(GroupKind.WINDOW, 4, 9))
    stages: tuple[tuple[int, ...], ...] = ((2, 2),)  # layers of each group on each rank
    chunk: int = 16
    gpu_blocks: int = 128
    slots: int = 64
    interval: int = 0
    staging_bytes: int = 1 << 14  # of a buffer on the device, at least
    retention: float = 1.0  # share of boundaries whose state vLLM keeps and offers


class FakeGroups(FakeScheduler):
    """One engine: scheduler side, workers, and everything of vLLM between them."""

    setup: GroupSetup
    frees_blocks = True  # once they leave a window

    def __init__(self, setup: GroupSetup) -> None:
        self._remote = None if setup.server is None else replace(REMOTE, max_queue=setup.max_write_queue)
        self.words = [STATE_WORDS if group.kind is GroupKind.STATE else group.block for group in setup.groups]
        self.failed_loads: set[str] = set()
        self.failures = 0  # of requests that have waited for a load
        rules = SaveRules(
            lcm(*(group.block for group in setup.groups)),
            setup.chunk,
            setup.save_decode,
            setup.save_tails,
            spares_last_token=True,
            marks_decode=any(group.kind is GroupKind.STATE for group in setup.groups),
        )
        load_rules = LoadRules(async_load=True, runs_ahead=setup.run_ahead > 0, only_if_faster=False)
        options = scheduler_options(setup, rules, load_rules, self._remote)
        caches = [
            [np.full((setup.gpu_blocks, max(self.words)), GARBAGE, np.int64) for _ in range(max(layers))]
            for layers in setup.stages
        ]
        config = options.config.model_copy(update={"checkpoint_interval": setup.interval})
        super().__init__(setup, setup.groups, caches, replace(options, config=config))

    def retains(self) -> bool:
        """See ``FakeTables``."""
        return self.random.random() < self.setup.retention

    # -- workers ----------------------------------------------------------------------------------------------------

    def _worker(self, rank: int) -> StoreWorker:
        setup = self.setup
        paged = self._paged(rank)
        groups = Groups(
            tuple(
                Group(group.kind, group.block, size_bytes, group.span)
                for group, size_bytes in zip(self.groups, paged.block_bytes, strict=True)
            )
        )
        remote = replace(self._remote, rank=rank) if self._remote else None
        options = self._engine_options(rank, paged.layout.slot_bytes, 4 << 20, remote)
        how = WorkerOptions(async_save=setup.async_save, overwrites_early=setup.overwrites_early, groups=groups)
        return StoreWorker(paged, Namespace({"model": "groups", "shard": rank}), options, how)

    def _paged(self, rank: int) -> GroupedPagedKV:
        bound: list[PagedKV | None] = []
        for number, count in enumerate(self.setup.stages[rank]):
            first = next((paged for paged in bound if paged is not None), None)
            bound.append(self._bind_group(rank, number, count, first) if count else None)
        full = [number for number, group in enumerate(self.groups) if group.kind is GroupKind.FULL]
        return bind_groups(bound, full, block_tokens=self.align, chunk_tokens=self.setup.chunk)

    def _bind_group(self, rank: int, number: int, count: int, first: PagedKV | None) -> PagedKV:
        caches = {
            f"{number}.{at}": cache[:, : self.words[number]] for at, cache in enumerate(self.caches[rank][:count])
        }
        block_tokens, chunk_tokens = self.groups[number].block, self.setup.chunk
        return self._bind(caches, block_tokens, chunk_tokens, staging_bytes=self.setup.staging_bytes, beside=first)

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _execute(self, step: Step) -> None:
        for worker, plan in zip(self.workers, self._prepare(step), strict=True):
            if self.random.random() < 0.3:
                worker._background._stores.submit(time.sleep, 0.002)  # stores may read blocks as late as that
            worker.begin_step(plan)
            worker.load()
        for part in step.work:
            self._compute(step, part)
        for worker in self.workers:
            worker.store()
            worker.end_loads()
            assert not worker.take_failed_block_ids(), "vLLM would end the engine"
            self.failed_loads |= worker.take_failed_requests()
            self._take_report(step, worker)
            self._take_fetched(step, worker)
            step.failed |= self.failed_loads & step.fetched
            self.failed_loads -= step.failed
        assert all((cache[NULL] == GARBAGE).all() for layers in self.caches for cache in layers), (
            "the null block is written"
        )
        assert not self.wrong, self.wrong

    def _write(self, step: Step, part: Scheduled, tokens: list[int], start: int) -> None:
        values = kv_of(f"{self.weights} {part.request.salt}", tokens)

        def write() -> None:
            wrong = self._wrong_group(part.tables, values, start)
            for number in range(len(self.groups)):
                self._write_group(number, part.tables[number], values if wrong is None else -values, start)
            assert wrong is None, f"{part.request.request_id}: wrong bytes of group {wrong} before token {start}"

        self._launch(write)

    def _layers(self, number: int) -> list[tuple[Cache, int]]:
        """Return the caches of a group's layers on all ranks, with a number that distinguishes their values."""
        return [
            (cache[:, : self.words[number]], 1 + at + 100 * number + 10_000 * rank)
            for rank, caches in enumerate(self.caches)
            for at, cache in enumerate(caches[: self.setup.stages[rank][number]])
        ]

    def _wrong_group(self, tables: list[list[int]], values: npt.NDArray[np.int64], start: int) -> int | None:
        """Return the first group that lacks what the token at ``start`` attends to."""
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            positions = range(group.first_needed(start), start)
            for cache, mark in self._layers(number):
                if group.kind is GroupKind.STATE:
                    found = cache[table[(start - 1) // group.block]].tolist() if start else []
                    right = found == ([int(values[start - 1]) + mark, start] if start else [])
                else:
                    found = [cache[table[at // group.block], at % group.block] for at in positions]
                    right = found == [int(values[at]) + mark for at in positions]
                if not right:
                    return number
        return None

    def _write_group(self, number: int, table: list[int], values: npt.NDArray[np.int64], start: int) -> None:
        group, end = self.groups[number], len(values)
        for cache, mark in self._layers(number):
            if group.kind is GroupKind.STATE:
                cache[table[(end - 1) // group.block]] = [int(values[end - 1]) + mark, end]
                continue
            for at in range(start, end):
                assert table[at // group.block] != NULL
                cache[table[at // group.block], at % group.block] = int(values[at]) + mark

    def _set_back(self, step: Step) -> list[FakeRequest]:
        for req_id in step.failed:
            self.loading[req_id][0].num_computed_tokens = 0
            self.loading[req_id][0].failed = True
            self.failures += 1
        return []

    def _allocated(self, request: FakeRequest, external: int) -> None:
        super()._allocated(request, external)
        request.failed = False  # it computes now; preempted, it may be offered a hit again

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_offer(self, request: FakeRequest, num_local: int, external: int) -> None:
        assert external % self.align == 0
        assert num_local + external < request.num_tokens
        assert not (external and request.failed), "a failed load is tried again, and again"
        assert self.scheduler.is_async_load(request.request_id) or not external

    def _check_plan(self, plan: StepPlan) -> None:
        """Check that a load brings exactly what its request needs and does not share; stores must read whole tables."""
        for fetch in plan.fetches:
            if fetch.req_id == NO_REQUEST:
                assert not any(len(job.block_ids) for job in fetch.loads)
                continue
            request = self.loading[fetch.req_id][0]
            rows = {int(row) for job in fetch.loads for row in job.block_ids}
            wanted = {row for row in rows if row & ((1 << _ROW_BITS) - 1)}
            needed = set()
            for number, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
                for at in group.needed_blocks(request.num_computed_tokens):
                    if at * group.block >= request.local:
                        assert self.uses[table[at]] == 1, "a shared block"
                        needed.add((number << _ROW_BITS) + table[at])
            assert NULL not in {row & ((1 << _ROW_BITS) - 1) for row in needed}
            assert wanted == needed or (fetch.lost_block_ids and wanted <= needed)
            for job in fetch.loads:
                is_wanted = any(int(row) in wanted for row in job.block_ids)
                assert is_wanted or job.step.source is Place.MEMORY, "read for nothing"
        for meta in plan.requests:
            assert not meta.loads
            for store in meta.stores:
                assert all(self.uses[int(row) & ((1 << _ROW_BITS) - 1)] for row in store.block_ids), "a free block"
