"""Counts of failed calls to a tier, and times of its reads and writes. ``ops/meters`` reads both."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from kvstore.errors import TierError, TierTimeoutError
from kvstore.tiers.base import Tier
from kvstore.tiers.guards.base import TierWrapper

Result = TypeVar("Result")

_TIMED: Final = {"get": "get", "borrow": "get", "put": "put"}  # the operation that a call is timed as
MAX_TIMES: Final = 4096  # of each operation, kept until they are taken


class Statistics(TierWrapper):
    """Wrapper that counts and times the calls to a tier. Thread-safe.

    Attributes:
        errors: calls that raised ``TierError``.
        timeouts: those of them that timed out.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.errors = 0
        self.timeouts = 0
        self._lock = threading.Lock()
        self._times_s = {operation: deque[float](maxlen=MAX_TIMES) for operation in ("get", "put")}

    def take_times_s(self, operation: str) -> list[float]:
        """Return the times of each ``get`` or ``put`` that ended since the last call, including failed ones."""
        with self._lock:
            taken = list(self._times_s[operation])
            self._times_s[operation].clear()
        return taken

    def _call(self, operation: str, action: Callable[[], Result]) -> Result:
        """Forward, count and time."""
        begin_s = time.perf_counter()
        try:
            return action()
        except TierError as error:
            with self._lock:
                self.errors += 1
                self.timeouts += isinstance(error, TierTimeoutError)
            raise
        finally:
            if operation in _TIMED:
                with self._lock:
                    self._times_s[_TIMED[operation]].append(time.perf_counter() - begin_s)
