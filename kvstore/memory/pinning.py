"""Locking host memory in place, so that a GPU copies to and from it at full speed.

CUDA requires that no copy touches both pinned and other memory, so what is pinned at once consists of whole slots.

A serving engine captures CUDA graphs after it has registered its KV cache. While a thread captures one, registering
memory on another fails, waits, or breaks the capture, unless the registering thread has said that it goes on beside
captures. That takes calls that torch does not offer; where they are not found, memory is pinned before anything is
captured, or not at all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch

from kvstore.memory.cudart import CudaRuntime, find_runtime

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process
_OF_CAPTURES: Final = range(900, 909)  # from cudaErrorStreamCaptureUnsupported on: a capture is in the way


class Refusal(NamedTuple):
    """Why memory could not be pinned, and whether that may pass."""

    reason: str
    may_pass: bool = False


class Pinner(Protocol):
    """Pins ranges of memory. Called from several threads, for different ranges.

    Attributes:
        goes_beside_captures: it may be called while another thread captures a graph.
    """

    goes_beside_captures: bool

    def pin(self, address: int, num_bytes: int) -> Refusal | None:
        """Pin a populated, page-aligned range. Returns None, or why it could not be pinned."""

    def unpin(self, address: int) -> None:
        """Give back the range that was pinned at ``address``."""


class CudaPinner:
    """Pins with ``cudaHostRegister``.

    Args:
        device: that copies to and from the memory.
        runtime: None if it was not found. What fails then leaves its error behind, on the thread that called.
    """

    def __init__(self, device: torch.device, runtime: CudaRuntime | None) -> None:
        self._device = device
        self._runtime = runtime
        self.goes_beside_captures = runtime is not None

    def pin(self, address: int, num_bytes: int) -> Refusal | None:
        """See ``Pinner``."""
        # A new thread would open a context on device 0, which costs GPU memory.
        try:
            with torch.cuda.device(self._device), self._beside_captures():
                error = int(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
                if error:
                    self._clear_error()
        except RuntimeError as broken:  # torch's, of a device that fails at everything
            return Refusal(str(broken).partition("\n")[0])
        return Refusal(f"cudaHostRegister returned error {error}", error in _OF_CAPTURES) if error else None

    def unpin(self, address: int) -> None:
        """See ``Pinner``. Errors are ignored: the memory is being given back."""
        with torch.cuda.device(self._device), self._beside_captures():
            if int(_cudart().cudaHostUnregister(address)):
                self._clear_error()

    def _beside_captures(self) -> AbstractContextManager[None]:
        return nullcontext() if self._runtime is None else self._runtime.beside_captures()

    def _clear_error(self) -> None:
        if self._runtime is not None:
            self._runtime.clear_error()


def find_pinner(device: torch.device) -> Pinner | None:
    """What pins memory for a device; None for a CPU, which needs no pinned memory."""
    return CudaPinner(device, find_runtime()) if device.type == "cuda" else None


def _cudart() -> Any:  # noqa: ANN401 - a module made at run time
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
