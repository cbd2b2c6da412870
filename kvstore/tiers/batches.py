"""Batches that several tiers serve at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def all_of(calls: Sequence[Future[None]], result: T) -> Future[T]:
    """A future that is done, with ``result``, when all of ``calls`` are."""
    everything: Future[T] = Future()
    left = len(calls)
    lock = threading.Lock()

    def note(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            everything.set_result(result)

    for call in calls:
        call.add_done_callback(note)
    return everything
