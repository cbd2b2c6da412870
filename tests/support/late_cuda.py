"""``CudaStreams`` over a late device: the real code, with ``torch.cuda`` replaced by what a CPU can do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from kvstore.paged.streams import CudaStreams, Work
from support.late_device import CPU, LateDevice, LateEvent, LateStream


class CudaEvent:
    """Event in the place of one of ``torch.cuda``."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.event: LateEvent | None = None  # a wait for an event that was never recorded is no wait

    def record(self, stream: LateStream) -> None:
        self.event = stream.now()

    def query(self) -> bool:
        self._device.run_at_random()
        return self.event is None or self.event.is_reached

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.event is None or self.event.is_reached)

    def elapsed_time(self, end: CudaEvent) -> float:
        """Return the time in ms of the device's clock."""
        assert self.event is not None
        assert end.event is not None
        return float(end.event.stream.done_at[end.event.place] - self.event.stream.done_at[self.event.place]) * 1e3


def late_cuda(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    """Return the streams of a CUDA device that is a late one. Work is launched to torch's current stream."""

    def on(stream: LateStream | None) -> AbstractContextManager[None]:
        return nullcontext() if stream is None else device.on(stream)

    def deferred(launch: Callable[..., Any]) -> Callable[..., Any]:
        def defer(streams: CudaStreams, *arguments: Any) -> Any:
            place = 0 if callable(arguments[0]) else 1  # ``way`` may come first
            work: Work = arguments[place]
            later = [*arguments]
            later[place] = lambda: device.current.launch(work)
            return launch(streams, *later)

        return defer

    monkeypatch.setattr(CudaStreams, "_run", deferred(CudaStreams._run))
    monkeypatch.setattr(CudaStreams, "_launch", deferred(CudaStreams._launch))
    monkeypatch.setattr(LateStream, "wait_event", lambda self, event: self.hold(event.event), raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _memory, _stream: None)
    replacements: dict[str, Any] = {
        "Stream": lambda _device: device.make_stream(),
        "Event": lambda **_options: CudaEvent(device),
        "current_stream": lambda _device: device.current,
        "stream": on,
        "device": lambda _device: nullcontext(),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return CudaStreams(CPU)
