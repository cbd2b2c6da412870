"""Work whose result somebody waits for, on threads of one's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Work = tuple["Future[Any]", Callable[[], Any]]


def carry_out(work: Work) -> None:
    """Do it on this thread, unless it was withdrawn; its future gets what it returns or raises."""
    future, action = work
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits raises it
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, work  # or what it raised would keep this frame alive, and this frame what it raised
