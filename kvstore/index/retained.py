"""Retained chunks, which stay on disk until a time, within a share of each tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Self

from kvstore.index.deadlines import Deadlines
from kvstore.index.owners import Owner
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixKey
from kvstore.model.retention import Retention
from kvstore.policies import Policy

_ENDED_AT_ONCE: Final = 256  # takes a millisecond; after a night without requests thousands may have ended


class Limits(NamedTuple):
    """Bounds of retention, in chunks; 0 for none.

    Attributes:
        chunks: of all tenants together.
        of_tenant: of one tenant.
    """

    chunks: int = 0
    of_tenant: int = 0

    @classmethod
    def of_disk(cls, num_chunks: int, share: float) -> Self:
        """Return the bounds for a disk of so many chunks, of which one tenant may retain a share: half for all."""
        return cls(num_chunks // 2, int(num_chunks * share))


NO_RETENTION: Final = Limits()


class _Stay(NamedTuple):
    until_s: float  # on the index's clock
    tenant: bytes
    owner: Owner | None


class Retained:
    """Chunks that stay on disk until a time. ``key in retained`` tells if a chunk is one of them.

    Unlike a lease this is no use, so the chunks may leave memory. The tenant is a part of each key, so no tenant
    changes what another one retains. Memory is proportional to the chunks.

    Args:
        order: the policy of the disk, which offers no retained chunk for eviction.
        limits: the bounds.
        owner_of: tells the owner of a chunk, which retains at most half of its quota.
    """

    def __init__(
        self,
        order: Policy,
        limits: Limits = NO_RETENTION,
        owner_of: Callable[[PrefixKey], Owner | None] = lambda _: None,
    ) -> None:
        self._order = order
        self._limits = limits
        self._owner_of = owner_of
        self._fresh: dict[PrefixKey, None] = {}  # whose time has begun or become longer since ``take_fresh``
        self._stays: dict[PrefixKey, _Stay] = {}
        self._of_tenant: Counter[bytes] = Counter()
        self._ends = Deadlines[PrefixKey]()

    def __len__(self) -> int:
        return len(self._stays)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._stays

    def keep(self, keys: Sequence[PrefixKey], until_s: float, tenant: bytes) -> int:
        """Let chunks stay until a time, or for longer if they do already. Returns how many do, from the front."""
        count = self.admitted(keys, tenant)
        for key in keys[:count]:
            stay = self._stays.get(key)
            if stay is None:
                self._order.hold(key)
                self._of_tenant[tenant] += 1
                if (owner := self._owner_of(key)) is not None:
                    owner.num_retained += 1
                self._set(key, _Stay(until_s, tenant, owner))
            elif stay.until_s < until_s:
                self._set(key, stay._replace(until_s=until_s))
        return count

    def admitted(self, keys: Sequence[PrefixKey], tenant: bytes) -> int:
        """Return how many of these chunks, from the front, ``keep`` would let stay."""
        room = min(self._limits.chunks - len(self._stays), self._limits.of_tenant - self._of_tenant[tenant])
        new = Counter[Owner]()
        for count, key in enumerate(keys):
            if key in self._stays:
                continue
            room -= 1
            if (owner := self._owner_of(key)) is not None:
                new[owner] += 1
            if room < 0 or (owner is not None and owner.num_retained + new[owner] > owner.max_retained):
                return count
        return len(keys)

    def take_fresh(self) -> Iterable[PrefixKey]:
        """Return the chunks whose time has begun or become longer since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def of(self, ref: ChunkRef) -> Retention:
        """Return the retention of a chunk that has one."""
        stay = self._stays[ref.prefix_key]
        return Retention(ref, stay.until_s, stay.tenant)

    def drop(self, key: PrefixKey) -> bool:
        """Let a chunk stay no longer. Returns True if it had to."""
        stay = self._stays.pop(key, None)
        if stay is None:
            return False
        self._order.free(key)
        self._fresh.pop(key, None)
        self._ends.withdraw(key)
        self._of_tenant[stay.tenant] -= 1
        if not self._of_tenant[stay.tenant]:
            del self._of_tenant[stay.tenant]
        if stay.owner is not None:
            stay.owner.num_retained -= 1
        return True

    def move(self, key: PrefixKey, to: PrefixKey) -> None:
        """Let a chunk stay in place of another one, which it holds."""
        stay = self._stays.get(key)
        if stay is None:
            return
        self.drop(key)
        self.keep([to], stay.until_s, stay.tenant)

    def end_due(self, now_s: float) -> None:
        """End what has expired by now, or if that is much, a part of it."""
        for key in self._ends.take_due(now_s, _ENDED_AT_ONCE):
            self.drop(key)

    def _set(self, key: PrefixKey, stay: _Stay) -> None:
        self._stays[key] = stay
        self._fresh[key] = None
        self._ends.set(key, stay.until_s)
