"""Locking host memory in place, so that a GPU copies to and from it at full speed.

Pinning a pool of tens of GiB takes the driver seconds. So it is pinned in pieces, on the threads that populate them;
until its piece is pinned, a copy works, only slower. CUDA requires that no copy touches both pinned and other memory,
so a piece consists of whole slots.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Pinner(Protocol):
    """Pins ranges of memory. Called from several threads, for different ranges."""

    def pin(self, address: int, num_bytes: int) -> str | None:
        """Pin a populated, page-aligned range. Returns None, or why it could not be pinned."""

    def unpin(self, address: int) -> None:
        """Give back the range that was pinned at ``address``."""


class NoPinner:
    """For processes without a GPU, which need no pinned memory."""

    def pin(self, address: int, num_bytes: int) -> str | None:  # noqa: ARG002 - there is nothing to do
        """Do nothing."""
        return None

    def unpin(self, address: int) -> None:
        """Do nothing."""


class CudaPinner:
    """Pins with ``cudaHostRegister``, on the device that was current when this was made."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def pin(self, address: int, num_bytes: int) -> str | None:
        """See ``Pinner``."""
        with torch.cuda.device(self._device):  # a new thread would open a context on device 0, which costs GPU memory
            error = int(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        return f"cudaHostRegister returned error {error}" if error else None

    def unpin(self, address: int) -> None:
        """See ``Pinner``. Errors are ignored: the memory is being given back."""
        with torch.cuda.device(self._device):
            _cudart().cudaHostUnregister(address)


def find_pinner() -> Pinner:
    """The pinner for this process: CUDA's only where CUDA is in use already, as others must not open a context."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return CudaPinner() if in_use else NoPinner()


def _cudart() -> Any:  # noqa: ANN401 - a module made at run time
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
