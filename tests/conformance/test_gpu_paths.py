"""Tests of copies between device and host memory, whole and by layer, while the model overwrites the blocks.

Every test runs on a device that the CPU simulates, and on a real one if the machine has one (`make test-gpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch
from support.gpus import BLOCKS, CHUNK_BLOCKS, LAYERS, SLOTS, Gpu, opened

from kvstore.adapters.vllm.plan import Fetch
from kvstore.adapters.vllm.worker.background import Background
from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.paged.base import BlockIds
from kvstore.transfer.mover import LoadJob, Mover, StoreJob

T = TypeVar("T")

LATER = 251  # the value that the model writes to blocks right after they were gathered or read
DEVICES = ["late", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
IDS = [np.array(ids, dtype=np.int64) for ids in np.random.default_rng(5).permutation(BLOCKS)[:40].reshape(10, 4)]
VALUES = range(1, 11)


@pytest.fixture(params=DEVICES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def gpu(kind: str, request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with opened(kind, request.param) as gpu:
        yield gpu


def held(gpu: Gpu, slot: ByteArray) -> set[int]:
    """Return the numbers in a slot."""
    return set(np.unique(slot[: gpu.size_bytes]).tolist())


def chunks_of(gpu: Gpu) -> list[tuple[BlockIds, int, ByteArray]]:
    assert len(IDS) == SLOTS
    return list(zip(IDS, VALUES, gpu.slots(), strict=True))


def test_a_gather_reads_what_was_written_before_it_and_nothing_later(gpu: Gpu) -> None:
    events = []
    for ids, value, slot in chunks_of(gpu):
        gpu.hold_up()
        gpu.fill(ids, value)
        events.append(gpu.paged.gather(ids, slot))
        gpu.fill(ids, LATER)
    for event in events:
        gpu.paged.streams.reach(event)
    assert [held(gpu, slot) for slot in gpu.slots()] == [{value} for value in VALUES]


def test_a_payload_is_there_when_its_own_moment_is_reached(gpu: Gpu) -> None:
    (ids, value, slot), (more, _, other), *_ = chunks_of(gpu)
    gpu.hold_up()
    gpu.fill(ids, value)
    event = gpu.paged.gather(ids, slot)
    gpu.hold_up()
    gpu.paged.gather(more, other)
    gpu.paged.streams.reach(event)
    assert gpu.paged.streams.is_reached(event)
    assert held(gpu, slot) == {value}


def test_several_chunks_in_one_call(gpu: Gpu) -> None:
    gpu.hold_up()
    for ids, value, _ in chunks_of(gpu):
        gpu.fill(ids, value)
    events = gpu.paged.gather_chunks([gpu.paged.chunk(ids, slot) for ids, _, slot in chunks_of(gpu)])
    for ids in IDS:
        gpu.fill(ids, LATER)
    for event in events:
        gpu.paged.streams.reach(event)
    assert [held(gpu, slot) for slot in gpu.slots()] == [{value} for value in VALUES]
    gpu.paged.scatter_chunks([gpu.paged.chunk(ids, slot) for ids, _, slot in chunks_of(gpu)])
    seen = [gpu.read(ids) for ids in IDS]
    gpu.wait()
    assert [saw() for saw in seen] == [{value} for value in VALUES]


def test_kernels_behind_a_scatter_see_it(gpu: Gpu) -> None:
    seen = []
    for ids, value, slot in chunks_of(gpu):
        slot[:] = value
        gpu.hold_up()
        gpu.paged.scatter(ids, slot, CHUNK_BLOCKS, 0)
        seen.append(gpu.read(ids))
        gpu.fill(ids, LATER)
    gpu.wait()
    assert [saw() for saw in seen] == [{value} for value in VALUES]


def test_a_scatter_comes_after_the_kernels_before_it(gpu: Gpu) -> None:
    ids, value, slot = chunks_of(gpu)[0]
    slot[:] = value
    gpu.hold_up()
    gpu.fill(ids, LATER)
    gpu.paged.scatter(ids, slot, CHUNK_BLOCKS, 0)
    assert read_now(gpu, ids) == {value}


def read_now(gpu: Gpu, ids: BlockIds) -> set[int]:
    saw = gpu.read(ids)
    gpu.wait()
    return saw()


def test_a_slot_may_change_when_the_moment_of_its_scatter_is_reached(gpu: Gpu) -> None:
    for ids, value, slot in chunks_of(gpu):
        slot[:] = value
        gpu.hold_up()
        event = gpu.paged.scatter(ids, slot, CHUNK_BLOCKS, 0)
        gpu.paged.streams.reach(event)
        slot[:] = LATER
    assert [read_now(gpu, ids) for ids in IDS] == [{value} for value in VALUES]


def test_part_of_a_chunk_goes_back(gpu: Gpu) -> None:
    ids, value, slot = chunks_of(gpu)[0]
    gpu.fill(np.arange(BLOCKS), LATER)
    parts = slot[: gpu.size_bytes].reshape(-1, CHUNK_BLOCKS, gpu.layout.page_bytes[0])
    parts[:] = np.arange(value, value + CHUNK_BLOCKS)[None, :, None]
    gpu.hold_up()
    gpu.paged.scatter(ids[:2], slot, CHUNK_BLOCKS, 1)
    assert [read_now(gpu, ids[n : n + 1]) for n in range(4)] == [{value + 1}, {value + 2}, {LATER}, {LATER}]


def test_both_ways_in_turn(gpu: Gpu) -> None:
    """Each chunk is gathered, overwritten, and scattered to other blocks, one chunk after the other."""
    seen = []
    for number, (ids, value, slot) in enumerate(chunks_of(gpu)):
        gpu.hold_up()
        gpu.fill(ids, value)
        event = gpu.paged.gather(ids, slot)
        gpu.fill(ids, LATER)
        gpu.paged.streams.reach(event)
        other = IDS[number - 1]
        gpu.paged.scatter(other, slot, CHUNK_BLOCKS, 0)
        seen.append(gpu.read(other))
        gpu.fill(other, LATER)
    gpu.wait()
    assert [saw() for saw in seen] == [{value} for value in VALUES]


def test_layer_by_layer_out_with_each_layer_overwritten_at_once(gpu: Gpu) -> None:
    chunks = [gpu.paged.chunk(ids, slot) for ids, _, slot in chunks_of(gpu)]
    event = None
    for layer in range(LAYERS):
        gpu.hold_up()
        for ids, value, _ in chunks_of(gpu):
            gpu.fill(ids, value + 20 * layer, range(layer, layer + 1))
        event = gpu.paged.gather_layers(range(layer, layer + 1), chunks)
        for ids in IDS:
            gpu.fill(ids, LATER, range(layer, layer + 1))
    gpu.paged.streams.reach(event)
    for _, value, slot in chunks_of(gpu):
        layers = slot[: gpu.size_bytes].reshape(LAYERS, -1)
        assert [set(np.unique(layer).tolist()) for layer in layers] == [{value + 20 * layer} for layer in range(LAYERS)]


def test_layer_by_layer_in_is_seen_by_the_kernels_behind_each(gpu: Gpu) -> None:
    for _, value, slot in chunks_of(gpu):
        slot[: gpu.size_bytes].reshape(LAYERS, -1)[:] = value + 20 * np.arange(LAYERS)[:, None]
    chunks = [gpu.paged.chunk(ids, slot) for ids, _, slot in chunks_of(gpu)]
    seen = []
    for layer in range(LAYERS):
        gpu.hold_up()
        gpu.paged.scatter_layers(range(layer, layer + 1), chunks)
        only = range(layer, layer + 1)
        seen += [(value + 20 * layer, gpu.read(ids, only)) for ids, value, _ in chunks_of(gpu)]
        for ids in IDS:
            gpu.fill(ids, LATER, only)
    gpu.wait()
    assert [saw() for _, saw in seen] == [{value} for value, _ in seen]


def test_the_host_waits_for_nothing_that_it_launches(gpu: Gpu) -> None:
    ids, _, slot = chunks_of(gpu)[0]
    for _ in range(10):  # longer than any launch takes
        gpu.hold_up()
    gpu.paged.gather(ids, slot)
    gpu.paged.scatter(ids, gpu.slots()[1], CHUNK_BLOCKS, 0)
    gpu.paged.gather_layers(range(1), [gpu.paged.chunk(ids, slot)])
    gpu.paged.scatter_layers(range(1), [gpu.paged.chunk(ids, slot)])
    assert gpu.is_behind, "the host waited for the device"
    gpu.wait()


# Concurrently with the model


def test_a_gather_on_another_thread_reads_what_the_model_had_launched(gpu: Gpu) -> None:
    side = gpu.paged.for_thread()
    with ThreadPoolExecutor(1) as thread:
        for ids, value, slot in chunks_of(gpu):
            gpu.hold_up()
            gpu.fill(ids, value)
            event = gpu.paged.streams.now()

            def save(ids: BlockIds = ids, slot: ByteArray = slot, event: object = event) -> None:
                side.streams.hold(event)  # type: ignore[arg-type]
                side.streams.reach(side.gather(ids, slot))

            thread.submit(save).result()
            gpu.fill(ids, LATER)
    assert [held(gpu, slot) for slot in gpu.slots()] == [{value} for value in VALUES]


def test_blocks_may_be_written_behind_a_fence_while_a_save_is_under_way(gpu: Gpu) -> None:
    side = gpu.paged.for_thread()
    events = []
    for ids, value, slot in chunks_of(gpu):
        gpu.hold_up()
        gpu.fill(ids, value)
        side.streams.hold(gpu.paged.streams.now())
        events.append(side.gather(ids, slot))
        gpu.paged.fence()
        gpu.fill(ids, LATER)
    assert gpu.is_behind, "the host waited for the device"
    for event in events:
        gpu.paged.streams.reach(event)
    assert [held(gpu, slot) for slot in gpu.slots()] == [{value} for value in VALUES]


def test_a_load_on_another_thread_is_there_when_it_has_ended(gpu: Gpu) -> None:
    side = gpu.paged.for_thread()
    with ThreadPoolExecutor(1) as thread:
        for ids, value, slot in chunks_of(gpu):
            slot[:] = value
            gpu.hold_up()
            gpu.fill(ids, LATER)  # launched before the load begins
            event = gpu.paged.streams.now()

            def load(ids: BlockIds = ids, slot: ByteArray = slot, event: object = event) -> None:
                side.streams.hold(event)  # type: ignore[arg-type]
                side.scatter(ids, slot, CHUNK_BLOCKS, 0)
                side.streams.wait()

            thread.submit(load).result()
            slot[:] = LATER
    assert [read_now(gpu, ids) for ids in IDS] == [{value} for value in VALUES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saves_and_loads_of_a_worker_beside_a_model_that_writes(kind: str, dtype: torch.dtype) -> None:
    """Blocks are overwritten as soon as their save has ended, and read as soon as their load has."""
    with opened(kind, dtype) as gpu:
        pool = SlabPool(SLOTS, gpu.layout.slot_bytes, gpu.paged.device)
        assert pool.wait_populated(60.0)
        mover = Mover(gpu.paged, LabelledPool(pool, gpu.paged.streams), {})
        background = Background(mover)
        refs = [ChunkRef(bytes([number]) * 16, CHUNK_BLOCKS) for number in range(SLOTS)]
        for number, (ids, value, _) in enumerate(chunks_of(gpu)):
            gpu.hold_up()
            gpu.fill(ids, value)
            background.save(number, [StoreJob(StoreStep(refs[number], number, ()), ids)], ())
            background.finish_saves()
            gpu.fill(ids, LATER)
        gpu.wait()
        assert not any(saved.failed for saved in taken(background.take_saved, SLOTS))
        for number in range(SLOTS):
            job = LoadJob(LoadStep(refs[number], number, Place.MEMORY), IDS[number - 1], 0)
            background.fetch(Fetch(number + 1, "request", [job]))
        assert not any(fetched.result.failed for fetched in taken(background.take_fetched, SLOTS))
        assert [read_now(gpu, IDS[number - 1]) for number in range(SLOTS)] == [{value} for value in VALUES]
        background.stop()
        assert background.wait(60.0)
        mover.close(60.0)


def taken(take: Callable[[], Sequence[T]], number: int) -> list[T]:
    """Call ``take`` until it has returned so many items, and return all of them."""
    found: list[T] = []
    while len(found) < number:
        found += take()
    return found
