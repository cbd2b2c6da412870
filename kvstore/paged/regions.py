"""Which bytes of a chunk's payload are copied to or from a staging buffer, by as few copies as pays.

In the buffer the layers of a chunk that move together lie as in its payload, so one copy brings all of them. Only some
of its blocks are many pieces, one in each plane: they are copied one by one if that is faster than to bring what lies
between them as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.layout import KVLayout
from kvstore.paged.base import ChunkBlocks

COPY_BYTES = 256 << 10  # to begin a copy takes about as long as to copy so many bytes
PIECE_COPIES = 4  # a piece counts as so many copies: the host takes longer to begin one than the device


class Region(NamedTuple):
    """Bytes of a payload, and where they begin in the part of a buffer that its chunk has."""

    begin: int
    end: int
    staged: int


def regions_of(
    chunk: ChunkBlocks, layers: range, layout: KVLayout, copy_bytes: int, *, exactly: bool
) -> Iterator[Region]:
    """The regions of some layers.

    Args:
        chunk: its blocks lie side by side in each plane.
        layers: those that move together.
        layout: of the payload.
        copy_bytes: as ``COPY_BYTES``.
        exactly: no byte of other blocks may be copied.
    """
    num_blocks, num_wanted = chunk.chunk_blocks, len(chunk.block_ids)
    begin, end = layout.layer_range(layers[0], num_blocks)[0], layout.layer_range(layers[-1], num_blocks)[1]
    if num_wanted == num_blocks:
        yield Region(begin, end, 0)
        return
    if not num_wanted:
        return
    first = begin + chunk.first_block * layout.page_bytes[layers[0]]
    last = end - (num_blocks - chunk.first_block - num_wanted) * layout.page_bytes[layers[-1]]
    num_pieces = len(layers) * layout.planes
    wanted_bytes = (end - begin) // num_blocks * num_wanted
    if not exactly and last - first + copy_bytes <= wanted_bytes + num_pieces * PIECE_COPIES * copy_bytes:
        yield Region(first, last, first - begin)
        return
    for layer in layers:
        page_bytes = layout.page_bytes[layer]
        for plane in range(layout.planes):
            first = layout.layer_range(layer, num_blocks)[0] + (plane * num_blocks + chunk.first_block) * page_bytes
            yield Region(first, first + num_wanted * page_bytes, first - begin)
