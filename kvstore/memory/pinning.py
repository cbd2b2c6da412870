"""Locking host memory in place, so that a GPU copies to and from it at full speed.

CUDA requires that no copy touches both pinned and other memory, so each pinned range consists of whole slots.

A serving engine captures CUDA graphs after it has registered its KV cache. While a thread captures one, registering
memory on another fails, waits, or breaks the capture, unless the registering thread has set its capture mode to
relaxed. That needs calls of the CUDA runtime that torch does not expose; without them, memory is pinned before any
capture, or not at all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch

from kvstore.paged.runtime import CudaRuntime, find_runtime

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process
_OF_CAPTURES: Final = range(900, 909)  # from cudaErrorStreamCaptureUnsupported on: a capture prevents the call


class Refusal(NamedTuple):
    """Reason of a failure to pin memory; with ``may_pass``, a later attempt can succeed."""

    reason: str
    may_pass: bool = False


class Pinner(Protocol):
    """Pins ranges of memory. Called from several threads, for different ranges.

    Attributes:
        is_safe_during_captures: calls are safe while another thread captures a graph.
    """

    is_safe_during_captures: bool

    def pin(self, address: int, num_bytes: int) -> Refusal | None:
        """Pin a populated, page-aligned range. Returns None, or the reason of a failure."""

    def unpin(self, address: int) -> None:
        """Unpin the range that was pinned at ``address``."""


class CudaPinner:
    """Pins with ``cudaHostRegister``.

    Args:
        device: the one that copies to and from the memory.
        runtime: None if it was not found. Failed calls then leave their error pending on the calling thread.
    """

    def __init__(self, device: torch.device, runtime: CudaRuntime | None) -> None:
        self._device = device
        self._runtime = runtime
        self.is_safe_during_captures = runtime is not None

    def pin(self, address: int, num_bytes: int) -> Refusal | None:
        """See ``Pinner``."""
        # A new thread would open a context on device 0, which costs GPU memory.
        try:
            with torch.cuda.device(self._device), self._relaxed_capture_mode():
                error = int(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
                if error:
                    self._clear_error()
        except RuntimeError as broken:  # from torch, when every call to the device fails
            return Refusal(str(broken).partition("\n")[0])
        return Refusal(f"cudaHostRegister returned error {error}", error in _OF_CAPTURES) if error else None

    def unpin(self, address: int) -> None:
        """See ``Pinner``. Errors are ignored: the memory is being given back."""
        with torch.cuda.device(self._device), self._relaxed_capture_mode():
            if int(_cudart().cudaHostUnregister(address)):
                self._clear_error()

    def _relaxed_capture_mode(self) -> AbstractContextManager[None]:
        return nullcontext() if self._runtime is None else self._runtime.relaxed_capture_mode()

    def _clear_error(self) -> None:
        if self._runtime is not None:
            self._runtime.clear_error()


def find_pinner(device: torch.device) -> Pinner | None:
    """Return the pinner for a device; None for a CPU, which needs no pinned memory."""
    return CudaPinner(device, find_runtime()) if device.type == "cuda" else None


def _cudart() -> Any:  # noqa: ANN401 - a module made at run time
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
