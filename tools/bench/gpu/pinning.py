"""Pinning of host memory: its speed in pieces of several sizes, and the time of launches during it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import torch

from kvstore.chunks import ByteArray
from kvstore.memory.mapped import map_bytes, populate
from kvstore.memory.pinning import Pinner, Refusal, find_pinner
from kvstore.tools.bench.gpu.figures import GB_PER_S, US, Figure, duration, percentile
from kvstore.tools.bench.gpu.scale import MIB, Scale
from kvstore.tools.bench.samples import require

_PIECES_BYTES = (16 * MIB, 64 * MIB, 256 * MIB)
_LAUNCHES = 2000
_LEAST_LAUNCHES = 10
_LEAST_S = 1e-9  # where there is nothing to pin


def measure_pinning(scale: Scale) -> Iterator[Figure]:
    """Measure registration against touching as many fresh pages, and launches during it against launches alone.

    Raises:
        BenchError: memory could not be pinned.
    """
    tiny = torch.zeros(1024, device=scale.device)
    if scale.is_cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    _launches(tiny, scale, _LAUNCHES.__gt__)
    alone_s = _launches(tiny, scale, _LAUNCHES.__gt__)
    pinner = find_pinner(tiny.device)
    for piece_bytes in sorted({min(size, scale.pinned_bytes) for size in _PIECES_BYTES}):
        memory = map_bytes(scale.pinned_bytes)
        begin_s = perf_counter()
        populate(memory, 0, len(memory), lambda: False)
        touch_s = perf_counter() - begin_s
        pinning = _Pinning(pinner, memory, piece_bytes)
        beside_s = _launches(tiny, scale, partial(_while_alive, pinning))
        pin_s = pinning.end()
        title = f"in pieces of {piece_bytes // MIB} MiB"
        register, touch = (len(memory) / seconds / 1e9 for seconds in (pin_s, touch_s))
        yield Figure(f"register {title}, against touching", register, touch, touch_s / pin_s, GB_PER_S)
        for share in (50, 99, 100):
            value_s, limit_s = (percentile(samples, share) for samples in (beside_s, alone_s))
            name = f"launch while registering {title}, p{share}"
            yield duration(name, value_s, limit_s, US, more={"launches": len(beside_s)})


class _Pinning(threading.Thread):
    """Thread that pins a range piece by piece; ``end`` unpins it."""

    def __init__(self, pinner: Pinner | None, memory: ByteArray, piece_bytes: int) -> None:
        super().__init__(daemon=True)
        self._pinner, self._memory, self._piece_bytes = pinner, memory, piece_bytes
        self._seconds = _LEAST_S
        self._problem: Refusal | None = None
        self._pinned: list[int] = []
        self.start()

    def run(self) -> None:
        begin_s = perf_counter()
        for begin in range(0, len(self._memory), self._piece_bytes):
            piece = self._memory[begin : begin + self._piece_bytes]
            if self._pinner is None:  # a CPU needs no pinned memory
                continue
            self._problem = self._pinner.pin(piece.ctypes.data, len(piece))
            if self._problem is not None:
                return
            self._pinned.append(piece.ctypes.data)
        self._seconds = max(perf_counter() - begin_s, _LEAST_S)

    def end(self) -> float:
        """Wait for the thread, unpin the range, and return the seconds that pinning took.

        Raises:
            BenchError: a piece could not be pinned.
        """
        self.join()
        if self._pinner is not None:
            for address in self._pinned:
                self._pinner.unpin(address)
        require(self._problem is None, f"memory cannot be pinned: {self._problem}")
        return self._seconds


def _while_alive(thread: threading.Thread, number: int) -> bool:
    return number < _LEAST_LAUNCHES or thread.is_alive()


def _launches(tiny: torch.Tensor, scale: Scale, goes_on: Callable[[int], bool]) -> list[float]:
    """Return the host seconds of each launch of a small kernel, while ``goes_on(number)``."""
    samples: list[float] = []
    while goes_on(len(samples)):
        begin_s = perf_counter()
        tiny.add_(1)
        samples.append(perf_counter() - begin_s)
        if len(samples) % 100 == 0:
            scale.wait()  # the queue of a stream is bounded
    scale.wait()
    return samples
