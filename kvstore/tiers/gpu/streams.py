"""The order of work on the slots of a device, across CUDA streams.

The host launches work and runs ahead of the device, so what happens to a slot must be put in order on the device: each
use of a slot leaves an event behind, and the next one, on whatever stream, waits for it there and not on the host. Work
on the same slot is thus done in the order in which it was launched; work on other slots is not held up.

Copies between host and device run on streams of their own, one for each direction, as PCIe carries both at once. The
memory is PyTorch's, whose allocator must be told which streams use a block: otherwise a pool that is closed could be
given to somebody else while a kernel still reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch


class SlotStreams(Protocol):
    """Puts work on slots in order. Thread-safe; a slot has one writer, or readers, at a time."""

    def using(self, slot: int, memory: torch.Tensor) -> AbstractContextManager[None]:
        """What is launched inside, on the current stream, comes after all former work on the slot."""

    def aside(self, *, inward: bool) -> AbstractContextManager[None]:
        """What is launched inside runs beside the model, and is done at the end. ``inward``: from host to device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between the host and the device, on the current stream."""


class NoStreams:
    """For slots in host memory: work is done when its call returns, so it is in order already."""

    def using(self, slot: int, memory: torch.Tensor) -> AbstractContextManager[None]:  # noqa: ARG002 - nothing to do
        """See ``SlotStreams``."""
        return nullcontext()

    def aside(self, *, inward: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - nothing to do
        """See ``SlotStreams``."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``SlotStreams``. By numpy: torch would wake its thread pool, which belongs to the model."""
        np.copyto(target.numpy(), source.numpy())


class CudaStreams:
    """For slots on a CUDA device."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # held for enqueueing events only
        # For each slot, by stream, the end of the last use. A later use on the same stream implies the earlier one.
        self._last_uses: list[dict[int, torch.cuda.Event]] = [{} for _ in range(num_slots)]

    @contextmanager
    def using(self, slot: int, memory: torch.Tensor) -> Iterator[None]:
        """See ``SlotStreams``."""
        stream = torch.cuda.current_stream(self._device)
        last_uses = self._last_uses[slot]
        with self._lock:
            for event in last_uses.values():
                stream.wait_event(event)
        memory.record_stream(stream)
        try:
            yield
        finally:  # also if something raises: part of the work may have been launched
            with self._lock:
                event = last_uses.setdefault(stream.cuda_stream, torch.cuda.Event())  # type: ignore[no-untyped-call]
                event.record(stream)

    @contextmanager
    def aside(self, *, inward: bool) -> Iterator[None]:
        """See ``SlotStreams``."""
        stream = self._inward if inward else self._outward
        # The waiting thread sleeps: spinning would cost the engine a core.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        # The device first: a new thread would be left on device 0, in a context that costs GPU memory.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            try:
                yield
            finally:  # also if something raises: the caller's buffer must not be in use any more
                done.record(stream)
                done.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``SlotStreams``. From and to pinned memory it returns at once; other memory costs a detour."""
        target.copy_(source, non_blocking=True)


def find_streams(device: torch.device, num_slots: int) -> SlotStreams:
    """Those that the device needs. What its current stream did to the slots' memory so far is done afterwards."""
    if device.type == "cpu":
        return NoStreams()
    torch.cuda.current_stream(device).synchronize()  # the allocator may have got the memory from work still under way
    return CudaStreams(device, num_slots)
