"""Reads of several threads, one chunk after the other.

A disk treats calls alike that come together: threads that read a chunk each get all of them at the end, and nothing can
be used before. Threads that read the pieces of one chunk together, and then those of the next, get the first one early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait

from kvstore.tiers.tasks import Work, carry_out


class SharedReads:
    """Pieces to be read, in the order of the calls they belong to. Thread-safe; has no threads but its callers."""

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()

    def results(self, reads: Sequence[Callable[[], bool]]) -> Generator[bool, None, None]:
        """What each read returns, in order; the caller's thread takes part, also in reads that came before these.

        To be closed, or exhausted: none of the reads is under way any more then.
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
        """Carry out the foremost read; False if the ``last`` one that matters has begun, as others may wait for it."""
        if last.running() or last.done():
            return False
        try:
            work = self._waiting.popleft()
        except IndexError:  # somebody has taken it and is about to begin
            return False
        carry_out(work)
        return True
