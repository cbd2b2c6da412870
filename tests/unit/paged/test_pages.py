"""Gather and scatter, for every layout a backend may use, against a reference that copies block by block in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvstore.model.errors import InvalidCallError, LayoutError
from kvstore.paged.base import BlockIds, HostPagedKV, PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.planes import LayerCache, find_planes
from kvstore.transfer.mover import as_block_ids

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

B, H, N, D = 9, 3, 4, 5  # blocks, heads, tokens in a block, head size; odd ones on purpose
CHUNK_BLOCKS = 4
Caches = dict[str, LayerCache]
Pages = Callable[[LayerCache, int], list[torch.Tensor]]


def noise(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return random bytes as any dtype, NaNs included, as no code may look at values."""
    item = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(sum(shape) + item)
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * item), dtype=torch.uint8, generator=generator).view(dtype)


def block_outermost(layers: int, dtype: torch.dtype) -> Caches:
    """Return one tensor [block, layer, H, N, 2D], in which the stride of a block spans all layers."""
    whole = noise((B, layers, H, N, 2 * D), dtype)
    return {f"layer.{n}": whole[:, n] for n in range(layers)}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def gather(paged: PagedKV, block_ids: BlockIds, slot: ByteArray) -> None:
    """Gather, and wait for it."""
    paged.streams.reach(paged.gather(block_ids, slot))


# The reference: for each block its pages, one per plane, as contiguous tensors in physical order.


def logical(cache: LayerCache, block: int) -> list[torch.Tensor]:
    assert isinstance(cache, torch.Tensor)
    return [cache[block]]


def tokens_first(cache: LayerCache, block: int) -> list[torch.Tensor]:
    """Return the pages of a logical [B, H, N, C] that is in memory as [B, N, H, C]."""
    assert isinstance(cache, torch.Tensor)
    return [cache[block].permute(1, 0, 2)]


def kv_first(cache: LayerCache, block: int) -> list[torch.Tensor]:
    return [cache[0][block], cache[1][block]]


def kernel_blocks_of_two(cache: LayerCache, block: int) -> list[torch.Tensor]:
    assert isinstance(cache, torch.Tensor)
    return [cache[2 * block : 2 * block + 2]]


def kv_first_kernel_blocks(cache: LayerCache, block: int) -> list[torch.Tensor]:
    return [cache[0][2 * block : 2 * block + 2], cache[1][2 * block : 2 * block + 2]]


def spaced(cache: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the same blocks, each followed by ``elements`` of other data."""
    length = cache[0].numel()
    wide = noise((cache.shape[0], length + elements), cache.dtype)
    view = wide[:, :length].view(cache.shape)
    view.copy_(cache)
    return view


def shifted(cache: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the same blocks, not at the beginning of their storage."""
    store = noise((cache.numel() + elements,), cache.dtype)
    view = store[elements:].view(cache.shape)
    view.copy_(cache)
    return view


LAYOUTS: dict[str, tuple[Callable[[torch.dtype], Caches], Pages]] = {
    "LBHNC": (lambda t: {f"l{n}": noise((B, H, N, 2 * D), t) for n in range(3)}, logical),
    "LBNHC": (lambda t: {f"l{n}": noise((B, N, H, 2 * D), t).permute(0, 2, 1, 3) for n in range(3)}, tokens_first),
    "BLHNC": (lambda t: block_outermost(3, t), logical),
    "B2NHD": (lambda t: {f"l{n}": noise((B, 2, N, H, D), t) for n in range(2)}, logical),
    "2BNHD": (lambda t: {f"l{n}": noise((2, B, N, H, D), t) for n in range(2)}, kv_first),
    "2BNHD of B2NHD": (lambda t: {"l": noise((B, 2, N, H, D), t).transpose(0, 1)}, kv_first),
    "pair": (lambda t: {f"l{n}": (noise((B, N, H, D), t), noise((B, N, H, D), t)) for n in range(2)}, kv_first),
    "MLA B1NC": (lambda t: {f"l{n}": noise((B, 1, N, 36), t) for n in range(2)}, logical),
    "MLA BNC": (lambda t: {f"l{n}": noise((B, N, 36), t) for n in range(2)}, logical),
    "kernel blocks": (lambda t: {f"l{n}": noise((2 * B, H, N, D), t) for n in range(2)}, kernel_blocks_of_two),
    "2BNHD kernel blocks": (lambda t: {"l": noise((2, 2 * B, N, H, D), t)}, kv_first_kernel_blocks),
    "layers of several sizes": (
        lambda t: {"a": noise((B, 1, 3, 3), t), "b": noise((B, H, N, 16), t), "c": noise((B, 1, 1, 1), t)},
        logical,
    ),
    "spaced": (lambda t: {"a": spaced(noise((B, N, 8), t), 8), "b": spaced(noise((B, N, 8), t), 3)}, logical),
    "shifted": (lambda t: {"a": shifted(noise((B, N, 8), t), 3)}, logical),
    "one block long": (lambda t: {"a": noise((B, 1), t)}, logical),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8]
cases = pytest.mark.parametrize("layout", LAYOUTS)


def bind(caches: Caches) -> HostPagedKV:
    paged = bind_paged_kv(caches, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
    assert isinstance(paged, HostPagedKV)
    return paged


def on_device(caches: Caches, device: str = "cpu") -> PagedKV:
    layout = bind(caches).layout
    moved = {name: _moved(cache, device) for name, cache in caches.items()}
    return DevicePagedKV([find_planes(name, cache, B) for name, cache in moved.items()], layout, B)


def _moved(cache: LayerCache, device: str) -> LayerCache:
    """Return the same layout on another device; nothing is copied if it is there already."""
    if device == "cpu":
        return cache
    if not isinstance(cache, torch.Tensor):
        return [moved for part in cache if isinstance(moved := _moved(part, device), torch.Tensor)]
    store = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage()).to(device)
    return store.as_strided(cache.shape, cache.stride(), cache.storage_offset())


def slot_for(paged: PagedKV) -> ByteArray:
    """Return a buffer as long as a slot, full of something recognisable."""
    return np.full(paged.layout.slot_bytes, 0xEE, np.uint8)


def expected_payload(caches: Caches, pages: Pages, block_ids: Sequence[int]) -> bytes:
    parts = []
    for cache in caches.values():
        found = [pages(cache, block) for block in block_ids]
        parts += [raw(found[b][plane]) for plane in range(len(found[0])) for b in range(len(block_ids))]
    return b"".join(parts)


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(layout: str, dtype: torch.dtype) -> None:
    make, pages = LAYOUTS[layout]
    caches = make(dtype)
    for paged in (bind(caches), on_device(caches)):
        for block_ids in ([7, 0, 8, 3], [5], [2, 1]):
            slot = slot_for(paged)
            gather(paged, as_block_ids(block_ids), slot)
            wanted = expected_payload(caches, pages, block_ids)
            assert len(wanted) == paged.layout.payload_bytes(len(block_ids))
            assert slot.tobytes() == wanted.ljust(len(slot), b"\xee")


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("first", "targets"), [(0, [7, 0, 8, 3]), (1, [4, 2]), (3, [6]), (2, []), (0, [1])])
def test_scatter_writes_these_blocks_and_nothing_else(
    layout: str, dtype: torch.dtype, first: int, targets: list[int]
) -> None:
    make, pages = LAYOUTS[layout]
    sources = [3, 8, 5, 0]
    originals = make(dtype)
    payload = slot_for(bind(originals))
    gather(bind(originals), as_block_ids(sources), payload)
    for paged_of in (bind, on_device):
        caches = make(dtype)
        before = [_storage(cache) for cache in caches.values()]
        wanted = {block: [raw(page) for c in caches.values() for page in pages(c, block)] for block in range(B)}
        for source, target in zip(sources[first:], targets, strict=False):
            wanted[target] = [raw(page) for c in originals.values() for page in pages(c, source)]
        paged_of(caches).scatter(as_block_ids(targets), payload, len(sources), first)
        for block in range(B):
            assert [raw(page) for c in caches.values() for page in pages(c, block)] == wanted[block], block
        if not targets:
            assert before == [_storage(cache) for cache in caches.values()]


def _storage(cache: LayerCache) -> list[bytes]:
    parts = [cache] if isinstance(cache, torch.Tensor) else cache
    return [raw(torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())) for part in parts]


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_layer_by_layer_is_the_same(layout: str, dtype: torch.dtype) -> None:
    """Two chunks of different lengths are gathered at once, and parts of them scattered to other blocks."""
    make, _ = LAYOUTS[layout]
    check_layers(make, dtype, [bind, on_device])


@pytest.mark.gpu
@cases
def test_layer_by_layer_on_a_real_device(layout: str) -> None:
    check_layers(LAYOUTS[layout][0], torch.bfloat16, [lambda caches: on_device(caches, "cuda")])


def check_layers(
    make: Callable[[torch.dtype], Caches], dtype: torch.dtype, ways: Sequence[Callable[[Caches], PagedKV]]
) -> None:
    for paged_of in ways:
        paged, again = paged_of(make(dtype)), paged_of(make(dtype))
        sources = [as_block_ids([7, 0, 8, 3]), as_block_ids([5, 2])]
        whole, parts = [slot_for(paged), slot_for(paged)], [slot_for(paged), slot_for(paged)]
        for block_ids, slot in zip(sources, whole, strict=True):
            gather(paged, block_ids, slot)
        chunks = [paged.chunk(ids, slot) for ids, slot in zip(sources, parts, strict=True)]
        targets = [again.chunk(as_block_ids([1, 6]), parts[0], 4, 1), again.chunk(as_block_ids([4]), parts[1], 2, 1)]
        for layer in range(paged.layout.num_layers):
            paged.gather_layers(range(layer, layer + 1), chunks)
            paged.streams.wait()
            again.scatter_layers(range(layer, layer + 1), targets)
        again.streams.wait()
        assert all(np.array_equal(one, other) for one, other in zip(whole, parts, strict=True))
        moved, wanted = slot_for(paged), slot_for(paged)
        gather(again, as_block_ids([1, 6, 4, 0]), moved)
        gather(paged, as_block_ids([0, 8, 2, 0]), wanted)
        assert np.array_equal(moved, wanted)
        paged.gather_layers(range(1), [])
        again.scatter_layers(range(1), [])


@pytest.mark.parametrize("paged_of", [bind, on_device])
def test_scatter_leaves_what_lies_between_blocks(paged_of: Callable[[Caches], PagedKV]) -> None:
    cache = spaced(noise((B, N, 8), torch.uint8), 24)
    paged = paged_of({"l": cache})
    whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).view(B, -1)
    whole.fill_(0x5A)
    payload = np.zeros(paged.layout.slot_bytes, np.uint8)
    paged.scatter(as_block_ids([6, 2]), payload, 3, 1)
    changed = (whole != 0x5A).nonzero().tolist()
    assert changed == [[block, byte] for block in (2, 6) for byte in range(N * 8)]


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_a_real_device_moves_the_same_bytes(layout: str, dtype: torch.dtype) -> None:
    make, pages = LAYOUTS[layout]
    caches = make(dtype)
    paged = on_device(caches, "cuda")
    slot = slot_for(paged)
    gather(paged, as_block_ids([7, 0, 8, 3]), slot)
    assert slot.tobytes() == expected_payload(caches, pages, [7, 0, 8, 3]).ljust(len(slot), b"\xee")
    paged.scatter(as_block_ids([1, 2]), slot, 4, 2)  # the contents of 8 and 3
    again = slot_for(paged)
    gather(paged, as_block_ids([1, 7, 2]), again)
    assert again.tobytes() == expected_payload(caches, pages, [8, 7, 3]).ljust(len(again), b"\xee")


def test_a_storage_at_an_odd_address() -> None:
    memory = bytearray(np.random.default_rng(0).bytes(B * N * 16 + 1))
    cache = torch.frombuffer(memory, dtype=torch.uint8, offset=1).view(B, N, 16)
    paged = bind({"l": cache})
    slot = slot_for(paged)
    gather(paged, as_block_ids([8, 1]), slot)
    assert slot[: 2 * N * 16].tobytes() == expected_payload({"l": cache}, logical, [8, 1])
    paged.scatter(as_block_ids([0]), slot, 2, 1)
    assert raw(cache[0]) == raw(cache[1])


def test_a_larger_cache_in_random_order() -> None:
    rng = np.random.default_rng(3)
    num_blocks = 200
    cache = noise((num_blocks, 2, 16, 2, 8), torch.bfloat16)
    paged = bind_paged_kv({"a": cache, "b": cache.clone()}, num_blocks=num_blocks, block_tokens=16, chunk_tokens=256)
    block_ids = rng.permutation(num_blocks)[:16]
    slot = slot_for(paged)
    gather(paged, block_ids, slot)
    targets = rng.permutation(num_blocks)[:16]
    wanted = cache.clone()
    wanted[torch.from_numpy(targets)] = cache[torch.from_numpy(block_ids)]
    paged.scatter(targets, slot, 16, 0)
    assert raw(cache) == raw(wanted)


# Layout


def test_the_layout_says_how_a_block_lies() -> None:
    contiguous = noise((B, H, N, D), torch.bfloat16)
    transposed = noise((B, N, H, D), torch.bfloat16).permute(0, 2, 1, 3)
    layouts = [bind({"l": cache}).layout for cache in (contiguous, transposed, contiguous.view(torch.float16))]
    assert len({layout.fingerprint for layout in layouts}) == 3
    assert [layout.page_bytes for layout in layouts] == [(H * N * D * 2,)] * 3
    packed = bind_paged_kv({"l": contiguous}, num_blocks=B, block_tokens=N, chunk_tokens=N, packing="avx512")
    assert packed.layout.fingerprint != layouts[0].fingerprint


def test_layers_keep_their_order() -> None:
    caches: Caches = {"z": noise((B, N, 8), torch.uint8), "a": noise((B, N, 16), torch.uint8)}
    assert bind(caches).layout.page_bytes == (N * 8, N * 16)
    assert bind(LAYOUTS["pair"][0](torch.uint8)).layout.planes == 2


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(torch.zeros(B), id="no blocks"),
        pytest.param(torch.zeros(B + 1, H, N, D), id="another number of blocks"),
        pytest.param(torch.zeros(2, B, N * H * D), id="K/V first, but flat"),
        pytest.param(torch.zeros(H, B, N, D), id="heads first"),
        pytest.param(torch.zeros(B, H, N, 2 * D)[..., :D], id="holes in every token"),
        pytest.param(torch.zeros(B, H, 2 * N, D)[:, :, :N], id="holes in every head"),
        pytest.param(torch.zeros(B, 1, N, D).expand(B, H, N, D), id="heads share memory"),
        pytest.param(torch.zeros(1, H, N, D).expand(B, H, N, D), id="blocks share memory"),
        pytest.param(torch.zeros(H, B, N, D).transpose(0, 1), id="heads outermost in memory"),
        pytest.param(torch.zeros(2 * B, 2, N, D)[:, 0], id="kernel blocks apart"),
        pytest.param(torch.zeros(B, H, 0, D), id="empty blocks"),
        pytest.param(torch.zeros(0, H, N, D), id="no block at all"),
        pytest.param(torch.zeros(2, 0, N, H, D), id="no block at all, K/V first"),
        pytest.param((torch.zeros(B, N, D), torch.zeros(B, N, D + 1)), id="K and V of different sizes"),
        pytest.param((), id="no tensors"),
    ],
)
def test_layouts_that_are_not_understood(cache: LayerCache) -> None:
    with pytest.raises(LayoutError):
        bind({"layer.0": cache})


def test_the_message_names_layer_shape_and_strides() -> None:
    with pytest.raises(LayoutError, match=r"layer attn\.7: .*\(10, 3, 4, 5\).*\(60, 20, 5, 1\).*not supported"):
        bind({"attn.7": torch.zeros(B + 1, H, N, D)})


def test_ambiguous_with_two_blocks() -> None:
    with pytest.raises(LayoutError, match="is ambiguous"):
        bind_paged_kv({"l": torch.zeros(2, 2, N, H, D)}, num_blocks=2, block_tokens=N, chunk_tokens=N)


def test_layers_that_do_not_fit_together() -> None:
    with pytest.raises(LayoutError, match="differ"):
        bind({"a": torch.zeros(B, N, D), "b": torch.zeros(2, B, N, H, D)})
    with pytest.raises(LayoutError, match="no layer"):
        bind({})
    with pytest.raises(LayoutError, match="0 blocks"):
        bind_paged_kv({"a": torch.zeros(B, N, D)}, num_blocks=0, block_tokens=N, chunk_tokens=N)


# Bad calls


def test_reserved_blocks_are_never_copied() -> None:
    cache = noise((B, N, D), torch.uint8)
    before, slot = cache.clone(), np.zeros(4096, np.uint8)
    on_host = bind_paged_kv(
        {"l": cache}, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N, reserved_blocks=1
    )
    planes = [find_planes("l", cache, B)]
    device = DevicePagedKV(planes, on_host.layout, B, 1)
    for paged in (on_host, on_host.for_thread(), device, device.for_thread()):
        with pytest.raises(InvalidCallError, match=f"block id 0 is not in 1..{B - 1}"):
            gather(paged, as_block_ids([1, 0]), slot)
        with pytest.raises(InvalidCallError, match="block id 0 "):
            paged.scatter(as_block_ids([0, 1]), slot, 2, 0)
        with pytest.raises(InvalidCallError, match="block id 0 "):
            paged.chunk(as_block_ids([2, 0]), slot)
        gather(paged, as_block_ids([1, B - 1]), slot)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("bad", [-1, B, 2**40, -(2**40)])
@pytest.mark.parametrize("paged_of", [bind, on_device])
def test_bad_block_ids_touch_nothing(bad: int, paged_of: Callable[[Caches], PagedKV]) -> None:
    cache = noise((B, N, D), torch.uint8)
    paged, before, slot = paged_of({"l": cache}), cache.clone(), np.zeros(4096, np.uint8)
    with pytest.raises(InvalidCallError, match=f"block id {bad} is not in 0..{B - 1}"):
        gather(paged, as_block_ids([0, bad, 99]), slot)
    with pytest.raises(InvalidCallError, match=f"block id {bad} "):
        paged.scatter(as_block_ids([0, bad]), slot, 2, 0)
    with pytest.raises(InvalidCallError, match=f"block id {bad} "):
        paged.chunk(as_block_ids([0, bad]), slot)
    assert torch.equal(cache, before)
    assert not slot.any()
