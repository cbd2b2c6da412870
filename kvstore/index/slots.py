"""Slots of the pool, the uses that keep chunks from eviction, and the removal of chunks without uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

from kvstore.index.entries import LOADING, NO_FILE, NO_SLOT, READY, STORED, Entries, Entry, InMemory
from kvstore.index.leases import Leases
from kvstore.index.owners import Owner
from kvstore.index.plans import MissReason, Place
from kvstore.index.trails import keys_of
from kvstore.index.writes import DiskWrites
from kvstore.model.chunks import ChunkRef
from kvstore.model.history import Cause, Fate
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.policies import Policy


class Slots:
    """Assigns slots to chunks, and evicts chunks to free slots.

    Args:
        chunks: all entries of the index.
        num_slots: slots of the pool, numbered from 0.
        order: the policy for memory; each chunk with a slot has size 1.
        take_turns: True to reuse a returned slot after all other free ones, because a device may still read it and
            the next writer would wait. False to reuse it at once, while the processor's caches hold it.
    """

    def __init__(self, chunks: Entries, num_slots: int, order: Policy, *, take_turns: bool) -> None:
        self.num_slots = num_slots
        self.order = order
        self.num_idle = 0  # slots of readable, unused chunks, which may be evicted
        self.free = deque(range(num_slots - 1, -1, -1))  # the next one to use is last
        self._chunks = chunks
        self._take_turns = take_turns
        self._num_hung = 0  # free slots at the front of ``free`` to which a hung read may still write

    def has_room(self, count: int, newcomer: PrefixKey | None = None, owner: Owner | None = None) -> bool:
        """Tell if ``count`` slots could be taken one after the other."""
        own = self._own_victims(count, owner)
        if own is None:
            return False
        missing, going = count - len(self.free) - len(own), dict.fromkeys(own)
        others = self.order.make_room(missing, lambda key: key not in going and self._chunks.is_unused(key), newcomer)
        return others is not None

    def take(self, newcomer: PrefixKey | None = None, owner: Owner | None = None) -> int | None:
        """Return a free slot, evicting the least valuable unused chunk if there is none.

        An owner at its quota makes room with its own chunks. Returns None if it has none that may go, or if the
        newcomer is worth less than the chunk that would go.
        """
        own = self._own_victims(1, owner)
        victims = self.order.make_room(1, self._chunks.is_unused, newcomer) if not (own or self.free) else own
        if own is None or victims is None:
            return None
        for key in victims:
            self.drop(victim := self._chunks[key])
            self._chunks.note_evicted(victim, Place.MEMORY, newcomer)
        slot = self.free.pop()
        self._num_hung = min(self._num_hung, len(self.free))
        return slot

    def _own_victims(self, count: int, owner: Owner | None) -> list[PrefixKey] | None:
        """Return the chunks that an owner must give up to get so many slots; None if there are too few."""
        if owner is None:
            return []
        share = owner.memory
        missing = share.used_bytes + count - share.capacity_bytes
        if missing > share.num_idle:  # known without a search, which a prompt longer than the quota would repeat
            return None
        return share.make_room(missing, self._chunks.is_unused)

    def count_idle(self, chunk: Entry, number: int) -> None:
        """Count a readable chunk as unused, or as used again with -1."""
        self.num_idle += number
        if chunk.owner is not None:
            chunk.owner.memory.num_idle += number

    def room_of(self, owner: Owner | None) -> int:
        """Return the slots, free or idle, that loads of an owner could still take."""
        room = len(self.free) + self.num_idle
        return room if owner is None else min(room, owner.memory.spare_slots)

    def add(self, chunk: Entry) -> None:
        """Let the policy order a chunk that has a slot."""
        self.order.add(chunk.prefix_key, share=chunk.owner.memory if chunk.owner is not None else None)

    def fill(self, chunk: Entry, slot: int, state: InMemory) -> None:
        """Assign a slot to a chunk in use, whose bytes are on their way."""
        chunk.slot = slot
        self._chunks.move(chunk, state)
        self.add(chunk)

    def drop(self, chunk: Entry) -> None:
        """Release a chunk's slot."""
        assert chunk.memory is not NO_SLOT, "its number may be another chunk's by now"
        self._chunks.note_change(chunk)
        if chunk.in_memory:
            self.count_idle(chunk, -1)
        self.order.evict(chunk.prefix_key)
        if chunk.memory is LOADING:  # a read that hangs may still write to it
            self.free.appendleft(chunk.slot)
            self._num_hung += 1
        elif self._take_turns:
            self.free.insert(self._num_hung, chunk.slot)
        else:
            self.free.append(chunk.slot)
        if chunk.disk is NO_FILE:
            self._chunks.vanish(chunk)
            chunk.memory = NO_SLOT
        else:
            self._chunks.move(chunk, NO_SLOT)


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
        """Tell the policies that a chain of chunks is used, see ``Policy.touch_chain``.

        Of known chunks the entries' own keys should be given: policies keep them, and a copy takes 64 bytes.
        """
        self.last_touched = chain
        for order in self.orders:
            order.touch_chain(chain, noted, leaves)

    def refresh(self, chain: Sequence[PrefixKey], leaves: AbstractSet[PrefixKey]) -> None:
        """Tell the policies that a chain of chunks is wanted, without a use, see ``Policy.refresh_chain``."""
        for order in self.orders:
            order.refresh_chain(chain, leaves)

    def begin(self, chunk: Entry, count: int = 1) -> None:
        """Keep a chunk from eviction until ``count`` uses have ended."""
        if chunk.uses == 0 and chunk.memory is READY:  # counted here, not in a call, as loads do so for every chunk
            self.slots.num_idle -= 1
            if chunk.owner is not None:
                chunk.owner.memory.num_idle -= 1
        chunk.uses += count

    def end(self, chunk: Entry) -> None:
        """End a use. After the last one, a chunk that is in no place or was forgotten is removed."""
        chunk.uses -= 1
        if chunk.uses:
            return
        if chunk.memory is READY:
            self.slots.num_idle += 1
            if chunk.owner is not None:
                chunk.owner.memory.num_idle += 1
        if chunk.forgotten:
            self.discard(chunk)
        elif chunk.memory is READY and not self.keep_in_memory:
            self.slots.drop(chunk)
        elif chunk.memory is NO_SLOT and chunk.disk is NO_FILE:  # no slot for a load from the remote tier
            self.chunks.vanish(chunk)

    def lease(self, lease_id: str, refs: Sequence[ChunkRef], ttl_s: float) -> int:
        """Keep chunks from eviction until ``release``, or for ``ttl_s``; replaces a lease of the same name.

        Returns how many of them, from the front, are held. All leases together hold at most half as many different
        chunks as there are slots, and a multiple of that counting shared chunks once per lease. Those on an owner's
        chunks hold at most half of its quotas.
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

    def remove(self, chunk: Entry, fate: Fate | None = Fate.REMOVED, cause: Cause = Cause.NONE) -> None:
        """Remove a chunk on request or when it expires, and note the reason; without ``fate`` it has been told."""
        if fate is not None:
            self.chunks.tell(fate, chunk, None, cause)
        self.chunks.note_gone(chunk, MissReason.REMOVED)
        self.discard(chunk)

    def discard(self, chunk: Entry) -> None:
        """Remove a chunk from every place, now or when its last use ends; leases do not keep it."""
        self.chunks.break_checkpoint(chunk.prefix_key)
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
            order.remove(chunk.prefix_key)

    def forget(self, chunk: Entry) -> None:
        """Make a chunk in use unreachable at once, and announce the removal of its file."""
        if chunk.forgotten:
            return
        chunk.forgotten = True
        self.chunks.break_checkpoint(chunk.prefix_key)
        self.chunks.expiries.withdraw(chunk.prefix_key)
        self.chunks.note_change(chunk)
        self._unlease(chunk)
        if chunk.disk is not NO_FILE:
            self.disk.removals.append(chunk.ref)

    def supersede(self, chunk: Entry) -> None:
        """Drop the tails held by a whole chunk that has just become available in a place."""
        is_removed = chunk.forgotten or chunk.prefix_key not in self.chunks
        if is_removed or chunk.num_blocks != self.chunks.whole_blocks:
            return
        for key in keys_of(chunk.trail[:-PREFIX_KEY_BYTES]):
            tail = self.chunks.get(key)
            if tail is not None and not tail.forgotten:
                self.take_in(chunk, tail)

    def take_in(self, chunk: Entry, tail: Entry) -> bool:
        """Drop a tail that a known chunk holds; lookups and leases of the tail move to the chunk.

        A tail stays if it is to be kept for longer, or if it is in a place where the chunk is not, since a crash or
        failure in between would lose both. A tail that is being read stays, too, and so does one of another owner, as
        after a restart that does not know whose it is.
        """
        is_read = tail.memory is LOADING
        lacks_slot = self.keep_in_memory and tail.memory is not NO_SLOT and chunk.memory is not READY
        lacks_file = tail.disk is not NO_FILE and chunk.disk is not STORED
        is_others = tail.owner is not chunk.owner
        if is_read or is_others or lacks_slot or lacks_file or not chunk.lasts_until(tail.expires_s):
            return False
        self.chunks.counters.superseded_tails += 1
        self.disk.retained.move(tail.prefix_key, chunk.prefix_key)
        freed, added = self.leases.move(tail.prefix_key, chunk.prefix_key)
        if added:
            self.begin(chunk, added)
        self._end_leases(tail, freed)
        self.discard(tail)
        return True

    def _unlease(self, chunk: Entry) -> None:
        """Take a chunk out of all leases; otherwise it could not be stored again before they end."""
        self._end_leases(chunk, self.leases.drop_chunk(chunk.prefix_key))

    def _end_leases(self, chunk: Entry, count: int) -> None:
        """End the uses of ``count`` leases that no longer hold a chunk."""
        chunk.uses -= count
        if count and not chunk.uses and chunk.memory is READY:
            self.slots.count_idle(chunk, 1)
