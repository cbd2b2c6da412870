"""Paged KV cache of several groups of layers, whose blocks are of different kinds but come from one pool of ids.

A copy moves a list of *rows*: blocks of one or several groups, in the order of the payload. A row's id is its block's,
with the group in the upper bits (``rows_of``). Payloads are ``[group][layer][plane][block][page bytes]``, where a group
is a run of consecutive rows of one group. A row whose block is null is left out: its bytes are not loaded.
"""

# ruff: noqa: ARG002 - rows say what others are told by further arguments

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import KVLayout
from kvstore.paged.base import BlockIds, ChunkBlocks, Copiers, PagedKV, check_block_ids
from kvstore.paged.streams import DeviceEvent

_GROUP_SHIFT: Final = 32
_BLOCK_MASK: Final = (1 << _GROUP_SHIFT) - 1


def row_of(group: int, block_id: int) -> int:
    """Return a block of a group as a row. A block id of group 0 equals its row."""
    return block_id + (group << _GROUP_SHIFT)


def rows_of(group: int, block_ids: BlockIds) -> BlockIds:
    """Return blocks of a group as rows."""
    return block_ids + row_of(group, 0)


def any_present(rows: BlockIds) -> bool:
    """Tell if any row has a block that is not null."""
    return bool((rows & _BLOCK_MASK).any())


class _Segment(NamedTuple):
    """Consecutive rows of one group: its cache, their part of the payload, and the rows whose block is not null."""

    paged: PagedKV
    place: slice
    chunk: ChunkBlocks


class GroupedPagedKV(PagedKV):
    """Groups of one worker's cache. See ``PagedKV``; ``block_ids`` are rows, and blocks are not moved by layer.

    Args:
        groups: the cache of each group, all in the same pool of ids; None for one without layers on this rank.
        layout: of a chunk, which combines all groups that keep all tokens.
    """

    moves_layers = False

    def __init__(self, groups: Sequence[PagedKV | None], layout: KVLayout) -> None:
        self.layout = layout
        self._groups = tuple(groups)
        self._bound = tuple(group for group in groups if group is not None)
        self._movers = [None if group is None else self._mover_of(group) for group in groups]
        self._first = self._bound[0]
        self._block_bytes = np.array([0 if group is None else group.layout.block_bytes for group in groups])
        self.num_blocks = self._first.num_blocks
        self.device = self._first.device
        self.streams = self._first.streams

    def _mover_of(self, group: PagedKV) -> PagedKV:
        """Return the first cache with the same planes as a group, so that one launch moves the blocks of both."""
        return next((first for first in self._bound if group.has_planes_of(first)), group)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block, by group."""
        return tuple(self._block_bytes.tolist())

    @property
    def device_bytes(self) -> int:
        """See ``PagedKV``: the buffers are shared."""
        return self._first.device_bytes

    def for_thread(self) -> PagedKV:
        """See ``PagedKV``."""
        first = self._first.for_thread()
        return self._each(lambda group: first if group is self._first else group.beside(first))

    def beside(self, other: PagedKV) -> PagedKV:
        """See ``PagedKV``."""
        return self._each(lambda group: group.beside(other))

    def with_help(self, copiers: Copiers) -> PagedKV:
        """See ``PagedKV``."""
        return self._each(lambda group: group.with_help(copiers))

    def _each(self, change: Callable[[PagedKV], PagedKV]) -> GroupedPagedKV:
        return GroupedPagedKV([None if group is None else change(group) for group in self._groups], self.layout)

    def bytes_of(self, block_ids: BlockIds) -> int:
        """See ``PagedKV``: null blocks have none."""
        own = (block_ids >> _GROUP_SHIFT)[block_ids & _BLOCK_MASK > 0]
        return int(self._block_bytes[own].sum())

    def fence(self) -> None:
        """See ``PagedKV``."""
        self._first.fence()

    def settle(self) -> None:
        """See ``PagedKV``: the buffers are shared."""
        self._first.settle()

    def restore(self) -> None:
        """See ``PagedKV``."""
        for group in self._bound:
            group.restore()

    def gather(self, block_ids: BlockIds, payload: ByteArray) -> DeviceEvent:
        """See ``PagedKV``; bytes of the payload behind the rows are not written."""
        chunks = [ChunkBlocks(block_ids, payload, len(block_ids), 0)]
        self._check_sources(block_ids)
        return self._move(chunks, lambda paged, parts: paged.gather_chunks(parts), self.streams.now())[0]

    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``; the rest of a part's last block becomes zeros."""
        self._check_sources(*(chunk.block_ids for chunk in chunks))
        begun = self.blank([self._rest_of(chunk) for chunk in chunks])
        return self._move(chunks, lambda paged, parts: paged.gather_chunks(parts), begun)

    def _rest_of(self, chunk: ChunkBlocks) -> ByteArray:
        end = int(self._block_bytes[chunk.block_ids >> _GROUP_SHIFT].sum())
        return chunk.payload[end : self.layout.payload_bytes(chunk.chunk_blocks)]

    def blank(self, parts: Sequence[ByteArray]) -> DeviceEvent:
        """See ``PagedKV``."""
        parts = [part for part in parts if len(part)]
        return self._first.blank(parts) if parts else self.streams.now()

    def _check_sources(self, *rows: BlockIds) -> None:
        """Refuse null blocks, which cannot be sources of a copy."""
        for block_ids in rows:
            check_block_ids(block_ids & _BLOCK_MASK, range(1, self.num_blocks))

    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        return self._move(chunks, lambda paged, parts: paged.scatter_chunks(parts), self.streams.now())

    def _move(
        self,
        chunks: Sequence[ChunkBlocks],
        move: Callable[[PagedKV, Sequence[ChunkBlocks]], list[DeviceEvent]],
        begun: DeviceEvent,
    ) -> list[DeviceEvent]:
        """Move several chunks, with one call for each group. Copies end in order, so a chunk's last event is its end.

        ``begun`` is the event of the work before, and that of chunks without a copy.
        """
        parts: dict[PagedKV, list[tuple[int, ChunkBlocks]]] = {}  # by moving cache, each with its chunk's number
        for number, chunk in enumerate(chunks):
            for paged, _, part in self._segments(chunk.block_ids, chunk.payload):
                if len(part.block_ids):
                    parts.setdefault(paged, []).append((number, part))
        events = [begun] * len(chunks)
        for paged, own in parts.items():
            for (number, _), event in zip(own, move(paged, [part for _, part in own]), strict=True):
                events[number] = event
        return events

    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """See ``PagedKV``; to be moved whole."""
        return ChunkBlocks(block_ids, payload, chunk_blocks or len(block_ids), first_block)

    def layers_with(self, layer: int) -> range:
        """See ``PagedKV``."""
        raise _not_by_layer()

    def gather_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        raise _not_by_layer()

    def scatter_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        raise _not_by_layer()

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """See ``PagedKV``."""
        self._check_sources(block_ids)
        for paged, place, chunk in self._segments(block_ids, _NO_BYTES):
            paged.gather_on_device(chunk.block_ids, payload[place])

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """See ``PagedKV``."""
        for paged, place, (ids, _, rows, first, _) in self._segments(block_ids, _NO_BYTES):
            if len(ids):
                paged.scatter_on_device(ids, payload[place], rows, first)

    def _segments(self, block_ids: BlockIds, payload: ByteArray) -> Iterator[_Segment]:
        """Yield the rows by group, each with its part of the payload; groups without layers here are left out."""
        numbers, blocks = block_ids >> _GROUP_SHIFT, block_ids & _BLOCK_MASK
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(blocks)] if len(blocks) else []
        begin = 0
        for start, stop in pairwise(edges):
            paged = self._movers[numbers[start]]
            if paged is None:
                continue
            place = slice(begin, begin + paged.layout.payload_bytes(stop - start))
            begin = place.stop
            wanted = np.flatnonzero(blocks[start:stop])
            first, last = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
            ids = np.ascontiguousarray(blocks[start + first : start + last])
            yield _Segment(paged, place, ChunkBlocks(ids, payload[place], stop - start, first))


_NO_BYTES: Final = np.empty(0, np.uint8)


def _not_by_layer() -> InvalidCallError:
    return InvalidCallError("a cache of several groups is not moved layer by layer: move whole chunks")
