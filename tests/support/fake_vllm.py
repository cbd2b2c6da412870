"""Plays vLLM's scheduler and model runner around a `StoreScheduler` and real `StoreWorker`s, without vLLM.

The KV of a token is a hash over all tokens up to it, written into real tensors. A step computes it only if all KV
before it is right, as attention would, and garbage otherwise; so a wrong byte in any block, once used, is an error that
names the request. Modelled, because it is what goes wrong: blocks shared by prefix before they are loaded, freed blocks
filled with garbage, steps planned before the last one's report, rejected drafts, preemption, aborts, new weights.
"""

from __future__ import annotations

import copy
import hashlib
import random
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvstore import assembly
from kvstore.adapters.vllm.plan import StepPlan, StepReport
from kvstore.adapters.vllm.requests.params import NO_PARAMS, Handover, RequestParams
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.connected import Connected
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.telemetry.announcer import ANNOUNCED, Adapter, Removed, Stored
from kvstore.adapters.vllm.worker.pushes import PushOptions
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.assembly import EngineOptions, RemoteOptions
from kvstore.catalog.index import ChunkIndex
from kvstore.catalog.plans import Place
from kvstore.keys import KeyExtras, Namespace, PrefixHasher
from kvstore.paged.binding import bind_paged_kv
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from support.remote import REMOTE, FakeServer

BLOCK = 4
CHUNK = 16
LAYERS = 2
CHUNK_SLOT_BYTES = 4096
CHUNK_FILE_BYTES = 8192
GARBAGE = 0x6B6B6B6B
_SERVER_BYTES = 8 << 20
VOCABULARY = 50


def kv_of(seed: str, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """The KV of every token; ``seed`` is what besides the tokens decides it."""
    value = zlib.crc32(seed.encode())
    values = []
    for token in tokens:
        value = (value * 6364136223846793005 + token * 2 + 1442695040888963407) % (1 << 62)
        values.append(value)
    return np.array(values, np.int64)


def sample(tokens: Sequence[int]) -> int:
    """The token that the model says next."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


@dataclass(eq=False)
class FakeRequest:
    """Satisfies `RequestView`."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 1
    salt: str = ""
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    priority: int = 0
    placeholders: int = 0
    state: str = "waiting"  # running, preempted, loading, finished
    loaded: bool = False  # the fetch it waited for is over
    blocks: list[int] = field(default_factory=list)
    on_gpu: int = 0  # tokens whose KV the runner has written; drafts rejected are not counted
    stale: int = 0  # outputs on their way that belong to a time before the last preemption or failed load
    drop_stale: bool = False
    in_flight: int = 0
    mixed: bool = False  # some of its KV belongs to weights that are gone
    lora_request: Adapter | None = None
    answer: dict[str, object] | None = None  # what the client hears of its KV

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """Of all whole blocks, each with what comes before it."""
        hasher, hashes = hashlib.sha256(self.salt.encode()), []
        for end in range(BLOCK, self.num_tokens + 1, BLOCK):
            hasher.update(bytes(self.all_token_ids[end - BLOCK : end]))
            hashes.append(hasher.digest())
        return hashes

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens


@dataclass
class Scheduled:
    """A request's part in a step, as the runner sees it."""

    request: FakeRequest
    start: int
    count: int
    drafts: int
    blocks: list[int]
    samples: bool


@dataclass
class Step:
    """A step on its way."""

    plan: StepPlan
    work: list[Scheduled]
    has_loads: bool
    failed_blocks: set[int] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)
    report: StepReport | None = None
    outputs: dict[str, list[int]] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)


class Listener:
    """A router that does not count: it takes each event at its word, and must always be right."""

    def __init__(self) -> None:
        self.blocks: dict[Place, dict[bytes, tuple[int, ...]]] = {place: {} for place in ANNOUNCED}

    def hear(self, events: Iterable[Stored | Removed]) -> None:
        """Take in what was announced."""
        for event in events:
            held = self.blocks[event.place]
            if isinstance(event, Removed):
                for name in event.hashes:
                    del held[name]  # nobody takes back what was not said
                continue
            blocks = event.blocks
            assert len(blocks.token_ids) == BLOCK * len(blocks.hashes)
            for number, name in enumerate(blocks.hashes):
                assert name not in held, "said twice"
                held[name] = tuple(blocks.token_ids[number * BLOCK : (number + 1) * BLOCK])


@dataclass(frozen=True)
class Setup:
    """How to build a `FakeVllm`."""

    folder: Path | None = None
    ranks: int = 1
    stages: tuple[int, ...] = ()  # with pipeline parallelism, the layers of each rank
    replicas: bool = False  # all ranks hold the same KV, as with MLA
    gpu_blocks: int = 64
    slots: int = 16
    disk_chunks: int = 64
    local_cpu: bool = True
    loads: bool = True
    saves: bool = True
    save_decode: bool = False
    save_tails: bool = True
    skip_last_tokens: int = 0
    priority_limit: int | None = None
    min_retrieve_tokens: int = 0
    max_tokens_per_load: int = 0
    max_write_queue: int | None = None
    verify_fraction: float = 0.0
    run_ahead: int = 0  # steps planned before the report of the first of them
    drafts: int = 0
    budget: int = 64
    max_running: int = 8
    defer_stores: bool = False  # a draft model: the report leaves before the stores are done
    async_load: bool | None = False  # loads; None lets the adapter choose
    async_save: bool = False
    layerwise: bool = False
    seed: int = 0
    server: FakeServer | None = None  # a remote tier, shared with others
    handover: HandoverOptions | None = None
    receiver: FakeServer | None = None  # where requests are handed over
    push_slots: int = 8
    port: int | None = None  # of the first rank's own server, for other engines
    peers: tuple[str, ...] | None = None  # other engines, over real sockets
    sources: tuple[str, ...] = ()  # other engines that requests may name
    lookup_timeout_s: float = 5.0
    hold_s: float | None = None  # how long answers of the remote tier count, if not for long
    min_remote_tokens: int = 0


def _remote_of(setup: Setup) -> RemoteOptions | None:
    """What comes from elsewhere: from a tier in a dictionary, or over real sockets."""
    if setup.port is not None or setup.peers is not None:
        num_sends = 0 if setup.port is None else 64
        peers, timeout_s = setup.peers or (), setup.lookup_timeout_s
        return RemoteOptions(
            None, lookup_timeout_s=timeout_s, hold_s=0.2, max_queue=num_sends, peers=peers, sources=setup.sources
        )
    if setup.server is None:
        return None
    hold_s = REMOTE.hold_s if setup.hold_s is None else setup.hold_s
    timeout_s = setup.lookup_timeout_s
    return replace(REMOTE, max_queue=setup.max_write_queue, lookup_timeout_s=timeout_s, hold_s=hold_s)


class FakeVllm:
    """One engine: scheduler side, `ranks` workers, and everything of vLLM between them."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self._remote = _remote_of(setup)
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
        self.free: deque[int] = deque(range(1, setup.gpu_blocks))  # vLLM keeps block 0 for itself
        self.uses = dict.fromkeys(range(setup.gpu_blocks), 0)
        self.hashes: OrderedDict[tuple[str, tuple[int, ...]], int] = OrderedDict()  # the local prefix cache
        self.hash_of: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.kept: dict[str, tuple[FakeRequest, int]] = {}  # ended, blocks kept until so many ranks have reported
        self.deferred_frees: list[tuple[int, list[int]]] = []
        self.in_flight: deque[Step] = deque()
        self.planned = self.processed = 0
        self.loading: dict[str, tuple[FakeRequest, int]] = {}  # wait for a fetch, until so many ranks have reported
        self.preempted = False  # somebody, since the last step
        self.taken: list[int] = []  # blocks given away since
        self.loaded_tokens: dict[str, int] = {}
        self.take: Callable[[int], int] = lambda offered: offered  # how many external tokens vLLM makes use of
        self.recovered = 0  # requests set back by failed loads

    def _worker(self, rank: int) -> StoreWorker:
        setup = self.setup
        layers = {f"layer.{number}": torch.from_numpy(cache) for number, cache in enumerate(self.caches[rank])}
        paged = bind_paged_kv(
            layers, num_blocks=setup.gpu_blocks, block_tokens=BLOCK, chunk_tokens=CHUNK, reserved_blocks=1
        )
        options = EngineOptions(
            max_local_cpu_bytes=setup.slots * CHUNK_SLOT_BYTES,
            local_cpu=setup.local_cpu,
            local_disk=setup.folder / f"rank-{rank}" if setup.folder else None,
            max_local_disk_bytes=setup.disk_chunks * CHUNK_FILE_BYTES,
            use_odirect=False,
            disk_io_threads=2,
            remote=self._remote_at(rank),
        )
        push = None
        if setup.receiver is not None:
            push = PushOptions(rank, setup.push_slots * CHUNK_SLOT_BYTES, connect=setup.receiver.connect)
        how = WorkerOptions(tuple(layers), setup.layerwise, setup.async_save, push)
        server = None
        if setup.port is not None:
            where = EmbeddedOptions(_SERVER_BYTES, "127.0.0.1", setup.port + rank)
            server = EmbeddedServer(self.namespace(rank), paged.layout, where)
        return StoreWorker(paged, self.namespace(rank), options, how, server)

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
        raise AssertionError(f"not done after {max_steps} steps: {self.waiting} {self.running} {self.kept}")

    def ask(self, name: str, tokens: Iterable[int], **how: Any) -> FakeRequest:
        """Add a request and work until all are done."""
        request = self.add(name, tokens, **how)
        self.run()
        return request

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.hashes.clear()
        self.hash_of.clear()

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
        has_loads = False
        skipped: list[FakeRequest] = []
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.blocks))  # first those that hold some
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.setup.max_running:
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
            self.scheduler.allocated(request.request_id, request.blocks, external)
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
        blocks = {part.request.request_id: part.request.blocks for part in work}
        counts = {part.request.request_id: part.count for part in work}
        plan = self.scheduler.plan_step(counts, blocks.__getitem__, preempts=self.preempted)
        self.preempted = False
        for part in work:
            self._after_schedule(part)
        self.planned += 1
        return Step(copy.deepcopy(plan), work, has_loads)

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
        self.scheduler.allocated(request.request_id, request.blocks, 0)
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

    def _execute(self, step: Step) -> None:
        plans = [copy.deepcopy(step.plan) for _ in self.workers]  # each rank gets its own, as over a wire
        for worker, plan in zip(self.workers, plans, strict=True):
            worker.prepare(plan)
        self._scramble_taken()
        for worker, plan in zip(self.workers, plans, strict=True):
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
        for position in range(end + accepted, end + part.drafts):  # rejected drafts leave their KV behind
            self._put(part.blocks, position, GARBAGE + position)
        request.on_gpu = end + accepted

    def _write(self, step: Step, part: Scheduled, tokens: list[int], start: int, end: int) -> None:
        """Compute the KV of ``[start, end)``, from what stands before it."""
        request = part.request
        values = kv_of(f"{self.weights} {request.salt}", tokens[:end])
        right = not request.mixed and self._holds(part.blocks, values[:start])
        if not right and not request.mixed:
            unheard = [*self.in_flight, step]
            assert any(not earlier.failed_blocks.isdisjoint(part.blocks) for earlier in unheard), (
                f"{request.request_id}: wrong bytes before token {start}"
            )
        for position in range(start, end):
            self._put(part.blocks, position, int(values[position]) if right else -position)

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
        if self.scheduler.finish_request(request.request_id, computed):
            assert not loading, "its blocks would be freed twice"
            self.kept[request.request_id] = (request, len(self.workers))
        elif not loading:
            self._free_request(request)

    # -- vLLM's blocks ----------------------------------------------------------------------------------------------

    def _local_hit(self, request: FakeRequest) -> list[int]:
        blocks = []
        for number in range((request.num_tokens - 1) // BLOCK):
            block = self.hashes.get((request.salt, tuple(request.all_token_ids[: (number + 1) * BLOCK])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _cache(self, request: FakeRequest, number: int) -> None:
        key = (request.salt, tuple(request.all_token_ids[: (number + 1) * BLOCK]))
        block = request.blocks[number]
        if block not in self.hash_of and key not in self.hashes:
            self.hashes[key] = block
            self.hash_of[block] = key

    def _uncache(self, block: int) -> None:
        key = self.hash_of.pop(block, None)
        if key is not None:
            del self.hashes[key]

    def _use(self, block: int) -> None:
        if self.uses[block] == 0 and block in self.free:
            self.free.remove(block)
        self.uses[block] += 1

    def _grow(self, request: FakeRequest, num_tokens: int) -> bool:
        missing = -(-num_tokens // BLOCK) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block = self.free.popleft()
            self._uncache(block)
            self.uses[block] = 1
            request.blocks.append(block)
            self.taken.append(block)
        return True

    def _scramble_taken(self) -> None:
        """The step that is carried out may overwrite the blocks that its schedule has given away."""
        blocks, self.taken = self.taken, []
        for layers in self.caches:
            for layer in layers:
                layer[blocks] = GARBAGE

    def _free_request(self, request: FakeRequest) -> None:
        blocks, request.blocks = request.blocks, []
        if request.in_flight:  # a step under way may still write them
            self.deferred_frees.append((self.planned, blocks))
        else:
            self._release(blocks)

    def _drain_deferred_frees(self) -> None:
        while self.deferred_frees and self.deferred_frees[0][0] <= self.processed:
            self._release(self.deferred_frees.pop(0)[1])

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.uses[block] -= 1
            if self.uses[block] == 0:
                self.free.append(block)

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
        assert self.workers[rank]._mover.settle(10) or self.workers[rank]._mover.cpu._closed
        return sorted(path for path in home.rglob("*.safetensors") if path.parent.name != ".free")

    def assert_nothing_leaked(self) -> None:
        """After `settle`: no lease, plan, write, slot or block is left."""
        scheduler = self.scheduler
        assert self.index.uses == 0
        assert not scheduler._steps.in_flight
        assert self.connected.saves.is_idle
        assert self.connected.loads.is_idle
        assert not +self.connected.loads._fetched_keys
        assert not scheduler._trackers
        chunks = self.index._chunks.values()
        slots = [chunk.slot for chunk in chunks if chunk.slot is not None]
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
