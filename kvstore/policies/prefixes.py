"""Prefixes of the chunks of one tier: on which chunk each depends, and how many depend on it."""

from __future__ import annotations

from kvstore.model.keys import PrefixKey


class Prefixes:
    """A forest of keys. Nearly all chunks have a prefix and are that of one other: such a one takes one entry."""

    def __init__(self) -> None:
        self._parents: dict[PrefixKey, PrefixKey] = {}  # of chunks in the tier
        self._counts: dict[PrefixKey, int] = {}  # of children in the tier, unless as many as of parents: one or none

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._parents

    def parent(self, key: PrefixKey) -> PrefixKey | None:
        """Return the chunk on which a chunk in the tier depends; it may be absent itself."""
        return self._parents.get(key)

    def num_children(self, key: PrefixKey) -> int:
        """Return how many chunks in the tier depend on one, which may be absent."""
        count = self._counts.get(key)
        return (key in self._parents) if count is None else count

    def link(self, key: PrefixKey, parent: PrefixKey) -> None:
        """Note on which chunk one depends that has just been added, or had no prefix."""
        count = self.num_children(key)
        self._parents[key] = parent
        self._count(key, count)
        self._count(parent, self.num_children(parent) + 1)

    def unlink(self, key: PrefixKey) -> None:
        """Note that a chunk leaves the tier."""
        if key in self._parents:
            count, parent = self.num_children(key), self._parents.pop(key)
            self._count(key, count)
            self._count(parent, self.num_children(parent) - 1)

    def _count(self, key: PrefixKey, count: int) -> None:
        if count == (key in self._parents):
            self._counts.pop(key, None)
        else:
            self._counts[key] = count
