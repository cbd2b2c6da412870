"""The worker side alone: its work on plans, and the order of its hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.gate import HANG_GUARD_S, Gate
from support.remote import REMOTE
from support.remote import install as install_remote
from support.rig import FakeTier, install

from kvstore.adapters.vllm.plan import ReqMeta, StepPlan, StepReport, StepResult, Written
from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.adapters.vllm.worker.pushes import PushOptions
from kvstore.adapters.vllm.worker.worker import StoreWorker, WorkerOptions
from kvstore.engine.options import EngineOptions
from kvstore.handover.tracker import PushJob
from kvstore.handover.transport import Transport
from kvstore.index.plans import LoadStep, Place, StoreStep, TierState
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv
from kvstore.tiers.disk.tier import DiskTier
from kvstore.transfer.mover import LoadJob, Mover, StoreJob, as_block_ids

ONE = Namespace({"model": "one"})
REF = ChunkRef(b"k" * 16, 2)
OTHER = ChunkRef(b"o" * 16, 2)


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.arange(16 * 8, dtype=torch.int64).reshape(16, 1, 4, 2)


@pytest.fixture
def worker(cache: torch.Tensor, tmp_path: Path) -> Iterator[StoreWorker]:
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = EngineOptions(4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, use_odirect=False)
    worker = StoreWorker(paged, Namespace({"model": "one"}), options)
    worker.facts()
    yield worker
    worker.close()


def store(ref: ChunkRef, slot: int, blocks: list[int], *, write_behind: bool = False) -> ReqMeta:
    return ReqMeta(
        "store", stores=[StoreJob(StoreStep(ref, slot, (Place.DISK,) if write_behind else ()), as_block_ids(blocks))]
    )


def load(ref: ChunkRef, slot: int, blocks: list[int], *, from_disk: bool = False) -> ReqMeta:
    return ReqMeta(
        "load", loads=[LoadJob(LoadStep(ref, slot, Place.DISK if from_disk else Place.MEMORY), as_block_ids(blocks), 0)]
    )


def carry_out(worker: StoreWorker, plan: StepPlan) -> StepReport | None:
    worker.begin_step(plan)
    worker.load()
    worker.store()
    return worker.take_report()


def result_of(report: StepReport | None, number: int) -> StepResult:
    assert report is not None
    return report.steps[number]


def test_stores_then_loads(worker: StoreWorker, cache: torch.Tensor) -> None:
    wanted = cache[[1, 2]].clone()
    stored = result_of(carry_out(worker, StepPlan(1, 0, [store(REF, 0, [1, 2])])), 1)
    assert stored == StepResult(ranks_loaded=1, ranks_ended=1)
    loaded = result_of(carry_out(worker, StepPlan(2, 1, [load(REF, 0, [7, 5])])), 2)
    assert loaded == StepResult(ranks_loaded=1, ranks_ended=1)
    assert torch.equal(cache[[7, 5]], wanted)
    assert not worker.take_failed_block_ids()


def test_loads_may_start_twice_or_after_the_forward_pass(worker: StoreWorker, cache: torch.Tensor) -> None:
    carry_out(worker, StepPlan(1, 0, [store(REF, 0, [1, 2])]))
    worker.begin_step(StepPlan(2, 1, [load(REF, 0, [7, 5])]))
    worker.load()
    cache[[7, 5]] = 0
    worker.load()
    assert not cache[[7, 5]].any(), "a second call must not overwrite what was computed"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_step_that_computes_nothing_ends_without_a_store(cache: torch.Tensor, *, async_save: bool) -> None:
    """vLLM 0.30 does not ask for one then, and the last chunks of an ended request are stored in such a step."""
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    worker = StoreWorker(paged, ONE, EngineOptions(4 * 4096), WorkerOptions(async_save=async_save))
    worker.facts()
    worker.begin_step(StepPlan(1, 0, [replace(store(REF, 0, [1, 2]), finished=True)]))
    worker.load()
    worker.end_empty_step()
    worker._background.finish_saves()
    worker.end_loads()
    assert worker.take_ended_requests() == {"store"}
    assert result_of(worker.take_report(), 1).ranks_ended == 1
    worker.begin_step(StepPlan(2, 1, computes=True))
    worker.end_empty_step()
    assert worker._plan is not None, "a step that computes ends with its store"
    worker.close()


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_that_fails_within_a_step_stops_an_engine_that_runs_ahead(
    cache: torch.Tensor, *, layerwise: bool
) -> None:
    """VLLM would deliver the tokens of steps that it has planned meanwhile, computed on garbage."""
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = WorkerOptions(layer_names=("layer",), layerwise=layerwise, runs_ahead=True)
    worker = StoreWorker(paged, ONE, EngineOptions(4 * 4096), options)
    worker.facts()

    def load_what_was_never_stored() -> None:
        worker.load()
        worker.wait_for_layer("layer")
        worker.end_loads()

    worker.begin_step(StepPlan(1, 0, [load(REF, 0, [7, 5])]))
    with pytest.raises(TierError, match="2 blocks could not be loaded from memory within a step"):
        load_what_was_never_stored()
    worker.begin_step(StepPlan(2, 1, [ReqMeta("lost", [], [], lost_block_ids=[3])]))
    with pytest.raises(TierError, match="1 blocks could not be loaded"):
        load_what_was_never_stored()
    worker.close()


@pytest.mark.parametrize("names_layers_early", [False, True])
def test_layers_that_are_named_before_all_is_computed_are_stored_at_the_end(
    cache: torch.Tensor, *, names_layers_early: bool
) -> None:
    """With micro-batches a layer's hooks are called for each of them."""
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = WorkerOptions(layer_names=("layer",), layerwise=True, names_layers_early=names_layers_early)
    worker = StoreWorker(paged, ONE, EngineOptions(4 * 4096), options)
    worker.facts()
    worker.begin_step(StepPlan(1, 0, [store(REF, 0, [1, 2])], computes=True))
    cache[1] = 5
    worker.save_layer("layer")  # of the first half
    cache[2] = 6
    worker.save_layer("layer")
    worker.store()
    worker.begin_step(StepPlan(2, 1, [load(REF, 0, [7, 5])]))
    worker.load()
    worker.wait_for_layer("layer")
    worker.store()
    assert bool((cache[5] == 6).all()) is names_layers_early
    worker.close()


def test_a_broken_device_keeps_nothing_from_being_closed(worker: StoreWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Mock(return_value=True)
    monkeypatch.setattr(worker._mover, "close", close)
    with monkeypatch.context() as patch:
        patch.setattr(worker._paged.streams, "ends", Mock(side_effect=RuntimeError("an illegal memory access")))
        with pytest.raises(RuntimeError, match="illegal"):
            worker.close()
    close.assert_called_once_with(worker._engine.io_timeout_s)
    monkeypatch.undo()


def test_recalls_are_for_the_epoch_that_ends(worker: StoreWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines may still be in it."""
    said: list[str] = []
    monkeypatch.setattr(worker._mover, "remove", lambda place, refs: said.extend(place.value for _ in refs))
    monkeypatch.setattr(worker._mover, "reset", lambda _namespace: said.append("reset"))
    worker.begin_step(StepPlan(1, 0, epoch="next", recalls=[REF]))
    assert said == ["remote", "reset"]


def test_hooks_outside_a_step_do_nothing(worker: StoreWorker) -> None:
    worker.load()
    worker.store()
    assert worker.take_report() is None


def test_an_empty_plan_reports_nothing(worker: StoreWorker) -> None:
    assert carry_out(worker, StepPlan(1, 0)) is None


def test_a_step_that_computes_is_reported(worker: StoreWorker) -> None:
    """vLLM tells when it was over. Steps that compute nothing come in between, and vLLM may not report them."""
    assert carry_out(worker, StepPlan(1, 0, computes=True)) == StepReport(computed=1)
    assert carry_out(worker, StepPlan(2, 1)) is None


def test_a_missing_chunk_fails_and_names_its_blocks(worker: StoreWorker) -> None:
    report = carry_out(worker, StepPlan(1, 0, [load(REF, 0, [7, 5])]))
    assert result_of(report, 1).failed_loads == {REF.prefix_key}
    assert worker.take_failed_block_ids() == {5, 7}
    assert worker.take_failed_block_ids() == set()


def test_lost_blocks_are_reported_as_failed(worker: StoreWorker) -> None:
    report = carry_out(worker, StepPlan(1, 0, [ReqMeta("one", lost_block_ids=[3])]))
    assert result_of(report, 1).is_poisoned
    assert worker.take_failed_block_ids() == {3}


def test_stores_are_refused_until_the_failure_is_known(worker: StoreWorker) -> None:
    carry_out(worker, StepPlan(1, 0, [load(OTHER, 3, [9, 8])]))
    for number, acked, refused in ((2, 0, True), (3, 0, True), (4, 1, False)):
        report = carry_out(worker, StepPlan(number, acked, [store(REF, 0, [1, 2], write_behind=refused)]))
        assert (result_of(report, number).failed_stores == {REF.prefix_key}) is refused
        assert report is not None
        assert report.writes == ([Written(Place.DISK, REF, False)] if refused else [])


def test_ended_requests_are_reported_once_even_without_stores(worker: StoreWorker) -> None:
    report = carry_out(worker, StepPlan(1, 0, [ReqMeta("done", finished=True)]))
    assert result_of(report, 1).ranks_ended == 1
    assert worker.take_ended_requests() == {"done"}
    assert worker.take_ended_requests() == set()


def test_a_new_epoch_forgets_memory_and_disk(worker: StoreWorker) -> None:
    carry_out(worker, StepPlan(1, 0, [store(REF, 0, [1, 2], write_behind=True)]))
    assert worker._mover.flush(10)
    for number, from_disk in ((2, False), (3, True)):
        report = carry_out(
            worker, StepPlan(number, number, [load(REF, 0, [7, 5], from_disk=from_disk)], epoch="2" * (number == 2))
        )
        assert result_of(report, number).failed_loads == {REF.prefix_key}


def test_removals_leave_the_disk_before_the_steps_own_loads(worker: StoreWorker) -> None:
    carry_out(worker, StepPlan(1, 0, [store(REF, 0, [1, 2], write_behind=True)]))
    assert worker._mover.flush(10)
    report = carry_out(worker, StepPlan(2, 1, [load(REF, 1, [7, 5], from_disk=True)], removals=[REF]))
    assert result_of(report, 2).failed_loads == {REF.prefix_key}


def test_a_step_waits_for_no_removal_and_no_reset(
    cache: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may hang in each of them: the model's thread continues, and the chunks are no longer found."""
    tier, gate = FakeTier(), Gate()
    install(monkeypatch, tier)
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = EngineOptions(
        4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, io_timeout_s=2 * HANG_GUARD_S
    )  # no deadline ends a hung call
    worker = StoreWorker(paged, Namespace({"model": "one"}), options)
    carry_out(worker, StepPlan(1, 0, [store(REF, 0, [1, 2], write_behind=True)]))
    assert worker._mover.flush(HANG_GUARD_S)
    monkeypatch.setattr(tier, "remove", gate.before(tier.remove))
    monkeypatch.setattr(tier, "reset", gate.before(tier.reset))
    for number, plan in enumerate(
        [
            StepPlan(2, 1, [load(REF, 1, [7, 5], from_disk=True)], removals=[REF]),
            StepPlan(3, 2, [load(REF, 1, [7, 5], from_disk=True)], epoch="new"),
            StepPlan(4, 3, [store(REF, 2, [1, 2], write_behind=True)]),
            StepPlan(5, 4, [load(REF, 1, [7, 5], from_disk=True)]),
        ],
        2,
    ):
        result = result_of(carry_out(worker, plan), number)
        assert result.failed_loads == ({REF.prefix_key} if number != 4 else set())
    assert gate.reached.wait(HANG_GUARD_S)
    assert REF in tier.chunks, "nothing has been carried out yet"
    gate.open()
    assert worker._mover.flush(HANG_GUARD_S)
    assert [namespace.fields["epoch"] for namespace in tier.namespaces] == ["new"]
    assert REF in tier.chunks, "the new epoch's"
    worker.close()


def test_what_is_handed_over_stays_in_its_epoch(cache: torch.Tensor) -> None:
    """This holds even if its receiver is connected later; the model's thread does not wait for chunks on their way."""
    connected: list[Namespace] = []
    gate, namespace = Gate(), Namespace({"model": "one"})

    def connect(_url: str, namespace: Namespace, *_: object) -> Transport:
        gate()
        connected.append(namespace)
        raise TierError("nobody there")

    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    push = PushOptions(0, 1 << 20, connect=connect)
    worker = StoreWorker(paged, namespace, EngineOptions(4 * 4096), WorkerOptions(push=push))

    def handed(number: int) -> ReqMeta:
        jobs = [PushJob(REF, as_block_ids([1, 2]), handover=number)]
        return ReqMeta("r", receiver=DisaggSpec("r", "127.0.0.1", (7000,)), pushes=jobs)

    carry_out(worker, StepPlan(1, 0, [handed(1)]))
    assert gate.reached.wait(HANG_GUARD_S)
    pusher, buffers = worker._pushes._pusher, buffer_of(worker)
    for number in range(2, 6):
        carry_out(worker, StepPlan(number, number - 1, [handed(number)], epoch=f"epoch {number}"))
    assert (worker._pushes._pusher, buffer_of(worker)) == (pusher, buffers), "no memory for each reset"
    gate.open()
    worker.close()
    assert {space.id for space in connected} == {
        namespace.id,
        *(namespace.at_epoch(f"epoch {n}").id for n in range(2, 6)),
    }
    assert not any(thread.name == "kvstore-push" for thread in threading.enumerate())


def buffer_of(worker: StoreWorker) -> int:
    """Return the address of the buffer of hand-overs."""
    assert worker._pushes._pusher is not None
    return int(worker._pushes._pusher.pool.slot(0).ctypes.data)


def test_reports_merge_rank_by_rank_and_part_by_part() -> None:
    report = StepReport({1: StepResult(failed_loads={b"a"})}, writes=[Written(Place.DISK, REF, True)])
    report.merge(StepReport({1: StepResult(failed_stores={b"b"}, ranks_ended=1), 2: StepResult(lost_blocks=True)}))
    assert report.tiers.disk_answers
    other = StepResult(failed_loads={b"c"}, lost_chunks={b"c"}, ranks_ended=1)
    down = TierState(disk_answers=False)
    report.merge(StepReport({2: other}, writes=[Written(Place.DISK, REF, False)], tiers=down))
    assert report == StepReport(
        {
            1: StepResult(failed_loads={b"a"}, failed_stores={b"b"}, ranks_ended=1),
            2: StepResult(failed_loads={b"c"}, lost_chunks={b"c"}, lost_blocks=True, ranks_ended=1),
        },
        writes=[Written(Place.DISK, REF, True), Written(Place.DISK, REF, False)],
        tiers=down,
    )


def test_facts_tell_what_a_restart_finds(worker: StoreWorker, cache: torch.Tensor, tmp_path: Path) -> None:
    carry_out(worker, StepPlan(1, 0, [store(REF, 0, [1, 2], write_behind=True)]))
    worker.close()
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = EngineOptions(4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, use_odirect=False)
    reopened = StoreWorker(paged, Namespace({"model": "one"}), options)
    facts = reopened.facts()
    reopened.close()
    assert facts.survivors == [(REF, facts.stored_bytes[1])]
    assert (facts.num_slots, facts.slot_bytes, facts.disk_capacity_bytes) == (4, 4096, 1 << 20)


def test_a_start_that_fails_leaves_the_folder_to_the_next(
    cache: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = EngineOptions(4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, use_odirect=False)

    def unreadable(self: DiskTier) -> list[tuple[ChunkRef, int]]:
        raise TierError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "scan", unreadable)
        with pytest.raises(TierError, match="broken on purpose"):
            StoreWorker(paged, Namespace({"model": "one"}), options)
    StoreWorker(paged, Namespace({"model": "one"}), options).close()


def test_a_recall_takes_what_an_earlier_step_still_sends(cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk was found to be wrong just before a background thread would have sent it."""
    server = install_remote(monkeypatch)
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    worker = StoreWorker(
        paged,
        Namespace({"model": "one"}),
        EngineOptions(4 * 4096, remote=REMOTE),
        WorkerOptions(async_save=True),
    )
    gate, stores = Gate(), worker._background._storer
    monkeypatch.setattr(stores, "finish_store", gate.before(stores.finish_store))
    sent = StoreJob(StoreStep(REF, 0, (Place.REMOTE,)), as_block_ids([1, 2]))
    carry_out(worker, StepPlan(1, 0, [ReqMeta("store", stores=[sent])]))
    assert gate.reached.wait(HANG_GUARD_S)
    worker.begin_step(StepPlan(2, 1, recalls=[REF]))  # no wait of the model's thread
    gate.open()
    assert worker._background.wait(HANG_GUARD_S)
    assert not worker._mover.flush(HANG_GUARD_S).pending
    assert not server.all_chunks()
    worker.close()


def test_a_device_without_room_for_the_worker_leaves_the_folder_to_the_next(
    cache: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has taken its memory by then, and staging buffers need some, too."""
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    options = EngineOptions(4 * 4096, local_disk=tmp_path, max_local_disk_bytes=1 << 20, use_odirect=False)

    def no_room(self: Mover) -> Mover:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "for_thread", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            StoreWorker(paged, Namespace({"model": "one"}), options)
    StoreWorker(paged, Namespace({"model": "one"}), options).close()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("slot", [0, 1])
def test_a_copy_on_the_device_does_not_outlive_its_chunk(cache: torch.Tensor, slot: int, async_save: bool) -> None:
    """The scheduler reports no removal from memory; the chunk is stored again, into the same slot or another."""
    paged = bind_paged_kv({"layer": cache}, num_blocks=16, block_tokens=4, chunk_tokens=8)
    worker = StoreWorker(
        paged,
        Namespace({"model": "one"}),
        EngineOptions(4 * 4096, max_local_gpu_bytes=4 * 4096),
        WorkerOptions(async_save=async_save),
    )
    numbers = count(1)

    def step(meta: ReqMeta) -> None:
        number = next(numbers)
        carry_out(worker, StepPlan(number, number - 1, [meta]))
        worker._background.finish_saves()

    step(store(REF, 0, [1, 2]))
    for _ in range(3):
        step(load(REF, 0, [7, 5]))
    assert worker._mover.counters.chunks_loaded_from_gpu == 1
    cache[[1, 2]] += 1000
    step(store(REF, slot, [1, 2]))
    for hot_loads in (1, 1, 2):
        cache[[7, 5]] = 0
        step(load(REF, slot, [7, 5]))
        assert torch.equal(cache[[7, 5]], cache[[1, 2]])
        assert worker._mover.counters.chunks_loaded_from_gpu == hot_loads
    worker.close()
