"""Checks that the planners of a scheduler side have nothing planned or in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
    from kvstore.adapters.vllm.scheduler.saves import SavePlanner


def are_loads_idle(loads: LoadPlanner) -> bool:
    is_awaited = any(loads._fetched_keys.values())
    return not (loads._in_flight or loads._fetching or is_awaited)


def are_saves_idle(saves: SavePlanner) -> bool:
    return not (saves._in_flight or saves._writes or saves._plans.next.removals)
