"""Plays vLLM's model runner around real `StoreWorker`s, and checks every byte of every step.

A step computes the KV of a token only if all KV before it is right, as attention would, and garbage otherwise; so a
wrong byte in any block, once used, is an error that names the request.
"""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvstore import assembly
from kvstore.adapters.vllm.plan import StepReport
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.connected import Connected
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.worker.pushes import PushOptions
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.catalog.entries import NO_SLOT
from kvstore.catalog.index import ChunkIndex
from kvstore.catalog.plans import Place
from kvstore.keys import KeyExtras, Namespace, PrefixHasher
from kvstore.options import EngineOptions, RemoteOptions
from kvstore.paged.base import PagedKV, find_planes
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from support.fake_blocks import FakeBlocks
from support.fake_parts import (
    BLOCK,
    CHUNK,
    CHUNK_FILE_BYTES,
    CHUNK_SLOT_BYTES,
    GARBAGE,
    LAYERS,
    SERVER_BYTES,
    FakeRequest,
    Listener,
    Scheduled,
    Setup,
    Step,
    kv_of,
    remote_of,
    sample,
)
from support.idle import are_loads_idle, are_saves_idle
from support.late_device import LateDevice, LateStreams
from support.uses import uses_of


class FakeRunner(FakeBlocks):
    """The scheduler side, `ranks` workers, and the model that they serve."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.gpu_blocks)
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.late = None
        if setup.eagerness is not None:
            self.late = LateDevice(setup.seed, eagerness=setup.eagerness, is_uneven=True)
        self.wrong: list[AssertionError] = []  # found by what was launched
        self._remote = remote_of(setup)
        self.scheduler = StoreScheduler(
            SchedulerOptions(
                SaveRules(BLOCK, CHUNK, setup.save_decode, setup.save_tails, setup.skip_last_tokens),
                loads=setup.loads,
                saves=setup.saves,
                local_cpu=setup.local_cpu,
                priority_limit=setup.priority_limit,
                min_retrieve_tokens=setup.min_retrieve_tokens,
                min_remote_tokens=setup.min_remote_tokens,
                max_tokens_per_load=setup.max_tokens_per_load,
                max_write_queue=setup.max_write_queue,
                remote=self._remote,
                load_rules=LoadRules(setup.async_load, setup.run_ahead > 0, setup.layerwise),
                async_save=setup.async_save,
                announces=True,
                verify_fraction=setup.verify_fraction,
                handover=setup.handover or HandoverOptions(),
            )
        )
        self.heard = Listener()
        self._shareable: list[FakeRequest] = []  # all that came without tags
        self.weights = 0
        self.epochs = {0: ""}  # of the weights so far
        stages = setup.stages or (LAYERS,) * setup.ranks
        self.caches = [
            [np.full((setup.gpu_blocks, BLOCK), GARBAGE, np.int64) for _ in range(layers)] for layers in stages
        ]
        self.workers: list[StoreWorker] = []
        with patch.object(assembly, "open_tier", setup.server.open) if setup.server else nullcontext():
            try:
                self.workers.extend(self._worker(rank) for rank in range(len(stages)))
                self.scheduler.connect([worker.facts() for worker in self.workers])
            except BaseException:
                self.close()
                raise
        self._has_survivors = len(self.index) > 0
        self.in_flight: deque[Step] = deque()
        self.kept: dict[str, tuple[FakeRequest, int]] = {}  # ended, blocks kept until so many ranks have reported
        self.loading: dict[str, tuple[FakeRequest, int]] = {}  # wait for a fetch, until so many ranks have reported

    def _worker(self, rank: int) -> StoreWorker:
        setup = self.setup
        paged, layers = self._paged(rank), range(len(self.caches[rank]))
        options = EngineOptions(
            max_local_cpu_bytes=setup.slots * CHUNK_SLOT_BYTES,
            local_cpu=setup.local_cpu,
            local_disk=setup.folder / f"rank-{rank}" if setup.folder else None,
            max_local_disk_bytes=setup.disk_chunks * CHUNK_FILE_BYTES,
            use_odirect=False,
            disk_io_threads=2,
            remote=self._remote_at(rank),
            max_local_gpu_bytes=setup.hot_slots * CHUNK_SLOT_BYTES,
        )
        push = None
        if setup.receiver is not None:
            push = PushOptions(rank, setup.push_slots * CHUNK_SLOT_BYTES, connect=setup.receiver.connect)
        names = tuple(f"layer.{number}" for number in layers)
        how = WorkerOptions(names, setup.layerwise, setup.async_save, push, setup.overwrites_early)
        server = None
        if setup.port is not None:
            where = EmbeddedOptions(SERVER_BYTES, "127.0.0.1", setup.port + rank)
            server = EmbeddedServer(self.namespace(rank), paged.layout, where)
        return StoreWorker(paged, self.namespace(rank), options, how, server)

    def _paged(self, rank: int) -> PagedKV:
        blocks = self.setup.gpu_blocks
        layers = {f"layer.{number}": torch.from_numpy(cache) for number, cache in enumerate(self.caches[rank])}
        paged = bind_paged_kv(layers, num_blocks=blocks, block_tokens=BLOCK, chunk_tokens=CHUNK, reserved_blocks=1)
        if self.late is None:
            return paged
        planes = [find_planes(name, cache, blocks) for name, cache in layers.items()]
        streams = LateStreams(self.late)
        return DevicePagedKV(
            planes,
            paged.layout,
            blocks,
            1,
            streams=streams,
            staging_bytes=self.setup.staging_chunks * paged.layout.payload_bytes(paged.layout.blocks_per_chunk),
            copy_bytes=self.setup.copy_bytes,
        )

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
        if self.late is not None:
            for _ in range(20):
                self.late.run_at_random()

    def namespace(self, rank: int = 0, weights: int = 0) -> Namespace:
        """Of a rank's chunks, as computed with certain weights."""
        namespace = Namespace({"model": "fake", "shard": 0 if self.setup.replicas else rank})
        return namespace.at_epoch(self.epochs[weights]) if self.epochs[weights] else namespace

    def _remote_at(self, rank: int) -> RemoteOptions | None:
        if self._remote is None:
            return None
        sends = self.setup.port is not None or not (rank and self.setup.replicas)
        return replace(self._remote, sends=sends, rank=rank)

    def _mark(self, rank: int, layer: int) -> int:
        """Tells the KV of one layer of one rank from that of others."""
        return layer + (0 if self.setup.replicas else 1000 * rank)

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

    # -- a step -----------------------------------------------------------------------------------------------------

    def _overwrite_taken(self) -> None:
        """The step that is carried out may overwrite the blocks that its schedule has given away, and copy to some."""
        blocks, self.taken = self.taken, []
        copies, self.copies = self.copies, []

        def scramble() -> None:
            for layers in self.caches:
                for layer in layers:
                    layer[blocks] = GARBAGE
                    for source, target in copies:
                        layer[target] = layer[source]

        self._launch(scramble)

    def _execute(self, step: Step) -> None:
        plans = [copy.deepcopy(step.plan) for _ in self.workers]  # each rank gets its own, as over a wire
        if self.setup.overwrites_early:
            self._overwrite_taken()
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.prepare(plan)
        if not self.setup.overwrites_early:
            self._overwrite_taken()
        for worker, plan in zip(self.workers, plans, strict=True):
            if self.late is not None and self.random.random() < 0.3:
                worker._background._stores.submit(time.sleep, 0.005)  # or this thread lets the device do all at once
            worker.begin_step(plan)
            if step.has_loads:
                worker.load()
            if step.work and self.setup.layerwise:
                for number in range(max(map(len, self.caches))):  # a stage passes by those of others
                    worker.wait_for_layer(f"layer.{number}")
            worker.end_loads()
            step.failed_blocks |= worker.take_failed_block_ids()
            self._take_fetched(step, worker)
        for part in step.work:
            self._compute(step, part)
        merged: StepReport | None = None
        for worker in self.workers:
            if step.work and (self.setup.layerwise or self.setup.receiver is not None):
                for number in range(max(map(len, self.caches))):  # a stage passes by those of others
                    worker.save_layer(f"layer.{number}")
            if not step.has_loads:
                worker.load()
            if not self.setup.defer_stores:
                worker.store()
            worker.end_loads()
            step.failed_blocks |= worker.take_failed_block_ids()
            self._take_fetched(step, worker)
            report = copy.deepcopy(worker.take_report())
            for req_id in worker.take_ended_requests():
                self._rank_ended(step, req_id)
            if merged is None:
                merged = report
            elif report is not None:
                merged.merge(report)
            if self.setup.defer_stores:
                worker.store()
        step.report = merged
        assert not self.wrong, self.wrong

    def _take_fetched(self, step: Step, worker: StoreWorker) -> None:
        for req_id in worker.take_fetched_requests():
            request, ranks = self.loading[req_id]
            self.loading[req_id] = (request, ranks - 1)
            if ranks == 1:
                step.fetched.add(req_id)

    def _rank_ended(self, step: Step, req_id: str) -> None:
        request, ranks = self.kept[req_id]
        self.kept[req_id] = (request, ranks - 1)
        if ranks == 1:
            step.ended.add(req_id)

    def _compute(self, step: Step, part: Scheduled) -> None:
        request = part.request
        tokens = list(request.all_token_ids)
        start = request.on_gpu
        end = start + part.count - part.drafts
        while len(tokens) < end:  # sampled by a step whose output nobody has seen yet
            tokens.append(sample(tokens))
        accepted = 0
        if part.samples:
            accepted = self.random.randint(0, part.drafts)
            for _ in range(accepted + 1):
                tokens.append(sample(tokens))
            step.outputs[request.request_id] = tokens[end : end + accepted + 1]
            step.rejected[request.request_id] = part.drafts - accepted
        self._write(step, part, tokens, start, end + accepted)
        blocks = list(part.blocks)
        for position in range(end + accepted, end + part.drafts):  # rejected drafts leave their KV behind
            self._launch(partial(self._put, blocks, position, GARBAGE + position))
        request.on_gpu = end + accepted

    def _write(self, step: Step, part: Scheduled, tokens: list[int], start: int, end: int) -> None:
        """Compute the KV of ``[start, end)``, from what stands before it."""
        request, blocks, unheard = part.request, list(part.blocks), [*self.in_flight, step]
        values = kv_of(f"{self.weights} {request.salt}", tokens[:end])
        is_mixed = request.mixed

        def write() -> None:
            right = not is_mixed and self._holds(blocks, values[:start])
            for position in range(start, end):
                self._put(blocks, position, int(values[position]) if right else -position)
            assert right or is_mixed or any(not earlier.failed_blocks.isdisjoint(blocks) for earlier in unheard), (
                f"{request.request_id}: wrong bytes before token {start}"
            )

        self._launch(write)

    def _put(self, blocks: list[int], position: int, value: int) -> None:
        block, offset = blocks[position // BLOCK], position % BLOCK
        for rank, layers in enumerate(self.caches):
            for number, layer in enumerate(layers):
                layer[block, offset] = value + self._mark(rank, number)

    def _holds(self, blocks: list[int], values: npt.NDArray[np.int64]) -> bool:
        """Whether the blocks begin with this KV, in every layer of every rank."""
        return all(
            bool((layer[blocks].reshape(-1)[: len(values)] == values + self._mark(rank, number)).all())
            for rank, layers in enumerate(self.caches)
            for number, layer in enumerate(layers)
        )

    # -- checks -----------------------------------------------------------------------------------------------------

    def payload(self, tokens: Sequence[int], num_blocks: int, salt: str, rank: int, weights: int) -> bytes:
        """What the last blocks of a sequence must be, as a chunk."""
        values = kv_of(f"{weights} {salt}", tokens)[-num_blocks * BLOCK :]
        layers = range(len(self.caches[rank]))
        return b"".join((values + self._mark(rank, layer)).tobytes() for layer in layers)

    def chunk_files(self, rank: int = 0) -> list[Path]:
        """The files of the chunks on one rank's disk."""
        assert self.setup.folder is not None
        home = self.setup.folder / f"rank-{rank}"
        mover = self.workers[rank]._mover
        assert mover.settle(10) or mover.cpu._pool._preparation._closing.is_set()
        return sorted(path for path in home.rglob("*.safetensors") if path.parent.name != ".free")

    def assert_nothing_leaked(self) -> None:
        """After `settle`: no lease, plan, write, slot or block is left."""
        scheduler = self.scheduler
        assert uses_of(self.index) == 0
        assert not scheduler._steps.in_flight
        assert are_saves_idle(self.connected.saves)
        assert are_loads_idle(self.connected.loads)
        assert not +self.connected.loads._fetched_keys
        assert not scheduler._trackers
        chunks = self.index._chunks.values()
        slots = [chunk.slot for chunk in chunks if chunk.memory is not NO_SLOT]
        assert len(slots) == len(set(slots)) == self.index.slots_in_use
        assert not self.deferred_frees
        assert not any(self.uses.values())
        assert sorted(self.free) == list(range(1, self.setup.gpu_blocks))
        self._assert_routers_know()
        if self.setup.folder is not None:
            known = {chunk.ref.prefix_key.hex() for chunk in chunks if chunk.on_disk}
            for rank in range(len(self.workers)):
                for path in self.chunk_files(rank):
                    assert any(key in path.name for key in known), f"rank {rank}: {path.name} is not in the index"

    def _assert_routers_know(self) -> None:
        """What was announced is what is there, except for chunks that were on disk at start and not used since."""
        for place, heard in self.heard.blocks.items():
            there = dict(block for request in self._shareable for block in self._blocks_in(request, place))
            assert heard.items() <= there.items(), place
            assert heard.keys() == there.keys() or (place is Place.DISK and self._has_survivors), place
        assert self.scheduler._announcer is not None
        assert all(key in self.index for key in self.scheduler._announcer._known)

    def _blocks_in(self, request: FakeRequest, place: Place) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """The blocks of a request in the chunks of one place, each with its tokens."""
        hasher = PrefixHasher(CHUNK, BLOCK, KeyExtras(cache_salt=request.salt))
        hasher.update(request.all_token_ids)
        blocks = CHUNK // BLOCK
        for chunk in range(len(hasher.chunk_keys()) + 1):
            keys = hasher.block_keys(chunk)
            held = max((number for number, key in enumerate(keys, 1) if self.index.holds(key, place)), default=0)
            for block in range(chunk * blocks, chunk * blocks + held):
                yield request.block_hashes[block], tuple(request.all_token_ids[block * BLOCK : (block + 1) * BLOCK])
