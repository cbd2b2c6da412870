"""Leases: named sets of chunks that are kept from eviction until a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.index.deadlines import Deadlines
from kvstore.index.owners import Owner
from kvstore.model.keys import PrefixKey

HOLDS_PER_SLOT: Final = 16  # a shared chunk takes one slot, but each hold takes memory here


@dataclass
class _Lease:
    keys: dict[PrefixKey, None]  # in order
    expires_s: float


class LeaseView(NamedTuple):
    """One lease, as an administrator sees it.

    Attributes:
        name: of the lease.
        num_chunks: chunks that it holds.
        expires_s: its end, on the index's clock.
    """

    name: str
    num_chunks: int
    expires_s: float


class Leases:
    """Named sets of chunks. ``key in leases`` tells if any lease holds a chunk.

    Args:
        num_slots: slots of the pool. Leases hold at most half as many different chunks. Counting a shared chunk once
            per lease, they hold at most ``HOLDS_PER_SLOT`` times as many; otherwise leases on the same chunks would be
            unbounded.
        owner_of: tells the owner of a chunk. Leases hold at most half of its quotas.

    Attributes:
        ends: the ends of the leases, by name; an expired one still holds its chunks.
    """

    def __init__(self, num_slots: int, owner_of: Callable[[PrefixKey], Owner | None] = lambda _: None) -> None:
        self._owner_of = owner_of
        self._max_chunks = max(1, num_slots // 2)
        self._max_holds = max(1, num_slots * HOLDS_PER_SLOT)
        self._leases: dict[str, _Lease] = {}
        self._holders: dict[PrefixKey, dict[str, None]] = {}
        self._owners: dict[PrefixKey, Owner] = {}  # of these, as far as they have one
        self._num_holds = 0
        self.ends = Deadlines[str]()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._holders

    def views(self) -> list[LeaseView]:
        """Return all leases, on the index's clock. Thread-safe."""
        return [LeaseView(name, len(lease.keys), lease.expires_s) for name, lease in list(self._leases.items())]

    def admitted(self, keys: Sequence[PrefixKey]) -> int:
        """Return how many of these chunks, from the front, one more lease may hold."""
        room = self._max_chunks - len(self._holders)
        new = Counter[Owner]()
        count = 0
        for key in keys[: max(0, self._max_holds - self._num_holds)]:
            if key not in self._holders:
                room -= 1
                if (owner := self._owner_of(key)) is not None:
                    new[owner] += 1
                if room < 0 or (owner is not None and owner.num_leased + new[owner] > owner.max_leased):
                    break
            count += 1
        return count

    def add(self, name: str, keys: Sequence[PrefixKey], expires_s: float) -> None:
        """Add a lease. An earlier lease of that name must have been withdrawn."""
        for key in keys:
            self._add_holder(key, name)
        self._leases[name] = lease = _Lease(dict.fromkeys(keys), expires_s)
        self._num_holds += len(lease.keys)
        self.ends.set(name, expires_s)

    def withdraw(self, name: str) -> list[PrefixKey]:
        """End a lease and return the chunks it still held; none for an unknown name."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return []
        self.ends.withdraw(name)
        for key in lease.keys:
            self._drop_holder(key, name)
        return list(lease.keys)

    def drop_chunk(self, key: PrefixKey) -> int:
        """Remove a chunk from all leases and return how many held it."""
        holders = list(self._holders.get(key, ()))
        for name in holders:
            lease = self._leases[name]
            del lease.keys[key]
            self._drop_holder(key, name)
            if not lease.keys:
                self.withdraw(name)
        return len(holders)

    def move(self, key: PrefixKey, to: PrefixKey) -> tuple[int, int]:
        """Replace a chunk by another one in all leases that hold it.

        Returns how many leases held the first, and how many of these did not hold the second. Both are at most what was
        admitted before, so no limit is exceeded.
        """
        names = list(self._holders.get(key, ()))
        added = 0
        for name in names:
            lease = self._leases[name]
            del lease.keys[key]
            self._drop_holder(key, name)
            if to not in lease.keys:
                added += 1
                lease.keys[to] = None
                self._add_holder(to, name)
                self._num_holds += 1
        return len(names), added

    def _add_holder(self, key: PrefixKey, name: str) -> None:
        if key not in self._holders and (owner := self._owner_of(key)) is not None:
            self._owners[key] = owner
            owner.num_leased += 1
        self._holders.setdefault(key, {})[name] = None

    def _drop_holder(self, key: PrefixKey, name: str) -> None:
        holders = self._holders[key]
        del holders[name]
        self._num_holds -= 1
        if not holders:
            del self._holders[key]
            if (owner := self._owners.pop(key, None)) is not None:
                owner.num_leased -= 1
