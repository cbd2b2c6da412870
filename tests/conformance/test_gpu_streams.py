"""Tests of hot copies on a real device: the order of work across streams, and the error without room.

A kernel that only waits (`torch.cuda._sleep`) holds up a stream, so that any wrong order is detected. They run on
machines with a CUDA device: `make test-gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstore.memory.slabs import DeviceSlots, SlabPool
from kvstore.model.errors import ConfigError
from kvstore.paged.base import BlockIds, PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.transfer.mover import as_block_ids

pytestmark = pytest.mark.gpu

BLOCKS, CHUNK_BLOCKS = 16, 4
PAGE = (2, 16, 8, 64)  # 32 KiB in bfloat16
WAIT_CYCLES = 400_000_000  # 0.2 to 0.4 s
IDS, TARGETS = as_block_ids([5, 0, 9, 2]), as_block_ids([1, 3, 4, 6])


class Gpu:
    """A paged cache of three layers on the GPU, in which every byte of a block is one number."""

    def __init__(self) -> None:
        self.caches = {f"l{n}": torch.zeros((BLOCKS, *PAGE), dtype=torch.bfloat16, device="cuda") for n in range(3)}
        self.paged: PagedKV = bind_paged_kv(
            self.caches, num_blocks=BLOCKS, block_tokens=16, chunk_tokens=CHUNK_BLOCKS * 16
        )
        self.layout = self.paged.layout

    def open(self, slots: int = 1) -> DeviceSlots:
        return DeviceSlots(slots, self.layout.slot_bytes, self.paged.streams)

    def fill(self, value: int) -> None:
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(value)

    def values(self, block: int) -> set[int]:
        """Return the numbers in a block, once the current stream has reached this point."""
        parts = [cache[block].flatten().view(torch.uint8).cpu().numpy() for cache in self.caches.values()]
        return set(np.unique(np.concatenate(parts)).tolist())

    def gather(self, slots: DeviceSlots, slot: int, ids: BlockIds = IDS) -> None:
        with slots.using(slot) as memory:
            self.paged.gather_on_device(ids, memory[: self.layout.payload_bytes(CHUNK_BLOCKS)])

    def scatter(self, slots: DeviceSlots, slot: int, ids: BlockIds = TARGETS, first_block: int = 0) -> None:
        with slots.using(slot) as memory:
            payload = memory[: self.layout.payload_bytes(CHUNK_BLOCKS)]
            self.paged.scatter_on_device(ids, payload, CHUNK_BLOCKS, first_block)

    def put(self, slots: DeviceSlots, slot: int, value: int) -> None:
        """Fill a slot on a separate stream, and wait for it."""
        side = new_stream()
        with torch.cuda.stream(side), slots.using(slot) as memory:
            memory.fill_(value)
        side.synchronize()

    def got(self, slots: DeviceSlots, slot: int) -> set[int]:
        """Return the numbers in a slot, read on a separate stream."""
        with torch.cuda.stream(new_stream()), slots.using(slot) as memory:
            return set(np.unique(memory[: self.layout.payload_bytes(CHUNK_BLOCKS)].cpu().numpy()).tolist())


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    warm_up(gpu)
    yield gpu
    torch.cuda.synchronize()


def warm_up(gpu: Gpu) -> None:
    """Launch every kernel once, because the first load of a kernel waits for the whole device."""
    slots = gpu.open()
    gpu.put(slots, 0, 1)
    gpu.gather(slots, 0)
    gpu.scatter(slots, 0)
    gpu.scatter(slots, 0, TARGETS[1:3], 1)
    gpu.got(slots, 0)
    slots.close()
    gpu.fill(0)
    gpu.values(0)
    torch.cuda.synchronize()


def hold_up() -> None:
    """Make the current stream wait."""
    torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]


def test_a_gather_falls_in_line_with_the_kernels_around_it(gpu: Gpu) -> None:
    slots = gpu.open()
    hold_up()
    gpu.fill(7)
    gpu.gather(slots, 0)
    gpu.fill(9)  # the blocks are written again at once
    assert gpu.got(slots, 0) == {7}


def test_nobody_waits_for_gather_and_scatter(gpu: Gpu) -> None:
    slots = gpu.open(slots=2)
    gpu.fill(7)
    gpu.gather(slots, 0)
    torch.cuda.synchronize()
    hold_up()
    gpu.gather(slots, 1)
    gpu.scatter(slots, 0)
    assert not torch.cuda.current_stream().query(), "the host waited for the device"


def test_a_scatter_is_seen_by_later_kernels(gpu: Gpu) -> None:
    slots = gpu.open()
    gpu.put(slots, 0, 5)
    hold_up()
    gpu.scatter(slots, 0, TARGETS[1:3], 1)
    assert [gpu.values(block) for block in (1, 3, 4, 6)] == [{0}, {5}, {5}, {0}]


def test_a_slot_is_written_only_after_a_scatter_from_it(gpu: Gpu) -> None:
    slots = gpu.open()
    gpu.put(slots, 0, 5)
    hold_up()
    gpu.scatter(slots, 0)  # launched, not done
    gpu.put(slots, 0, 6)  # on another stream
    assert gpu.values(1) == {5}
    assert gpu.got(slots, 0) == {6}


def test_a_slot_is_written_only_after_scatters_from_two_streams(gpu: Gpu) -> None:
    slots = gpu.open()
    gpu.put(slots, 0, 5)
    with torch.cuda.stream(new_stream()):
        hold_up()
        gpu.scatter(slots, 0, TARGETS[:1])
    with torch.cuda.stream(new_stream()):
        gpu.scatter(slots, 0, TARGETS[1:2])
    gpu.put(slots, 0, 6)
    torch.cuda.synchronize()
    assert gpu.values(1) == gpu.values(3) == {5}


def test_gathers_into_one_slot_from_two_streams(gpu: Gpu) -> None:
    slots = gpu.open()
    gpu.fill(7)
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream()):
        hold_up()
        gpu.gather(slots, 0)
    gpu.put(slots, 0, 6)
    torch.cuda.synchronize()
    assert gpu.got(slots, 0) == {6}


def test_memory_of_closed_slots_is_lent_again_only_when_its_last_work_is_done(gpu: Gpu) -> None:
    slots = gpu.open(slots=2)
    gpu.put(slots, 0, 5)
    with torch.cuda.stream(new_stream()):
        hold_up()
        gpu.scatter(slots, 0)
    slots.close()
    others = [torch.full((2, gpu.layout.slot_bytes), 9, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert gpu.values(1) == {5}
    assert all(int(other.min()) == 9 for other in others)


@pytest.mark.parametrize("pinned", [True, False])
def test_slots_of_the_pool_and_other_buffers(gpu: Gpu, pinned: bool) -> None:
    pool = SlabPool(8, gpu.layout.slot_bytes, gpu.paged.device)
    assert pool.wait_populated(30.0)
    buffers = [pool.slot(n) if pinned else np.zeros(gpu.layout.slot_bytes, np.uint8) for n in range(8)]
    assert torch.from_numpy(buffers[0]).is_pinned() == pinned
    for number, buffer in enumerate(buffers, start=1):
        gpu.fill(number)
        gpu.paged.streams.reach(gpu.paged.gather(IDS, buffer))
        assert (buffer[: gpu.layout.payload_bytes(CHUNK_BLOCKS)] == number).all()
        gpu.fill(0)
        gpu.paged.scatter(TARGETS, buffer, CHUNK_BLOCKS, 0)
        gpu.paged.streams.wait()
        assert [gpu.values(block) for block in (0, 1, 3, 4, 6)] == [{0}, *[{number}] * 4]
    pool.close()


def test_a_device_without_room_says_how_much_is_free(gpu: Gpu) -> None:
    with pytest.raises(ConfigError, match=r"GiB of the memory of cuda:\d+, of which [\d.]+ are free: lower"):
        gpu.open(slots=1 << 30)
