"""Threads for calls that may hang, which cannot be cancelled, only abandoned.

They are daemon threads, not those of ``concurrent.futures``, which the interpreter joins at exit, because a stuck call
must not keep a process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from kvstore.model.errors import ClosedError, InvalidCallError, TierError
from kvstore.model.threads import Work, carry_out

Result = TypeVar("Result")


class AbandonableThreads:
    """Fixed number of threads, which tiers on one storage may share, because a hang concerns all of them.

    Args:
        name: of the tier, for thread names and messages.
        threads: calls at the same time.
        max_waiting: calls that may wait for a thread; further calls fail at once with ``TierError``.

    Raises:
        InvalidCallError: a count that is not positive.
    """

    def __init__(self, name: str, threads: int, max_waiting: int = 64) -> None:
        if not (threads > 0 and max_waiting > 0):
            raise InvalidCallError(f"counts of threads and calls must be positive, got {threads=} and {max_waiting=}")
        self._name = name
        self._threads = threads
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._stuck: set[Future[Any]] = set()
        self._is_closed = False
        for number in range(threads):
            thread = threading.Thread(target=serve, args=(self._work,), name=f"kvstore-{name}-{number}", daemon=True)
            thread.start()

    def submit(self, operation: str, action: Callable[[], Result]) -> Future[Result]:
        """Start a call.

        Raises:
            ClosedError: after ``close``.
            TierError: all threads hang in earlier calls, or too many calls wait.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"the {self._name} tier was closed")
            if len(self._stuck) >= self._threads:
                raise TierError(
                    f"{operation} of the {self._name} tier: all {self._threads} threads are stuck in earlier calls"
                )
            if self._work.qsize() >= self._max_waiting:
                raise TierError(f"{operation} of the {self._name} tier: {self._max_waiting} calls are waiting already")
            self._work.put((future, action))
        return future

    def abandon(self, future: Future[Any]) -> None:
        """Stop waiting for a call, whose thread is lost until the call ends."""
        self._stuck.add(future)
        future.add_done_callback(self._stuck.discard)  # runs at once if the call has just ended

    def close(self) -> None:
        """End the threads after the calls that wait. Idempotent; does not wait for them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._threads):
                self._work.put(None)


def start_aside(tier: str, operation: str, action: Callable[[], Result]) -> Future[Result]:
    """Start a call on a new thread, because all others may be stuck."""
    future: Future[Result] = Future()
    work: SimpleQueue[Work | None] = SimpleQueue()
    work.put((future, action))
    work.put(None)
    threading.Thread(target=serve, args=(work,), name=f"kvstore-{tier}-{operation}", daemon=True).start()
    return future


def serve(work: SimpleQueue[Work | None]) -> None:
    """Carry out actions in order, until None; the target of a thread."""
    while item := work.get():
        carry_out(item)
        del item  # or the last action's buffers would be kept alive until the next one
