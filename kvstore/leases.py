"""Who keeps which chunks from eviction, and until when. Pure bookkeeping: the index counts the uses that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.keys import PrefixKey


@dataclass
class _Lease:
    keys: list[PrefixKey]
    expires_s: float


class Leases:
    """Named sets of chunks. ``key in leases`` says whether anybody holds one."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._holders: Counter[PrefixKey] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._holders

    @property
    def num_chunks(self) -> int:
        """Chunks that are held, each counted once."""
        return len(self._holders)

    def add(self, name: str, keys: Sequence[PrefixKey], expires_s: float) -> None:
        """Note a lease; one of that name must have been withdrawn."""
        self._holders.update(keys)
        self._leases[name] = _Lease(list(keys), expires_s)

    def withdraw(self, name: str) -> list[PrefixKey]:
        """End a lease, and return the chunks it still held; none if there is no such lease."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return []
        for key in lease.keys:
            self._drop_holder(key)
        return lease.keys

    def drop_chunk(self, key: PrefixKey) -> int:
        """Take a chunk out of all leases; returns how many held it."""
        holders = 0
        for name, lease in list(self._leases.items()) if key in self._holders else ():
            if key in lease.keys:
                lease.keys.remove(key)
                self._drop_holder(key)
                holders += 1
                if not lease.keys:
                    del self._leases[name]
        return holders

    def expired(self, now_s: float) -> list[str]:
        """The names of the leases whose time is over."""
        return [name for name, lease in self._leases.items() if lease.expires_s <= now_s]

    def _drop_holder(self, key: PrefixKey) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
