"""A simulated vLLM for a model of one group: its runner, which checks every byte of every step.

The KV of a token is a hash over all tokens up to it, written into real tensors. `fake_scheduler.py` simulates the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.telemetry.announcer import Context, Removed
from kvstore.adapters.vllm.worker.pushes import PushOptions
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.engine.options import RemoteOptions
from kvstore.index.plans import Place
from kvstore.index.trails import keys_of
from kvstore.model.groups import GroupKind
from kvstore.model.keys import KeyExtras, Namespace, PrefixHasher
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from support.fake_host import scheduler_options
from support.fake_parts import (
    BLOCK,
    CHUNK,
    CHUNK_FILE_BYTES,
    CHUNK_SLOT_BYTES,
    GARBAGE,
    LAYERS,
    FakeRequest,
    Listener,
    Scheduled,
    Setup,
    Step,
    kv_of,
    remote_of,
)
from support.fake_scheduler import FakeScheduler, one_at_a_time
from support.fake_tables import FakeGroup


class FakeVllm(FakeScheduler):
    """One engine: scheduler side, `ranks` workers, and everything of vLLM between them."""

    setup: Setup

    def __init__(self, setup: Setup) -> None:
        self._remote = remote_of(setup)
        options = scheduler_options(
            setup,
            SaveRules(
                BLOCK,
                CHUNK,
                setup.save_decode,
                setup.save_tails,
                setup.skip_last_tokens,
                lookahead_tokens=setup.lookahead_tokens,
            ),
            LoadRules(setup.async_load, setup.run_ahead > 0, setup.layerwise),
            self._remote,
        )
        options = replace(
            options,
            loads=setup.loads,
            saves=setup.saves,
            config=options.config.model_copy(update={"priority_limit": setup.priority_limit}),
            announces=lambda request, blocks: Context((None,) * len(blocks), request.request_id),
            handover=setup.handover or HandoverOptions(),
        )
        stages = setup.stages or (LAYERS,) * setup.ranks
        caches = [[np.full((setup.gpu_blocks, BLOCK), GARBAGE, np.int64) for _ in range(layers)] for layers in stages]
        super().__init__(setup, [FakeGroup(GroupKind.FULL, BLOCK)], caches, options)
        self.recovered = 0  # requests set back by failed loads
        self.heard = Listener()
        self._shareable: list[FakeRequest] = []  # all without tags
        self._has_survivors = len(self.index) > 0

    def _worker(self, rank: int) -> StoreWorker:
        setup = self.setup
        caches = {f"layer.{number}": cache for number, cache in enumerate(self.caches[rank])}
        chunk_bytes = len(caches) * CHUNK * caches["layer.0"].itemsize
        paged = self._bind(
            caches, BLOCK, CHUNK, staging_bytes=setup.staging_chunks * chunk_bytes, copy_bytes=setup.copy_bytes
        )
        disk_bytes = setup.disk_chunks * CHUNK_FILE_BYTES
        options = self._engine_options(rank, CHUNK_SLOT_BYTES, disk_bytes, self._remote_at(rank))
        options = replace(options, max_local_gpu_bytes=setup.hot_slots * CHUNK_SLOT_BYTES)
        push = None
        if setup.receiver is not None:
            push = PushOptions(rank, setup.push_slots * CHUNK_SLOT_BYTES, connect=setup.receiver.connect)
        how = WorkerOptions(
            layer_names=tuple(caches),
            layerwise=setup.layerwise,
            async_save=setup.async_save,
            push=push,
            names_layers_early=setup.names_layers_early,
            overwrites_early=setup.overwrites_early,
            runs_ahead=setup.run_ahead > 0 and setup.async_load is not False,  # which is refused beside a slower tier
            engine_id=f"{os.getpid()}-{id(self)}",
        )
        server = None
        if setup.port is not None:
            hold_s = 0.0 if setup.handover is None else setup.handover.timeout_s
            where = EmbeddedOptions(setup.server_bytes, "127.0.0.1", setup.port + rank, hold_s=hold_s)
            server = EmbeddedServer(self.namespace(rank), paged.layout, where)
        return StoreWorker(paged, self.namespace(rank), options, how, server)

    def namespace(self, rank: int = 0, weights: int = 0) -> Namespace:
        """Return the namespace of a rank's chunks, as computed with certain weights."""
        namespace = Namespace({"model": "fake", "shard": 0 if self.setup.replicas else rank})
        return namespace.at_epoch(self.epochs[weights]) if self.epochs[weights] else namespace

    def _remote_at(self, rank: int) -> RemoteOptions | None:
        if self._remote is None:
            return None
        sends = self.setup.port is not None or not (rank and self.setup.replicas)
        return replace(self._remote, sends=sends, rank=rank)

    def _mark(self, rank: int, layer: int) -> int:
        """Return a number that distinguishes the KV of one layer of one rank."""
        return layer + (0 if self.setup.replicas else 1000 * rank)

    # -- actions of a client ----------------------------------------------------------------------------------------

    def add(self, name: str, tokens: Iterable[int], *, params: RequestParams = NO_PARAMS, **how: Any) -> FakeRequest:
        """Add a request."""
        request = super().add(name, tokens, params=params, **how)
        if not params.tags:
            self._shareable.append(request)
        return request

    # -- a step -----------------------------------------------------------------------------------------------------

    def _execute(self, step: Step) -> None:
        for worker, plan in zip(self.workers, self._prepare(step), strict=True):
            if self.late is not None and self.random.random() < 0.3:
                worker._background._stores.submit(time.sleep, 0.005)  # or this thread lets the device do all of it
            worker.begin_step(plan)
            if step.has_loads:
                worker.load()
            if step.work and self.setup.layerwise:
                for number in range(max(map(len, self.caches))):  # a stage skips those of others
                    worker.wait_for_layer(f"layer.{number}")
            worker.end_loads()
            step.failed_blocks |= worker.take_failed_block_ids()
            self._take_fetched(step, worker)
        if self.setup.names_layers_early:
            self._name_layers(step)
        for part in step.work:
            self._compute(step, part)
        if not self.setup.names_layers_early:
            self._name_layers(step)
        for worker in self.workers:
            if not step.has_loads:
                worker.load()
            if not self.setup.defer_stores:
                worker.store()
            worker.end_loads()
            step.failed_blocks |= worker.take_failed_block_ids()
            self._take_fetched(step, worker)
            self._take_report(step, worker)
            if self.setup.defer_stores:
                worker.store()
        assert not self.wrong, self.wrong

    def _name_layers(self, step: Step) -> None:
        if step.work and (self.setup.layerwise or self.setup.receiver is not None):
            for worker in self.workers:
                for number in range(max(map(len, self.caches))):  # a stage skips those of others
                    worker.save_layer(f"layer.{number}")

    def _write(self, step: Step, part: Scheduled, tokens: list[int], start: int) -> None:
        request, blocks, unheard = part.request, part.tables[0], [*self.in_flight, step]
        values = kv_of(f"{self.weights} {request.salt}", tokens)
        is_mixed = request.mixed

        def write() -> None:
            right = not is_mixed and self._holds(blocks, values[:start])
            for position in range(start, len(values)):
                self._put(blocks, position, int(values[position]) if right else -position)
            assert right or is_mixed or any(not earlier.failed_blocks.isdisjoint(blocks) for earlier in unheard), (
                f"{request.request_id}: wrong bytes before token {start}"
            )

        self._launch(write)
        for position in range(len(tokens), start + part.count):  # rejected drafts leave their KV behind
            self._launch(partial(self._put, blocks, position, GARBAGE + position))

    def _put(self, blocks: list[int], position: int, value: int) -> None:
        block, offset = blocks[position // BLOCK], position % BLOCK
        for rank, layers in enumerate(self.caches):
            for number, layer in enumerate(layers):
                layer[block, offset] = value + self._mark(rank, number)

    def _holds(self, blocks: list[int], values: npt.NDArray[np.int64]) -> bool:
        """Tell if the blocks begin with this KV, in every layer of every rank."""
        return all(
            bool((layer[blocks].reshape(-1)[: len(values)] == values + self._mark(rank, number)).all())
            for rank, layers in enumerate(self.caches)
            for number, layer in enumerate(layers)
        )

    # -- failed loads -----------------------------------------------------------------------------------------------

    def _check_offer(self, request: FakeRequest, num_local: int, external: int) -> None:
        assert external == 0 or self.setup.loads
        assert external <= max(0, request.num_tokens - self.setup.skip_last_tokens - num_local)

    def _process(self, step: Step) -> None:
        super()._process(step)
        events = self.scheduler.take_events()
        self.heard.hear(events)
        for event in events:
            if isinstance(event, Removed):
                gone = set(event.hashes)
                those = [request for request in self._shareable if not gone.isdisjoint(request.block_hashes)]
                there = {name for request in those for name, _ in self._blocks_in(request, event.place)}
                assert gone.isdisjoint(there), "taken back, but it can be found"

    def _take_outputs(self, step: Step) -> None:
        super()._take_outputs(step)
        if step.failed_blocks:
            for block in self.scheduler.spoilt_blocks(step.failed_blocks):
                self._uncache(block)

    def _set_back(self, step: Step) -> list[FakeRequest]:
        failed_blocks = step.failed_blocks
        scheduled = {part.request.request_id: part.count for part in step.work}
        failed: list[FakeRequest] = []
        marked: set[int] = set()
        for request, _ in self.loading.values() if failed_blocks else ():
            hits = [number for number, block in enumerate(request.tables[0]) if block in failed_blocks]
            request.num_computed_tokens = min(request.num_computed_tokens, min(hits, default=1 << 30) * BLOCK)
            request.on_gpu = request.num_computed_tokens
            self.recovered += bool(hits)
        for request in self.running if failed_blocks else ():
            computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            blocks = request.tables[0][: -(-computed // BLOCK)]
            hits = [number for number, block in enumerate(blocks) if block in failed_blocks]
            if not hits:
                continue
            first = next((number for number in hits if blocks[number] not in marked), None)
            marked |= {blocks[number] for number in hits}
            request.num_computed_tokens = computed if first is None else first * BLOCK
            request.on_gpu = request.num_computed_tokens
            # vLLM 0.32 lacks these two: where it runs ahead, it delivers a token made from garbage.
            request.placeholders = 0
            request.stale, request.drop_stale = request.in_flight, True
            failed.append(request)
        self.recovered += len(failed)
        return failed

    # -- checks -----------------------------------------------------------------------------------------------------

    def payload(self, tokens: Sequence[int], num_blocks: int, salt: str, rank: int, weights: int) -> bytes:
        """Return the payload that a chunk of a sequence's last blocks must have."""
        values = kv_of(f"{weights} {salt}", tokens)[-num_blocks * BLOCK :]
        layers = range(len(self.caches[rank]))
        return b"".join((values + self._mark(rank, layer)).tobytes() for layer in layers)

    def assert_nothing_leaked(self) -> None:
        """Assert after `settle` that no lease, plan, write, slot or block is left."""
        super().assert_nothing_leaked()
        self._assert_routers_know()
        if self.setup.folder is not None:
            known = {chunk.ref.prefix_key.hex() for chunk in self.index._chunks.values() if chunk.on_disk}
            for rank in range(len(self.workers)):
                for path in self.chunk_files(rank):
                    assert any(key in path.name for key in known), f"rank {rank}: {path.name} is not in the index"

    def _assert_routers_know(self) -> None:
        """Assert that routers know exactly the blocks that can be found, except for chunks that were on disk at start.

        Chunks that were loaded for a request that has only their first blocks are excepted, too, and those brought from
        a remote tier before a request asked for them.
        """
        assert self.scheduler._announcer is not None
        known, chunks = self.scheduler._announcer._known, self.index._chunks
        has_parts = any(len(blocks.hashes) < chunks[key].ref.num_blocks for key, blocks in known.items())
        has_parts |= self.setup.server is not None and self.connected.prefetches.num_chunks > 0
        for place, heard in self.heard.blocks.items():
            there = dict(block for request in self._shareable for block in self._blocks_in(request, place))
            assert heard.items() <= there.items(), place
            assert heard.keys() == there.keys() or has_parts or (place is Place.DISK and self._has_survivors), place

    def _blocks_in(self, request: FakeRequest, place: Place) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Yield the blocks of a request that chunks in one place hold, each with its tokens."""
        hasher = PrefixHasher(CHUNK, BLOCK, KeyExtras(cache_salt=request.salt))
        hasher.update(request.all_token_ids)
        blocks = CHUNK // BLOCK
        there = [chunk for chunk in self.index._chunks.values() if self.index.holds(chunk.ref.prefix_key, place)]
        ends = {key for chunk in there for key in keys_of(chunk.trail)} | {chunk.ref.prefix_key for chunk in there}
        for chunk in range(len(hasher.chunk_keys()) + 1):
            keys = hasher.block_keys(chunk)
            held = max((number for number, key in enumerate(keys, 1) if key in ends), default=0)
            for block in range(chunk * blocks, chunk * blocks + held):
                yield request.block_hashes[block], tuple(request.all_token_ids[block * BLOCK : (block + 1) * BLOCK])


def one_after_the_other(plain: Setup) -> AbstractContextManager[Callable[..., FakeVllm]]:
    """Make engines like ``plain``, or another setup, with the named fields changed; a new one closes the one before."""
    return one_at_a_time(lambda setup=plain, **changes: FakeVllm(replace(setup, **changes)))
