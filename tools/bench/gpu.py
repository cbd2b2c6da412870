"""The GPU's lines: stores from device memory to the pool and back, against pinned copies of as many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.tools.bench import moves
from kvstore.tools.bench.limits import MEMCPY_PIECE_BYTES
from kvstore.tools.bench.lines import Line, Subject

if TYPE_CHECKING:
    from kvstore.tools.bench.samples import Tick
    from kvstore.tools.bench.workbench import Workbench

_CALL = "keys of the token list, slot check, index"
STORE = Subject("GPU to host", "pinned copy", f"{_CALL}, gather on the device, copy")
RETRIEVE = Subject("host to GPU", "pinned copy", f"{_CALL}, copy, scatter on the device")
LAYER_STORE = Subject("GPU to host by layer", "pinned copy", f"{_CALL}, gather and copy: a next() each layer")
LAYER_RETRIEVE = Subject("host to GPU by layer", "pinned copy", f"{_CALL}, copy and scatter: a next() each layer")


class PinnedCopies:
    """The limit: copies between device and host in pieces of 32 MiB. Host memory is pinned if the device is a GPU."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._device = device
        on_device = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        on_host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        ranges = [slice(begin, begin + MEMCPY_PIECE_BYTES) for begin in range(0, size_bytes, MEMCPY_PIECE_BYTES)]
        self._pieces = [(on_device[piece], on_host[piece]) for piece in ranges]

    def to_host(self) -> None:
        """Copy from the device."""
        for on_device, on_host in self._pieces:
            on_host.copy_(on_device, non_blocking=True)
        self._wait()

    def to_device(self) -> None:
        """Copy to the device."""
        for on_device, on_host in self._pieces:
            on_device.copy_(on_host, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_gpu(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Move batches between a cache on a device and memory. With a workbench on the CPU, no GPU is needed.

    Raises:
        BenchError: a path lost or changed a byte.
    """
    copies = PinnedCopies(workbench.batch_bytes, workbench.paged.device)
    held = {
        STORE: (moves.store, copies.to_host),
        RETRIEVE: (moves.retrieve, copies.to_device),
        LAYER_STORE: (moves.store_by_layer, copies.to_host),
        LAYER_RETRIEVE: (moves.retrieve_by_layer, copies.to_device),
    }
    return moves.measure_moves("GPU", held, workbench, rounds, tick)
