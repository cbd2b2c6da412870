"""Buffers on a device through which blocks pass on their way to host memory and back.

Over PCIe large copies are fast and small ones slow, so blocks are gathered into one dense buffer, which is copied at
once. There are two buffers, used in turn: while one is copied on a stream of its own, the other is gathered or
scattered on the model's stream. Moments order both on the device, and the host waits only for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvstore.paged.streams import Moment, Streams, Way

Use = Callable[[torch.Tensor], object]  # of a buffer
BUFFERS = 2


class Staging:
    """Two buffers of ``size_bytes`` on a device. For one thread at a time.

    Args:
        size_bytes: of each.
        streams: how work is put in order there.

    Attributes:
        gathered: the end of the last gather.
    """

    def __init__(self, size_bytes: int, streams: Streams) -> None:
        self.size_bytes = size_bytes
        self.gathered: Moment = None
        self._streams = streams
        self._buffers = [streams.allocate(size_bytes) for _ in range(BUFFERS)]
        for buffer in self._buffers:
            streams.keep(buffer)
        self._free = [streams.now()] * BUFFERS  # when each buffer's last use ends
        self._turn = 0

    def carry_out(self, gather: Use, copy: Use) -> Moment:
        """Fill a buffer on the current stream, then copy it to the host on a copy stream. Returns the copy's end."""
        turn, buffer = self._next()
        self._streams.hold(self._free[turn])
        self._streams.run(lambda: gather(buffer))
        self.gathered = self._streams.now()
        self._free[turn] = self._streams.launch(Way.OUT, lambda: copy(buffer), self.gathered)
        return self._free[turn]

    def carry_in(self, copy: Use, scatter: Use) -> Moment:
        """Copy from the host into a buffer on a copy stream, then empty it on the current stream.

        Returns the copy's end: from then on the host's memory is no longer read.
        """
        turn, buffer = self._next()
        copied = self._streams.launch(Way.IN, lambda: copy(buffer), self._free[turn])
        self._streams.hold(copied)
        self._streams.run(lambda: scatter(buffer))
        self._free[turn] = self._streams.now()
        return copied

    def _next(self) -> tuple[int, torch.Tensor]:
        self._turn = (self._turn + 1) % BUFFERS
        return self._turn, self._buffers[self._turn]
