"""Which chunks are pinned: kept from eviction until a given second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator

from kvstore.server.spaces import Chunk


class Pins:
    """All pins, in groups that end in the same second. Belongs to the thread that decides."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._by_end: dict[int, dict[Chunk, None]] = {}

    def __iter__(self) -> Iterator[Chunk]:
        """All chunks that are pinned."""
        for chunks in self._by_end.values():
            yield from chunks

    def set(self, chunk: Chunk, end_s: float) -> None:
        """Pin a chunk until then; replaces an earlier pin."""
        self.drop(chunk)
        chunk.pin_end_s = max(1, math.floor(end_s))
        self.used_bytes += chunk.size_bytes
        self._by_end.setdefault(chunk.pin_end_s, {})[chunk] = None

    def drop(self, chunk: Chunk) -> None:
        """Unpin a chunk."""
        if not chunk.is_pinned:
            return
        together = self._by_end[chunk.pin_end_s]
        del together[chunk]
        if not together:
            del self._by_end[chunk.pin_end_s]
        self.used_bytes -= chunk.size_bytes
        chunk.pin_end_s = 0

    def expire(self, now_s: float) -> None:
        """Unpin the chunks whose time is over."""
        for end_s in [end_s for end_s in self._by_end if end_s <= now_s]:
            for chunk in list(self._by_end[end_s]):
                self.drop(chunk)

    def listed(self, now_s: float, at_most: int, spaces: Container[bytes]) -> dict[str, object]:
        """A report of what is pinned in some namespaces, by end and namespace, the pins first that end first."""
        found = []
        for end_s in sorted(self._by_end):
            chunks, sizes = Counter[str](), Counter[str]()
            for chunk in self._by_end[end_s]:
                if chunk.space.id not in spaces:
                    continue
                chunks[chunk.space.namespace.id.hex()] += 1
                sizes[chunk.space.namespace.id.hex()] += chunk.size_bytes
            ends_in_s = max(0, round(end_s - now_s))
            found += [
                {"namespace": name, "chunks": count, "bytes": sizes[name], "ends_in_s": ends_in_s}
                for name, count in chunks.items()
            ]
        return {"pins": found[:at_most], "left_out": max(0, len(found) - at_most)}
