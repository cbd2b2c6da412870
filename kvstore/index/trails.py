"""Trails of chunks, by which chunks that share leading blocks with a sequence are found.

The *trail* of a chunk is the concatenation of the keys at its blocks' ends; the last one is the chunk's own key. A key
names all tokens before it, so chunks that share a block share all blocks before it. A chunk whose trail begins with
another's holds all blocks of that one. In sorted order, the trails that share most with a sequence are therefore the
neighbours of the position where the sequence's own trail belongs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Final

from kvstore.index.pages import SortedPages
from kvstore.model.chunks import ChunkRef, chunk_of, is_trail_of
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey

TRAIL_SHARE: Final = 4  # a server keeps a trail of at most a quarter of its chunk's bytes; usually it is a thousandth
MAX_HEARD = 1 << 14  # about 10 MB with 16 blocks a chunk; beyond that the oldest are forgotten
_MAX_NAMED: Final = 64  # trails taken from one answer
_MAX_NEAR: Final = 64  # candidates examined, those that share most first
_number_of = int.from_bytes


class Trails:
    """The trails of known chunks in any state. Takes about ten bytes more than a trail itself.

    ``nearest`` and ``within`` may be called by any thread.
    """

    def __init__(self) -> None:
        self._alone = SortedPages(PREFIX_KEY_BYTES)  # those whose first block is in no other, as nearly all are
        self._groups: dict[PrefixKey, list[bytes]] = {}  # the others in order, by the key of that block's end

    def add(self, trail: bytes) -> None:
        """Add the trail of a chunk that is not known yet."""
        first = trail[:PREFIX_KEY_BYTES]
        group = self._groups.get(first)
        if group is not None:
            insort(group, trail)
        elif (other := self._alone.find(first)) is None:
            self._alone.add(trail)
        else:
            self._groups[first] = sorted((other, trail))  # before it is alone no more, as other threads search
            self._alone.discard(other)

    def add_all(self, trails: Iterable[bytes]) -> None:
        """``add`` many at once."""
        alone: list[bytes] = []
        for first, group in groupby(sorted(trails), _first_of):
            one, *others = group
            if others or first in self._groups or self._alone.find(first) is not None:
                for trail in (one, *others):
                    self.add(trail)
            else:
                alone.append(one)
        self._alone.add_all(alone)

    def discard(self, trail: bytes) -> None:
        """Drop the trail of a known chunk."""
        first = trail[:PREFIX_KEY_BYTES]
        group = self._groups.get(first)
        if group is None:
            self._alone.discard(trail)
            return
        del group[bisect_left(group, trail)]
        if not group:
            del self._groups[first]

    def nearest(self, trail: bytes) -> Iterator[tuple[PrefixKey, int]]:
        """Return chunks that share blocks with a trail and the numbers of shared blocks, most shared first.

        Of the chunks that share most, the first is the same for all trails that share the same blocks. Uses of a common
        prefix therefore count for one chunk instead of being spread over several.
        """
        return ((other[-PREFIX_KEY_BYTES:], shared) for other, shared in self.neighbours(trail))

    def closest(self, trail: bytes, at_most: int) -> tuple[bytes, ...]:
        """Return the trails of the first ``at_most`` of these chunks."""
        return tuple(other for other, _ in islice(self.neighbours(trail), at_most))

    def neighbours(self, trail: bytes) -> Iterator[tuple[bytes, int]]:
        """Return the trails of the chunks of ``nearest``, with the numbers of shared blocks."""
        first = trail[:PREFIX_KEY_BYTES]
        group = self._groups.get(first)
        if group is None:
            if (one := self._alone.find(first)) is not None:  # the usual case, faster than a group of one
                return iter(((one, _shared_by(one, trail)),))
            group = self._groups.get(first)  # another thread may have moved it
        return _outwards(group, trail) if group else iter(())

    def within(self, trail: bytes) -> Iterator[PrefixKey]:
        """Yield the keys of longer chunks that hold all blocks of a trail."""
        for key, shared in self.nearest(trail):
            if shared * PREFIX_KEY_BYTES < len(trail):
                return
            if key != trail[-PREFIX_KEY_BYTES:]:
                yield key

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._alone, *self._groups.values())


class RemoteTrails:
    """Trails named by a remote tier. They lead to other engines' chunks that share blocks with a sequence.

    A trail stays true, since keys name all tokens before them. It does not say if its chunk is still stored. The oldest
    are forgotten first. For one thread at a time.

    Args:
        max_trails: number of trails that are kept.
    """

    def __init__(self, max_trails: int = MAX_HEARD) -> None:
        self._max_trails = max_trails
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
        while len(self._by_key) > self._max_trails:
            self._trails.discard(self._by_key.popitem(last=False)[1])

    def forget(self, ref: ChunkRef) -> None:
        """Forget the trail of a removed chunk, which would hide others that share as much."""
        if self.trail_of(ref):
            self._trails.discard(self._by_key.pop(ref.prefix_key))

    def nearest(self, trail: bytes) -> Iterator[tuple[ChunkRef, int]]:
        """Return chunks that share blocks with a trail and the numbers of shared blocks, most shared first."""
        return ((chunk_of(other), shared) for other, shared in islice(self._trails.neighbours(trail), _MAX_NEAR))

    def closest(self, trail: bytes, at_most: int) -> tuple[bytes, ...]:
        """See ``Trails.closest``."""
        return self._trails.closest(trail, at_most)

    def __iter__(self) -> Iterator[bytes]:
        """Yield all trails, those added first in front."""
        return iter(self._by_key.values())

    def trail_of(self, ref: ChunkRef) -> bytes:
        """Return the trail of a chunk; empty if unknown."""
        trail = self._by_key.get(ref.prefix_key, b"")
        return trail if is_trail_of(trail, ref) else b""

    def clear(self) -> None:
        """Forget all."""
        self._trails = Trails()
        self._by_key.clear()


def is_trail(trail: bytes, blocks_per_chunk: int) -> bool:
    """Tell if bytes may be a trail: whole keys, and no more than a chunk has blocks."""
    return bool(trail) and len(trail) % PREFIX_KEY_BYTES == 0 and len(trail) <= blocks_per_chunk * PREFIX_KEY_BYTES


def keys_of(trail: bytes) -> Iterator[PrefixKey]:
    """Return the keys of a trail, the shortest prefix first."""
    return (trail[begin : begin + PREFIX_KEY_BYTES] for begin in range(0, len(trail), PREFIX_KEY_BYTES))


def _first_of(trail: bytes) -> PrefixKey:
    return trail[:PREFIX_KEY_BYTES]


def _outwards(group: Sequence[bytes], trail: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the trails of a group outwards from a trail's position, with the numbers of blocks they share with it."""
    below, above = _around(group, trail)
    shared_below, shared_above = _shared_by(below, trail), _shared_by(above, trail)
    if shared_below and shared_below >= shared_above:
        before, first = _around(group, trail[: shared_below * PREFIX_KEY_BYTES])
        if first < below:  # all from ``first`` on share as much
            below, above = before, first
            shared_below, shared_above = _shared_by(below, trail), _shared_by(above, trail)
    while shared_below or shared_above:
        if shared_above > shared_below:
            yield above, shared_above
            above = _around(group, above + b"\0")[1]
            shared_above = _shared_by(above, trail)
        else:
            yield below, shared_below
            below = _around(group, below)[0]
            shared_below = _shared_by(below, trail)


def _around(group: Sequence[bytes], trail: bytes) -> tuple[bytes, bytes]:
    """Return the last trail before one, and the first that is not; empty outside of the group.

    Another thread may move both between the search and the read; then they are searched again.
    """
    while True:
        place = bisect_left(group, trail)
        near = group[place - 1 : place + 1] if place else [b"", *group[:1]]  # one read
        below, above = (*near, b"", b"")[:2]
        if below < trail and (below or not place) and (trail <= above or not above):
            return below, above


def _shared_by(other: bytes, trail: bytes) -> int:
    """Return how many blocks two trails share."""
    if len(other) != len(trail):
        size = min(len(other), len(trail))
        other, trail = other[:size], trail[:size]
    differing = _number_of(other) ^ _number_of(trail)  # big-endian; faster than a bisection of the keys
    return (8 * len(trail) - differing.bit_length()) // (8 * PREFIX_KEY_BYTES)
