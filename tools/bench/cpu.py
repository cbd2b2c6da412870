"""The CPU tier's lines: stores and retrieves, whole and layer by layer, against memcpy of as many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine import CacheEngine
from kvstore.tools.bench import moves
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.samples import NAMESPACE, WARM_UP_ROUNDS, Pair, Tick

if TYPE_CHECKING:
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
    samples: dict[Subject, list[Pair]] = {subject: [] for subject in SUBJECTS}
    with CacheEngine(workbench.paged, NAMESPACE, moves.options(workbench)) as engine:
        for number in range(WARM_UP_ROUNDS + rounds):
            tick("CPU")
            for subject, move in SUBJECTS.items():
                samples[subject].append(move(engine, workbench, workbench.memcpy, limit_first=number % 2 == 0))
    return move_lines(samples, workbench)
