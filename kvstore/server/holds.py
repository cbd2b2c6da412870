"""Holds on chunks that were handed over to the server's owner: they are not evicted until the owner has read them."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.server.spaces import Chunk


class Holds:
    """All holds, which last equally long. Belongs to the thread that decides."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Chunk, float] = OrderedDict()  # the first to end first
        self._readers: dict[Chunk, int] = {}  # workers that have yet to read it, if several of the owner's do
        self._over: set[Chunk] = set()  # chunks that are still there, and were not read in time

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def hold(self, chunk: Chunk, end_s: float, num_readers: int = 1) -> None:
        """Hold a chunk until ``num_readers`` of the owner's workers have read it, at most until ``end_s``.

        ``end_s`` must not be before the end of any other hold. Only the first hold of a chunk counts until it is
        dropped, so that a sender cannot prolong it with repeated requests.
        """
        if chunk in self._over or chunk in self._ends:
            return
        self._ends[chunk] = end_s
        if num_readers > 1:
            self._readers[chunk] = num_readers

    def note_read(self, chunk: Chunk, *, by_owner: bool) -> None:
        """Drop the hold once the owner's worker here has read the chunk, or as many clients as workers need it."""
        num_left = self._readers.get(chunk, 1)
        if num_left > 1:
            self._readers[chunk] = num_left - 1
        elif by_owner or chunk in self._readers:
            self.drop(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Drop the hold of a chunk that was read, or is gone."""
        self._ends.pop(chunk, None)
        self._readers.pop(chunk, None)
        self._over.discard(chunk)

    def expire(self, now_s: float) -> None:
        """End the holds of chunks that were not read in time."""
        while self._ends and next(iter(self._ends.values())) <= now_s:
            chunk, _ = self._ends.popitem(last=False)
            self._readers.pop(chunk, None)
            self._over.add(chunk)
