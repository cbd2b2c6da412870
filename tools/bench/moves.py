"""One sample of each call of ``CacheEngine`` that moves KV, checked outside the timed part."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvstore.options import EngineOptions
from kvstore.tools.bench.samples import Pair, paired, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from kvstore.engine import CacheEngine
    from kvstore.tools.bench.workbench import Workbench

T = TypeVar("T")


def options(workbench: Workbench) -> EngineOptions:
    """Of an engine whose pool holds two batches, so that stores evict."""
    return EngineOptions(2 * workbench.pool_bytes)


def store(engine: CacheEngine, workbench: Workbench, limit: Callable[[], object], *, limit_first: bool) -> Pair:
    """Store a new batch."""
    slots = workbench.new_batch()
    pair, stored = paired(limit, lambda: engine.store(workbench.tokens, slot_mapping=slots), limit_first=limit_first)
    _require_all(stored, workbench, "stored")
    return pair


def store_by_layer(
    engine: CacheEngine, workbench: Workbench, limit: Callable[[], object], *, limit_first: bool
) -> Pair:
    """Store a new batch, layer after layer."""
    slots = workbench.new_batch()
    pair, stored = paired(
        limit, lambda: _last(engine.store_layer(workbench.tokens, slot_mapping=slots)), limit_first=limit_first
    )
    _require_all(stored or 0, workbench, "stored layer by layer")
    return pair


def store_and_flush(
    engine: CacheEngine, workbench: Workbench, limit: Callable[[], object], *, limit_first: bool
) -> Pair:
    """Store a new batch, and wait until all of it is in the slower tiers."""
    slots = workbench.new_batch()

    def path() -> int:
        stored = engine.store(workbench.tokens, slot_mapping=slots)
        return stored if engine.flush() else 0

    pair, written = paired(limit, path, limit_first=limit_first)
    _require_all(written, workbench, "written")
    return pair


def retrieve(engine: CacheEngine, workbench: Workbench, limit: Callable[[], object], *, limit_first: bool) -> Pair:
    """Retrieve the batch to other blocks, and check every byte of the cache."""
    block_ids, slots = workbench.destination()
    pair, loaded = paired(limit, lambda: engine.retrieve(workbench.tokens, slot_mapping=slots), limit_first=limit_first)
    _check(loaded, workbench, block_ids)
    return pair


def retrieve_by_layer(
    engine: CacheEngine, workbench: Workbench, limit: Callable[[], object], *, limit_first: bool
) -> Pair:
    """Retrieve the batch to other blocks, layer after layer, and check every byte of the cache."""
    block_ids, slots = workbench.destination()
    pair, loaded = paired(
        limit, lambda: _last(engine.retrieve_layer(workbench.tokens, slot_mapping=slots)), limit_first=limit_first
    )
    _check(loaded, workbench, block_ids)
    return pair


def _last(yields: Iterable[T | None]) -> T | None:
    """What a generator that advances layer by layer yields in the end."""
    last = None
    for last in yields:  # noqa: B007 - used behind the loop
        pass
    return last


def _check(loaded: torch.Tensor | None, workbench: Workbench, block_ids: torch.Tensor) -> None:
    require(loaded is not None, "a load layer by layer did not say what it loaded")
    assert loaded is not None
    _require_all(int(loaded.sum()), workbench, "retrieved")
    workbench.check(block_ids)


def _require_all(tokens: int, workbench: Workbench, what: str) -> None:
    require(tokens == workbench.num_tokens, f"{tokens} of {workbench.num_tokens} tokens were {what}")
