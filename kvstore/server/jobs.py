"""Calls for the thread that decides, from other threads."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
_ENDED: Final = "the server has ended"


class Jobs:
    """Queue of calls, with a descriptor that is readable when there are any. ``report`` and ``ask`` are thread-safe."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._jobs: deque[Callable[[], None]] = deque()
        self._asked: set[Future[Any]] = set()

    def report(self, job: Callable[[], None]) -> None:
        """Queue a call."""
        self._jobs.append(job)
        self.rouse()

    def ask(self, call: Callable[[], Result], timeout_s: float) -> Result:
        """Return the result of a call, or raise its error.

        Raises:
            TimeoutError: it has not begun in time, and never will; or it has not ended.
        """
        if self.fd < 0:
            raise TimeoutError(_ENDED)
        asked = Future[Result]()

        def carry_out() -> None:
            if asked.set_running_or_notify_cancel():
                try:
                    asked.set_result(call())
                except Exception as error:  # noqa: BLE001 - whoever asked gets it, and others are served
                    asked.set_exception(error)

        self._asked.add(asked)
        self.report(carry_out)
        try:
            return asked.result(timeout_s)
        except CancelledError as error:
            raise TimeoutError(_ENDED) from error
        finally:
            asked.cancel()
            self._asked.discard(asked)

    def rouse(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self.fd, 1)

    def carry_out(self, *, is_roused: bool) -> None:
        """Carry out the calls that are queued now; those that these queue come after the next messages.

        Args:
            is_roused: the descriptor is readable.
        """
        if is_roused:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
        for _ in range(len(self._jobs)):
            self._jobs.popleft()()

    def close(self) -> None:
        """Close the descriptor; calls may still be queued, but are not carried out. Nobody waits for them any more."""
        fd, self.fd = self.fd, -1  # a disk call that hung may return later, and report
        os.close(fd)
        for asked in list(self._asked):
            asked.cancel()
