"""How well a load that comes layer by layer hides behind the computing of the layers, for ``kvstore bench``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.tools.bench_work import BenchError, Pair, Workbench

if TYPE_CHECKING:
    from kvstore.engine import CacheEngine

LOADS_PER_PAIR = 2


def retrieve_by_layer(engine: CacheEngine, workbench: Workbench) -> Pair:
    """Load the batch once as fast as it comes, and once while a model computes each layer for as long as that took.

    The limit is the larger of the two sums, that of the loading and that of the computing: all of the other is hidden.

    Raises:
        BenchError: a byte is wrong.
    """
    load_s, _ = _load(engine, workbench, 0.0)
    path_s, compute_s = _load(engine, workbench, load_s / workbench.paged.layout.num_layers)
    return Pair(max(load_s, compute_s), path_s)


def _load(engine: CacheEngine, workbench: Workbench, layer_s: float) -> tuple[float, float]:
    """Load the batch with that much computing behind each layer: the time of all, and that of the computing."""
    block_ids, slots = workbench.destination()
    compute_s, loaded = 0.0, None
    begin_s = time.perf_counter()
    for loaded in engine.retrieve_layer(workbench.tokens, slot_mapping=slots):
        if loaded is None:
            compute_s += _compute(layer_s)
    total_s = time.perf_counter() - begin_s
    if loaded is None or not bool(loaded.all()):
        raise BenchError("a load layer by layer did not bring all tokens: is another bench running in this folder?")
    workbench.check(block_ids)
    return total_s, compute_s


def _compute(layer_s: float) -> float:
    """Sleeps, as a thread does that waits for a device; returns how long it really was."""
    begin_s = time.perf_counter()
    if layer_s:
        time.sleep(layer_s)
    return time.perf_counter() - begin_s
