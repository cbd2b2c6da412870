"""Owners of chunks, and the shares of memory and disk that each may fill.

An owner is a name in the configuration, or stands for all others. Keys contain the salt and the tags of a request, so
the chunks of one prefix belong to one owner.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.index.plans import Place
from kvstore.model.errors import ConfigError
from kvstore.model.keys import PrefixHasher
from kvstore.model.quotas import ANY_NAME, NO_QUOTAS, OTHERS, QuotaRules
from kvstore.policies import LRU

NO_BOUND: Final = sys.maxsize
_GIB: Final = 1 << 30


class Share(LRU):
    """Chunks of one owner in one tier, or of several owners without quotas of their own there.

    Args:
        owner: name of the owner, ``OTHERS`` for several.
        capacity_bytes: their bound; of memory in slots.
        unit_bytes: the bytes of one unit of the capacity.
    """

    def __init__(self, owner: str, capacity_bytes: int, unit_bytes: int = 1) -> None:
        super().__init__(capacity_bytes)
        self.owner = owner
        self.unit_bytes = unit_bytes
        self.num_idle = 0  # slots of readable, unused chunks, which may be evicted

    @property
    def is_bounded(self) -> bool:
        """True if there is a quota."""
        return self.capacity_bytes != NO_BOUND

    @property
    def spare_slots(self) -> int:
        """Slots, free or idle, that loads could still take."""
        return self.capacity_bytes - self.used_bytes + self.num_idle


@dataclass(eq=False)
class Owner:
    """Owner of chunks, and counts of what happened to them.

    Attributes:
        name: in the configuration, or ``OTHERS``.
        memory: its share of the slots.
        disk: its share of the disk.
        max_leased: the most chunks that its leases may hold, which stay in memory and on disk.
        max_retained: the most chunks that stay on disk until a time.
        num_leased: chunks that its leases hold.
        num_retained: chunks that it retains.
        stored: chunks that became readable by a store.
        refused: chunks offered, but not stored in memory or not written to disk.
        evicted_memory, evicted_disk: chunks evicted to make room.
    """

    name: str
    memory: Share
    disk: Share
    max_leased: int
    max_retained: int
    num_leased: int = 0
    num_retained: int = 0
    stored: int = 0
    refused: int = 0
    evicted_memory: int = 0
    evicted_disk: int = 0

    def shares(self) -> Iterator[tuple[str, Share]]:
        """Yield its own shares with their tiers; those of all others belong to ``OTHERS``."""
        for place, share in ((Place.MEMORY, self.memory), (Place.DISK, self.disk)):
            if share.owner == self.name:
                yield place.value, share

    def note_evicted(self, place: Place) -> None:
        """Count a chunk that was evicted from a place."""
        if place is Place.MEMORY:
            self.evicted_memory += 1
        else:
            self.evicted_disk += 1


class Owners:
    """All owners, which are as many as the configuration has names, and one more. There are none without quotas.

    Args:
        rules: the quotas.
        slot_bytes: bytes of a slot.
        chunk_bytes: most bytes of a chunk on disk.

    Raises:
        ConfigError: a quota does not hold one chunk.
    """

    def __init__(self, rules: QuotaRules = NO_QUOTAS, *, slot_bytes: int = 1, chunk_bytes: int = 1) -> None:
        self._rules = rules
        self._by_name: dict[str, Owner] = {}
        self._by_id: dict[bytes, Owner] = {}
        if not rules:
            return
        memory = _shares(rules.memory_bytes, slot_bytes, "local_cpu_quotas", slot_bytes)
        disk = _shares(rules.disk_bytes, chunk_bytes, "local_disk_quotas")
        for name in (*rules.names, OTHERS):
            own_memory = memory.get(name, memory[OTHERS])
            own_disk = disk.get(name, disk[OTHERS])
            on_disk = own_disk.capacity_bytes // chunk_bytes
            half = min(own_memory.capacity_bytes, on_disk) // 2
            self._by_name[name] = Owner(name, own_memory, own_disk, half, on_disk // 2)
        self._by_id = {rules.owner_of(name): self._by_name[name] for name in rules.names}

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._by_name.values())

    def of(self, hasher: PrefixHasher | None) -> Owner | None:
        """Return the owner of a sequence's chunks; None without quotas. None stands for a sequence without a name."""
        if not self._by_name:
            return None
        name = self._rules.name_of(hasher.extras) if hasher is not None else ""
        return self._by_name.get(name) or self._by_name[OTHERS]

    def by_id(self, owner_id: bytes) -> Owner | None:
        """Return the owner that a note on disk tells; None without quotas. Unknown ids are others."""
        return (self._by_id.get(owner_id) or self._by_name[OTHERS]) if self._by_name else None

    def id_of(self, hasher: PrefixHasher) -> bytes:
        """Return the id by which notes on disk and cache servers tell whose chunks these are; empty without a name."""
        return self._rules.owner_of(self._rules.name_of(hasher.extras))


def _shares(quotas: Mapping[str, int], chunk_bytes: int, key: str, unit_bytes: int = 1) -> dict[str, Share]:
    """Return the shares of one tier by name, always with that of all others.

    Raises:
        ConfigError: a quota does not hold one chunk.
    """
    shares = {OTHERS: Share(OTHERS, NO_BOUND, unit_bytes)}
    for number, (name, quota_bytes) in enumerate(quotas.items(), 1):
        if quota_bytes < chunk_bytes:
            raise ConfigError(
                f"quota {number} of {key} is {quota_bytes / _GIB:.6f} GiB and does not hold one chunk of "
                f"{chunk_bytes / _GIB:.6f} GiB: raise it"
            )
        owner = OTHERS if name == ANY_NAME else name
        shares[owner] = Share(owner, quota_bytes // unit_bytes, unit_bytes)
    return shares
