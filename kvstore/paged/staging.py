"""Buffers on a device through which blocks pass on their way to host memory and back.

Over PCIe large copies are fast and small ones slow, so blocks are gathered into one dense buffer, which is copied at
once. The buffers are used in turn: while one is copied on a copy stream, another is gathered or scattered on the
current stream, and a third may wait for either. Moments order all of it on the device, and the host never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from kvstore.paged.footprint import BUFFERS
from kvstore.paged.streams import DeviceEvent, Direction, Streams, Work

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
        try:
            return self._streams.launch(direction, work, after)
        except BaseException:  # copies launched before one raised also use the buffer
            self._streams.hold(self._streams.launch(direction, _nothing, after))
            self.last_use = self._free[turn] = self._streams.now()
            raise

    def _next(self) -> tuple[int, torch.Tensor]:
        self._turn = (self._turn + 1) % BUFFERS
        return self._turn, self.buffers[self._turn]


def _nothing() -> None:
    pass
