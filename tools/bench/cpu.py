"""Bench lines of the CPU tier: stores and retrieves, whole and layer by layer, against memcpy of as many bytes."""

from __future__ import annotations

from kvstore.tools.bench import moves
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import Tick
from kvstore.tools.bench.workbench import Workbench

_CALL = "keys of the token list, slot check, index"
SUBJECTS = {
    Subject("CPU store", "memcpy", f"{_CALL}, gather"): moves.store,
    Subject("CPU retrieve", "memcpy", f"{_CALL}, scatter"): moves.retrieve,
    Subject("CPU store by layer", "memcpy", f"{_CALL}, gather: a next() each layer"): moves.store_by_layer,
    Subject("CPU retrieve by layer", "memcpy", f"{_CALL}, scatter: a next() each layer"): moves.retrieve_by_layer,
}


def measure_cpu(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Move batches in and out of memory.

    Raises:
        BenchError: a path lost or changed a byte.
    """
    held = {subject: (move, workbench.memcpy) for subject, move in SUBJECTS.items()}
    return moves.measure_moves("CPU", held, workbench, rounds, tick)
