"""Places of blocks in the cache and in a dense buffer, in the form that kernels on a device read.

A *place* is four numbers: a block's id, and its part of the buffer as blocks of chunks before its own, blocks of its
chunk, and blocks of its chunk before it. None of them depends on the planes that are moved, so the places of some
chunks serve every layer. They are written on the host into a ring of pinned memory, and copied to the same offset of a
ring on the device, in one copy for all launches of a call. Both rings are allocated at start, and a part of them is
overwritten only when its last use has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from kvstore.model.errors import InvalidCallError
from kvstore.paged.base import BlockIds
from kvstore.paged.footprint import LAUNCHES, NUMBERS, WORD_BYTES
from kvstore.paged.streams import DeviceEvent, Streams


class Piece(NamedTuple):
    """Blocks of one chunk from ``first_block`` on, where the buffer has room for ``chunk_blocks`` of them."""

    block_ids: BlockIds
    chunk_blocks: int
    first_block: int


class Places:
    """Places of the pieces of some launches, one after the other, which are sent to the device together.

    Attributes:
        pieces: those of each launch.
        on_device: ``[4, blocks]``, filled by ``PlaceRing.send``.
        is_sent: True if ``PlaceRing.send`` was launched.
        last_use: the end of the last launch that reads them.
        key: the key under which the ring keeps them for other layers; None if it does not.
    """

    def __init__(
        self, pieces: Sequence[Sequence[Piece]], begin: int, on_host: torch.Tensor, on_device: torch.Tensor
    ) -> None:
        self.pieces = pieces
        self.begin = begin
        self.on_host = on_host
        self.on_device = on_device
        self.is_sent = False
        self.last_use: DeviceEvent = None
        self.key: int | None = None

    def parts(self) -> Iterator[Part]:
        """Yield the pieces and places of each launch."""
        begin = 0
        for pieces in self.pieces:
            end = begin + _blocks_of(pieces)
            yield Part(self, pieces, self.on_device[:, begin:end])
            begin = end


class Part(NamedTuple):
    """Pieces of one launch, and their places, a view of ``on_device`` with the row stride of all launches."""

    places: Places
    pieces: Sequence[Piece]
    on_device: torch.Tensor


class PlaceRing:
    """Ring of the places of launches under way. For one thread at a time.

    Args:
        max_blocks: the maximum of one launch, and of launches whose places are sent together.
        streams: the device.
    """

    def __init__(self, max_blocks: int, streams: Streams) -> None:
        self.max_blocks = max_blocks
        self._size = LAUNCHES * NUMBERS * max_blocks
        self._streams = streams
        self._on_host = streams.pinned(self._size * WORD_BYTES, torch.int64)
        self._on_device = streams.allocate(self._size * WORD_BYTES, torch.int64)
        streams.keep(self._on_device)
        allocated = streams.now()
        self._oldest_first: deque[Places] = deque()
        self._kept: dict[int, Places] = {}  # for other layers, by the identity of the first block ids
        self._end = 0
        self._streams.reach(allocated)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use."""
        return self._size * WORD_BYTES

    def write(self, pieces: Sequence[Sequence[Piece]]) -> Places:
        """Write the places of some launches' pieces on the host. Waits only if the ring is full of current launches."""
        num_blocks = sum(map(_blocks_of, pieces))
        if num_blocks > self.max_blocks:
            raise InvalidCallError(f"cannot move {num_blocks} blocks at once, but only {self.max_blocks}")
        begin = self._take(NUMBERS * num_blocks)
        part = slice(begin, begin + NUMBERS * num_blocks)
        on_host = self._on_host[part]
        places = Places(pieces, begin, on_host, self._on_device[part].view(NUMBERS, num_blocks))
        _fill(on_host.numpy().reshape(NUMBERS, num_blocks), pieces)
        self._oldest_first.append(places)
        return places

    def keep(self, pieces: Sequence[Sequence[Piece]]) -> Places:
        """Write places that later layers of the same blocks reuse, or return those that an earlier layer wrote."""
        key = id(pieces[0][0].block_ids)  # whose array lives as long as the places
        known = self._kept.get(key)
        if known is None or not _are_same(known.pieces, pieces):
            known = self.write(pieces)
            known.key, self._kept[key] = key, known
        return known

    def ends(self) -> list[DeviceEvent]:
        """Return the ends of all uses of places in the ring."""
        return [places.last_use for places in self._oldest_first]

    def forget(self) -> None:
        """Drop kept places, so that they are sent again after the device's memory was discarded."""
        self._kept.clear()

    def send(self, places: Places) -> None:
        """Copy places to the device, on the stream of the caller."""
        places.on_device.view(-1).copy_(places.on_host, non_blocking=True)

    def _take(self, size: int) -> int:
        """Return the offset of room for ``size`` numbers, after waiting for former uses of it."""
        begin = self._end if self._end + size <= self._size else 0
        if begin < self._end:  # entries behind the end are older than those at the beginning
            while self._oldest_first and self._oldest_first[0].begin >= self._end:
                self._forget_oldest()
        while self._oldest_first and begin <= self._oldest_first[0].begin < begin + size:
            self._forget_oldest()
        self._end = begin + size
        return begin

    def _forget_oldest(self) -> None:
        oldest = self._oldest_first[0]
        self._streams.reach(oldest.last_use)
        self._oldest_first.popleft()
        if oldest.key is not None and self._kept.get(oldest.key) is oldest:
            del self._kept[oldest.key]


def _blocks_of(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.block_ids) for piece in pieces)


def _are_same(pieces: Sequence[Sequence[Piece]], others: Sequence[Sequence[Piece]]) -> bool:
    """Tell if launches have the same blocks, by identity of the arrays of ids, which never change."""
    if [*map(len, pieces)] != [*map(len, others)]:
        return False
    pairs = zip(chain.from_iterable(pieces), chain.from_iterable(others), strict=True)
    return all(one.block_ids is other.block_ids and one[1:] == other[1:] for one, other in pairs)


def _fill(numbers: np.ndarray[tuple[int, int], np.dtype[np.int64]], launches: Sequence[Sequence[Piece]]) -> None:
    """Write the places of all pieces in a few calls, because numpy takes as long for one piece as for all of them."""
    pieces: list[Piece] = []
    before: list[int] = []
    shifts: list[int] = []
    num_blocks = 0
    for launch in launches:
        blocks_before = 0
        for piece in launch:
            pieces.append(piece)
            before.append(blocks_before)
            shifts.append(piece.first_block - num_blocks)
            blocks_before += piece.chunk_blocks
            num_blocks += len(piece.block_ids)
    if num_blocks:
        lengths = [len(piece.block_ids) for piece in pieces]
        np.concatenate([piece.block_ids for piece in pieces], out=numbers[0])
        numbers[1] = np.repeat(before, lengths)
        numbers[2] = np.repeat([piece.chunk_blocks for piece in pieces], lengths)
        numbers[3] = np.arange(num_blocks) + np.repeat(shifts, lengths)
