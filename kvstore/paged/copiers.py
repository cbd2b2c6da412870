"""Copies that are shared between the caller and a few helper threads.

One thread rarely reaches a machine's memory bandwidth: measured, two threads copied 1.9 times as much as one. Each
takes the next copy as soon as its last one is done, and the caller does not wait for a helper that has not started, so
a thread that the system does not schedule delays only its current copy.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

_MAX_THREADS = 4  # of one engine, to leave bandwidth for others


class Copiers:
    """Calling thread and its helpers, which end at ``close``. One call at a time.

    Args:
        threads: number of copying threads, including the caller.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "kvstore-copy")  # has no thread before it is used

    def each(self, items: Iterable[Item], copy: Callable[[Item], None]) -> None:
        """Copy all items, in any order. If a copy raises, this raises after all copies under way have ended."""
        if not self._helpers:
            for item in items:
                copy(item)
            return
        waiting = deque(items)

        def work() -> None:
            while True:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                copy(item)

        helping = [self._pool.submit(work) for _ in range(min(self._helpers, len(waiting) - 1))]
        try:
            work()
        finally:
            waiting.clear()
            for helper in helping:
                if not helper.cancel():
                    helper.result()

    def close(self) -> None:
        """End the helpers."""
        self._pool.shutdown(wait=True, cancel_futures=True)


ALONE = Copiers(1)
"""Copies without helpers. It has no thread to end, so it can be shared."""


def copy_threads() -> int:
    """Return the number of the calling thread's cores, at most 4: one where vLLM has bound it to a single core."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
