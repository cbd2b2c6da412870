"""Moves on a device that does nothing before somebody waits for it: who waits for what, and what comes after what."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.gate import HANG_GUARD_S
from support.late_device import Failure, LateDevice, late_paged
from support.rig import BLOCK, BLOCKS_PER_CHUNK, CHUNK, SLOT_BYTES, FakeTier, Rig

from kvstore.adapters.vllm.plan import Fetch, ReqMeta, StepPlan
from kvstore.adapters.vllm.worker.background import Background
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.catalog.plans import LoadStep, Place, StoreStep
from kvstore.chunks import ChunkRef, Outcome
from kvstore.handover.pusher import PushCounters, Pusher, PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.keys import Namespace
from kvstore.memory.labelled import LabelledPool
from kvstore.memory.slabs import SlabPool
from kvstore.options import EngineOptions
from kvstore.transfer.hot import HotChunks
from kvstore.transfer.lane import Lane
from kvstore.transfer.layerwise import LayerLoad, LayerStore
from kvstore.transfer.mover import LoadJob, Mover, StoreJob, as_block_ids
from kvstore.transfer.stopwatch import Stopwatch

TARGET = 60  # chunks are loaded to the blocks from here on downwards
LAYERS = 2
FULL = torch.OutOfMemoryError("CUDA out of memory")


class Bench:
    """A mover over a late device, in whose cache block ``b`` holds ``b`` in every byte."""

    def __init__(self) -> None:
        self.device = LateDevice(1, eagerness=0.0)
        self.rig = Rig()
        self.paged = late_paged(
            self.device, self.rig.caches, num_blocks=self.rig.num_blocks, block_tokens=BLOCK, chunk_tokens=CHUNK,
            staging_bytes=SLOT_BYTES,
        )  # fmt: skip
        self.cpu = LabelledPool(SlabPool(8, SLOT_BYTES), self.paged.streams)
        self.tier = FakeTier()
        self.written: list[tuple[ChunkRef, bool]] = []
        lanes = {Place.DISK: Lane(self.cpu, self.tier, lambda *written: self.written.append(written))}
        self.hot = HotChunks(self.paged, 4 * SLOT_BYTES)
        self.mover = Mover(self.paged, self.cpu, lanes, self.hot)
        for block in range(self.rig.num_blocks):
            self.model_writes(block, block)
        self.device.run_all()
        self.device.counts.clear()

    def drain(self, worker: StoreWorker) -> bool:
        """Let the device go on while the worker looks on."""
        self.device._eagerness = 0.7
        try:
            return worker.drain(5)
        finally:
            self.device._eagerness = 0.0

    def model_writes(self, block: int, value: int) -> None:
        """A kernel of the model."""
        for cache in self.rig.caches.values():
            self.device.current.launch(partial(cache[block].fill_, value))

    def overwrite(self, number: int) -> None:
        """The model's next kernels write other tokens to the blocks of chunk ``number``."""
        for block in range(BLOCKS_PER_CHUNK * number, BLOCKS_PER_CHUNK * (number + 1)):
            self.model_writes(block, 0xEE)

    def held(self) -> list[int]:
        """What is in the target's blocks when everything is done; -1 for a mixture."""
        self.device.run_all()
        values = [set(self.rig.held(block).tolist()) for block in range(TARGET, TARGET - BLOCKS_PER_CHUNK, -1)]
        return [next(iter(value)) if len(value) == 1 else -1 for value in values]

    @property
    def host_waits(self) -> int:
        return self.device.counts["reach"] + self.device.counts["wait"]


def ref_of(number: int) -> ChunkRef:
    return ChunkRef(bytes([number]) * 16, BLOCKS_PER_CHUNK)


def blocks_of(number: int) -> list[int]:
    return list(range(BLOCKS_PER_CHUNK * number, BLOCKS_PER_CHUNK * (number + 1)))


def store_job(number: int, slot: int, *, write: bool = False) -> StoreJob:
    return StoreJob(StoreStep(ref_of(number), slot, (Place.DISK,) if write else ()), as_block_ids(blocks_of(number)))


def load_job(number: int, slot: int, source: Place = Place.MEMORY) -> LoadJob:
    ids = as_block_ids(range(TARGET, TARGET - BLOCKS_PER_CHUNK, -1))
    return LoadJob(LoadStep(ref_of(number), slot, source), ids, 0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.device.stalled = []
    bench.device.failures.clear()
    assert bench.mover.close(HANG_GUARD_S)


# -- slots ---------------------------------------------------------------------------------------------------------


def test_a_tier_fills_a_slot_when_it_has_been_read(bench: Bench) -> None:
    """The load that read it was over for the index long before it was for the device."""
    bench.mover.store([store_job(1, 0), store_job(2, 1, write=True)])
    assert bench.mover.flush(HANG_GUARD_S)
    bench.model_writes(0, 0)  # a step that is still being computed
    assert not bench.mover.load([load_job(1, 0)]).failed
    no_blocks = LoadJob(LoadStep(ref_of(2), 0, Place.DISK), as_block_ids([]), 0)
    assert not bench.mover.load([no_blocks]).failed  # chunk 2 comes to the slot of chunk 1
    assert bench.held() == blocks_of(1)
    assert not bench.mover.load([load_job(2, 0)]).failed
    assert bench.held() == blocks_of(2)


def test_a_gather_fills_a_slot_when_it_has_been_read(bench: Bench) -> None:
    """By another stream: that of a thread beside the model."""
    bench.mover.store([store_job(1, 0)])
    saver, loader = bench.mover.for_thread(), bench.mover.for_thread()
    assert not loader.load([load_job(1, 0)]).failed
    bench.device.stalled = [loader.paged.streams.copying[way] for way in loader.paged.streams.copying]  # type: ignore[attr-defined]
    stores = saver.start_store([store_job(2, 0)])
    with pytest.raises(AssertionError, match="streams wait for each other"):
        saver.finish_store(stores)
    bench.device.stalled = []
    assert bench.held() == blocks_of(1)


def test_a_closed_pool_has_no_slot_in_use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is unpinned then, and may be given back."""
    bench.mover.store([store_job(1, 0)])
    assert not bench.mover.load([load_job(1, 0)]).failed
    assert not bench.cpu.is_settled
    seen: list[bool] = []
    monkeypatch.setattr(bench.cpu._pool, "close", lambda: seen.append(bench.cpu.is_settled))
    bench.cpu.close()
    assert seen == [True]


# -- who waits -----------------------------------------------------------------------------------------------------


def test_a_load_waits_for_nothing(bench: Bench) -> None:
    bench.mover.store([store_job(number, number) for number in (1, 2, 3)])
    bench.device.counts.clear()
    bench.model_writes(0, 0)
    for number in (1, 2, 3):
        assert not bench.mover.load([load_job(number, number)]).failed
    assert bench.host_waits == 0
    assert bench.held() == blocks_of(3)


def test_a_load_by_layer_waits_for_nothing(bench: Bench) -> None:
    bench.mover.store([store_job(1, 1)])
    bench.device.counts.clear()
    load = LayerLoad(bench.mover, [load_job(1, 1)])
    for layer in range(LAYERS):
        load.move(layer)
    assert not load.finish().failed
    assert bench.host_waits == 0
    assert not bench.cpu.is_settled
    assert bench.held() == blocks_of(1)


def test_a_store_by_layer_is_known_when_it_is_in_memory(bench: Bench) -> None:
    store = LayerStore(bench.mover, [store_job(1, 1)])
    for layer in range(LAYERS):
        store.move(layer)
    assert bench.host_waits == 0
    assert store.finish() == set()
    bench.overwrite(1)
    assert not bench.mover.load([load_job(1, 1)]).failed
    assert bench.held() == blocks_of(1)


def test_a_store_by_layer_that_is_given_up_waits_for_nothing(bench: Bench) -> None:
    store = LayerStore(bench.mover, [store_job(1, 1)])
    store.move(0)
    assert store.finish(trusted=False) == {ref_of(1).prefix_key}
    assert bench.host_waits == 0
    assert not bench.cpu.is_settled  # its slot is filled again when the copy has ended
    assert bench.cpu.read(1, ref_of(1)) is None


def test_what_a_load_takes_is_told_without_the_step_before(bench: Bench) -> None:
    bench.mover.store([store_job(1, 1)])
    for _ in range(1000):
        bench.model_writes(0, 0)  # the late device's clock counts what it does
    with (watch := Stopwatch(bench.paged)):
        assert not bench.mover.load([load_job(1, 1)]).failed
    assert not watch.has_stopped
    bench.device.run_all()
    assert watch.has_stopped
    assert 0 < watch.seconds < 100


# -- stores beside the model ---------------------------------------------------------------------------------------


def test_a_chunk_is_found_when_its_bytes_are_there(bench: Bench) -> None:
    stores = bench.mover.start_store([store_job(1, 1, write=True)])
    bench.overwrite(1)
    assert bench.host_waits == 0
    assert bench.cpu.read(1, ref_of(1)) is None
    assert not bench.tier.chunks
    assert bench.mover.finish_store(stores) == set()
    assert bench.mover.flush(HANG_GUARD_S)
    (payload,) = bench.tier.chunks.values()
    assert {*blocks_of(1)} <= set(payload)


@pytest.fixture
def background(bench: Bench) -> Iterator[Background]:
    background = Background(bench.mover)
    yield background
    bench.device.stalled = []
    background.stop()
    assert background.wait(HANG_GUARD_S)


def saved(bench: Bench, background: Background) -> list[int]:
    """What was saved of chunk 1."""
    assert background.wait(HANG_GUARD_S)
    (step,) = background.take_saved()
    assert not step.failed
    assert not bench.mover.load([load_job(1, 1)]).failed
    return bench.held()


def test_a_save_reads_blocks_before_a_fence(bench: Bench, background: Background) -> None:
    """However late its thread, and its stream, come."""
    gate = threading.Event()
    background._stores.submit(gate.wait)
    bench.device.stalled = [background._storer.paged.streams.current]  # type: ignore[attr-defined]
    bench.device.counts.clear()
    background.save(1, [store_job(1, 1)], [])
    background.fence()
    bench.overwrite(1)
    assert bench.host_waits == 0
    bench.device.run_at_random()
    bench.device.stalled = []
    bench.device.run_all()
    gate.set()
    assert saved(bench, background) == blocks_of(1)


def test_a_save_reads_what_the_step_has_written(bench: Bench, background: Background) -> None:
    for block in blocks_of(1):
        bench.model_writes(block, 77)
    background.save(1, [store_job(1, 1)], [])
    assert saved(bench, background) == [77] * BLOCKS_PER_CHUNK


def test_a_load_beside_has_ended_when_the_device_has_done_it(bench: Bench, background: Background) -> None:
    bench.mover.store([store_job(1, 1)])
    background.fetch(Fetch(1, "one", [load_job(1, 1)]))
    assert background.wait(HANG_GUARD_S)
    assert background.take_fetched() == []
    assert bench.held() == blocks_of(1)
    (fetched,) = background.take_fetched()
    assert not fetched.result.failed


def test_what_is_forgotten_while_it_is_copied_is_not_found(bench: Bench, background: Background) -> None:
    gate = threading.Event()
    background._stores.submit(gate.wait)
    background.save(1, [store_job(1, 1, write=True)], [])
    background.forget_saves()  # does not wait
    bench.mover.reset(Namespace({"model": "another"}))
    gate.set()
    assert background.wait(HANG_GUARD_S)
    (step,) = background.take_saved()
    assert step.failed == {ref_of(1).prefix_key}
    assert bench.mover.load([load_job(1, 1)]).failed
    assert bench.mover.flush(HANG_GUARD_S)
    assert not bench.tier.chunks
    assert bench.written == [(ref_of(1), False)]


def test_a_write_of_what_was_forgotten_stores_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights come between the chunk's end and its write, which would name them."""
    stores = bench.mover.start_store([store_job(1, 1, write=True)])
    lane = bench.mover._lanes[Place.DISK]
    write = lane.write

    def forget_then_write(*arguments: Any) -> None:
        lane.reset(Namespace({"model": "another"}))
        write(*arguments)  # and what is in memory is forgotten only then

    monkeypatch.setattr(lane, "write", forget_then_write)
    bench.mover.finish_store(stores)
    assert bench.mover.flush(HANG_GUARD_S)
    assert not bench.tier.chunks


def test_what_follows_saves_does_not_hold_up_the_model(bench: Bench, background: Background) -> None:
    gate, seen = threading.Event(), list[int]()
    background._stores.submit(gate.wait)
    background.save(1, [store_job(1, 1, write=True)], [])
    background.follow_saves(lambda: seen.append(len(bench.written) + len(bench.mover._lanes[Place.DISK]._writing)))
    assert not seen
    gate.set()
    assert background.wait(HANG_GUARD_S)
    background.take_saved()
    assert seen == [1]


# -- a device that is full, or broken ------------------------------------------------------------------------------


def test_a_full_device_fails_loads(bench: Bench) -> None:
    bench.mover.store([store_job(1, 1)])
    bench.device.failures.append(Failure(FULL))
    assert bench.mover.load([load_job(1, 1)]).failed == {ref_of(1).prefix_key}
    assert bench.mover.counters.failed_copies == 1
    assert not bench.mover.load([load_job(1, 1)]).failed
    assert bench.held() == blocks_of(1)


def test_a_full_device_fails_stores(bench: Bench) -> None:
    bench.device.failures.append(Failure(FULL))
    jobs = [store_job(1, 1, write=True), store_job(2, 2)]
    assert bench.mover.store(jobs) == {ref_of(1).prefix_key, ref_of(2).prefix_key}
    assert bench.written == [(ref_of(1), False)]
    assert bench.mover.counters.failed_copies == 2
    assert bench.mover.load([load_job(1, 1)]).failed
    assert bench.mover.store(jobs) == set()


@pytest.mark.parametrize("full_at", range(LAYERS))
def test_a_full_device_fails_what_goes_by_layer(bench: Bench, full_at: int) -> None:
    bench.mover.store([store_job(1, 1)])
    load, store = LayerLoad(bench.mover, [load_job(1, 1)]), LayerStore(bench.mover, [store_job(2, 2)])
    for layer in range(LAYERS):
        for moves in (load, store):
            if layer == full_at:
                bench.device.failures.append(Failure(FULL))
            moves.move(layer)
    assert load.finish().failed == {ref_of(1).prefix_key}
    assert store.finish() == {ref_of(2).prefix_key}
    assert bench.cpu.read(2, ref_of(2)) is None


def test_a_broken_device_is_heard_of(bench: Bench) -> None:
    bench.mover.store([store_job(1, 1)])
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    bench.device.failures.append(Failure(broken))
    with pytest.raises(torch.AcceleratorError):
        bench.mover.load([load_job(1, 1)])
    bench.device.failures.append(Failure(broken))
    with pytest.raises(torch.AcceleratorError):
        bench.mover.store([store_job(2, 2, write=True)])
    assert bench.written == [(ref_of(2), False)]


# -- hand-over -----------------------------------------------------------------------------------------------------


class Inbox(Transport):
    """A receiver in memory, which takes each layer as soon as it may."""

    def __init__(self, layer_bytes: int) -> None:
        self.layer_bytes = layer_bytes
        self.found: list[bytes] = []
        self.may_go = threading.Event()

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        assert self.may_go.wait(HANG_GUARD_S)
        layers = 0
        for part in ready:
            layers = part.stop
            for parcel in parcels:
                self.found.append(parcel.payload[part.start * self.layer_bytes : layers * self.layer_bytes].tobytes())
        return [Outcome.STORED if layers == LAYERS else Outcome.FAILED] * len(parcels)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("slots", [1, 2])
def test_what_is_handed_over_is_what_the_step_has_computed(bench: Bench, slots: int) -> None:
    """The model's thread waits for nothing, and goes on to write the blocks."""
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    pusher = Pusher(bench.paged, slots * SLOT_BYTES, lambda _: inbox, PushCounters())
    inbox.may_go.set()
    step = pusher.begin([(Receiver("there", 1), [push_job(1), push_job(2)])])
    step.reach(0)
    step.finish(trusted=True)
    for number in (1, 2):
        bench.overwrite(number)
    assert pusher.flush(HANG_GUARD_S)
    assert pusher.counters.sent == 2
    assert set(b"".join(inbox.found)) == {*blocks_of(1), *blocks_of(2)}
    pusher.close(HANG_GUARD_S)


def test_a_step_that_hands_over_waits_for_nothing(bench: Bench) -> None:
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: inbox, PushCounters())
    step = pusher.begin([(Receiver("there", 1), [push_job(1)])])
    for layer in range(LAYERS):
        step.reach(layer)
    step.finish(trusted=True)
    assert bench.host_waits == 0
    inbox.may_go.set()
    assert pusher.flush(HANG_GUARD_S)
    pusher.close(HANG_GUARD_S)


@pytest.mark.parametrize("full_at", range(LAYERS))
def test_a_full_device_hands_over_nothing(bench: Bench, full_at: int) -> None:
    inbox = Inbox(bench.rig.layout.payload_bytes(BLOCKS_PER_CHUNK) // LAYERS)
    inbox.may_go.set()
    pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: inbox, PushCounters())
    step = pusher.begin([(Receiver("there", 1), [push_job(1)])])
    for layer in range(LAYERS):
        if layer == full_at:
            bench.device.failures.append(Failure(FULL))
        step.reach(layer)
    step.finish(trusted=True)
    assert pusher.flush(HANG_GUARD_S)
    assert pusher.counters == PushCounters(failed=1)
    pusher.close(HANG_GUARD_S)


def push_job(number: int) -> PushJob:
    return PushJob(ref_of(number), as_block_ids(blocks_of(number)))


# -- the worker ----------------------------------------------------------------------------------------------------


def worker_of(bench: Bench, *, overwrites_early: bool = False) -> StoreWorker:
    options = EngineOptions(8 * SLOT_BYTES)
    how = WorkerOptions(async_save=True, overwrites_early=overwrites_early)
    return StoreWorker(bench.paged, Namespace({"model": "late"}), options, how)


def carry_out(worker: StoreWorker, plan: StepPlan) -> None:
    worker.begin_step(plan)
    worker.load()
    worker.store()


@pytest.mark.parametrize("overwrites_early", [False, True])
def test_blocks_taken_from_a_request_are_read_first(bench: Bench, *, overwrites_early: bool) -> None:
    worker = worker_of(bench, overwrites_early=overwrites_early)
    bench.device.counts.clear()
    bench.device.stalled = [worker._background._storer.paged.streams.current]  # type: ignore[attr-defined]
    gate = threading.Event()
    worker._background._stores.submit(gate.wait)
    carry_out(worker, StepPlan(1, 0, [ReqMeta("one", stores=[store_job(1, 1)])]))
    if not overwrites_early:  # model runner V2 does it before
        worker.prepare(StepPlan(2, 0, preempts=True))
    bench.overwrite(1)
    assert bench.host_waits == 0
    bench.device.run_until(lambda: not bench.device.current.can_go_on)
    bench.device.stalled = []
    gate.set()
    assert bench.drain(worker)
    worker.end_loads()
    carry_out(worker, StepPlan(3, 2, [ReqMeta("two", loads=[load_job(1, 1)])]))
    assert bench.held() == blocks_of(1)
    bench.device.run_all()
    worker.close()


def test_how_long_loads_took_is_told_when_the_device_has_done_them(bench: Bench) -> None:
    worker = worker_of(bench)
    carry_out(worker, StepPlan(1, 0, [ReqMeta("one", stores=[store_job(1, 1)])]))
    assert bench.drain(worker)
    worker.take_report()
    for _ in range(1000):
        bench.model_writes(0, 0)
    carry_out(worker, StepPlan(2, 1, [ReqMeta("two", loads=[load_job(1, 1)])]))
    report = worker.take_report()
    assert report is not None
    assert report.steps[2].ranks_loaded == 1
    assert not report.load_times
    bench.device.run_all()
    report = worker.take_report()
    assert report is not None
    assert report.load_times[2].ranks == 1
    assert 0 < report.load_times[2].seconds < 100
    bench.device.run_all()
    worker.close()


def test_a_worker_at_rest_leaves_nothing_to_the_device(bench: Bench) -> None:
    worker = worker_of(bench)
    carry_out(worker, StepPlan(1, 0, [ReqMeta("one", stores=[store_job(1, 1)])]))
    assert bench.drain(worker)
    carry_out(worker, StepPlan(2, 1, [ReqMeta("two", loads=[load_job(1, 1)], stores=[store_job(2, 2)])]))
    worker.begin_step(StepPlan(3, 2, fetches=[Fetch(1, "three", [load_job(1, 1)])]))
    assert not bench.device.is_idle
    assert bench.drain(worker)
    assert bench.device.is_idle
    bench.device.run_all()
    worker.close()


def test_a_worker_does_not_wait_for_ever_for_a_device_that_hangs(bench: Bench) -> None:
    worker = worker_of(bench)
    carry_out(worker, StepPlan(1, 0, [ReqMeta("one", stores=[store_job(1, 1)])]))
    assert bench.drain(worker)
    carry_out(worker, StepPlan(2, 1, [ReqMeta("two", loads=[load_job(1, 1)])]))
    bench.device.stalled = [bench.device.current]
    assert not worker.drain(0.05)
    bench.device.stalled = []
    assert bench.drain(worker)
    bench.device.run_all()
    worker.close()
