"""Which chunks stay for a while whatever else needs room."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.server.spaces import Chunk


class PinView(NamedTuple):
    """Pins of one namespace that end together."""

    space_id: str
    end_s: int
    chunks: int
    bytes: int


class Pins:
    """Every pin ends at a second. Takes room for what is pinned now only. Belongs to the thread that decides."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._by_end: dict[int, dict[Chunk, None]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        """All chunks that are pinned."""
        for chunks in self._by_end.values():
            yield from chunks

    def set(self, chunk: Chunk, end_s: float) -> None:
        """Keep a chunk until then, whatever was said before."""
        self.drop(chunk)
        chunk.pin_end_s = max(1, math.floor(end_s))
        self.used_bytes += chunk.size_bytes
        self._by_end.setdefault(chunk.pin_end_s, {})[chunk] = None

    def drop(self, chunk: Chunk) -> None:
        """A chunk is kept no longer."""
        if not chunk.is_pinned:
            return
        together = self._by_end[chunk.pin_end_s]
        del together[chunk]
        if not together:
            del self._by_end[chunk.pin_end_s]
        self.used_bytes -= chunk.size_bytes
        chunk.pin_end_s = 0

    def expire(self, now_s: float) -> None:
        """End those whose time is over."""
        for end_s in [end_s for end_s in self._by_end if end_s <= now_s]:
            for chunk in list(self._by_end[end_s]):
                self.drop(chunk)

    def views(self) -> list[PinView]:
        """What is pinned, those first that end first."""
        found = []
        for end_s in sorted(self._by_end):
            chunks, sizes = Counter[str](), Counter[str]()
            for chunk in self._by_end[end_s]:
                chunks[chunk.space.id.hex()] += 1
                sizes[chunk.space.id.hex()] += chunk.size_bytes
            found += [PinView(space_id, end_s, chunks[space_id], sizes[space_id]) for space_id in chunks]
        return found
