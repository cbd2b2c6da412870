"""The trails of chunks that a remote tier named: the way to chunks of others that share blocks with a sequence.

What a trail says is true for good, since keys name all tokens before them. Whether its chunk is still there is another
question.
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
_MAX_NAMED: Final = 64  # of one answer
_MAX_NEAR: Final = 64  # looked at, of those that share most


class HeardTrails:
    """The trails heard of, the oldest forgotten first. For one thread at a time."""

    def __init__(self) -> None:
        self._trails = Trails()
        self._by_key: OrderedDict[PrefixKey, bytes] = OrderedDict()

    def add(self, asked: bytes, named: Iterable[bytes]) -> None:
        """Take in what was named for a trail. What shares no block with it, or is none, is left out."""
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
        """Forget the trail of a chunk that is gone: it would hide others that share as much."""
        if self.trail_of(ref):
            self._trails.discard(self._by_key.pop(ref.prefix_key))

    def nearest(self, trail: bytes) -> Iterator[tuple[ChunkRef, int]]:
        """Chunks that share blocks with a trail, and how many; those that share most come first."""
        return ((chunk_of(other), shared) for other, shared in islice(self._trails.neighbours(trail), _MAX_NEAR))

    def trail_of(self, ref: ChunkRef) -> bytes:
        """The trail of a chunk; empty if it was not heard of."""
        trail = self._by_key.get(ref.prefix_key, b"")
        return trail if is_trail_of(trail, ref) else b""

    def clear(self) -> None:
        """Forget all."""
        self._trails = Trails()
        self._by_key.clear()
