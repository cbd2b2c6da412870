"""Trails named by a remote tier. They lead to other engines' chunks that share blocks with a sequence.

A trail stays true, since keys name all tokens before them. It does not say if its chunk is still stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from kvstore.catalog.trails import Trails
from kvstore.chunks import ChunkRef, chunk_of, is_trail_of
from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey

MAX_HEARD = 1 << 14  # about 10 MB with 16 blocks a chunk; beyond that the oldest are forgotten
_MAX_NAMED: Final = 64  # trails taken from one answer
_MAX_NEAR: Final = 64  # candidates examined, those that share most first


class HeardTrails:
    """The trails named so far; the oldest are forgotten first. For one thread at a time."""

    def __init__(self) -> None:
        self._trails = Trails()
        self._by_key: OrderedDict[PrefixKey, bytes] = OrderedDict()

    def add(self, asked: bytes, named: Iterable[bytes]) -> None:
        """Add the trails named for the trail ``asked``, except malformed ones and those that share no block with it."""
        for trail in islice(named, _MAX_NAMED):
            if trail[:PREFIX_KEY_BYTES] != asked[:PREFIX_KEY_BYTES] or len(trail) % PREFIX_KEY_BYTES:
                continue
            key = trail[-PREFIX_KEY_BYTES:]
            known = self._by_key.get(key)
            if known == trail:
                self._by_key.move_to_end(key)
            elif known is None:
                self._by_key[key] = trail
                self._trails.add(trail)
        while len(self._by_key) > MAX_HEARD:
            self._trails.discard(self._by_key.popitem(last=False)[1])

    def forget(self, ref: ChunkRef) -> None:
        """Forget the trail of a removed chunk, which would hide others that share as much."""
        if self.trail_of(ref):
            self._trails.discard(self._by_key.pop(ref.prefix_key))

    def nearest(self, trail: bytes) -> Iterator[tuple[ChunkRef, int]]:
        """Return chunks that share blocks with a trail and the numbers of shared blocks, most shared first."""
        return ((chunk_of(other), shared) for other, shared in islice(self._trails.neighbours(trail), _MAX_NEAR))

    def trail_of(self, ref: ChunkRef) -> bytes:
        """Return the trail of a chunk; empty if unknown."""
        trail = self._by_key.get(ref.prefix_key, b"")
        return trail if is_trail_of(trail, ref) else b""

    def clear(self) -> None:
        """Forget all."""
        self._trails = Trails()
        self._by_key.clear()
