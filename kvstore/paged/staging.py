"""Room on a device through which blocks pass on their way to host memory and back.

On PCIe the size of a copy decides its speed, so blocks are gathered into one dense buffer, which leaves in one copy.
There are two buffers, used in turn: while one is copied, on a stream beside the model's, the other is gathered or
scattered on the model's. Events put both in order on the device, and the host waits only for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch

Moment = torch.cuda.Event | None  # None where everything is done at once
Work = Callable[[], object]
Use = Callable[[torch.Tensor], object]  # of a buffer
BUFFERS = 2


class Way(Enum):
    """Which way a copy goes; PCIe carries both at once."""

    IN = "host to device"
    OUT = "device to host"


class Streams(Protocol):
    """The current stream of the calling thread, and one beside it for the copies of each way."""

    def now(self) -> Moment:
        """The present of the current stream."""

    def hold(self, moment: Moment) -> None:
        """Let what the current stream is given from now on come after ``moment``."""

    def launch(self, way: Way, work: Work, after: Moment) -> Moment:
        """Do ``work`` beside the current stream, after ``after``. Returns its end."""

    def reach(self, moment: Moment) -> None:
        """Wait, on the host, for ``moment``."""

    def wait(self) -> None:
        """Wait, on the host, for everything launched so far on any of these streams."""

    def keep(self, memory: torch.Tensor) -> None:
        """Tell the allocator that streams beside the current one use ``memory``, which may be dropped at any time."""


class NoStreams:
    """For a device that does everything at once: the CPU."""

    def now(self) -> Moment:
        """See ``Streams``."""
        return None

    def hold(self, moment: Moment) -> None:
        """See ``Streams``."""

    def launch(self, way: Way, work: Work, after: Moment) -> Moment:  # noqa: ARG002 - there is one way and one time
        """See ``Streams``."""
        work()
        return None

    def reach(self, moment: Moment) -> None:
        """See ``Streams``."""

    def wait(self) -> None:
        """See ``Streams``."""

    def keep(self, memory: torch.Tensor) -> None:
        """See ``Streams``."""


class CudaStreams:
    """For a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = {way: torch.cuda.Stream(device) for way in Way}  # type: ignore[no-untyped-call]

    def now(self) -> Moment:
        """See ``Streams``."""
        return _end_of(torch.cuda.current_stream(self._device))

    def hold(self, moment: Moment) -> None:
        """See ``Streams``."""
        if moment is not None:
            torch.cuda.current_stream(self._device).wait_event(moment)

    def launch(self, way: Way, work: Work, after: Moment) -> Moment:
        """See ``Streams``."""
        stream = self._beside[way]
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
        for stream in (torch.cuda.current_stream(self._device), *self._beside.values()):
            stream.synchronize()

    def keep(self, memory: torch.Tensor) -> None:
        """See ``Streams``."""
        for stream in self._beside.values():
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
            streams = CudaStreams(device) if device.type == "cuda" else NoStreams()
        self.size_bytes = size_bytes
        self.streams = streams
        self._buffers = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        for buffer in self._buffers:
            streams.keep(buffer)
        self._free = [streams.now()] * BUFFERS  # when each buffer's last use ends
        self._turn = 0

    def carry_out(self, gather: Use, copy: Use) -> Moment:
        """Fill a buffer on the current stream, then copy it to the host beside it. Returns when it is there."""
        turn, buffer = self._next()
        self.streams.hold(self._free[turn])
        gather(buffer)
        self._free[turn] = self.streams.launch(Way.OUT, lambda: copy(buffer), self.streams.now())
        return self._free[turn]

    def carry_in(self, copy: Use, scatter: Use) -> None:
        """Copy from the host into a buffer, beside the current stream, then empty it on the current stream."""
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
