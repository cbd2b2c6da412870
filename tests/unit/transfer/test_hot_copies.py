"""Hot copies alone, over paged caches of several layouts, compared with a dictionary. The device is the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvstore.memory.slabs import Filling
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError, InvalidCallError
from kvstore.paged.base import BlockIds, HostPagedKV, PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.planes import find_planes
from kvstore.transfer.hot import PROMOTE_AT, HotChunks
from kvstore.transfer.mover import as_block_ids

BLOCKS, N, CHUNK_BLOCKS = 12, 4, 3
Caches = dict[str, torch.Tensor]
IDS, OTHERS = as_block_ids([7, 0, 4]), as_block_ids([1, 2, 3])


def make_caches() -> Caches:
    """Return layers of three layouts with blocks of different sizes, K/V in one block each; 12 blocks of noise."""
    noise = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 256, (BLOCKS, 2 * N * 15), dtype=torch.uint8, generator=noise)
    apart = torch.randint(0, 256, (BLOCKS, N * 6 + 5), dtype=torch.uint8, generator=noise)
    half = torch.randn((BLOCKS, N, 3, 2), generator=noise).to(torch.bfloat16)
    return {
        "dense": whole.view(BLOCKS, 2, N, 3, 5),
        "apart": apart[:, : N * 6].view(BLOCKS, N, 6),  # other data is between the blocks
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
    """Return the elements of every block, in logical order, layer by layer: slow, and independent of the layout."""
    return [[cache[block].flatten().tolist() for cache in caches.values()] for block in range(BLOCKS)]


def make_ref(number: int, num_blocks: int = CHUNK_BLOCKS) -> ChunkRef:
    return ChunkRef(bytes([number]) * 16, num_blocks)


def make_hot(paged: PagedKV, slots: int = 2) -> HotChunks:
    return HotChunks(paged, slots * paged.layout.slot_bytes)


def keep(hot: HotChunks, ref: ChunkRef, filling: Filling, block_ids: BlockIds) -> None:
    """Load a chunk from memory so often that a copy is kept."""
    for _ in range(PROMOTE_AT):
        hot.note_load(ref, filling, block_ids)


def check_slots(hot: HotChunks, slots: int) -> None:
    """Check that no slot is lost, and that none is used twice."""
    assert sorted([*hot._free, *(held.slot for held in hot._copies.values())]) == list(range(slots))


A, B, C = make_ref(1), make_ref(2), make_ref(3)
ONE, OTHER = Filling(0, 1), Filling(0, 2)


@both_ways
def test_any_order_of_gathers_and_scatters(bind: Bind) -> None:
    caches = make_caches()
    paged = bind(caches)
    hot = make_hot(paged, slots=4)
    blocks = contents(caches)
    held: dict[ChunkRef, tuple[Filling, list[list[list[float]]]]] = {}  # the longest unused first
    dice, hits, displaced = random.Random(5), 0, 0
    for _ in range(400):
        number = dice.randrange(6)
        ref, filling = make_ref(number, 1 + number % CHUNK_BLOCKS), Filling(number, dice.randrange(2))
        ids = dice.sample(range(BLOCKS), ref.num_blocks)
        choice = dice.random()
        if choice < 0.4:
            keep(hot, ref, filling, as_block_ids(ids))
            held.pop(ref, None)
            if len(held) == 4:
                del held[next(iter(held))]
                displaced += 1
            held[ref] = filling, [blocks[block] for block in ids]
        elif choice < 0.98:
            first = dice.randrange(ref.num_blocks)
            targets = ids[first : dice.randint(first, ref.num_blocks)]
            is_right = ref in held and held[ref][0] == filling
            assert hot.scatter(ref, filling, as_block_ids(targets), first) is is_right
            former = held.pop(ref, None)
            if is_right and former is not None:
                held[ref] = former
                hits += 1
                for place, block in enumerate(targets, start=first):
                    blocks[block] = former[1][place]
        else:
            hot.clear()
            held.clear()
        assert list(hot._copies) == list(held)
        check_slots(hot, 4)
    assert contents(caches) == blocks
    assert hits > 20
    assert displaced > 5


def test_a_copy_of_another_content_makes_room() -> None:
    paged = bind_host(make_caches())
    hot = make_hot(paged, slots=1)
    keep(hot, A, ONE, IDS)
    assert not hot.scatter(A, OTHER, OTHERS, 0)
    assert not hot.scatter(A, ONE, OTHERS, 0), "it is forgotten"
    check_slots(hot, 1)
    keep(hot, A, OTHER, IDS)
    keep(hot, A, ONE, IDS)  # while the copy of the other content exists
    check_slots(hot, 1)
    assert hot.scatter(A, ONE, OTHERS, 0)


class Failing(HostPagedKV):
    """A paged cache whose device fails on command."""

    is_broken = False

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        self.fail_if_broken()
        super().gather_on_device(block_ids, payload)

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        self.fail_if_broken()
        super().scatter_on_device(block_ids, payload, chunk_blocks, first_block)

    def fail_if_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("call", ["gather", "scatter"])
def test_a_device_that_fails_is_left_out(caplog: pytest.LogCaptureFixture, call: str) -> None:
    caches = make_caches()
    paged = Failing([find_planes(*layer, BLOCKS) for layer in caches.items()], bind_host(caches).layout, BLOCKS)
    hot = make_hot(paged)
    keep(hot, A, ONE, IDS)
    paged.is_broken = True
    if call == "gather":
        keep(hot, B, ONE, OTHERS)
    else:
        assert not hot.scatter(A, ONE, OTHERS, 0)
    paged.is_broken = False
    assert f"the GPU tier is left out from now on: cannot {call} a chunk on cpu: CUDA error" in caplog.text
    keep(hot, A, ONE, IDS)
    assert not hot.scatter(A, ONE, OTHERS, 0)
    hot.clear()
    keep(hot, A, ONE, IDS)
    assert not hot.scatter(A, ONE, OTHERS, 0)


@both_ways
def test_bad_blocks_are_refused_and_lose_no_slot(bind: Bind) -> None:
    caches = make_caches()
    paged, before = bind(caches), contents(caches)
    hot = make_hot(paged)
    with pytest.raises(InvalidCallError, match="block id 12 is not in"):
        keep(hot, A, ONE, as_block_ids([1, 12, 2]))
    check_slots(hot, 2)
    keep(hot, A, ONE, IDS)
    with pytest.raises(InvalidCallError, match="block id -1 is not in"):
        hot.scatter(A, ONE, as_block_ids([3, -1]), 1)
    check_slots(hot, 2)
    assert contents(caches) == before


def test_after_close_nothing_is_kept() -> None:
    hot = make_hot(bind_host(make_caches()))
    keep(hot, A, ONE, IDS)
    hot.close()
    assert not hot.scatter(A, ONE, OTHERS, 0)
    keep(hot, C, ONE, IDS)
    assert not hot.scatter(C, ONE, OTHERS, 0)
    assert hot._slots._pool.nbytes == 0


def test_a_bound_below_one_chunk() -> None:
    with pytest.raises(ConfigError, match="4095 bytes of device memory do not hold one chunk of 4096: raise max_local"):
        HotChunks(bind_host(make_caches()), 4095)
