"""Makes a tier slow, for tests and for simulating slower tiers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import InvalidCallError
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.guards.base import TierWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MOVED = (Outcome.HIT, Outcome.STORED)


class Latency(TierWrapper):
    """Adds a delay to every call about chunks, and a bandwidth that all calls share, as on one link.

    Args:
        inner: the tier to slow down.
        delay_s: before each call about chunks; calls of several threads wait side by side.
        bytes_per_s: after a ``get`` or ``put``, for the stored bytes moved; None means no limit.
        sleep: waits.
        clock: seconds, for the time at which the link is free.

    Raises:
        InvalidCallError: a negative delay, or a bandwidth that is not positive.
    """

    def __init__(
        self,
        inner: Tier,
        delay_s: float,
        bytes_per_s: float | None = None,
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        if not delay_s >= 0 or (bytes_per_s is not None and not bytes_per_s > 0):
            raise InvalidCallError(f"no tier has {delay_s=} and {bytes_per_s=}")
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._link_free_s = float("-inf")

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Wait, then forward."""
        self._sleep(self._delay_s)
        return self.inner.contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Wait, forward, and wait for the link."""
        self._sleep(self._delay_s)
        return self._transmit(transfers, self.inner.get(transfers))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Wait, forward, and wait for the link."""
        self._sleep(self._delay_s)
        return self._transmit(transfers, self.inner.put(transfers))

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Wait, then forward."""
        self._sleep(self._delay_s)
        self.inner.remove(refs)

    def _transmit(self, transfers: Sequence[Transfer], outcomes: list[Outcome]) -> list[Outcome]:
        moved = zip(transfers, outcomes, strict=True)
        moved_bytes = sum(self.stored_bytes(item.ref.num_blocks) for item, outcome in moved if outcome in _MOVED)
        if self._bytes_per_s is not None and moved_bytes:
            with self._lock:
                now_s = self._clock()
                self._link_free_s = max(self._link_free_s, now_s) + moved_bytes / self._bytes_per_s
                wait_s = self._link_free_s - now_s
            self._sleep(wait_s)
        return outcomes
