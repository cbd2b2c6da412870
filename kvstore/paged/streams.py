"""Order of work on a device, and its memory. Only this module uses streams, events and the allocator.

The host launches work and runs ahead of the device. Dependent work waits on the device and not on the host: the end of
the work launched on a stream so far is an *event*, and another stream, or the host, can wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from kvstore.model.errors import ConfigError, DeviceFullError

# None where work is done when its call returns. Valid for the streams that made it only.
DeviceEvent = torch.cuda.Event | None
Work = Callable[[], object]

_GIB = 2**30
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Direction(Enum):
    """Direction of a copy; PCIe carries both at once."""

    IN = "host to device"
    OUT = "device to host"


class Streams:
    """Current stream of the calling thread, and a copy stream for each direction.

    This base class is for the CPU, where work is done when its call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> DeviceEvent:
        """Return the end of the current stream's work so far."""
        return None

    def hold(self, event: DeviceEvent) -> None:
        """Order later work of the current stream after ``event``."""

    def run(self, work: Work) -> None:
        """Launch ``work`` on the current stream.

        Raises:
            DeviceFullError: the device had no memory for it.
        """
        with _full_is_ours(self.device):
            self._run(work)

    def launch(self, direction: Direction, work: Work, after: DeviceEvent) -> DeviceEvent:
        """Launch ``work`` on a copy stream, after ``after``. Returns its end.

        Raises:
            DeviceFullError: see ``run``.
        """
        with _full_is_ours(self.device):
            return self._launch(direction, work, after)

    def reach(self, event: DeviceEvent) -> None:
        """Let the host wait for ``event``. Any thread may call it."""

    def is_reached(self, event: DeviceEvent) -> bool:  # noqa: ARG002 - all that was launched is done
        """Tell if the device has reached ``event``. Never waits. Any thread may call it."""
        return True

    def seconds_between(self, begin: DeviceEvent, end: DeviceEvent) -> float:  # noqa: ARG002 - callers have clocks
        """Return the device's time between two reached events; 0 where work is done when its call returns."""
        return 0.0

    def allocate(self, size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Allocate ``size_bytes`` of device memory as a row of ``dtype``, for later work of the current stream.

        Allocated outside inference mode, in which engines start, because other threads cannot write to its tensors.

        Raises:
            ConfigError: there is no room; the message has the free memory.
        """
        try:
            with torch.inference_mode(mode=False):
                return self._empty(size_bytes).view(dtype)
        except (RuntimeError, TypeError) as error:  # a TypeError if the size is no 64-bit number
            if isinstance(error, torch.AcceleratorError):  # the device is broken, not full
                raise
            raise ConfigError(
                f"cannot take {size_bytes / _GIB:.1f} GiB of the memory of {self.device}{self._room()}: lower "
                "max_local_gpu_size, or what the engine takes (vLLM: --gpu-memory-utilization)"
            ) from error

    def pinned(self, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate ``size_bytes`` of pinned host memory as one row of ``dtype``, for copies that run asynchronously."""
        with torch.inference_mode(mode=False):
            host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            return host.view(dtype)

    def keep(self, memory: torch.Tensor) -> None:
        """Tell the allocator that these streams use ``memory``, which may be dropped at any time."""

    def for_thread(self) -> Streams:
        """Return streams for one other thread, with a new stream in the role of that thread's current one."""
        return self

    def ends(self) -> list[DeviceEvent]:
        """Return the end of each stream's work so far."""
        return []

    def wait(self) -> None:
        """Let the host wait for all work launched so far on any of these streams. For ``close``, and for tests."""

    def _run(self, work: Work) -> None:
        work()

    def _launch(self, direction: Direction, work: Work, after: DeviceEvent) -> DeviceEvent:  # noqa: ARG002 - there is one direction and one time
        work()
        return None

    def _empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def _room(self) -> str:
        return ""


class CudaStreams(Streams):
    """Streams of a CUDA device, which need not be the current device of the calling thread: new threads begin on 0.

    Args:
        device: with its number.
        own: used as the current stream; None for that of the calling thread.
    """

    def __init__(self, device: torch.device, own: torch.cuda.Stream | None = None) -> None:
        super().__init__(device)
        self._own = own
        self._copying = {direction: torch.cuda.Stream(device) for direction in Direction}  # type: ignore[no-untyped-call]

    def now(self) -> DeviceEvent:
        """See ``Streams``."""
        return _end_of(self._current())

    def hold(self, event: DeviceEvent) -> None:
        """See ``Streams``."""
        if event is not None:
            self._current().wait_event(event)

    def _run(self, work: Work) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._own):  # None: the current one stays
            work()

    def _launch(self, direction: Direction, work: Work, after: DeviceEvent) -> DeviceEvent:
        stream = self._copying[direction]
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            work()
        return _end_of(stream)

    def reach(self, event: DeviceEvent) -> None:
        """See ``Streams``."""
        if event is not None:
            with torch.cuda.device(self.device):  # else a thread of ours opens a context on device 0
                event.synchronize()

    def is_reached(self, event: DeviceEvent) -> bool:
        """See ``Streams``."""
        if event is None:
            return True
        with torch.cuda.device(self.device):
            return bool(event.query())  # type: ignore[no-untyped-call]

    def seconds_between(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        """See ``Streams``."""
        return 0.0 if begin is None or end is None else float(begin.elapsed_time(end)) / 1e3

    def keep(self, memory: torch.Tensor) -> None:
        """See ``Streams``."""
        for stream in self._all():
            memory.record_stream(stream)

    def for_thread(self) -> Streams:
        """See ``Streams``."""
        return CudaStreams(self.device, torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def ends(self) -> list[DeviceEvent]:
        """See ``Streams``."""
        return [_end_of(stream) for stream in self._all()]

    def wait(self) -> None:
        """See ``Streams``."""
        for stream in self._all():
            stream.synchronize()

    def _empty(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._own):  # the stream to which the allocator assigns it
            return super()._empty(size_bytes)

    def _current(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self.device)

    def _all(self) -> list[torch.cuda.Stream]:
        return [self._current(), *self._copying.values()]

    def _room(self) -> str:
        return f", of which {torch.cuda.mem_get_info(self.device)[0] / _GIB:.1f} are free"


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device, with the caller's current one."""
    return CudaStreams(device) if device.type == "cuda" else Streams(device)


@contextmanager
def _full_is_ours(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _CUDA_OUT_OF_MEMORY:
            raise  # a device that failed goes on failing
        raise DeviceFullError(
            f"{device} has no memory left to copy a chunk: lower what the engine takes (vLLM: --gpu-memory-utilization)"
        ) from error


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return the end of a stream's work so far. A wait for it sleeps, because a spinning thread would cost a core."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
