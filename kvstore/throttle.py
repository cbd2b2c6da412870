"""Keeps a fault that comes again and again from flooding the log."""

from __future__ import annotations

import time


class Throttle:
    """Lets one message a cause and minute through, so that a broken tier does not flood the log."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._last_s: dict[str, float] = {}

    def is_due(self, cause: str) -> bool:
        """Whether to speak about ``cause`` now. Thread-safe; a race costs at most a line too many."""
        now_s = time.monotonic()
        last_s = self._last_s.get(cause)
        if last_s is not None and now_s - last_s < self._every_s:
            return False
        self._last_s[cause] = now_s
        return True
