"""Which chunks are held: they were handed over to the server's owner, and stay until it has read them."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.server.spaces import Chunk


class Holds:
    """All of them. Belongs to the thread that decides. All holds last equally long."""

    def __init__(self) -> None:
        self._ends: OrderedDict[Chunk, float] = OrderedDict()  # the first to end first
        self._over: set[Chunk] = set()  # that nobody has read in time, and that are still there

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def hold(self, chunk: Chunk, end_s: float) -> None:
        """Hold a chunk until then at most, which is later than that of any other.

        Its first hold counts until it is dropped: a sender that asks for it again and again holds it no longer.
        """
        if chunk not in self._over:
            self._ends.setdefault(chunk, end_s)

    def drop(self, chunk: Chunk) -> None:
        """It was read, or is gone."""
        self._ends.pop(chunk, None)
        self._over.discard(chunk)

    def expire(self, now_s: float) -> None:
        """Nobody has read these in time."""
        while self._ends and next(iter(self._ends.values())) <= now_s:
            self._over.add(self._ends.popitem(last=False)[0])
