"""Keeps a fault that comes again and again from flooding the log."""

from __future__ import annotations

import threading
import time

MAX_CAUSES = 256  # some are made of what strangers choose, such as addresses


class Throttle:
    """Lets one message a cause and minute through, so that a broken tier does not flood the log."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._last_s: dict[str, float] = {}  # the longest ago first
        self._lock = threading.Lock()

    def is_due(self, cause: str) -> bool:
        """Whether to speak about ``cause`` now; not about one more, where many are spoken about. Thread-safe."""
        now_s = time.monotonic()
        with self._lock:
            while self._last_s and now_s - next(iter(self._last_s.values())) >= self._every_s:
                del self._last_s[next(iter(self._last_s))]
            if cause in self._last_s or len(self._last_s) >= MAX_CAUSES:
                return False
            self._last_s[cause] = now_s
            return True
