"""The workers of a `FakeGroups` and the model that they serve: every byte of every step is checked.

All groups alias one pool of blocks, as in vLLM: a block holds what was last written to it, of whatever group. Before
each step every token that the model attends to must hold the right KV, and the block of the last token the right state,
by the definition of each kind.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvstore import assembly
from kvstore.adapters.vllm.plan import StepPlan, StepReport
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.connected import Connected
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.catalog.entries import NO_SLOT
from kvstore.catalog.index import ChunkIndex
from kvstore.catalog.plans import Place
from kvstore.checkpoints.groups import Group, Groups, Kind
from kvstore.keys import Namespace
from kvstore.options import EngineOptions, RemoteOptions
from kvstore.paged.base import PagedKV, find_planes
from kvstore.paged.binding import bind_groups, bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.grouped import GroupedPagedKV
from support.fake_parts import GARBAGE, kv_of, sample
from support.fake_tables import NULL, FakeGroup, FakeTables, GroupRequest
from support.idle import are_loads_idle, are_saves_idle
from support.late_device import LateDevice, LateStreams
from support.remote import REMOTE, FakeServer
from support.uses import uses_of

STATE_WORDS = 2
_ROW_BITS = 32


@dataclass(frozen=True)
class GroupSetup:
    """How to build a `FakeGroups`."""

    groups: tuple[FakeGroup, ...] = (FakeGroup(Kind.FULL, 4), FakeGroup(Kind.WINDOW, 4, 9))
    stages: tuple[tuple[int, ...], ...] = ((2, 2),)  # layers of each group on each rank
    chunk: int = 16
    gpu_blocks: int = 128
    slots: int = 64
    folder: Path | None = None
    server: FakeServer | None = None
    local_cpu: bool = True
    save_decode: bool = False
    save_tails: bool = True
    interval: int = 0
    min_retrieve_tokens: int = 0
    min_remote_tokens: int = 0
    max_tokens_per_load: int = 0
    max_write_queue: int | None = None
    verify_fraction: float = 0.0
    run_ahead: int = 0
    budget: int = 64
    async_save: bool = False
    overwrites_early: bool = False
    retention: float = 1.0  # how often the state at a boundary is kept by vLLM, and offered
    eagerness: float | None = None  # of a device that does its work as late as it may
    staging_bytes: int = 1 << 14  # of a buffer on the device, at the least
    copies: bool = False  # some blocks are copied where others would be shared, as by vLLM's model runner V2
    seed: int = 0


@dataclass
class Part:
    """A request's part in a step."""

    request: GroupRequest
    count: int
    samples: bool
    tables: list[list[int]]


@dataclass
class Step:
    """A step on its way."""

    plan: StepPlan
    work: list[Part]
    report: StepReport | None = None
    outputs: dict[str, int] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


class GroupRunner(FakeTables):
    """The scheduler side, its workers, and the model that they serve."""

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup.groups, setup.gpu_blocks)
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.late = None
        if setup.eagerness is not None:
            self.late = LateDevice(setup.seed, eagerness=setup.eagerness, is_uneven=True)
        self.wrong: list[AssertionError] = []  # found by what was launched
        self.words = [STATE_WORDS if group.kind is Kind.STATE else group.block for group in setup.groups]
        self.pages = [
            [np.full((setup.gpu_blocks, max(self.words)), GARBAGE, np.int64) for _ in range(max(layers))]
            for layers in setup.stages
        ]
        remote = None
        if setup.server is not None:
            remote = replace(REMOTE, max_queue=setup.max_write_queue)
        self.scheduler = StoreScheduler(self._options(remote))
        self.workers: list[StoreWorker] = []
        with patch.object(assembly, "open_tier", setup.server.open) if setup.server else nullcontext():
            try:
                self.workers.extend(self._worker(rank, remote) for rank in range(len(setup.stages)))
                self.scheduler.connect([worker.facts() for worker in self.workers])
            except BaseException:
                self.close()
                raise
        self.weights = 0
        self.loading: dict[str, tuple[GroupRequest, int]] = {}  # until so many ranks have reported
        self.kept: dict[str, tuple[GroupRequest, int]] = {}
        self.failed_loads: set[str] = set()

    def _options(self, remote: RemoteOptions | None) -> SchedulerOptions:
        setup = self.setup
        return SchedulerOptions(
            SaveRules(
                self.align,
                setup.chunk,
                setup.save_decode,
                setup.save_tails,
                spares_last_token=True,
                marks_decode=any(group.kind is Kind.STATE for group in self.groups),
            ),
            local_cpu=setup.local_cpu,
            min_retrieve_tokens=setup.min_retrieve_tokens,
            min_remote_tokens=setup.min_remote_tokens,
            max_tokens_per_load=setup.max_tokens_per_load,
            max_write_queue=setup.max_write_queue,
            remote=remote,
            load_rules=LoadRules(async_load=True, runs_ahead=setup.run_ahead > 0, only_if_faster=False),
            async_save=setup.async_save,
            verify_fraction=setup.verify_fraction,
            checkpoint_interval_tokens=setup.interval,
        )

    # -- workers ----------------------------------------------------------------------------------------------------

    def _worker(self, rank: int, remote: RemoteOptions | None) -> StoreWorker:
        setup = self.setup
        paged = self._paged(rank)
        groups = Groups(
            tuple(
                Group(group.kind, group.block, size_bytes, group.span)
                for group, size_bytes in zip(self.groups, paged.block_bytes, strict=True)
            )
        )
        options = EngineOptions(
            max_local_cpu_bytes=setup.slots * paged.layout.slot_bytes,
            local_cpu=setup.local_cpu,
            local_disk=setup.folder / f"rank-{rank}" if setup.folder else None,
            max_local_disk_bytes=4 << 20,
            use_odirect=False,
            disk_io_threads=2,
            remote=replace(remote, rank=rank) if remote else None,
        )
        how = WorkerOptions(async_save=setup.async_save, overwrites_early=setup.overwrites_early, groups=groups)
        return StoreWorker(paged, Namespace({"model": "groups", "shard": rank}), options, how)

    def _paged(self, rank: int) -> GroupedPagedKV:
        bound: list[PagedKV | None] = []
        for number, count in enumerate(self.setup.stages[rank]):
            first = next((paged for paged in bound if paged is not None), None)
            bound.append(self._bind(rank, number, count, first) if count else None)
        full = [number for number, group in enumerate(self.groups) if group.kind is Kind.FULL]
        return bind_groups(bound, full, block_tokens=self.align, chunk_tokens=self.setup.chunk)

    def _bind(self, rank: int, number: int, count: int, first: PagedKV | None) -> PagedKV:
        blocks, words = self.setup.gpu_blocks, self.words[number]
        layers = {
            f"{number}.{at}": torch.from_numpy(page)[:, :words] for at, page in enumerate(self.pages[rank][:count])
        }
        paged = bind_paged_kv(
            layers,
            num_blocks=blocks,
            block_tokens=self.groups[number].block,
            chunk_tokens=self.setup.chunk,
            reserved_blocks=1,
        )
        if self.late is None:
            return paged
        planes = [find_planes(name, cache, blocks) for name, cache in layers.items()]
        assert first is None or isinstance(first, DevicePagedKV)
        streams = LateStreams(self.late) if first is None else None
        return DevicePagedKV(
            planes, paged.layout, blocks, 1, streams=streams, staging_bytes=self.setup.staging_bytes, beside=first
        )

    @property
    def index(self) -> ChunkIndex:
        """The scheduler's catalog."""
        return self.connected.index

    @property
    def connected(self) -> Connected:
        """What the scheduler plans with."""
        assert self.scheduler._connected is not None
        return self.scheduler._connected

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def retains(self) -> bool:
        """See ``FakeTables``."""
        return self.random.random() < self.setup.retention

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _launch(self, work: Callable[[], None]) -> None:
        """Have the model do something: at once, or on its stream."""
        if self.late is None:
            work()
            return

        def noting_errors() -> None:  # any thread that waits for the device may do it
            try:
                work()
            except AssertionError as error:
                self.wrong.append(error)

        self.late.current.launch(noting_errors)

    def _let_time_pass(self) -> None:
        if self.late is None:
            return
        if self.random.random() < 0.05:
            self.late.run_all()  # or a slow stream never ends beside a fast one
        for _ in range(20):
            self.late.run_at_random()

    def execute(self, step: Step) -> None:
        plans = [copy.deepcopy(step.plan) for _ in self.workers]
        if self.setup.overwrites_early:
            self._overwrite_taken()
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.prepare(plan)
        if not self.setup.overwrites_early:
            self._overwrite_taken()
        for worker, plan in zip(self.workers, plans, strict=True):
            if self.random.random() < 0.3:
                worker._background._stores.submit(time.sleep, 0.002)  # stores may read blocks as late as that
            worker.begin_step(plan)
            worker.load()
        for part in step.work:
            self._compute(step, part)
        for worker in self.workers:
            worker.store()
            worker.end_loads()
            self._take_moved(step, worker)
        assert all((page[NULL] == GARBAGE).all() for pages in self.pages for page in pages), "the null block is written"
        assert not self.wrong, self.wrong

    def _take_moved(self, step: Step, worker: StoreWorker) -> None:
        """What one rank tells vLLM at the end of a step; vLLM counts how many ranks have said so."""
        assert not worker.take_failed_block_ids(), "vLLM would end the engine"
        self.failed_loads |= worker.take_failed_requests()
        report = copy.deepcopy(worker.take_report())
        if step.report is None:
            step.report = report
        elif report is not None:
            step.report.merge(report)
        for req_id in worker.take_fetched_requests():
            request, ranks = self.loading[req_id]
            self.loading[req_id] = (request, ranks - 1)
            if ranks == 1:
                step.fetched.add(req_id)
        for req_id in worker.take_ended_requests():
            request, ranks = self.kept[req_id]
            self.kept[req_id] = (request, ranks - 1)
            if ranks == 1:
                step.ended.add(req_id)
        step.failed |= self.failed_loads & step.fetched
        self.failed_loads -= step.failed

    def _overwrite_taken(self) -> None:
        """The step that is carried out may overwrite the blocks that its schedule has given away, and copy to some."""
        blocks, self.taken = self.taken, []
        copies, self.copies = self.copies, []

        def scramble() -> None:
            for pages in self.pages:
                for page in pages:
                    page[blocks] = GARBAGE
                    for source, target in copies:
                        page[target] = page[source]

        if blocks:
            self._launch(scramble)

    def _compute(self, step: Step, part: Part) -> None:
        request = part.request
        tokens = list(request.all_token_ids)
        start = request.on_gpu
        end = request.on_gpu = start + part.count
        while len(tokens) < end:  # sampled by a step whose output nobody has seen yet
            tokens.append(sample(tokens))
        if part.samples:
            step.outputs[request.request_id] = sample(tokens[:end])
        values = kv_of(f"{self.weights} {request.salt}", tokens[:end])

        def compute() -> None:
            wrong = self._wrong_group(part.tables, values, start)
            for number in range(len(self.groups)):
                self._write(number, part.tables[number], values if wrong is None else -values, start, end)
            assert wrong is None, f"{request.request_id}: wrong bytes of group {wrong} before token {start}"

        self._launch(compute)

    def _layers(self, number: int) -> list[tuple[npt.NDArray[np.int64], int]]:
        """The pages of a group's layers on all ranks, with what tells their values apart."""
        return [
            (page[:, : self.words[number]], 1 + at + 100 * number + 10_000 * rank)
            for rank, pages in enumerate(self.pages)
            for at, page in enumerate(pages[: self.setup.stages[rank][number]])
        ]

    def _wrong_group(self, tables: list[list[int]], values: npt.NDArray[np.int64], start: int) -> int | None:
        """The first group that does not hold what the token at ``start`` attends to."""
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            positions = range(group.first_needed(start), start)
            for page, mark in self._layers(number):
                if group.kind is Kind.STATE:
                    found = page[table[(start - 1) // group.block]].tolist() if start else []
                    right = found == ([int(values[start - 1]) + mark, start] if start else [])
                else:
                    found = [page[table[at // group.block], at % group.block] for at in positions]
                    right = found == [int(values[at]) + mark for at in positions]
                if not right:
                    return number
        return None

    def _write(self, number: int, table: list[int], values: npt.NDArray[np.int64], start: int, end: int) -> None:
        group = self.groups[number]
        for page, mark in self._layers(number):
            if group.kind is Kind.STATE:
                page[table[(end - 1) // group.block]] = [int(values[end - 1]) + mark, end]
                continue
            for at in range(start, end):
                assert table[at // group.block] != NULL
                page[table[at // group.block], at % group.block] = int(values[at]) + mark

    # -- checks -----------------------------------------------------------------------------------------------------

    def assert_nothing_leaked(self) -> None:
        """After `settle`: no lease, plan, write, slot or block is left."""
        assert uses_of(self.index) == 0
        assert not self.scheduler._steps.in_flight
        assert are_saves_idle(self.connected.saves)
        assert are_loads_idle(self.connected.loads)
        assert not +self.connected.loads._fetched_keys
        assert not self.scheduler._trackers
        slots = [chunk.slot for chunk in self.index._chunks.values() if chunk.memory is not NO_SLOT]
        assert len(slots) == len(set(slots)) == self.index.slots_in_use
        assert not self.deferred_frees
        assert not any(self.uses.values())
        assert sorted(self.free) == list(range(1, self.num_blocks))

    def check_plan(self, plan: StepPlan) -> None:
        """A load brings what its request needs and does not share, no more and no less; stores read whole tables."""
        for fetch in plan.fetches:
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
