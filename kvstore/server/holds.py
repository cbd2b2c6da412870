"""Which chunks are held: they were handed over to the server's owner, and stay until it has read them."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.server.spaces import Chunk


class Holds:
    """All of them. Belongs to the thread that decides. All holds last equally long."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Chunk, float] = OrderedDict()  # the first to end first
        self._readers: dict[Chunk, int] = {}  # of those that several of the owner's workers read, how many have not
        self._over: set[Chunk] = set()  # that nobody has read in time, and that are still there

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def hold(self, chunk: Chunk, end_s: float, num_readers: int = 1) -> None:
        """Hold a chunk, which so many of the owner's workers read, until then at most: later than any other.

        Its first hold counts until it is dropped: a sender that asks for it again and again holds it no longer.
        """
        if chunk in self._over or chunk in self._ends:
            return
        self._ends[chunk] = end_s
        if num_readers > 1:
            self._readers[chunk] = num_readers

    def note_read(self, chunk: Chunk, *, by_owner: bool) -> None:
        """Drop it, if the owner's worker here has read it, or as many clients as it has workers that need it."""
        num_left = self._readers.get(chunk, 1)
        if num_left > 1:
            self._readers[chunk] = num_left - 1
        elif by_owner or chunk in self._readers:
            self.drop(chunk)

    def drop(self, chunk: Chunk) -> None:
        """It was read, or is gone."""
        self._ends.pop(chunk, None)
        self._readers.pop(chunk, None)
        self._over.discard(chunk)

    def expire(self, now_s: float) -> None:
        """Nobody has read these in time."""
        while self._ends and next(iter(self._ends.values())) <= now_s:
            chunk, _ = self._ends.popitem(last=False)
            self._readers.pop(chunk, None)
            self._over.add(chunk)
