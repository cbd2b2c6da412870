"""Moves on a device that does nothing until the host waits for it: the waits, and the order of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from support.gate import HANG_GUARD_S
from support.late_bench import FULL, LAYERS, TARGET, Bench, blocks_of, load_job, ref_of, store_job
from support.late_device import Failure, LateDevice
from support.rig import BLOCKS_PER_CHUNK

from kvstore.index.plans import LoadStep, Place
from kvstore.model.chunks import Outcome
from kvstore.transfer import layerwise
from kvstore.transfer.layerwise import LayerLoad, LayerStore
from kvstore.transfer.mover import LoadJob, as_block_ids
from kvstore.transfer.stopwatch import Stopwatch


def on_another_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as beside:
        beside.submit(work).result(HANG_GUARD_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench.running() as bench:
        yield bench


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
    """It was read by another stream, that of a background thread."""
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


def test_a_mover_that_is_closed_uses_no_buffer() -> None:
    """Slots are free before the blocks are there, by a stream that the allocator does not know."""
    with Bench.running() as bench:
        bench.mover.store([store_job(1, 0)])
        bench.device.run_all()
        bench.model_writes(0, 0)
        with bench.device.on(bench.device.make_stream()):
            assert not bench.mover.load([load_job(1, 0)]).failed
        uses: list[Any] = bench.paged._staging.ends()
        assert not all(event.is_reached for event in uses)
    assert all(event.is_reached for event in uses)


def test_a_load_that_failed_under_way_uses_its_slots(bench: Bench) -> None:
    """Some of its copies may have been launched."""
    bench.mover.store([store_job(1, 0)])
    bench.device.failures.append(Failure(FULL, is_under_way=True))
    assert bench.mover.load([load_job(1, 0)]).failed
    assert not bench.cpu.is_settled
    bench.device.run_all()
    assert bench.cpu.is_settled


def test_what_is_verified_is_compared_when_it_has_come(bench: Bench) -> None:
    bench.mover.store([store_job(1, 0)])
    computed_again = LoadJob(LoadStep(ref_of(1), 0, Place.MEMORY), as_block_ids(blocks_of(1)), 0)
    assert bench.mover.deviation(computed_again) == 0


def test_a_comparison_that_fails_gives_its_memory_up_when_no_copy_writes_to_it(bench: Bench) -> None:
    bench.mover.store([store_job(1, 0)])
    bench.device.failures.extend([None, Failure(FULL, is_under_way=True)])  # the gather is launched, and a copy of some
    computed_again = LoadJob(LoadStep(ref_of(1), 0, Place.MEMORY), as_block_ids(blocks_of(1)), 0)
    assert bench.mover.deviation(computed_again) is None
    assert bench.device.is_idle


# -- waits -----------------------------------------------------------------------------------------------------


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


def test_small_layers_are_stored_together_when_all_of_them_are_computed() -> None:
    with Bench.running(copy_bytes=1 << 18) as bench:
        store = LayerStore(bench.mover, [store_job(1, 1)])
        bench.device.counts.clear()
        for layer in range(LAYERS):
            for block in blocks_of(1):
                bench.model_computes(layer, block, 77)
            store.move(layer)
        assert bench.device.counts["run"] == 1
        assert store.finish() == set()
        bench.overwrite(1)
        assert not bench.mover.load([load_job(1, 1)]).failed
        assert bench.held() == [77] * BLOCKS_PER_CHUNK


def test_small_layers_are_loaded_together_when_all_of_them_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "READ_BYTES", 1)
    with Bench.running(copy_bytes=1 << 18) as bench:
        bench.mover.store([store_job(1, 1, write=True)])
        assert bench.mover.flush(HANG_GUARD_S)
        bench.device.counts.clear()
        load = LayerLoad(bench.mover, [load_job(1, 2, Place.DISK)])
        for layer in range(LAYERS):
            load.move(layer)
        assert not load.finish().failed
        assert bench.device.counts["run"] == 1
        assert bench.held() == blocks_of(1)

        former, get = bench.held(), bench.tier.get_layers
        lost = [Outcome.MISS]
        monkeypatch.setattr(
            bench.tier, "get_layers", lambda chunks, layers: lost if 1 in layers else get(chunks, layers)
        )
        bench.tier.chunks[ref_of(2)] = bytes(len(bench.tier.chunks[ref_of(1)]))
        load = LayerLoad(bench.mover, [load_job(2, 3, Place.DISK)])
        for layer in range(LAYERS):
            load.move(layer)
        assert load.finish().failed == {ref_of(2).prefix_key}
        assert bench.held() == former, "not even of the layers that have come"


@pytest.mark.parametrize("seed", range(8))
def test_layers_may_be_loaded_by_several_threads(seed: int) -> None:
    """Each has a separate current stream; small layers came on that of the first."""
    with Bench.running(copy_bytes=1 << 18, device=LateDevice(seed, eagerness=0.3)) as bench:
        bench.mover.store([store_job(1, 0)])
        bench.device.run_all()
        load, seen = LayerLoad(bench.mover, [load_job(1, 0)]), list[int]()

        def compute(layer: int) -> None:
            load.move(layer)
            block = bench.rig.caches[f"layer.{layer}"][TARGET]
            bench.device.current.launch(lambda: seen.append(int(block.flatten()[0])))

        for layer in range(LAYERS):
            on_another_thread(partial(compute, layer))
        assert not load.finish().failed
        bench.device.run_all()
        assert seen == [blocks_of(1)[0]] * LAYERS


@pytest.mark.parametrize("seed", range(8))
def test_layers_may_be_stored_by_several_threads(seed: int) -> None:
    """Small ones are gathered on the stream of the last, after the work on those of the others."""
    with Bench.running(copy_bytes=1 << 18, device=LateDevice(seed, eagerness=0.3)) as bench:
        store = LayerStore(bench.mover, [store_job(1, 0)])

        def compute(layer: int) -> None:
            for block in blocks_of(1):
                bench.model_computes(layer, block, 0x77)
            store.move(layer)

        for layer in range(LAYERS):
            on_another_thread(partial(compute, layer))
        assert store.finish() == set()
        stored = bench.cpu.read(0, ref_of(1))
        assert stored is not None
        assert set(stored[: bench.paged.layout.payload_bytes(BLOCKS_PER_CHUNK)].tolist()) == {0x77}


def test_what_a_load_takes_is_told_without_the_step_before(bench: Bench) -> None:
    bench.mover.store([store_job(1, 1)])
    for _ in range(1000):
        bench.model_writes(0, 0)  # the late device's clock counts what it does
    with (watch := Stopwatch(bench.paged)):
        assert not bench.mover.load([load_job(1, 1)]).failed
    stopped = [watch.has_stopped]
    bench.device.run_all()
    assert [*stopped, watch.has_stopped] == [False, True]
    assert 2 <= watch.seconds < 100  # of its clock


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
