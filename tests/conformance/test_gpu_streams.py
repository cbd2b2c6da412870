"""The GPU tier on a real device: the order of work across streams, pinned memory, and what it says without room.

A kernel that only waits (`torch.cuda._sleep`) holds up a stream, so that anything out of order is seen. Runs where
there is a CUDA device: `make test-gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.memory.slabs import SlabPool
from kvstore.paged.base import PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.tiers.base import TierSetup, Transfer
from kvstore.tiers.gpu.tier import GpuTier
from kvstore.transfer.mover import as_block_ids

pytestmark = pytest.mark.gpu

BLOCKS, CHUNK_BLOCKS = 16, 4
PAGE = (2, 16, 8, 64)  # 32 KiB in bfloat16
WAIT_CYCLES = 400_000_000  # 0.2 to 0.4 s
STORED, HIT = Outcome.STORED, Outcome.HIT
A, B = ChunkRef(b"a" * 16, CHUNK_BLOCKS), ChunkRef(b"b" * 16, CHUNK_BLOCKS)
IDS, TARGETS = as_block_ids([5, 0, 9, 2]), as_block_ids([1, 3, 4, 6])


class Gpu:
    """A paged cache of three layers on the GPU, in which every byte of a block is one number."""

    def __init__(self) -> None:
        self.caches = {f"l{n}": torch.zeros((BLOCKS, *PAGE), dtype=torch.bfloat16, device="cuda") for n in range(3)}
        self.paged: PagedKV = bind_paged_kv(
            self.caches, num_blocks=BLOCKS, block_tokens=16, chunk_tokens=CHUNK_BLOCKS * 16
        )
        self.layout = self.paged.layout

    def open(self, slots: int = 4) -> GpuTier:
        return GpuTier.open(TierSetup(Namespace({}), self.layout, slots * self.layout.slot_bytes))

    def fill(self, value: int) -> None:
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(value)

    def values(self, block: int) -> set[int]:
        """The numbers that are in a block, as soon as the current stream has come here."""
        parts = [cache[block].flatten().view(torch.uint8).cpu().numpy() for cache in self.caches.values()]
        return set(np.unique(np.concatenate(parts)).tolist())

    def buffer(self, value: int) -> ByteArray:
        return np.full(self.layout.slot_bytes, value, np.uint8)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    warm_up(gpu)
    yield gpu
    torch.cuda.synchronize()


def warm_up(gpu: Gpu) -> None:
    """Launch every kernel once: loading one for the first time waits for the whole device."""
    tier = gpu.open(slots=1)
    tier.gather(A, gpu.paged, IDS)
    tier.scatter(A, gpu.paged, IDS, 0)
    got(tier, gpu, A)
    tier.close()
    gpu.fill(0)
    gpu.values(0)
    torch.cuda.synchronize()


def hold_up() -> None:
    """Let the current stream wait."""
    torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]


def got(tier: GpuTier, gpu: Gpu, ref: ChunkRef) -> set[int]:
    """The numbers that are in a chunk."""
    buffer = gpu.buffer(0xEE)
    assert tier.get([Transfer(ref, buffer)]) == [HIT]
    return set(np.unique(buffer[: gpu.layout.payload_bytes(ref.num_blocks)]).tolist())


def test_a_gather_falls_in_line_with_the_kernels_around_it(gpu: Gpu) -> None:
    tier = gpu.open()
    hold_up()
    gpu.fill(7)
    assert tier.gather(A, gpu.paged, IDS) is STORED
    gpu.fill(9)  # the blocks are written again at once
    with ThreadPoolExecutor(1) as threads:  # another thread, on another stream
        assert threads.submit(got, tier, gpu, A).result() == {7}


def test_nobody_waits_for_gather_and_scatter(gpu: Gpu) -> None:
    tier = gpu.open()
    gpu.fill(7)
    tier.gather(A, gpu.paged, IDS)
    torch.cuda.synchronize()
    hold_up()
    tier.gather(B, gpu.paged, IDS)
    tier.scatter(A, gpu.paged, TARGETS, 0)
    assert not torch.cuda.current_stream().query(), "the host waited for the device"


def test_a_scatter_is_seen_by_later_kernels(gpu: Gpu) -> None:
    tier = gpu.open()
    assert tier.put([Transfer(A, gpu.buffer(5))]) == [STORED]
    hold_up()
    assert tier.scatter(A, gpu.paged, TARGETS[1:3], 1) is HIT
    assert [gpu.values(block) for block in (1, 3, 4, 6)] == [{0}, {5}, {5}, {0}]


def test_a_slot_is_written_only_after_a_scatter_from_it(gpu: Gpu) -> None:
    tier = gpu.open(slots=1)
    tier.put([Transfer(A, gpu.buffer(5))])
    hold_up()
    assert tier.scatter(A, gpu.paged, TARGETS, 0) is HIT  # launched, not done
    tier.remove([A])
    assert tier.put([Transfer(B, gpu.buffer(6))]) == [STORED]  # the same slot, on another stream
    assert gpu.values(1) == {5}
    assert got(tier, gpu, B) == {6}


def test_a_slot_is_written_only_after_scatters_from_two_streams(gpu: Gpu) -> None:
    tier = gpu.open(slots=1)
    tier.put([Transfer(A, gpu.buffer(5))])
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(slow):
        hold_up()
        tier.scatter(A, gpu.paged, TARGETS[:1], 0)
    with torch.cuda.stream(quick):
        tier.scatter(A, gpu.paged, TARGETS[1:2], 0)
    tier.remove([A])
    tier.put([Transfer(B, gpu.buffer(6))])
    torch.cuda.synchronize()
    assert gpu.values(1) == gpu.values(3) == {5}


def test_gathers_into_one_slot_from_two_streams(gpu: Gpu) -> None:
    tier = gpu.open(slots=1)
    gpu.fill(7)
    torch.cuda.synchronize()
    slow = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(slow):
        hold_up()
        tier.gather(A, gpu.paged, IDS)
    tier.remove([A])
    tier.put([Transfer(B, gpu.buffer(6))])
    torch.cuda.synchronize()
    assert got(tier, gpu, B) == {6}


def test_memory_of_a_closed_tier_is_lent_again_only_when_its_last_work_is_done(gpu: Gpu) -> None:
    tier = gpu.open(slots=2)
    tier.put([Transfer(A, gpu.buffer(5))])
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        hold_up()
        tier.scatter(A, gpu.paged, TARGETS, 0)
    tier.close()
    others = [torch.full((2, gpu.layout.slot_bytes), 9, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert gpu.values(1) == {5}
    assert all(int(other.min()) == 9 for other in others)


@pytest.mark.parametrize("pinned", [True, False])
def test_slots_of_the_pool_and_other_buffers(gpu: Gpu, pinned: bool) -> None:
    tier = gpu.open(slots=8)
    pool = SlabPool(8, gpu.layout.slot_bytes)
    assert pool.wait_populated(30.0)
    buffers = [pool.slot(n) if pinned else gpu.buffer(0) for n in range(8)]
    assert torch.from_numpy(buffers[0]).is_pinned() == pinned
    refs = [ChunkRef(bytes([n]) * 16, CHUNK_BLOCKS) for n in range(8)]

    def round_trip(number: int) -> None:
        transfer = Transfer(refs[number], buffers[number])
        for value in range(number, 200, 16):
            buffers[number][:] = value
            assert tier.put([transfer]) == [STORED]
            buffers[number][:] = 0xEE  # put has no hold of it any more
            assert tier.get([transfer]) == [HIT]
            assert (buffers[number][: gpu.layout.payload_bytes(CHUNK_BLOCKS)] == value).all()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(round_trip, range(8)))
    pool.close()


def test_a_device_without_room_says_how_much_is_free() -> None:
    layout = Gpu().layout
    with pytest.raises(ConfigError, match=r"GiB of the memory of cuda:\d+, of which [\d.]+ are free: lower"):
        GpuTier.open(TierSetup(Namespace({}), layout, 1 << 50))


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no device 'cuda:99': this process sees \d+, from cuda:0 on"):
        GpuTier.open(TierSetup(Namespace({}), Gpu().layout, 1 << 30, {"device": "cuda:99"}))
