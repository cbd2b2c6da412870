"""What torch does not offer of the CUDA runtime that it has loaded."""

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
    """Calls of the runtime, for the calling thread.

    Args:
        library: where they are.

    Raises:
        AttributeError: one is not there.
    """

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - a ctypes library makes its functions at run time
        self._take_error = library.cudaGetLastError
        self._exchange_mode = library.cudaThreadExchangeStreamCaptureMode
        self._pci_bus_id = library.cudaDeviceGetPCIBusId

    def clear_error(self) -> None:
        """Forget the error of a call that failed. Otherwise torch raises it after whatever it launches next."""
        self._take_error()

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Within it, the thread's calls neither fail while another thread captures a graph, nor break its capture."""
        mode = ctypes.c_int(_RELAXED)
        self._exchange_mode(ctypes.byref(mode))  # now holds what it was
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))

    def pci_address(self, device_index: int) -> str | None:
        """Where a device is plugged in, as sysfs writes it: ``0000:65:00.0``."""
        text = ctypes.create_string_buffer(_ADDRESS_BYTES)
        if self._pci_bus_id(text, ctypes.c_int(len(text)), ctypes.c_int(device_index)):
            self.clear_error()
            return None
        return text.value.decode("ascii").lower()


def find_runtime(maps: Path = _MAPS, version: str | None = torch.version.cuda) -> CudaRuntime | None:
    """The runtime that torch uses; None if it cannot be told, as where it is linked into torch itself.

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
