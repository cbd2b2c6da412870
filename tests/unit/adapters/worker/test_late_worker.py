"""A worker on a device that does nothing until the host waits: asynchronous stores and loads, and idle states."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate
from support.late_bench import Bench, blocks_of, load_job, ref_of, store_job
from support.rig import BLOCKS_PER_CHUNK, SLOT_BYTES

from kvstore.adapters.vllm.plan import Fetch, ReqMeta, StepPlan
from kvstore.adapters.vllm.worker.background import Background
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.engine.options import EngineOptions
from kvstore.handover.pusher import PushCounters, Pusher
from kvstore.handover.tracker import PushJob
from kvstore.handover.transport import Parcel, Receiver, Transport
from kvstore.index.plans import Place
from kvstore.model.chunks import Outcome
from kvstore.model.keys import Namespace
from kvstore.paged.staging import Staging
from kvstore.paged.streams import DeviceEvent, Direction
from kvstore.protocol.progress import Progress
from kvstore.transfer.mover import as_block_ids


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench.running() as bench:
        yield bench


# -- asynchronous stores -------------------------------------------------------------------------------------------


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
    """Return the saved contents of chunk 1, as a load brings them back."""
    assert background.wait(HANG_GUARD_S)
    (step,) = background.take_saved()
    assert not step.failed
    assert not bench.mover.load([load_job(1, 1)]).failed
    return bench.held()


def test_a_save_reads_blocks_before_a_fence(bench: Bench, background: Background) -> None:
    """Its thread and its stream may be late."""
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


def test_a_load_beside_comes_after_what_the_step_before_writes(bench: Bench, background: Background) -> None:
    """Blocks that a request has left may still be written, or zeroed for the load."""
    bench.mover.store([store_job(1, 1)])
    bench.device.run_all()
    for block in load_job(1, 1).block_ids:
        bench.model_writes(int(block), 0)
    bench.device.stalled = [bench.device.current]
    background.fetch(Fetch(1, "one", [load_job(1, 1)]))
    assert background.wait(HANG_GUARD_S)
    bench.device.run_unstalled()
    bench.device.stalled = []
    assert bench.held() == blocks_of(1)


def test_a_load_beside_has_ended_when_the_device_has_done_it(bench: Bench, background: Background) -> None:
    bench.mover.store([store_job(1, 1)])
    background.fetch(Fetch(1, "one", [load_job(1, 1)]))
    assert background.wait(HANG_GUARD_S)
    assert background.take_fetched() == []
    assert bench.held() == blocks_of(1)
    (fetched,) = background.take_fetched()
    assert not fetched.result.failed


def test_loads_that_go_side_by_side_use_buffers_one_after_the_other(
    bench: Bench, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, most = list[None](), list[int]()
    original = Staging.carry_in

    def carry_in(self: Staging, *work: Any) -> DeviceEvent:
        inside.append(None)
        time.sleep(0.005)  # lets another thread in, if possible
        most.append(len(inside))
        inside.pop()
        return original(self, *work)

    monkeypatch.setattr(Staging, "carry_in", carry_in)
    bench.mover.store([store_job(number, number, write=True) for number in range(4)])
    assert bench.mover.flush(HANG_GUARD_S)
    for number in range(4):
        background.fetch(Fetch(number, "one", [load_job(number, 4 + number, Place.DISK)]))
    assert background.wait(HANG_GUARD_S)
    bench.device.run_all()
    assert not any(fetched.result.failed for fetched in background.take_fetched())
    assert {*most} == {1}


def test_a_load_for_which_no_thread_can_be_started_has_failed(
    bench: Bench, background: Background, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are computed, and a thread that reads another one does not read it later, into blocks given away."""
    bench.mover.store([store_job(number, number, write=True) for number in range(2)])
    assert bench.mover.flush(HANG_GUARD_S)
    bench.tier.before_get = gate
    refuse_threads(monkeypatch, "kvstore-fetch-slow")
    for number in range(2):
        background.fetch(Fetch(number, "one", [load_job(number, 4 + number, Place.DISK)]))
        assert gate.reached.wait(HANG_GUARD_S)
    gate.open()
    assert background.wait(HANG_GUARD_S)
    bench.device.run_all()
    ended = {fetched.fetch.number: fetched.result.failed for fetched in background.take_fetched()}
    assert ended == {0: set(), 1: {ref_of(1).prefix_key}}
    assert bench.held() == blocks_of(0)


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
    """New weights arrive between the end of the chunk and its write, which would use their name."""
    stores = bench.mover.start_store([store_job(1, 1, write=True)])
    lane = bench.mover._lanes[Place.DISK]
    write = lane.write

    def forget_then_write(*arguments: Any, **others: Any) -> None:
        lane.reset(Namespace({"model": "another"}))
        write(*arguments, **others)  # and chunks in memory are forgotten only then

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


# -- the worker ----------------------------------------------------------------------------------------------------


def worker_of(bench: Bench, *, overwrites_early: bool = False, async_save: bool = True) -> StoreWorker:
    options = EngineOptions(8 * SLOT_BYTES)
    how = WorkerOptions(async_save=async_save, overwrites_early=overwrites_early)
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
    gate = threading.Event()
    worker._background._stores.submit(gate.wait)  # it lets the device continue when it waits for its copies
    carry_out(worker, StepPlan(2, 1, [ReqMeta("two", loads=[load_job(1, 1)], stores=[store_job(2, 2)])]))
    worker.begin_step(StepPlan(3, 2, fetches=[Fetch(1, "three", [load_job(1, 1)])]))
    idle = [bench.device.is_idle]
    gate.set()
    assert bench.drain(worker)
    assert [*idle, bench.device.is_idle] == [False, True]
    bench.device.run_all()
    worker.close()


@pytest.mark.parametrize("beside", [False, True])
def test_a_worker_is_not_at_rest_before_blocks_are_there(bench: Bench, *, beside: bool) -> None:
    """The slots of the blocks are free by then."""
    worker = worker_of(bench, async_save=False)
    carry_out(worker, StepPlan(1, 0, [ReqMeta("one", stores=[store_job(1, 1)])]))
    assert bench.drain(worker)
    loads, model = [load_job(1, 1)], bench.device.current
    bench.device.stalled = [worker._background._loader.paged.streams.current if beside else model]  # type: ignore[attr-defined]
    if beside:
        worker.begin_step(StepPlan(2, 1, fetches=[Fetch(1, "two", loads)]))
        assert worker._background.wait(HANG_GUARD_S)
    else:
        carry_out(worker, StepPlan(2, 1, [ReqMeta("two", loads=loads)]))
    bench.device.run_unstalled()
    assert worker._tiers.cpu.is_settled
    assert not worker.drain(0.0)
    bench.device.stalled = []
    assert bench.drain(worker)
    worker.close()


def test_a_worker_is_not_at_rest_before_what_it_hands_over_is_copied() -> None:
    """They are copied into memory that is no slot of the pool."""
    with Bench.running(copy_bytes=1 << 18) as bench:
        worker, gate = worker_of(bench), threading.Event()
        pusher = Pusher(bench.paged, 4 * SLOT_BYTES, lambda _: HeldUp(gate), PushCounters())
        worker._pushes._pusher = pusher
        job = PushJob(ref_of(1), as_block_ids(blocks_of(1)))
        pusher.begin([(Receiver("there", 1), [job])]).finish(trusted=True)
        copies = bench.paged.streams.copying[Direction.OUT]  # type: ignore[attr-defined]
        bench.device.stalled = [copies]
        bench.device.run_unstalled()
        assert bench.device.current.done == bench.device.current.launched
        assert not worker.drain(0.0)
        bench.device.stalled = []
        assert bench.drain(worker)
        assert copies.done == copies.launched
        gate.set()
        worker.close()


class HeldUp(Transport):
    """Transport that takes nothing until a gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        assert self.gate.wait(HANG_GUARD_S)
        for _ in ready:
            pass
        return [Outcome.STORED] * len(parcels)

    def tell(self, progress: Progress) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


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
