"""Many copies, shared between the caller and a few helping threads.

One thread rarely reaches the memory bandwidth of a machine: on two processors of one kind, two threads copied 1.9 times
as much as one. Everybody takes the next copy as soon as the last is done, and a helper that has not begun is not waited
for, so that threads which the system holds up cost no more than the copies that they are at.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

_MAX_THREADS = 4  # of one engine: others want to copy too


class Copiers:
    """The calling thread and its helpers, which end at ``close``. One call at a time.

    Args:
        threads: how many copy at once, the caller included.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "kvstore-copy")  # has no thread before it is used

    def each(self, items: Iterable[Item], copy: Callable[[Item], None]) -> None:
        """Copy everything, in any order. What a copy raises is raised here, once nobody copies any more."""
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
"""Whoever copies without help. It has no thread to end, so that all may share it."""


def copy_threads() -> int:
    """As many as there are processors for the calling thread: one where vLLM has bound it to a core of its own."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
