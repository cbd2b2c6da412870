"""Calls on other threads, each with a future, and none that runs after its caller was told that it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvstore.model.throttle import Throttle

Result = TypeVar("Result")
Work = tuple["Future[Any]", Callable[[], Any]]
_throttle = Throttle(logging.getLogger(__name__))


def open_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Open a pool of which one thread runs already, as later the machine may have none left.

    Whatever is submitted is carried out then, even if ``submit`` raises because a further thread cannot be started.

    Raises:
        RuntimeError: the machine has no thread left.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    pool.submit(int)
    return pool


def start(pool: ThreadPoolExecutor, action: Callable[[], Result], otherwise: Callable[[], Result]) -> Future[Result]:
    """Start an action on a thread of a pool. If it cannot begin, it never does, and ``otherwise`` is carried out here.

    The pool's ``submit`` queues it, and then raises if the machine has no thread left. Another of its threads would
    carry it out later, when its buffers may already belong to others.
    """
    future: Future[Result] = Future()

    def tell_of_cancel(queued: Future[None]) -> None:
        """Pass on that the pool cancels what waits; unlike the pool, to those who wait for several futures, too."""
        if queued.cancelled() and future.cancel():
            future.set_running_or_notify_cancel()

    try:
        pool.submit(carry_out, (future, action)).add_done_callback(tell_of_cancel)
    except RuntimeError as error:
        if future.cancel():
            _throttle.log("start", "a call cannot begin on a thread: %s", error)
            future = Future()
            carry_out((future, otherwise))
    return future


def carry_out(work: Work) -> None:
    """Run the action on this thread, unless it was cancelled; its future gets the result or the exception."""
    future, action = work
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, work  # or its exception and this frame would keep each other alive
