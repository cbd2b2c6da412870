"""Which chunks share leading blocks with a sequence: the way from a block's end to the chunks that hold it.

The *trail* of a chunk is the keys at the ends of its blocks, one after the other; the last one is its own. A key names
all tokens before it: chunks that share a block share all blocks before it, and whose trail begins with another's holds
all of its blocks. So in the order of their trails, the chunks that share most with a sequence are the neighbours of the
place where its own trail belongs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey

TRAIL_SHARE: Final = 4  # a server keeps one that takes at most this part of its chunk's bytes; usually a thousandth


class Trails:
    """The trails of known chunks, whatever their state. Takes about 0.5 KiB for a chunk of 16 blocks.

    ``nearest`` and ``within`` may be called by any thread.
    """

    def __init__(self) -> None:
        self._groups: dict[PrefixKey, list[bytes]] = {}  # in order, by the key of the first block's end

    def add(self, trail: bytes) -> None:
        """Add the trail of a chunk that is not known yet."""
        first = trail[:PREFIX_KEY_BYTES]
        group = self._groups.get(first)
        if group is None:
            self._groups[first] = [trail]  # nearly always, and smaller than a list that grew
        else:
            insort(group, trail)

    def add_all(self, trails: Iterable[bytes]) -> None:
        """``add`` many at once."""
        grown = set()
        for trail in trails:
            first = trail[:PREFIX_KEY_BYTES]
            self._groups.setdefault(first, []).append(trail)
            grown.add(first)
        for first in grown:
            self._groups[first].sort()

    def discard(self, trail: bytes) -> None:
        """Drop the trail of a known chunk."""
        first = trail[:PREFIX_KEY_BYTES]
        group = self._groups[first]
        del group[bisect_left(group, trail)]
        if not group:
            del self._groups[first]

    def nearest(self, trail: bytes) -> Iterator[tuple[PrefixKey, int]]:
        """The chunks that share blocks with a trail, and how many; those that share most come first.

        Of those that share the most blocks the first is the same for all trails that share these with it: what many
        sequences begin with is a use of one chunk then, and not of one here and one there.
        """
        return ((other[-PREFIX_KEY_BYTES:], shared) for other, shared in self.neighbours(trail))

    def closest(self, trail: bytes, at_most: int) -> tuple[bytes, ...]:
        """The trails of up to so many of these chunks."""
        return tuple(other for other, _ in islice(self.neighbours(trail), at_most))

    def neighbours(self, trail: bytes) -> Iterator[tuple[bytes, int]]:
        """The trails of these chunks, and how many blocks they share."""
        group = self._groups.get(trail[:PREFIX_KEY_BYTES])
        return _outwards(group, trail) if group is not None else iter(())

    def within(self, trail: bytes) -> Iterator[PrefixKey]:
        """The longer chunks that hold all blocks of a trail."""
        for key, shared in self.nearest(trail):
            if shared * PREFIX_KEY_BYTES < len(trail):
                return
            if key != trail[-PREFIX_KEY_BYTES:]:
                yield key

    def __iter__(self) -> Iterator[bytes]:
        return (trail for group in self._groups.values() for trail in group)


def is_trail(trail: bytes, blocks_per_chunk: int) -> bool:
    """Whether it may be one: of whole keys, and of no more than a chunk has."""
    return bool(trail) and len(trail) % PREFIX_KEY_BYTES == 0 and len(trail) <= blocks_per_chunk * PREFIX_KEY_BYTES


def keys_of(trail: bytes) -> Iterator[PrefixKey]:
    """The keys of a trail, the shortest prefix first."""
    return (trail[begin : begin + PREFIX_KEY_BYTES] for begin in range(0, len(trail), PREFIX_KEY_BYTES))


def _outwards(group: Sequence[bytes], trail: bytes) -> Iterator[tuple[bytes, int]]:
    """The trails of a group, from the place on where a trail belongs, and how many blocks they share with it."""
    above = bisect_left(group, trail)
    below = above - 1
    below_it, shared_below = _shared_at(group, below, trail)
    above_it, shared_above = _shared_at(group, above, trail)
    if shared_below >= max(1, shared_above):
        first = bisect_left(group, trail[: shared_below * PREFIX_KEY_BYTES])
        if first < below:  # all from there on share as much
            above, below = first, first - 1
            below_it, shared_below = _shared_at(group, below, trail)
            above_it, shared_above = _shared_at(group, above, trail)
    while shared_below or shared_above:
        if shared_above > shared_below:
            yield above_it, shared_above
            above += 1
            above_it, shared_above = _shared_at(group, above, trail)
        else:
            yield below_it, shared_below
            below -= 1
            below_it, shared_below = _shared_at(group, below, trail)


def _shared_at(group: Sequence[bytes], place: int, trail: bytes) -> tuple[bytes, int]:
    """A trail of a group, and how many blocks it shares with another; 0 outside of the group."""
    there = group[place : place + 1] if place >= 0 else ()  # read once: another thread may change the group meanwhile
    if not there:
        return b"", 0
    (other,) = there
    shared, end = 1, min(len(trail), len(other)) // PREFIX_KEY_BYTES
    while shared < end:  # the keys up to a common one are common, so that halving finds the last
        middle = (shared + end + 1) // 2
        begin = (middle - 1) * PREFIX_KEY_BYTES
        if trail[begin : begin + PREFIX_KEY_BYTES] == other[begin : begin + PREFIX_KEY_BYTES]:
            shared = middle
        else:
            end = middle - 1
    return other, shared
