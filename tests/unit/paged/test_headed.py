"""KV heads in pages of every layout: chunks of one engine are divided by engines of any other tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import LayoutError
from kvstore.model.heads import Division, Part, heads_of, shards_with
from kvstore.paged.base import PagedKV
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.planes import HeadedPages, LayerCache, find_heads

B, N, D, LAYERS, CHUNK_BLOCKS = 6, 5, 3, 2, 4
SHARDS = (1, 2, 3, 4, 6, 8, 12, 16)
TOTALS = (1, 2, 3, 4, 6, 8, 12)
Heads = torch.Tensor  # [blocks, KV heads, tokens, 2, head size], independent of the holder


def _in_order(values: torch.Tensor, *order: int) -> torch.Tensor:
    """Return the same values and dimensions, with memory in another order."""
    back = [order.index(dim) for dim in range(values.dim())]
    return values.permute(*order).contiguous().permute(*back)


def _flat(values: Heads) -> torch.Tensor:
    return values.flatten(3)  # [B, H, N, C]


def _kernel_blocks(values: Heads) -> torch.Tensor:
    """Return each block of 5 tokens in 5 kernel blocks of one."""
    return _in_order(values.permute(0, 2, 1, 3, 4).reshape(-1, values.shape[1], 1, 2 * D), 0, 1, 2, 3)


LAYOUTS: Mapping[str, Callable[[Heads], LayerCache]] = {
    "[B, H, N, C], heads first": lambda values: _in_order(_flat(values), 0, 1, 2, 3),
    "[B, H, N, C], tokens first": lambda values: _in_order(_flat(values), 0, 2, 1, 3),
    "[2, B, N, H, D]": lambda values: _in_order(values.permute(3, 0, 2, 1, 4), 0, 1, 2, 3, 4),
    "[2, B, N, H, D], heads first": lambda values: _in_order(values.permute(3, 0, 2, 1, 4), 0, 1, 3, 2, 4),
    "[B, 2, N, H, D]": lambda values: _in_order(values.permute(0, 3, 2, 1, 4), 0, 1, 2, 3, 4),
    "[B, 2, N, H, D], heads first": lambda values: _in_order(values.permute(0, 3, 2, 1, 4), 0, 1, 3, 2, 4),
    "K and V apart": lambda values: [_in_order(part.permute(0, 2, 1, 3), 0, 1, 2, 3) for part in values.unbind(3)],
    "kernel blocks": _kernel_blocks,
}


def _bound(caches: Mapping[str, LayerCache], num_heads: int) -> tuple[PagedKV, HeadedPages]:
    paged = bind_paged_kv(caches, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
    pages = find_heads(caches, num_heads, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
    return paged, pages


def _gathered(paged: PagedKV, num_blocks: int) -> ByteArray:
    payload = np.zeros(paged.layout.slot_bytes, np.uint8)
    paged.gather(np.arange(1, 1 + num_blocks, dtype=np.int64), payload[: paged.layout.payload_bytes(num_blocks)])
    return payload


def _caches(make: Callable[[Heads], LayerCache], layers: list[Heads], heads: range) -> dict[str, LayerCache]:
    return {f"layer.{number}": make(values[:, heads.start : heads.stop]) for number, values in enumerate(layers)}


@settings(max_examples=150)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    total=st.sampled_from(TOTALS),
    sizes=st.tuples(st.sampled_from(SHARDS), st.sampled_from(SHARDS)),
    num_blocks=st.integers(1, CHUNK_BLOCKS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    data=st.data(),
)
def test_any_size_reads_any_other(
    layout: str, total: int, sizes: tuple[int, int], num_blocks: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """A worker takes from others' payloads, byte for byte, what it would have gathered itself."""
    if any(max(size, total) % min(size, total) for size in sizes):
        return
    make, (own_size, other_size) = LAYOUTS[layout], sizes
    shape = (B, total, N, 2, D)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    layers = [torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS)]
    heads = heads_of(data.draw(st.integers(0, own_size - 1)), own_size, total)
    paged, pages = _bound(_caches(make, layers, heads), len(heads))
    assert pages.layout(len(heads)) == paged.layout
    parts, payloads = [], []
    for shard in shards_with(heads, other_size, total):
        held = heads_of(shard, other_size, total)
        other = bind_paged_kv(_caches(make, layers, held), num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)
        parts.append(Part(shard, f"{shard}", pages.layout(len(held)), held))
        assert parts[-1].layout == other.layout, "known without a look at that engine"
        payloads.append(_gathered(other, num_blocks))
    division = Division(other_size, tuple(parts), paged.layout, heads, pages.rows)
    target = np.full(paged.layout.slot_bytes, 0xA5, np.uint8)
    for part, payload in zip(parts, payloads, strict=True):
        division.take(part, payload, target, num_blocks)
    payload_bytes = paged.layout.payload_bytes(num_blocks)
    assert target[:payload_bytes].tobytes() == _gathered(paged, num_blocks)[:payload_bytes].tobytes()
    assert (target[payload_bytes:] == 0xA5).all()


def test_heads_are_divided_as_ranks_divide_them() -> None:
    assert [heads_of(shard, 2, 8) for shard in range(2)] == [range(4), range(4, 8)]
    assert [heads_of(shard, 4, 2) for shard in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert shards_with(range(2), 4, 8) == [0]
    assert shards_with(range(4, 8), 4, 8) == [2, 3]
    assert shards_with(range(2), 8, 2) == [0, 4], "of workers that hold the same, the first"
    assert shards_with(range(3), 2, 6) == [0]
    assert shards_with(range(2, 4), 2, 6) == [0, 1], "neither size divides the other"


@pytest.mark.parametrize("num_shards", [3, 5, 12])
def test_a_size_that_does_not_divide_the_heads_is_refused(num_shards: int) -> None:
    with pytest.raises(LayoutError, match="8 KV heads cannot be divided among"):
        heads_of(0, num_shards, 8)


@pytest.mark.parametrize(
    ("cache", "num_heads"),
    [
        (torch.zeros(B, 4, N, 2 * D), 2),
        (torch.zeros(B, N, 2 * D), 1),
        (torch.zeros(2, B, N, N, D), N),
    ],
    ids=["another number", "without heads", "as many tokens"],
)
def test_a_shape_that_does_not_tell_is_refused(cache: torch.Tensor, num_heads: int) -> None:
    with pytest.raises(LayoutError, match="does not tell which dimension"):
        find_heads({"layer": cache}, num_heads, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N)


def test_parts_that_do_not_make_our_pages_are_refused() -> None:
    caches = {"layer": torch.zeros(B, 4, N, 2 * D)}
    paged, pages = _bound(caches, 4)
    half = [Part(rank, f"{rank}", pages.layout(2), range(2 * rank, 2 * rank + 2)) for rank in range(2)]
    Division(2, tuple(half), paged.layout, range(4), pages.rows)
    with pytest.raises(LayoutError, match="do not hold the KV heads"):
        Division(2, tuple(half[:1]), paged.layout, range(4), pages.rows)
    with pytest.raises(LayoutError, match="not made of heads like ours"):
        Division(2, (half[0], half[1]._replace(layout=pages.layout(3))), paged.layout, range(4), pages.rows)
    with pytest.raises(LayoutError, match="rows of heads"):
        Division(2, tuple(half), paged.layout, range(4), (7,))
