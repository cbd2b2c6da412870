"""Rate limit for log messages, so that a recurring fault does not flood the log."""

from __future__ import annotations

import logging
import threading
import time

MAX_CAUSES = 256  # some causes contain text chosen by strangers, such as addresses


class Throttle:
    """Logs at most one message per cause and interval. Thread-safe.

    Args:
        logger: of the module whose messages these are.
        every_s: time for which further messages of a cause are suppressed.
    """

    def __init__(self, logger: logging.Logger, every_s: float = 60.0) -> None:
        self._logger = logger
        self._every_s = every_s
        self._last_s: dict[str, float] = {}  # oldest first
        self._lock = threading.Lock()

    def log(
        self,
        cause: str,
        message: str,
        *args: object,
        level: int = logging.WARNING,
        exc_info: BaseException | None = None,
    ) -> None:
        """Log a message, unless one of the same cause was logged within ``every_s``."""
        if self.is_due(cause):
            message += f"; further messages suppressed for {self._every_s:.0f} s"
            self._logger.log(level, message, *args, exc_info=exc_info, stacklevel=2)

    def is_due(self, cause: str) -> bool:
        """Tell if ``cause`` may be logged now; false beyond ``MAX_CAUSES`` causes within ``every_s``."""
        now_s = time.monotonic()
        with self._lock:
            while self._last_s and now_s - next(iter(self._last_s.values())) >= self._every_s:
                del self._last_s[next(iter(self._last_s))]
            if cause in self._last_s or len(self._last_s) >= MAX_CAUSES:
                return False
            self._last_s[cause] = now_s
            return True
