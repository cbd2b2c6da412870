"""Actions with futures, for threads outside an executor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Work = tuple["Future[Any]", Callable[[], Any]]


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


def serve(work: SimpleQueue[Work | None]) -> None:
    """Carry out actions in order, until None; the target of a thread."""
    while item := work.get():
        carry_out(item)
        del item  # or the last action's buffers would be kept alive until the next one
