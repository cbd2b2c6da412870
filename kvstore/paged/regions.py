"""Regions of a chunk's payload to copy to or from a staging buffer, chosen for the least time.

In the buffer the layers of a chunk that move together are laid out as in its payload, so one copy moves all of them. A
subset of the blocks consists of many pieces, one in each plane: they are copied one by one if that is faster than to
copy the bytes between them as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.model.layout import KVLayout
from kvstore.paged.base import ChunkBlocks

COPY_BYTES = 256 << 10  # launching a copy takes about as long as copying so many bytes
PIECE_COPIES = 4  # a piece counts as so many copies, because launching one takes the host longer than the device


class Region(NamedTuple):
    """Bytes of a payload, and their offset in the chunk's part of a buffer."""

    begin: int
    end: int
    staged: int


def regions_of(
    chunk: ChunkBlocks, layers: range, layout: KVLayout, copy_bytes: int, *, exactly: bool
) -> Iterator[Region]:
    """Yield the regions of some layers.

    Args:
        chunk: its blocks are adjacent in each plane.
        layers: those that move together.
        layout: of the payload.
        copy_bytes: see ``COPY_BYTES``.
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
