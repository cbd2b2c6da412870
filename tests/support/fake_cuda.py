"""A fake CUDA runtime: registered memory, a capture of graphs, each thread's last error, and batches of copies."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.memory import pinning
from kvstore.paged.runtime import CudaRuntime

GLOBAL, RELAXED = 0, 2  # capture modes of a thread
OUT_OF_MEMORY, UNSUPPORTED = 2, 900
HANG_GUARD_S = 30.0


class FakeCuda:
    """Fake CUDA driver. ``install`` puts it in the place of torch's.

    Attributes:
        capturing: another thread captures a graph, in global mode.
        hangs: a call that collides with the capture waits for its end; otherwise it fails.
        error: what every registration fails with; 0 for none.
        registered: size of each range, by its address.
        calls: how often memory was registered, or should have been.
        broken: how many captures were broken.
        batches: number of copies of each batch.
        batch_error: what a batch fails with, after its first copy; 0 for none.
        stream: handle of the stream whose work is being done.
        wrong: complaints about batches; a callback cannot raise.
        uses_host_pointers: the device can, as most.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.hangs = False
        self.error = 0
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.broken = 0
        self.batches: list[int] = []
        self.batch_error = 0
        self.stream = 0
        self.wrong: list[str] = []
        self.uses_host_pointers = True
        self._ended = threading.Event()
        self._of_thread = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``CudaPinner`` use this runtime."""
        module = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        monkeypatch.setattr(pinning, "_cudart", lambda: module)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def runtime(self, major: int = 13) -> CudaRuntime:
        """Return the calls that torch does not offer, through ctypes as in a process with CUDA."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        batch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer)
        exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(self._exchange)
        address = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_int, ctypes.c_int)
        library = SimpleNamespace(
            cudaGetLastError=ctypes.CFUNCTYPE(ctypes.c_int)(self.take_error),
            cudaThreadExchangeStreamCaptureMode=exchange,
            cudaDeviceGetPCIBusId=address(self._address),
            cudaDeviceGetAttribute=ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int
            )(self._attribute),
        )
        if major >= 12:
            library.cudaMemcpyBatchAsync = batch(self._copy_batch)
        return CudaRuntime(library, major)

    def end_capture(self) -> None:
        """End the capture, and let the calls that wait for it continue."""
        self.capturing = False
        self._ended.set()

    def mode(self) -> int:
        """Return the capture mode of the calling thread."""
        return int(getattr(self._of_thread, "mode", GLOBAL))

    def take_error(self) -> int:
        """Return the calling thread's last error, and reset it."""
        error, self._of_thread.error = getattr(self._of_thread, "error", 0), 0
        return int(error)

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        """Pin a range, for every device."""
        assert flags == 1
        self.calls += 1
        return self._end(self._collide() or self.error) or self._remember(address, num_bytes)

    def unregister(self, address: int) -> int:
        """Unpin a range."""
        return self._end(self._collide() or (0 if self.registered.pop(address, 0) else 1))

    def _collide(self) -> int:
        if not self.capturing or self.mode() == RELAXED:
            return 0
        if self.hangs:
            assert self._ended.wait(HANG_GUARD_S), "waits for a capture that waits for it"
            return 0
        self.broken += 1
        return UNSUPPORTED

    def _remember(self, address: int, num_bytes: int) -> int:
        self.registered[address] = num_bytes
        return 0

    def _end(self, error: int) -> int:
        if error:
            self._of_thread.error = error
        return error

    def _exchange(self, mode: Any) -> int:
        mode[0], self._of_thread.mode = self.mode(), mode[0]
        return 0

    def _copy_batch(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, firsts: int, kinds: int, stream: int
    ) -> int:
        """Copy at once, because the caller launches a batch where the device does its work."""
        given = (kinds, _words(firsts, 1), (ctypes.c_uint32 * 6).from_address(attributes)[:])
        if given != (1, [0], [1, 0, 0, 0, 0, 0]):  # all in the order of the stream
            self.wrong.append(f"attributes {given}")
        if stream != self.stream:
            self.wrong.append(f"stream {stream} instead of {self.stream}")
        self.batches.append(count)
        for target, source, size in zip(*(_words(table, count) for table in (targets, sources, sizes)), strict=True):
            ctypes.memmove(target, source, size)
            if self.batch_error:
                break
        return self._end(self.batch_error)

    def _attribute(self, value: Any, attribute: int, index: int) -> int:
        if index > 1:
            return self._end(101)  # cudaErrorInvalidDevice
        value[0] = int(attribute == 91 and self.uses_host_pointers)
        return 0

    def _address(self, text: Any, size: int, index: int) -> int:
        if index > 1:
            return self._end(101)  # cudaErrorInvalidDevice
        written = b"0000:%02X:00.0\0" % (0x3A + index)
        assert size >= len(written)
        for place, letter in enumerate(written):
            text[place] = letter
        return 0


def _words(address: int, count: int) -> list[int]:
    return (ctypes.c_uint64 * count).from_address(address)[:]
