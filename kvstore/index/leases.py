"""Uses, which keep chunks from eviction, and the removal of chunks without uses. Leases are uses with an end."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple

from kvstore.index.entries import LOADING, NO_FILE, NO_SLOT, READY, STORED, Deadlines, Entries, Entry
from kvstore.index.plans import MissReason
from kvstore.index.slots import Slots
from kvstore.index.trails import keys_of
from kvstore.index.writes import DiskWrites
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.policies import Policy

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
    """

    def __init__(self, num_slots: int) -> None:
        self._max_chunks = max(1, num_slots // 2)
        self._max_holds = max(1, num_slots * HOLDS_PER_SLOT)
        self._leases: dict[str, _Lease] = {}
        self._holders: dict[PrefixKey, dict[str, None]] = {}
        self._num_holds = 0
        self._ends = Deadlines[str]()

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
        count = 0
        for key in keys[: max(0, self._max_holds - self._num_holds)]:
            room -= key not in self._holders
            if room < 0:
                break
            count += 1
        return count

    def add(self, name: str, keys: Sequence[PrefixKey], expires_s: float) -> None:
        """Add a lease. An earlier lease of that name must have been withdrawn."""
        for key in keys:
            self._holders.setdefault(key, {})[name] = None
        self._leases[name] = lease = _Lease(dict.fromkeys(keys), expires_s)
        self._num_holds += len(lease.keys)
        self._ends.set(name, expires_s)

    def withdraw(self, name: str) -> list[PrefixKey]:
        """End a lease and return the chunks it still held; none for an unknown name."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return []
        self._ends.withdraw(name)
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
            keys = self._leases[name].keys
            del keys[key]
            self._drop_holder(key, name)
            if to not in keys:
                added += 1
                keys[to] = None
                self._holders.setdefault(to, {})[name] = None
                self._num_holds += 1
        return len(names), added

    def take_expired(self, now_s: float) -> list[str]:
        """Return the names of the leases that have expired, each once; they still hold their chunks."""
        return self._ends.take_due(now_s)

    def _drop_holder(self, key: PrefixKey, name: str) -> None:
        holders = self._holders[key]
        del holders[name]
        self._num_holds -= 1
        if not holders:
            del self._holders[key]


@dataclass(eq=False)
class Uses:
    """Counts the uses of chunks, and removes chunks.

    Attributes:
        chunks, slots, disk, leases: the parts of the index.
        orders: the policies in use.
        keep_in_memory: False drops a chunk from memory when its last use ends.
        last_touched: the chain of the last ``touch``.
    """

    chunks: Entries
    slots: Slots
    disk: DiskWrites
    leases: Leases
    orders: Sequence[Policy]
    keep_in_memory: bool
    last_touched: Sequence[PrefixKey] = ()

    def touch(
        self,
        chain: Sequence[PrefixKey],
        noted: AbstractSet[PrefixKey] = frozenset(),
        leaves: AbstractSet[PrefixKey] = frozenset(),
    ) -> None:
        """Tell the policies that a chain of chunks is used, see ``Policy.touch_chain``."""
        self.last_touched = chain
        for order in self.orders:
            order.touch_chain(chain, noted, leaves)

    def begin(self, chunk: Entry, count: int = 1) -> None:
        """Keep a chunk from eviction until ``count`` uses have ended."""
        if chunk.uses == 0 and chunk.memory is READY:
            self.slots.num_idle -= 1
        chunk.uses += count

    def end(self, chunk: Entry) -> None:
        """End a use. After the last one, a chunk that is in no place or was forgotten is removed."""
        chunk.uses -= 1
        if chunk.uses:
            return
        if chunk.memory is READY:
            self.slots.num_idle += 1
        if chunk.forgotten:
            self.discard(chunk)
        elif chunk.memory is READY and not self.keep_in_memory:
            self.slots.drop(chunk)
        elif chunk.memory is NO_SLOT and chunk.disk is NO_FILE:  # no slot for a load from the remote tier
            self.chunks.vanish(chunk)

    def lease(self, lease_id: str, refs: Sequence[ChunkRef], ttl_s: float) -> int:
        """Keep chunks from eviction until ``release``, or for ``ttl_s``; replaces a lease of the same name.

        Returns how many of them, from the front, are held. All leases together hold at most half as many different
        chunks as there are slots, and a multiple of that counting shared chunks once per lease.
        """
        former = self.leases.withdraw(lease_id)
        held = [ref.prefix_key for ref in takewhile(self.chunks.is_here, refs)]
        del held[self.leases.admitted(held) :]
        for key in held:
            self.begin(self.chunks[key])
        if held:
            self.leases.add(lease_id, held, self.chunks.now_s + ttl_s)
        for key in former:  # last, so that a renewed lease does not lose its chunks in between
            self.end(self.chunks[key])
        return len(held)

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and ended ones are ignored."""
        for key in self.leases.withdraw(lease_id):
            self.end(self.chunks[key])

    def remove(self, chunk: Entry) -> None:
        """Remove a chunk on request, and note the reason."""
        self.chunks.note_gone(chunk, MissReason.REMOVED)
        self.discard(chunk)

    def discard(self, chunk: Entry) -> None:
        """Remove a chunk from every place, now or when its last use ends; leases do not keep it."""
        self.chunks.break_checkpoint(chunk.ref.prefix_key)
        self._unlease(chunk)
        if chunk.uses:
            self.forget(chunk)
            return
        if chunk.memory is not NO_SLOT:
            self.slots.drop(chunk)
        if chunk.disk is not NO_FILE:
            self.disk.drop(chunk, announce=not chunk.forgotten)
        self.chunks.vanish(chunk)
        for order in self.orders:
            order.remove(chunk.ref.prefix_key)

    def forget(self, chunk: Entry) -> None:
        """Make a chunk in use unreachable at once, and announce the removal of its file."""
        if chunk.forgotten:
            return
        chunk.forgotten = True
        self.chunks.break_checkpoint(chunk.ref.prefix_key)
        self.chunks.expiries.withdraw(chunk.ref.prefix_key)
        self.chunks.note_change(chunk)
        self._unlease(chunk)
        if chunk.disk is not NO_FILE:
            self.disk.removals.append(chunk.ref)

    def supersede(self, chunk: Entry) -> None:
        """Drop the tails held by a whole chunk that has just become available in a place."""
        if chunk.ref.num_blocks != self.chunks.whole_blocks or not self.chunks.is_known(chunk.ref.prefix_key):
            return  # not a whole chunk, or removed meanwhile
        for key in keys_of(chunk.trail[:-PREFIX_KEY_BYTES]):
            tail = self.chunks.get(key)
            if tail is not None and not tail.forgotten:
                self.take_in(chunk, tail)

    def take_in(self, chunk: Entry, tail: Entry) -> bool:
        """Drop a tail that a known chunk holds; lookups and leases of the tail move to the chunk.

        A tail stays if it is to be kept for longer, or if it is in a place where the chunk is not, since a crash or
        failure in between would lose both. A tail that is being read stays, too.
        """
        is_read = tail.memory is LOADING
        lacks_slot = self.keep_in_memory and tail.memory is not NO_SLOT and chunk.memory is not READY
        lacks_file = tail.disk is not NO_FILE and chunk.disk is not STORED
        if is_read or lacks_slot or lacks_file or not chunk.lasts_until(tail.expires_s):
            return False
        self.chunks.counters.superseded_tails += 1
        freed, added = self.leases.move(tail.ref.prefix_key, chunk.ref.prefix_key)
        if added:
            self.begin(chunk, added)
        self._end_leases(tail, freed)
        self.discard(tail)
        return True

    def _unlease(self, chunk: Entry) -> None:
        """Take a chunk out of all leases; otherwise it could not be stored again before they end."""
        self._end_leases(chunk, self.leases.drop_chunk(chunk.ref.prefix_key))

    def _end_leases(self, chunk: Entry, count: int) -> None:
        """End the uses of ``count`` leases that no longer hold a chunk."""
        chunk.uses -= count
        if count and not chunk.uses and chunk.memory is READY:
            self.slots.num_idle += 1
