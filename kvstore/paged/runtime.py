"""Calls of the CUDA runtime that torch does not expose, through the library that torch has loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_MAPS: Final = Path("/proc/self/maps")
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
_ADDRESS_BYTES: Final = 32  # "0000:65:00.0" and a zero
_BATCH_MAJOR: Final = 13  # the call has another signature in CUDA 12.8, and may get another one in 14
_HOST_POINTERS: Final = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_BATCH_TYPES: Final = (
    *3 * (ctypes.c_void_p,),  # targets, sources, sizes
    ctypes.c_size_t,  # copies
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # the first copy that each of them applies to
    ctypes.c_size_t,  # number of attributes
    ctypes.c_void_p,  # stream
)


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``: order of access to sources, two places that only managed memory has, and flags."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_place", 2 * ctypes.c_int),
        ("target_place", 2 * ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


_IN_ORDER: Final = _Attributes(access_order=1)  # cudaMemcpySrcAccessOrderStream, as of a copy without attributes
_FROM_FIRST: Final = ctypes.c_size_t(0)


class CudaRuntime:
    """Functions of the CUDA runtime, which act on the calling thread. Thread-safe.

    Args:
        library: the loaded runtime.
        major: its major version.

    Raises:
        AttributeError: a function is missing.
    """

    def __init__(self, library: Any, major: int) -> None:  # noqa: ANN401 - ctypes makes functions at run time
        self._take_error = library.cudaGetLastError
        self._exchange_mode = library.cudaThreadExchangeStreamCaptureMode
        self._pci_bus_id = library.cudaDeviceGetPCIBusId
        self._attribute = library.cudaDeviceGetAttribute
        self._copy_batch = library.cudaMemcpyBatchAsync if major == _BATCH_MAJOR else None
        if self._copy_batch is not None:
            self._copy_batch.argtypes = _BATCH_TYPES

    def clear_error(self) -> None:
        """Forget the error of a call that failed. Otherwise torch raises it after its next launch."""
        self._take_error()

    @contextmanager
    def relaxed_capture_mode(self) -> Iterator[None]:
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

    def takes_batches(self, device_index: int) -> bool:
        """Tell if ``copy_all`` works for a device.

        It must use the host's addresses of pinned memory. Where it does not, as on WSL2, a batch fails after the call.
        """
        value = ctypes.c_int(0)
        if self._attribute(ctypes.byref(value), ctypes.c_int(_HOST_POINTERS), ctypes.c_int(device_index)):
            self.clear_error()
            return False
        return self._copy_batch is not None and bool(value.value)

    def copy_all(self, table: npt.NDArray[np.uint64], stream: int) -> int:
        """Launch copies between host and device in one call, in the order of a stream.

        Returns 0, or CUDA's error. Then some of them may have been launched. Needs ``takes_batches``.

        Args:
            table: addresses of targets, addresses of sources, and sizes in bytes: uint64 ``[3, copies]``, at least one.
            stream: handle of a stream that is not the default one.
        """
        assert self._copy_batch is not None
        targets, row_bytes = table.ctypes.data, table.strides[0]
        sources, sizes = targets + row_bytes, targets + 2 * row_bytes
        error = int(
            self._copy_batch(
                targets, sources, sizes, table.shape[1], ctypes.byref(_IN_ORDER), ctypes.byref(_FROM_FIRST), 1, stream
            )
        )
        if error:
            self.clear_error()
        return error


def find_runtime(maps: Path = _MAPS, version: str | None = torch.version.cuda) -> CudaRuntime | None:
    """Return the runtime that torch uses; None if it is not found, for example because torch links it statically.

    Args:
        maps: the files that are mapped into this process.
        version: of the runtime; None without CUDA.
    """
    if version is None:
        return None
    major = int(version.partition(".")[0])
    name = f"/libcudart.so.{major}"
    try:
        paths = {line.rpartition(" ")[2] for line in maps.read_text().splitlines() if name in line}
        return CudaRuntime(ctypes.CDLL(min(paths)), major) if paths else None
    except (OSError, AttributeError):
        return None
