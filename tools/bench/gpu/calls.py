"""GPU lines of ``kvstore bench``: stores and retrieves, against pinned copies of as many bytes."""

from __future__ import annotations

from kvstore.tools.bench import moves
from kvstore.tools.bench.gpu.copies import PinnedCopies
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import Tick
from kvstore.tools.bench.workbench import Workbench

_CALL = "keys of the token list, slot check, index"
STORE = Subject("GPU to host", "pinned copy", f"{_CALL}, gather on the device, copy")
RETRIEVE = Subject("host to GPU", "pinned copy", f"{_CALL}, copy, scatter on the device")
LAYER_STORE = Subject("GPU to host by layer", "pinned copy", f"{_CALL}, gather and copy: a next() each layer")
LAYER_RETRIEVE = Subject("host to GPU by layer", "pinned copy", f"{_CALL}, copy and scatter: a next() each layer")


def measure_gpu(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Move batches between a cache on a device and memory; a workbench on the CPU needs no GPU.

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
