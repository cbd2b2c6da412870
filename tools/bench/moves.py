"""Lines of ``CacheEngine``'s calls that move KV, on the CPU and on a GPU, with every byte checked afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.tools.bench.limits import PinnedCopies
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.samples import NAMESPACE, Limit, Pair, Pairing, Tick, alternating, require
from kvstore.tools.bench.workbench import Workbench

T = TypeVar("T")
_CALL = "keys of the token list, slot check, index"
CPU = (
    Subject("CPU store", "memcpy", f"{_CALL}, gather"),
    Subject("CPU retrieve", "memcpy", f"{_CALL}, scatter"),
    Subject("CPU store by layer", "memcpy", f"{_CALL}, gather: a next() each layer"),
    Subject("CPU retrieve by layer", "memcpy", f"{_CALL}, scatter: a next() each layer"),
)
GPU = (
    Subject("GPU to host", "pinned copy", f"{_CALL}, gather on the device, copy"),
    Subject("host to GPU", "pinned copy", f"{_CALL}, copy, scatter on the device"),
    Subject("GPU to host by layer", "pinned copy", f"{_CALL}, gather and copy: a next() each layer"),
    Subject("host to GPU by layer", "pinned copy", f"{_CALL}, copy and scatter: a next() each layer"),
)


def measure_cpu(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Move batches in and out of memory, against memcpy of as many bytes."""
    return _measured(CPU, workbench, (workbench.memcpy, workbench.memcpy), rounds, tick)


def measure_gpu(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Move batches between a cache on a device and memory; a workbench on the CPU needs no GPU."""
    copies = PinnedCopies(workbench.batch_bytes, workbench.paged.device)
    return _measured(GPU, workbench, (copies.to_host, copies.to_device), rounds, tick)


def _measured(
    subjects: Iterable[Subject], workbench: Workbench, limits: tuple[Limit, Limit], rounds: int, tick: Tick
) -> list[Line]:
    """Move batches in and out of a pool that holds two of them, so that stores evict."""
    out, back = limits
    moves = ((store, out), (retrieve, back), (store_by_layer, out), (retrieve_by_layer, back))
    with CacheEngine(workbench.paged, NAMESPACE, EngineOptions(2 * workbench.pool_bytes)) as engine:
        found = [[move(engine, workbench, limit, pair) for move, limit in moves] for pair in alternating(rounds, tick)]
    return move_lines(subjects, found, workbench)


def store(engine: CacheEngine, workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    """Store a new batch."""
    return _store(engine.store, "stored", workbench, limit, pair)


def store_by_layer(engine: CacheEngine, workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    """Store a new batch, layer by layer."""
    return _store(partial(_last_of, engine.store_layer), "stored layer by layer", workbench, limit, pair)


def store_and_flush(engine: CacheEngine, workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    """Store a new batch, and wait until all of it is in the slower tiers."""

    def path(tokens: list[int], slot_mapping: torch.Tensor) -> int:
        stored = engine.store(tokens, slot_mapping=slot_mapping)
        return stored if engine.flush() else 0

    return _store(path, "written", workbench, limit, pair)


def retrieve(engine: CacheEngine, workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    """Retrieve the batch to other blocks, and check every byte of the cache."""
    return _retrieve(engine.retrieve, workbench, limit, pair)


def retrieve_by_layer(engine: CacheEngine, workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    """Retrieve the batch to other blocks, layer by layer, and check every byte of the cache."""
    return _retrieve(partial(_last_of, engine.retrieve_layer), workbench, limit, pair)


def _store(call: Callable[..., int | None], done: str, workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    slots = workbench.new_batch()
    sample, tokens = pair(limit, lambda: call(workbench.tokens, slot_mapping=slots))
    require(tokens == workbench.num_tokens, f"{tokens or 0} of {workbench.num_tokens} tokens were {done}")
    return sample


def _retrieve(call: Callable[..., torch.Tensor | None], workbench: Workbench, limit: Limit, pair: Pairing) -> Pair:
    block_ids, slots = workbench.destination()
    sample, loaded = pair(limit, lambda: call(workbench.tokens, slot_mapping=slots))
    tokens = 0 if loaded is None else int(loaded.sum())
    require(tokens == workbench.num_tokens, f"{tokens} of {workbench.num_tokens} tokens were retrieved")
    workbench.check(block_ids)
    return sample


def _last_of(call: Callable[..., Iterable[T | None]], tokens: list[int], **keywords: Any) -> T | None:  # noqa: ANN401
    """Run a layer-by-layer generator to its end, and return its last item."""
    last = None
    for last in call(tokens, **keywords):  # noqa: B007 - used behind the loop
        pass
    return last
