"""Calls of the loaded CUDA runtime that torch does not expose: clearing errors, capture modes, PCI addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

_MAPS: Final = Path("/proc/self/maps")
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
_ADDRESS_BYTES: Final = 32  # "0000:65:00.0" and a zero


class CudaRuntime:
    """Functions of the CUDA runtime that act on the calling thread.

    Args:
        library: the loaded runtime.

    Raises:
        AttributeError: a function is missing.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - a ctypes library makes its functions at run time
        self._take_error = library.cudaGetLastError
        self._exchange_mode = library.cudaThreadExchangeStreamCaptureMode
        self._pci_bus_id = library.cudaDeviceGetPCIBusId

    def clear_error(self) -> None:
        """Forget the error of a call that failed. Otherwise torch raises it after its next launch."""
        self._take_error()

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let this thread's calls succeed while another thread captures a graph, without breaking the capture."""
        mode = ctypes.c_int(_RELAXED)
        self._exchange_mode(ctypes.byref(mode))  # now holds the former mode
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))

    def pci_address(self, device_index: int) -> str | None:
        """Return the PCI address of a device as sysfs writes it, such as ``0000:65:00.0``; None if the call fails."""
        text = ctypes.create_string_buffer(_ADDRESS_BYTES)
        if self._pci_bus_id(text, ctypes.c_int(len(text)), ctypes.c_int(device_index)):
            self.clear_error()
            return None
        return text.value.decode("ascii").lower()


def find_runtime(maps: Path = _MAPS, version: str | None = torch.version.cuda) -> CudaRuntime | None:
    """Return the runtime that torch uses; None if it is not found, for example because torch links it statically.

    Args:
        maps: the files that are mapped into this process.
        version: of the runtime; None without CUDA.
    """
    if version is None:
        return None
    name = f"/libcudart.so.{version.partition('.')[0]}"
    try:
        paths = {line.rpartition(" ")[2] for line in maps.read_text().splitlines() if name in line}
        return CudaRuntime(ctypes.CDLL(min(paths))) if paths else None
    except (OSError, AttributeError):
        return None
