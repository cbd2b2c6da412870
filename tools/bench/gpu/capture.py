"""CUDA graph captures during pinning of a pool, because vLLM captures its graphs right after it registers caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Literal

import torch

from kvstore.layout import round_up
from kvstore.memory.mapped import map_bytes, populate
from kvstore.memory.slabs import SlabPool
from kvstore.tools.bench.gpu.figures import Figure, count
from kvstore.tools.bench.gpu.scale import MIB, Scale
from kvstore.tools.bench.samples import BenchError, require

Mode = Literal["global", "relaxed"]
_SLOT_BYTES = 4 * MIB
_RAW_PIECE_BYTES = 64 * MIB
_LEAST_CAPTURES = 20
_PORTABLE = 1  # cudaHostRegisterPortable


def check_captures(mode: Mode, scale: Scale) -> Iterator[Figure]:
    """Capture graphs after a pool was pinned at start, and while another pool is pinned in the background.

    Raises:
        BenchError: a capture failed or its graph computed a wrong result, or a slot is not pinned at the end.
    """
    for in_background in (False, True):
        when = "in the background" if in_background else "at start"
        yield from _check_captures(mode, scale, f"pinned {when}, captures {mode}", in_background=in_background)


def _check_captures(mode: Mode, scale: Scale, title: str, *, in_background: bool) -> Iterator[Figure]:
    memory = torch.ones(1024, device=scale.device)
    num_slots = max(2, scale.pool_bytes // 2 // _SLOT_BYTES)
    with closing(SlabPool(num_slots, _SLOT_BYTES, memory.device, pin_in_background=in_background)) as pool:
        captures, failed = _captures(memory, scale, mode, lambda: pool.wait_populated(0.0))
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
    if float(memory.sum()) != 2 * len(memory):
        raise BenchError("a graph that was captured while memory was pinned computes something else")
