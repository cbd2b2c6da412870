"""Buffers on a device through which blocks pass on their way to host memory and back.

Over PCIe large copies are fast and small ones slow, so blocks are gathered into one dense buffer, which is copied at
once. There are two buffers, used in turn: while one is copied on a stream of its own, the other is gathered or
scattered on the model's stream. Events order both on the device, and the host waits only for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch

from kvstore.paged.footprint import BUFFERS

Moment = torch.cuda.Event | None  # None where everything is done at once
Work = Callable[[], object]
Use = Callable[[torch.Tensor], object]  # of a buffer


class Way(Enum):
    """The direction of a copy; PCIe carries both at once."""

    IN = "host to device"
    OUT = "device to host"


class Streams:
    """The current stream of the calling thread, and a copy stream for each direction.

    As it stands it is for the CPU, where work is done when its call returns.
    """

    def now(self) -> Moment:
        """The end of what the current stream has been given so far."""
        return None

    def hold(self, moment: Moment) -> None:
        """Order what the current stream is given from now on after ``moment``."""

    def launch(self, way: Way, work: Work, after: Moment) -> Moment:  # noqa: ARG002 - there is one way and one time
        """Launch ``work`` on a copy stream, after ``after``. Returns its end."""
        work()
        return None

    def reach(self, moment: Moment) -> None:
        """Let the host wait for ``moment``."""

    def wait(self) -> None:
        """Let the host wait for everything launched so far on any of these streams."""

    def keep(self, memory: torch.Tensor) -> None:
        """Tell the allocator that the copy streams use ``memory``, which may be dropped at any time."""


class CudaStreams(Streams):
    """For a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = {way: torch.cuda.Stream(device) for way in Way}  # type: ignore[no-untyped-call]

    def now(self) -> Moment:
        """See ``Streams``."""
        return _end_of(torch.cuda.current_stream(self._device))

    def hold(self, moment: Moment) -> None:
        """See ``Streams``."""
        if moment is not None:
            torch.cuda.current_stream(self._device).wait_event(moment)

    def launch(self, way: Way, work: Work, after: Moment) -> Moment:
        """See ``Streams``."""
        stream = self._copying[way]
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            work()
        return _end_of(stream)

    def reach(self, moment: Moment) -> None:
        """See ``Streams``."""
        if moment is not None:
            moment.synchronize()

    def wait(self) -> None:
        """See ``Streams``."""
        for stream in (torch.cuda.current_stream(self._device), *self._copying.values()):
            stream.synchronize()

    def keep(self, memory: torch.Tensor) -> None:
        """See ``Streams``."""
        for stream in self._copying.values():
            memory.record_stream(stream)


class Staging:
    """Two buffers of ``size_bytes`` on a device. For one thread at a time.

    Args:
        size_bytes: of each.
        device: where.
        streams: how work is put in order there; None for the device's own.
    """

    def __init__(self, size_bytes: int, device: torch.device, streams: Streams | None = None) -> None:
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else Streams()
        self.size_bytes = size_bytes
        self.streams = streams
        self._buffers = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        for buffer in self._buffers:
            streams.keep(buffer)
        self._free = [streams.now()] * BUFFERS  # when each buffer's last use ends
        self._turn = 0

    def carry_out(self, gather: Use, copy: Use) -> Moment:
        """Fill a buffer on the current stream, then copy it to the host on a copy stream. Returns the copy's end."""
        turn, buffer = self._next()
        self.streams.hold(self._free[turn])
        gather(buffer)
        self._free[turn] = self.streams.launch(Way.OUT, lambda: copy(buffer), self.streams.now())
        return self._free[turn]

    def carry_in(self, copy: Use, scatter: Use) -> None:
        """Copy from the host into a buffer on a copy stream, then empty it on the current stream."""
        turn, buffer = self._next()
        self.streams.hold(self.streams.launch(Way.IN, lambda: copy(buffer), self._free[turn]))
        scatter(buffer)
        self._free[turn] = self.streams.now()

    def _next(self) -> tuple[int, torch.Tensor]:
        self._turn = (self._turn + 1) % BUFFERS
        return self._turn, self._buffers[self._turn]


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of what a stream has been given so far."""
    event: torch.cuda.Event = stream.record_event()
    return event
