"""Order of work on a device, and its memory. Only this module uses streams, events and the allocator.

The host launches work and runs ahead of the device. Dependent work waits on the device and not on the host: the end of
the work launched on a stream so far is an *event*, and another stream, or the host, can wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ConfigError, DeviceFullError, InvalidCallError
from kvstore.paged.runtime import CudaRuntime, find_runtime

logger = logging.getLogger(__name__)

# None where work is done when its call returns. Valid for the streams that made it only.
DeviceEvent = torch.cuda.Event | None
Work = Callable[[], object]
T = TypeVar("T")

_GIB = 2**30
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_FAILED = (torch.OutOfMemoryError, torch.AcceleratorError)


class Direction(Enum):
    """Direction of a copy; PCIe carries both at once."""

    IN = "host to device"
    OUT = "device to host"


class Copy(NamedTuple):
    """Bytes ``begin ... end`` of a payload, and their offset in a buffer on the device."""

    payload: ByteArray
    begin: int
    end: int
    staged: int


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
        try:
            self._run(work)
        except _FAILED as error:
            self._refuse_if_full(error)
            raise

    def launch(self, direction: Direction, work: Work, after: DeviceEvent) -> DeviceEvent:
        """Launch ``work`` on a copy stream, after ``after``. Returns its end.

        Raises:
            DeviceFullError: see ``run``.
        """
        try:
            return self._launch(direction, work, after)
        except _FAILED as error:
            self._refuse_if_full(error)
            raise

    def copy(self, direction: Direction, copies: Sequence[Copy], buffer: torch.Tensor) -> None:
        """Copy bytes between payloads and a buffer on the device, as work of ``launch`` in this direction."""
        for payload, begin, end, staged in copies:
            on_host, on_device = torch.from_numpy(payload[begin:end]), buffer[staged : staged + end - begin]
            target, source = (on_host, on_device) if direction is Direction.OUT else (on_device, on_host)
            target.copy_(source, non_blocking=True)

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

    def _refuse_if_full(self, error: Exception) -> None:
        """Raise ``DeviceFullError`` if that is the reason of an error; a device that is broken stays broken."""
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _CUDA_OUT_OF_MEMORY:
            return
        raise DeviceFullError(
            f"{self.device} has no memory left to copy a chunk: lower what the engine takes "
            "(vLLM: --gpu-memory-utilization)"
        ) from error


class CudaStreams(Streams):
    """Streams of a CUDA device, which need not be the current device of the calling thread: new threads begin on 0.

    Torch gets the device's number and not its ``torch.device``, which it takes 5 us to look into, and streams are
    entered by themselves and not by ``torch.cuda.stream``, which takes 17 us: a launch has a dozen such calls. A stream
    that is entered remembers the former one, so only one thread may be in it, although several may launch. When it is
    left, it would open a context on the thread's former device, so the device is entered first.

    Args:
        device: with its number.
        own: used as the current stream; None for that of the calling thread.
        runtime: launches all copies of a buffer in one call; None for one call of torch for each.
    """

    def __init__(
        self, device: torch.device, own: torch.cuda.Stream | None = None, runtime: CudaRuntime | None = None
    ) -> None:
        super().__init__(device)
        self._number = device.index
        self._own = own
        self._runtime = runtime
        self._entering = threading.Lock()
        self._copying = {direction: torch.cuda.Stream(device) for direction in Direction}  # type: ignore[no-untyped-call]

    def now(self) -> DeviceEvent:
        """See ``Streams``."""
        return _end_of(self._current())

    def hold(self, event: DeviceEvent) -> None:
        """See ``Streams``."""
        if event is not None:
            self._current().wait_event(event)

    def _run(self, work: Work) -> None:
        self._on(self._own, work)

    def _launch(self, direction: Direction, work: Work, after: DeviceEvent) -> DeviceEvent:
        stream = self._copying[direction]
        if after is not None:
            stream.wait_event(after)
        self._on(stream, work)
        return _end_of(stream)

    def copy(self, direction: Direction, copies: Sequence[Copy], buffer: torch.Tensor) -> None:
        """See ``Streams``."""
        if self._runtime is not None:
            stream = self._copying[direction].cuda_stream
            error = self._runtime.copy_all(_addresses(direction, copies, buffer), stream)
            if not error:
                return
            if error != _CUDA_OUT_OF_MEMORY:
                logger.warning("copies go one by one from now on, because CUDA refuses a batch with error %d", error)
                self._runtime = None
        super().copy(direction, copies, buffer)

    def reach(self, event: DeviceEvent) -> None:
        """See ``Streams``."""
        if event is not None:
            with torch.cuda.device(self._number):  # else a thread of ours opens a context on device 0
                event.synchronize()

    def is_reached(self, event: DeviceEvent) -> bool:
        """See ``Streams``."""
        if event is None:
            return True
        with torch.cuda.device(self._number):
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
        return CudaStreams(self.device, torch.cuda.Stream(self.device), self._runtime)  # type: ignore[no-untyped-call]

    def ends(self) -> list[DeviceEvent]:
        """See ``Streams``."""
        return [_end_of(stream) for stream in self._all()]

    def wait(self) -> None:
        """See ``Streams``."""
        for stream in self._all():
            stream.synchronize()

    def _empty(self, size_bytes: int) -> torch.Tensor:
        return self._on(self._own, partial(super()._empty, size_bytes))  # the allocator assigns it to that stream

    def _on(self, stream: torch.cuda.Stream | None, work: Callable[[], T]) -> T:
        """Do work with a stream as the current one; None for that of the calling thread."""
        with self._entering, torch.cuda.device(self._number), stream or nullcontext():
            return work()

    def _current(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._number)

    def _all(self) -> list[torch.cuda.Stream]:
        return [self._current(), *self._copying.values()]

    def _room(self) -> str:
        return f", of which {torch.cuda.mem_get_info(self.device)[0] / _GIB:.1f} are free"


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device, with the caller's current one."""
    if device.type != "cuda":
        return Streams(device)
    runtime = find_runtime()
    takes_batches = runtime is not None and runtime.takes_batches(device.index)
    return CudaStreams(device, runtime=runtime if takes_batches else None)


def _addresses(direction: Direction, copies: Sequence[Copy], buffer: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Return addresses of targets, addresses of sources, and sizes: ``[3, copies]``.

    Raises:
        InvalidCallError: a copy would leave its payload or the buffer.
    """
    for payload, begin, end, staged in copies:
        is_inside = 0 <= begin < end <= payload.nbytes and 0 <= staged <= buffer.nbytes - (end - begin)
        if not (is_inside and payload.flags.c_contiguous):
            raise InvalidCallError(
                f"cannot copy bytes {begin}..{end} of {payload.nbytes} to or from {staged} of {buffer.nbytes}"
            )
    table = np.empty((3, len(copies)), np.uint64)
    host, device = (0, 1) if direction is Direction.OUT else (1, 0)
    buffer_begin = buffer.data_ptr()
    table[host] = [copy.payload.ctypes.data + copy.begin for copy in copies]
    table[device] = [buffer_begin + copy.staged for copy in copies]
    table[2] = [copy.end - copy.begin for copy in copies]
    return table


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return the end of a stream's work so far. A wait for it sleeps, because a spinning thread would cost a core."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
