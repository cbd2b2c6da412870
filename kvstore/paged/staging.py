"""Buffers on a device through which blocks pass on their way to host memory and back.

Over PCIe large copies are fast and small ones slow, so blocks are gathered into one dense buffer, which is copied at
once. The buffers are used in turn: while one is copied on a copy stream, another is gathered or scattered on the
current stream, and a third may wait for either. Events order all of it on the device, and the host never waits.

In the buffer the layers of a chunk that move together are laid out as in its payload, so one copy moves all of them. A
subset of the blocks consists of many pieces, one in each plane: they are copied one by one if that is faster than to
copy the bytes between them as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch

from kvstore.model.layout import KVLayout
from kvstore.paged.base import ChunkBlocks
from kvstore.paged.footprint import BUFFERS
from kvstore.paged.streams import DeviceEvent, Direction, Streams, Work

COPY_BYTES = 256 << 10  # adding a copy to a launch takes the host about as long as the device to copy so many bytes

Use = Callable[[torch.Tensor], object]  # of a buffer


class Staging:
    """Buffers of ``size_bytes`` on a device. For one thread at a time.

    Args:
        size_bytes: of each.
        streams: the order of work on the device.

    Attributes:
        last_use: the end of the last gather or scatter, also of one that raised.
        lock: for callers on several threads.
    """

    def __init__(self, size_bytes: int, streams: Streams) -> None:
        self.size_bytes = size_bytes
        self.lock = threading.Lock()
        self.last_use: DeviceEvent = None
        self._streams = streams
        self.buffers = [streams.allocate(size_bytes) for _ in range(BUFFERS)]
        for buffer in self.buffers:
            streams.keep(buffer)
        self._free = [streams.now()] * BUFFERS  # the end of each buffer's last use
        self._turn = 0

    def ends(self) -> list[DeviceEvent]:
        """Return the end of each buffer's last use."""
        return list(self._free)

    def carry_out(self, gather: Use, copy: Use) -> DeviceEvent:
        """Fill a buffer on the current stream, then copy it to the host on a copy stream. Returns the copy's end."""
        turn, buffer = self._next()
        self._streams.hold(self._free[turn])
        try:
            self._streams.run(lambda: gather(buffer))
        finally:  # a part of it may have been launched
            self.last_use = self._free[turn] = self._streams.now()
        self._free[turn] = self._copy(Direction.OUT, turn, lambda: copy(buffer), self.last_use)
        return self._free[turn]

    def carry_in(self, copy: Use, scatter: Use) -> DeviceEvent:
        """Copy from the host into a buffer on a copy stream, then empty it on the current stream.

        Returns the copy's end, after which the host's memory is no longer read.
        """
        turn, buffer = self._next()
        copied = self._copy(Direction.IN, turn, lambda: copy(buffer), self._free[turn])
        self._streams.hold(copied)
        try:
            self._streams.run(lambda: scatter(buffer))
        finally:
            self.last_use = self._free[turn] = self._streams.now()
        return copied

    def _copy(self, direction: Direction, turn: int, work: Work, after: DeviceEvent) -> DeviceEvent:
        with ExitStack() as failed:
            failed.callback(self._note_failed_copy, direction, turn, after)
            end = self._streams.launch(direction, work, after)
            failed.pop_all()
        return end

    def _note_failed_copy(self, direction: Direction, turn: int, after: DeviceEvent) -> None:
        """Note that copies launched before one raised also use the buffer."""
        self._streams.hold(self._streams.launch(direction, lambda: None, after))
        self.last_use = self._free[turn] = self._streams.now()

    def _next(self) -> tuple[int, torch.Tensor]:
        self._turn = (self._turn + 1) % BUFFERS
        return self._turn, self.buffers[self._turn]


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
    if not exactly and last - first + copy_bytes <= wanted_bytes + num_pieces * copy_bytes:
        yield Region(first, last, first - begin)
        return
    for layer in layers:
        page_bytes = layout.page_bytes[layer]
        for plane in range(layout.planes):
            first = layout.layer_range(layer, num_blocks)[0] + (plane * num_blocks + chunk.first_block) * page_bytes
            yield Region(first, first + num_wanted * page_bytes, first - begin)
