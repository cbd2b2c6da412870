"""Pinning of host memory: its speed, and what the model's thread notices of it.

Launches may take longer during it. CUDA graphs must be captured during it, because vLLM captures its graphs right after
it registers caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from time import perf_counter
from typing import Literal

import torch

from kvstore.memory.mapped import map_bytes, populate
from kvstore.memory.pinning import Pinner, find_pinner
from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray
from kvstore.model.layout import round_up
from kvstore.tools.bench.gpu.bed import MIB, Scale
from kvstore.tools.bench.gpu.figures import GB_PER_S, US, Figure, count, duration, percentile
from kvstore.tools.bench.samples import require, timed

Mode = Literal["global", "relaxed"]
_SLOT_BYTES = 4 * MIB
_RAW_PIECE_BYTES = 64 * MIB
_LEAST_CAPTURES = 20
_PORTABLE = 1  # cudaHostRegisterPortable
_PIECES_BYTES = (16 * MIB, 64 * MIB, 256 * MIB)
_LAUNCHES = 2000
_LEAST_LAUNCHES = 10
_LEAST_S = 1e-9  # where there is nothing to pin


def measure_pinning(scale: Scale) -> Iterator[Figure]:
    """Measure registration against touching as many fresh pages, and launches during it against launches alone."""
    tiny = torch.zeros(1024, device=scale.device)
    if scale.is_cuda:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    _launches(tiny, scale, _LAUNCHES.__gt__)
    alone_s = _launches(tiny, scale, _LAUNCHES.__gt__)
    pinner = find_pinner(tiny.device)
    for piece_bytes in sorted({min(size, scale.pinned_bytes) for size in _PIECES_BYTES}):
        memory = map_bytes(scale.pinned_bytes)
        touch_s, _ = timed(partial(populate, memory, 0, len(memory), lambda: False))
        with ExitStack() as pinned, ThreadPoolExecutor(1) as thread:
            pinning = thread.submit(_pin, pinner, memory, piece_bytes, pinned)
            beside_s = _launches(tiny, scale, partial(_goes_on, pinning))
            pin_s = pinning.result()
        title = f"in pieces of {piece_bytes // MIB} MiB"
        register, touch = (len(memory) / seconds / 1e9 for seconds in (pin_s, touch_s))
        yield Figure(f"register {title}, against touching", register, touch, touch_s / pin_s, GB_PER_S)
        for share in (50, 99, 100):
            value_s, limit_s = (percentile(samples, share) for samples in (beside_s, alone_s))
            name = f"launch while registering {title}, p{share}"
            yield duration(name, value_s, limit_s, US, more={"launches": len(beside_s)})


def _pin(pinner: Pinner | None, memory: ByteArray, piece_bytes: int, pinned: ExitStack) -> float:
    """Pin a range piece by piece until ``pinned`` is closed, and return the seconds that it took."""
    if pinner is None:  # a CPU needs no pinned memory
        return _LEAST_S
    begin_s = perf_counter()
    for begin in range(0, len(memory), piece_bytes):
        piece = memory[begin : begin + piece_bytes]
        problem = pinner.pin(piece.ctypes.data, len(piece))
        require(problem is None, f"memory cannot be pinned: {problem}")
        pinned.callback(pinner.unpin, piece.ctypes.data)
    return max(perf_counter() - begin_s, _LEAST_S)


def _goes_on(pinning: Future[float], number: int) -> bool:
    return number < _LEAST_LAUNCHES or not pinning.done()


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


def check_captures(mode: Mode, scale: Scale) -> Iterator[Figure]:
    """Capture graphs after a pool was pinned at start, and while another pool is pinned in the background."""
    memory, num_slots = torch.ones(1024, device=scale.device), max(2, scale.pool_bytes // 2 // _SLOT_BYTES)
    for in_background, when in ((False, "at start"), (True, "in the background")):
        title = f"pinned {when}, captures {mode}"
        with closing(SlabPool(num_slots, _SLOT_BYTES, memory.device, pin_in_background=in_background)) as pool:
            captures, failed = _captures(memory, scale, mode, partial(pool.wait_populated, 0.0))
            require(not failed, f"{title}: {len(failed)} of {captures} captures failed: {failed[:1]}")
            yield count(f"{title}: captures", captures, captures)
            slots = [torch.from_numpy(pool.slot(number)) for number in range(num_slots)]
            pinned = sum(slot.is_pinned() for slot in slots) if scale.is_cuda else num_slots
            require(pinned == num_slots, f"{title}: only {pinned} of {num_slots} slots are pinned")
            yield count(f"{title}: slots", pinned, num_slots)


def find_collisions(scale: Scale) -> Iterator[Figure]:
    """Run ``cudaHostRegister`` on one thread during captures in the default mode on another, without precautions.

    A figure below 1, or a run that hangs, shows that the precautions of ``SlabPool`` are needed.
    """
    memory = torch.ones(1024, device=scale.device)
    host = map_bytes(round_up(scale.pool_bytes, _RAW_PIECE_BYTES))
    populate(host, 0, len(host), lambda: False)
    errors: list[int] = []

    def register() -> None:
        addresses = range(host.ctypes.data, host.ctypes.data + len(host), _RAW_PIECE_BYTES)
        errors.extend(_register(address, _RAW_PIECE_BYTES) if scale.is_cuda else 0 for address in addresses)

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    captures, failed = _captures(memory, scale, "global", lambda: not thread.is_alive())
    thread.join()
    good = sum(error == 0 for error in errors)
    yield count("captures beside plain cudaHostRegister", captures - len(failed), captures, None)
    yield count("plain cudaHostRegister beside captures", good, len(errors), None)


def _register(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))  # type: ignore[no-untyped-call]


def _captures(
    memory: torch.Tensor, scale: Scale, mode: Mode, is_over: Callable[[], bool]
) -> tuple[int, list[RuntimeError]]:
    """Capture and replay small graphs until ``is_over()``; return their number, and the errors of failed ones."""
    captures, failed = 0, []
    while captures < _LEAST_CAPTURES or not is_over():
        captures += 1
        try:
            _capture(memory, scale, mode)
        except RuntimeError as error:
            failed.append(error)
    return captures, failed


def _capture(memory: torch.Tensor, scale: Scale, mode: Mode) -> None:
    memory.fill_(1)
    if not scale.is_cuda:
        memory.add_(1)
    else:
        torch.cuda.synchronize(scale.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            memory.add_(1)
        graph.replay()
    is_right = float(memory.sum()) == 2 * len(memory)
    require(is_right, "a graph that was captured while memory was pinned computes something else")
