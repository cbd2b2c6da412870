"""Reads shared by several threads, one chunk after the other.

A disk serves concurrent reads evenly: threads that each read a chunk all finish at the end, and no chunk can be used
before. Threads that together read the pieces of one chunk, then those of the next, finish the first chunk early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait

from kvstore.model.threads import Work, carry_out


class SharedReads:
    """Queue of pieces to read, in the order of the calls. Thread-safe; the callers' threads read."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()

    def results(self, reads: Sequence[Callable[[], bool]]) -> Generator[bool, None, None]:
        """Yield the result of each read, in order. The caller's thread also reads, including pieces of earlier calls.

        Close or exhaust it; afterwards none of the reads is under way.
        """
        futures: list[Future[bool]] = [Future() for _ in reads]
        self._waiting.extend(list(zip(futures, reads, strict=True)))
        try:
            for future in futures:
                while not future.done() and self._take_part(futures[-1]):
                    pass
                yield future.result()
        finally:
            wait([future for future in futures if not future.cancel()])

    def _take_part(self, last: Future[bool]) -> bool:
        """Carry out the first waiting read; False if the caller's ``last`` one has begun, or none is waiting."""
        if last.running() or last.done():
            return False
        try:
            work = self._waiting.popleft()
        except IndexError:  # another thread has taken it and is about to begin
            return False
        carry_out(work)
        return True
