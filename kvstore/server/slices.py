"""Long work of the thread that decides, split into slices of some milliseconds, between which it serves others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

SLICE_S: Final = 0.002


class Slices:
    """Runs work in slices. Belongs to the thread that decides. Between two steps of some work anything may happen.

    Args:
        report: queues a call for the thread that decides, behind other calls and messages.
        now: the monotonic time in seconds.
        after_step: called after every step.
    """

    def __init__(
        self, report: Callable[[Callable[[], None]], None], now: Callable[[], float], after_step: Callable[[], None]
    ) -> None:
        self._report = report
        self._now = now
        self._after_step = after_step
        self._waiting: deque[Iterator[None]] = deque()  # work that gets a slice in turn
        self._is_due = False

    def begin(self, work: Iterator[None]) -> None:
        """Begin work whose steps each take far less than a slice. Raises the errors of the first slice."""
        self._work_on(work)

    def _go_on(self) -> None:
        self._is_due = False
        if self._waiting:
            self._work_on(self._waiting.popleft())

    def _work_on(self, work: Iterator[None]) -> None:
        end_s = self._now() + SLICE_S
        for _ in work:
            self._after_step()
            if self._now() >= end_s:
                self._waiting.append(work)
                break
        else:
            self._after_step()
        if self._waiting and not self._is_due:
            self._is_due = True
            self._report(self._go_on)
