"""Holds up a call until the test lets it continue, or a test until a condition holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

HANG_GUARD_S: Final = 30.0  # a test that waits for longer has failed


class Gate:
    """Gate at which calls wait until it is opened; it knows when one is waiting."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._was_left = False

    def __call__(self) -> None:
        self.reached.set()
        if not self._open.wait(HANG_GUARD_S):
            self._was_left = True
            raise AssertionError("nobody has opened the gate")

    def open(self) -> None:
        """Let all calls through from now on. Fails if one has waited until the guard: the test waited for it."""
        self._open.set()
        assert not self._was_left, "the test waited for who waited here"

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call, behind the gate."""

        def held_up(*arguments: Any, **options: Any) -> Any:
            self()
            return call(*arguments, **options)

        return held_up


def until(condition: Callable[[], bool]) -> bool:
    """Wait for a condition; False if it never holds."""
    end_s = time.monotonic() + HANG_GUARD_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.005)
    return condition()
