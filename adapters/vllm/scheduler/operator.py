"""Queries and orders of an operator to the scheduler side, from other threads than vLLM's."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.index.plans import Place
from kvstore.model.version import __version__
from kvstore.ops import metrics
from kvstore.ops.drains import drain_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
    from kvstore.config import StoreConfig
    from kvstore.model.keys import KeyExtras
    from kvstore.ops.admin import Tree

logger = logging.getLogger(__name__)

_STATES: Final = ("ok", "being tried again", "left out")
_WAIT_S: Final = 1.0  # a busy engine plans several steps in this time; an idle one plans none


class SchedulerControls:
    """``Controls`` of a scheduler side. The index belongs to vLLM's thread, which carries out its changes.

    Args:
        scheduler: answers, and carries orders out.
        config: its configuration.
        versions: versions of the software around it.
    """

    def __init__(self, scheduler: StoreScheduler, config: StoreConfig, versions: dict[str, str]) -> None:
        self._scheduler = scheduler
        self._config = config
        self._versions = {"kvstore": __version__, **versions}
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._draining = threading.Lock()  # one such order at a time
        self._orders: dict[str, Future[int]] = {}  # the last of each kind
        self._is_draining = False

    def info(self) -> Tree:
        """Return the versions, the process, the tiers and the sizes of the scheduler side."""
        levels = self._scheduler.totals.levels()
        sizes = (metrics.KNOWN_CHUNKS, metrics.SLOTS, metrics.USED_SLOTS, metrics.DISK_USED_BYTES)
        return {
            "versions": self._versions,
            "process": os.getpid(),
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "enabled": self._scheduler.enabled,
            "draining": self._is_draining,
            "chunk_tokens": self._config.chunk_size,
            "tiers": self._tiers(),
            **{metric.name: int(levels.get(metric.key(), 0)) for metric in sizes},
        }

    def stats(self) -> Tree:
        """Return all metrics, as of the last step."""
        return self._scheduler.totals.as_tree()

    def config(self) -> Tree:
        """Return every key with its value."""
        return self._config.shown()

    def health(self) -> Tree:
        """Tell if the scheduler knows its workers, and each tier answers."""
        levels = self._scheduler.totals.levels()
        tiers = {tier: _STATES[int(levels.get(metrics.BREAKER_STATE.key(tier), 0))] for tier in self._tiers()}
        is_ready = self._scheduler.index is not None
        is_sound = is_ready and all(state == _STATES[0] for state in tiers.values())
        return {
            "status": "ok" if is_sound else "degraded",
            "enabled": self._scheduler.enabled,
            "connected": is_ready,
            "tiers": tiers,
        }

    def kv(self, tokens: Sequence[int], extras: KeyExtras) -> Tree:
        """Count the leading tokens that are known, in whole blocks, by the fastest tier that has them."""
        by_place = self._scheduler.find(tokens, extras)
        by_tier = {tier: by_place[Place(tier)] for tier in self._tiers()}
        return {"tokens": len(tokens), "known_tokens": by_place.total(), "tiers": by_tier}

    def clear(self) -> int | None:
        """Forget all chunks in memory and on disk, but not in a shared remote tier. None while vLLM is idle."""
        return self._order("clear", self._scheduler.clear)

    def pins(self) -> Tree:
        """Return the prompts that requests have pinned, by the hash of each."""
        now_s = time.monotonic()
        pins = [
            {"name": view.name, "chunks": view.num_chunks, "ends_in_s": round(max(0.0, view.expires_s - now_s), 1)}
            for view in self._scheduler.pins()
        ]
        return {"pins": pins, "counts": "pin" in self._config.request_fields}

    def unpin(self) -> int | None:
        """End all pins. None while vLLM is idle."""
        return self._order("unpin", self._scheduler.unpin_all)

    def drain(self) -> Tree:
        """Prepare the end of the engine, and count the chunks that are still to be written, on the slowest worker.

        ``unreached`` workers, on other hosts or without an answer, count nothing.
        """
        if not self._is_draining:
            logger.info("draining: no hand-overs begin, and other engines are turned away, until the engine ends")
        self._is_draining = True
        with self._draining:
            left = drain_all(self._scheduler.drain())
        return {"status": "closing", **left._asdict()}

    def _order(self, kind: str, action: Callable[[], int]) -> int | None:
        """Make vLLM's thread carry out an action. None if it is not done soon."""
        with self._lock:
            order = self._orders.get(kind)
            if order is None or order.done():  # otherwise the waiting order serves this call, too
                order = self._orders[kind] = Future()
                self._scheduler.call_soon(partial(self._carry_out, order, action))
        try:
            return order.result(_WAIT_S)
        except NotYet:
            return None

    def _carry_out(self, order: Future[int], action: Callable[[], int]) -> None:
        with self._lock:
            order.set_result(action())

    def switch(self, *, enabled: bool) -> None:
        """Turn lookups and stores on or off, at once."""
        self._scheduler.enabled = enabled

    def _tiers(self) -> list[str]:
        there = {
            Place.MEMORY: self._config.local_cpu,
            Place.DISK: bool(self._config.local_disk),
            Place.REMOTE: self._config.has_remote,
        }
        return [place.value for place, is_there in there.items() if is_there]
