"""Checks that nothing is under way: in an index, and in the planners of a scheduler side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
    from kvstore.adapters.vllm.scheduler.saves import SavePlanner
    from kvstore.index.index import ChunkIndex


def uses_of(index: ChunkIndex) -> int:
    """Count plans and writes in flight, and leases, per chunk; 0 when idle."""
    return sum(chunk.uses for chunk in index._chunks.values())


def are_loads_idle(loads: LoadPlanner) -> bool:
    is_awaited = any(loads._fetched_keys.values())
    return not (loads._in_flight or loads._fetching or is_awaited)


def are_saves_idle(saves: SavePlanner) -> bool:
    return not (saves._in_flight or saves._writes or saves._plans.next.removals)
