"""One sample of each call of ``CacheEngine`` that moves KV, with every byte checked outside the timed part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from kvstore.engine import CacheEngine
from kvstore.options import EngineOptions
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.samples import NAMESPACE, Limit, Pair, Tick, alternating, paired, require
from kvstore.tools.bench.workbench import Workbench

T = TypeVar("T")


def measure_moves(
    name: str, moves: Mapping[Subject, tuple[Callable[..., Pair], Limit]], workbench: Workbench, rounds: int, tick: Tick
) -> list[Line]:
    """Move batches in and out of a pool that holds two of them, so that stores evict.

    Args:
        name: passed to ``tick``.
        moves: a function of this module for each line, and its limit; called in this order in each round.
        workbench: source of the batches.
        rounds: samples of each line, warm-up excluded.
        tick: called before each round.

    Raises:
        BenchError: a path lost or changed a byte.
    """
    with CacheEngine(workbench.paged, NAMESPACE, EngineOptions(2 * workbench.pool_bytes)) as engine:
        sampled = [
            [move(engine, workbench, limit, limit_first=limit_first) for move, limit in moves.values()]
            for limit_first in alternating(name, rounds, tick)
        ]
    return move_lines(moves, sampled, workbench)


def store(engine: CacheEngine, workbench: Workbench, limit: Limit, *, limit_first: bool) -> Pair:
    """Store a new batch."""
    return _store(engine.store, "stored", workbench, limit, limit_first=limit_first)


def store_by_layer(engine: CacheEngine, workbench: Workbench, limit: Limit, *, limit_first: bool) -> Pair:
    """Store a new batch, layer by layer."""
    return _store(_last_of(engine.store_layer), "stored layer by layer", workbench, limit, limit_first=limit_first)


def store_and_flush(engine: CacheEngine, workbench: Workbench, limit: Limit, *, limit_first: bool) -> Pair:
    """Store a new batch, and wait until all of it is in the slower tiers."""

    def path(tokens: list[int], slot_mapping: torch.Tensor) -> int:
        stored = engine.store(tokens, slot_mapping=slot_mapping)
        return stored if engine.flush() else 0

    return _store(path, "written", workbench, limit, limit_first=limit_first)


def retrieve(engine: CacheEngine, workbench: Workbench, limit: Limit, *, limit_first: bool) -> Pair:
    """Retrieve the batch to other blocks, and check every byte of the cache."""
    return _retrieve(engine.retrieve, workbench, limit, limit_first=limit_first)


def retrieve_by_layer(engine: CacheEngine, workbench: Workbench, limit: Limit, *, limit_first: bool) -> Pair:
    """Retrieve the batch to other blocks, layer by layer, and check every byte of the cache."""
    return _retrieve(_last_of(engine.retrieve_layer), workbench, limit, limit_first=limit_first)


def _store(
    call: Callable[..., int | None], done: str, workbench: Workbench, limit: Limit, *, limit_first: bool
) -> Pair:
    slots = workbench.new_batch()
    pair, tokens = paired(limit, lambda: call(workbench.tokens, slot_mapping=slots), limit_first=limit_first)
    require(tokens == workbench.num_tokens, f"{tokens or 0} of {workbench.num_tokens} tokens were {done}")
    return pair


def _retrieve(
    call: Callable[..., torch.Tensor | None], workbench: Workbench, limit: Limit, *, limit_first: bool
) -> Pair:
    block_ids, slots = workbench.destination()
    pair, loaded = paired(limit, lambda: call(workbench.tokens, slot_mapping=slots), limit_first=limit_first)
    tokens = 0 if loaded is None else int(loaded.sum())
    require(tokens == workbench.num_tokens, f"{tokens} of {workbench.num_tokens} tokens were retrieved")
    workbench.check(block_ids)
    return pair


def _last_of(call: Callable[..., Iterable[T | None]]) -> Callable[..., T | None]:
    """Return a function that runs a layer-by-layer generator to its end, and returns its last item."""

    def run(*arguments: Any, **keywords: Any) -> T | None:  # noqa: ANN401 - whatever the generator takes
        last = None
        for last in call(*arguments, **keywords):  # noqa: B007 - used behind the loop
            pass
        return last

    return run
