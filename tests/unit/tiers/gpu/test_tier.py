"""The GPU tier's ways past the host, its slots, and its errors, on a CPU device. Real devices: test_gpu_streams.py."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError, InvalidCallError, TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.paged.base import BlockIds, HostPagedKV, PagedKV, find_planes
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.tiers.base import TierSetup, Transfer
from kvstore.tiers.gpu.slots import SlotLedger
from kvstore.tiers.gpu.tier import GpuTier
from kvstore.transfer.mover import as_block_ids

if TYPE_CHECKING:
    from kvstore.chunks import ByteArray

BLOCKS, N, CHUNK_BLOCKS = 12, 4, 3
STORED, FULL, FAILED, HIT, MISS = Outcome.STORED, Outcome.FULL, Outcome.FAILED, Outcome.HIT, Outcome.MISS
CPU = torch.device("cpu")
Caches = dict[str, torch.Tensor]


def make_caches() -> Caches:
    """Layers of three layouts with blocks of different sizes, K/V in one block each; 12 blocks of noise."""
    noise = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 256, (BLOCKS, 2 * N * 15), dtype=torch.uint8, generator=noise)
    apart = torch.randint(0, 256, (BLOCKS, N * 6 + 5), dtype=torch.uint8, generator=noise)
    half = torch.randn((BLOCKS, N, 3, 2), generator=noise).to(torch.bfloat16)
    return {
        "dense": whole.view(BLOCKS, 2, N, 3, 5),
        "apart": apart[:, : N * 6].view(BLOCKS, N, 6),  # something else lies between the blocks
        "tokens first": half.permute(0, 2, 1, 3),
    }


def bind_host(caches: Caches) -> HostPagedKV:
    paged = bind_paged_kv(caches, num_blocks=BLOCKS, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
    assert isinstance(paged, HostPagedKV)
    return paged


def bind_device(caches: Caches) -> DevicePagedKV:
    return DevicePagedKV([find_planes(*layer, BLOCKS) for layer in caches.items()], bind_host(caches).layout, BLOCKS)


both_ways = pytest.mark.parametrize("bind", [bind_host, bind_device])
Bind = Callable[[Caches], PagedKV]


def contents(caches: Caches) -> list[list[list[float]]]:
    """For every block what its elements are, in logical order, layer by layer: slow, and blind to how it lies."""
    return [[cache[block].flatten().tolist() for cache in caches.values()] for block in range(BLOCKS)]


def make_ref(number: int, num_blocks: int = CHUNK_BLOCKS) -> ChunkRef:
    return ChunkRef(bytes([number]) * 16, num_blocks)


def make_tier(layout: KVLayout, slots: int = 2) -> GpuTier:
    return GpuTier(layout, slots, CPU)


def slot_buffer(layout: KVLayout) -> ByteArray:
    return np.full(layout.slot_bytes, 0xEE, np.uint8)


A, B, C = make_ref(1), make_ref(2), make_ref(3)
IDS, OTHERS = as_block_ids([7, 0, 4]), as_block_ids([1, 2, 3])


# Device paths


@both_ways
def test_any_order_of_gathers_and_scatters(bind: Bind) -> None:
    caches = make_caches()
    paged = bind(caches)
    tier = make_tier(paged.layout, slots=4)
    blocks, held = contents(caches), dict[ChunkRef, list[list[list[float]]]]()
    dice = random.Random(5)
    for _ in range(300):
        number = dice.randrange(6)
        ref = make_ref(number, 1 + number % CHUNK_BLOCKS)
        ids = dice.sample(range(BLOCKS), ref.num_blocks)
        if dice.random() < 0.4:
            outcome = tier.gather(ref, paged, as_block_ids(ids))
            assert outcome is (STORED if ref in held or len(held) < 4 else FULL)
            if outcome is STORED:
                held[ref] = [blocks[block] for block in ids]
        elif dice.random() < 0.8:
            first = dice.randrange(ref.num_blocks)
            targets = ids[first : dice.randint(first, ref.num_blocks)]
            assert tier.scatter(ref, paged, as_block_ids(targets), first) is (HIT if ref in held else MISS)
            for place, block in enumerate(targets if ref in held else [], start=first):
                blocks[block] = held[ref][place]
        elif held:
            gone = dice.choice(sorted(held))
            tier.remove([gone])
            del held[gone]
        assert tier.used_bytes == len(held) * paged.layout.slot_bytes
    assert contents(caches) == blocks
    assert {ref for ref, _ in tier.scan()} == set(held)
    assert tier.counters.full > 0
    assert tier.counters.hits > 20


@both_ways
def test_what_is_gathered_can_be_got_and_what_is_put_can_be_scattered(bind: Bind) -> None:
    caches = make_caches()
    paged, layout = bind(caches), bind(caches).layout
    wanted, buffer = slot_buffer(layout), slot_buffer(layout)
    bind_host(caches).gather(IDS, wanted)
    tier = make_tier(layout)
    assert tier.gather(A, paged, IDS) is STORED
    assert tier.get([Transfer(A, buffer)]) == [HIT]
    assert buffer.tobytes() == wanted.tobytes()
    assert tier.put([Transfer(B, buffer)]) == [STORED]
    before = contents(caches)
    for cache in caches.values():
        cache.zero_()
    assert tier.scatter(B, paged, IDS, 0) is HIT
    assert [contents(caches)[block] for block in IDS] == [before[block] for block in IDS]
    events = tier.counters
    assert (events.hits, events.stored, events.bytes_read) == (2, 2, 2 * layout.payload_bytes(CHUNK_BLOCKS))


class Interrupted(HostPagedKV):
    """A paged cache in which something happens before the blocks are copied."""

    def __init__(self, caches: Caches, before: Callable[[], object]) -> None:
        super().__init__([find_planes(*layer, BLOCKS) for layer in caches.items()], bind_host(caches).layout, BLOCKS)
        self.before = before

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        self.before()
        super().gather_on_device(block_ids, payload)

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        self.before()
        super().scatter_on_device(block_ids, payload, chunk_blocks, first_block)


@pytest.mark.parametrize("forget", ["remove", "clear", "replace", "close"])
def test_a_slot_that_is_read_is_not_overwritten(forget: str) -> None:
    caches = make_caches()
    paged = bind_host(caches)
    tier = make_tier(paged.layout)
    tier.gather(A, paged, IDS)
    sources = [contents(caches)[block] for block in IDS]

    def interrupt() -> None:
        if forget == "close":
            tier.close()
            return
        if forget == "replace":
            assert tier.gather(A, paged, OTHERS) is STORED
            assert tier.gather(B, paged, OTHERS) is FULL
        else:
            tier.remove([A]) if forget == "remove" else tier.clear()
            assert not tier.contains([A])[0]
            assert [tier.gather(ref, paged, OTHERS) for ref in (B, C)] == [STORED, FULL]
        assert tier.used_bytes == tier.capacity_bytes  # the one that is being read counts still

    targets = as_block_ids([9, 10, 11])
    assert tier.scatter(A, Interrupted(caches, interrupt), targets, 0) is HIT
    assert [contents(caches)[block] for block in targets] == sources
    if forget != "close":
        assert tier.used_bytes == paged.layout.slot_bytes
        assert tier.gather(C, paged, OTHERS) is STORED  # into the slot that was read


def test_a_chunk_that_is_read_is_not_replaced_in_a_full_tier() -> None:
    caches = make_caches()
    paged = bind_host(caches)
    tier = make_tier(paged.layout, slots=1)
    tier.gather(A, paged, IDS)
    outcomes: list[Outcome] = []
    interrupted = Interrupted(caches, lambda: outcomes.append(tier.gather(A, paged, OTHERS)))
    assert tier.scatter(A, interrupted, OTHERS, 0) is HIT
    assert outcomes == [FULL]
    assert tier.contains([A]) == [True]
    assert tier.gather(A, paged, OTHERS) is STORED


def test_what_was_cleared_while_it_was_gathered_does_not_come_back() -> None:
    caches = make_caches()
    tier = make_tier(bind_host(caches).layout)
    outcome = tier.gather(A, Interrupted(caches, lambda: tier.reset(Namespace({"weights": "new"}))), IDS)
    assert outcome is FAILED
    assert tier.contains([A]) == [False]
    assert tier.used_bytes == 0
    assert (tier.counters.failed, tier.counters.stored) == (1, 0)


def test_closed_while_it_was_gathered() -> None:
    caches = make_caches()
    tier = make_tier(bind_host(caches).layout)
    assert tier.gather(A, Interrupted(caches, tier.close), IDS) is FAILED
    with pytest.raises(ClosedError, match="GPU tier"):
        tier.gather(A, bind_host(caches), IDS)
    with pytest.raises(ClosedError, match="GPU tier"):
        tier.scatter(A, bind_host(caches), IDS, 0)


def test_a_closed_tier_holds_no_memory() -> None:
    caches = make_caches()
    tier = make_tier(bind_host(caches).layout)
    tier.gather(A, bind_host(caches), IDS)
    assert tier._pool is not None
    pool = weakref.ref(tier._pool)
    tier.close()
    assert pool() is None
    assert tier.used_bytes == 0


# Errors


def test_a_device_that_fails_breaks_the_tier_and_loses_no_slot() -> None:
    caches = make_caches()
    paged = bind_host(caches)
    tier = make_tier(paged.layout, slots=1)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(TierError, match="cannot gather a chunk on cpu: CUDA error"):
        tier.gather(A, Interrupted(caches, fail), IDS)
    assert tier.used_bytes == 0
    tier.gather(A, paged, IDS)
    with pytest.raises(TierError, match="cannot scatter a chunk on cpu: CUDA error"):
        tier.scatter(A, Interrupted(caches, fail), IDS, 0)
    tier.remove([A])
    assert tier.gather(B, paged, IDS) is STORED
    assert (tier.counters.stored, tier.counters.hits, tier.counters.failed) == (2, 0, 0)


@both_ways
def test_bad_blocks_are_refused(bind: Bind) -> None:
    caches = make_caches()
    paged, before = bind(caches), contents(caches)
    tier = make_tier(paged.layout)
    for ref in (make_ref(1, 2), make_ref(1, 4)):
        with pytest.raises(InvalidCallError, match=f"chunk of {ref.num_blocks} blocks cannot be gathered from 3"):
            tier.gather(ref, paged, IDS)
    with pytest.raises(InvalidCallError, match="chunk of 5 blocks cannot be gathered from 5"):
        tier.gather(make_ref(1, 5), paged, as_block_ids(range(5)))
    with pytest.raises(InvalidCallError, match="block id 12 is not in"):
        tier.gather(A, paged, as_block_ids([1, 12, 2]))
    assert tier.used_bytes == 0
    tier.gather(A, paged, IDS)
    for ids, first in (([1, 2], 2), ([1], -1), ([0, 1, 2, 3], 0)):
        with pytest.raises(InvalidCallError, match=f"has no blocks {first} to {first + len(ids)}"):
            tier.scatter(A, paged, as_block_ids(ids), first)
    with pytest.raises(InvalidCallError, match="block id -1 is not in"):
        tier.scatter(A, paged, as_block_ids([3, -1]), 1)
    assert contents(caches) == before


def test_another_cache_is_refused() -> None:
    paged = bind_host(make_caches())
    tier = make_tier(bind_host({"one": torch.zeros((BLOCKS, N, 8))}).layout)
    with pytest.raises(InvalidCallError, match="does not fit a GPU tier on cpu with blocks of 128:"):
        tier.gather(A, paged, IDS)
    tier = make_tier(paged.layout)
    paged.device = torch.device("cuda", 1)
    with pytest.raises(InvalidCallError, match=r"cache on cuda:1 with blocks of .* GPU tier on cpu"):
        tier.scatter(A, paged, IDS, 0)


def open_on(device: str, capacity_bytes: int = 1 << 20) -> GpuTier:
    layout = bind_host(make_caches()).layout
    return GpuTier.open(TierSetup(Namespace({}), layout, capacity_bytes, {"device": device}))


@pytest.mark.parametrize("device", ["bogus", "", "cuda:x", "meta", "mps"])
def test_devices_that_are_none(device: str) -> None:
    with pytest.raises(ConfigError, match="cuda, cuda:<number> and cpu are known"):
        open_on(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_without_cuda_it_says_so(device: str) -> None:
    with pytest.raises(ConfigError, match=r"needs CUDA, and torch .* finds none: set max_local_gpu_size to 0"):
        open_on(device)


@pytest.mark.parametrize("capacity_bytes", [2**62, 2**80])
def test_a_device_without_room(capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"GiB of the memory of cpu: lower max_local_gpu_size, or"):
        open_on("cpu", capacity_bytes)


def test_a_capacity_below_one_chunk() -> None:
    with pytest.raises(ConfigError, match="do not hold one chunk of 4096: raise max_local_gpu_size"):
        open_on("cpu", 4095)


def test_opened_in_inference_mode_it_can_be_used_outside() -> None:
    with torch.inference_mode():  # in which engines like to start
        tier = open_on("cpu")
    caches = make_caches()
    assert tier._pool is not None
    tier._pool[0].zero_()  # as a copy on a thread would do
    assert tier.gather(A, bind_device(caches), IDS) is STORED
    with torch.inference_mode():
        assert tier.gather(B, bind_device(caches), OTHERS) is STORED


# Slots


def test_the_lowest_free_slot_is_taken() -> None:
    ledger = SlotLedger(3)
    fills = [ledger.begin_fill(ref) for ref in (A, B)]
    assert [fill and fill.slot for fill in fills] == [0, 1]
    for fill in fills:
        assert fill is not None
        assert ledger.end_fill(fill, is_whole=True)
    ledger.drop(A)
    again = ledger.begin_fill(C)
    assert again is not None
    assert again.slot == 0
    assert not ledger.end_fill(again, is_whole=False)
    assert ledger.slots_in_use == 1
    assert ledger.refs() == [B]


def test_a_slot_is_free_when_its_last_reader_leaves() -> None:
    ledger = SlotLedger(1)
    fill = ledger.begin_fill(A)
    assert fill is not None
    ledger.end_fill(fill, is_whole=True)
    assert [ledger.begin_read(A), ledger.begin_read(A)] == [0, 0]
    ledger.drop(A)
    assert ledger.begin_read(A) is None
    ledger.end_read(A, 0)
    assert ledger.begin_fill(B) is None
    ledger.end_read(A, 0)
    assert ledger.begin_fill(B) is not None
