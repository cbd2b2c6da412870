"""Calls under way in a tier, for which its ``close`` waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.model.errors import ClosedError, TierError


class RunningCalls:
    """Counter of the calls of a tier. Thread-safe.

    Args:
        tier: name of the tier, for messages.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._changed = threading.Condition()
        self._number = 0
        self._is_closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call. If it fails because of ``close``, it raises ``ClosedError``."""
        with self._changed:
            if self._is_closed:
                raise ClosedError(f"the {self._tier} tier was closed")
            self._number += 1
        try:
            yield
        except TierError as error:
            if self._is_closed:
                raise ClosedError(f"the {self._tier} tier was closed during the call") from error
            raise
        finally:
            with self._changed:
                self._number -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse further calls. Returns False if they were refused before."""
        with self._changed:
            was_open, self._is_closed = not self._is_closed, True
        return was_open

    def wait(self, timeout_s: float) -> None:
        """Wait until no call is under way, or time ran out."""
        with self._changed:
            self._changed.wait_for(lambda: not self._number, timeout_s)
