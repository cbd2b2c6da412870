"""The geometry of payloads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.errors import LayoutError
from kvstore.model.layout import KVLayout, round_up


def test_sizes() -> None:
    layout = KVLayout(page_bytes=(1000, 36, 1000), planes=2, block_tokens=16, chunk_tokens=64)
    assert layout.num_layers == 3
    assert layout.blocks_per_chunk == 4
    assert layout.block_bytes == 4072
    assert layout.payload_bytes(3) == 12216
    assert layout.slot_bytes == 16384
    assert [layout.layer_range(n, 3) for n in range(3)] == [(0, 6000), (6000, 6216), (6216, 12216)]


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=6), st.sampled_from([1, 2]), st.integers(1, 8))
def test_layers_follow_each_other_without_gaps(pages: list[int], planes: int, blocks: int) -> None:
    layout = KVLayout(tuple(pages), planes, block_tokens=4, chunk_tokens=32)
    ranges = [layout.layer_range(n, blocks) for n in range(len(pages))]
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert [end - begin for begin, end in ranges] == [page * planes * blocks for page in pages]
    assert ranges[-1][1] == layout.payload_bytes(blocks) <= layout.slot_bytes
    assert layout.slot_bytes % 4096 == 0
    assert layout.slot_bytes - layout.payload_bytes(8) < 4096


@pytest.mark.parametrize(
    ("least_bytes", "sizes"), [(1, [1, 1, 1]), (120, [1, 1, 1]), (121, [2, 1]), (312, [2, 1]), (10**6, [3])]
)
def test_layers_go_together_until_they_have_enough_bytes(least_bytes: int, sizes: list[int]) -> None:
    layout = KVLayout(page_bytes=(30, 48, 30), planes=1, block_tokens=16, chunk_tokens=64)
    groups = layout.layer_groups(least_bytes)
    assert [layer for group in groups for layer in group] == [0, 1, 2]
    assert [len(group) for group in groups] == sizes


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_fingerprint_is_golden() -> None:
    layout = KVLayout(page_bytes=(4096, 4096), planes=1, block_tokens=16, chunk_tokens=256, physical="cpu x")
    assert layout.fingerprint == "9ea861e02778b7a6"


def test_fingerprint_follows_what_bytes_mean() -> None:
    variants = [
        KVLayout((4096, 4096), 1, 16, 256),
        KVLayout((4096,), 1, 16, 256),
        KVLayout((4096, 4096), 2, 16, 256),
        KVLayout((4096, 4096), 1, 32, 256),
        KVLayout((4096, 2048), 1, 16, 256),
        KVLayout((2048, 4096), 1, 16, 256),
        KVLayout((4096, 4096), 1, 16, 256, "other"),
    ]
    assert len({layout.fingerprint for layout in variants}) == len(variants)
    assert KVLayout((4096, 4096), 1, 16, 512).fingerprint == variants[0].fingerprint  # a block is the same


@pytest.mark.parametrize("pages", [(), (0,), (4096, -1)])
def test_impossible_pages(pages: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="positive"):
        KVLayout(pages, 1, 16, 256)


@pytest.mark.parametrize(("block", "chunk"), [(16, 100), (0, 256), (16, 0), (-16, 256), (16, -256)])
def test_chunks_are_whole_blocks(block: int, chunk: int) -> None:
    with pytest.raises(LayoutError, match="multiple"):
        KVLayout((4096,), 1, block, chunk)


def test_the_message_offers_a_chunk_size_that_works() -> None:
    with pytest.raises(LayoutError, match="such as 112"):
        KVLayout((4096,), 1, 16, 100)


@pytest.mark.parametrize("planes", [1, 2])
def test_leading_blocks_are_ranges_of_each_plane(planes: int) -> None:
    layout = KVLayout((4, 8), planes, 2, 6)
    assert (
        layout.front_ranges(3, 2)
        == {
            1: [(0, 8), (12, 28)],
            2: [(0, 8), (12, 20), (24, 40), (48, 64)],
        }[planes]
    )
    assert sum(end - begin for begin, end in layout.front_ranges(3, 2)) == layout.payload_bytes(2)


@pytest.mark.parametrize("planes", [1.5, True, "2", None])
def test_numbers_are_whole(planes: object) -> None:
    with pytest.raises(LayoutError, match="integers"):
        KVLayout((1000,), planes, block_tokens=16, chunk_tokens=64)  # type: ignore[arg-type]
