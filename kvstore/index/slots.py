"""The pool's slots: their assignment to chunks, and eviction when none is free."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.index.entries import LOADING, NO_FILE, NO_SLOT, Entries, Entry, InMemory
from kvstore.model.keys import PrefixKey
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

    def has_room(self, count: int, newcomer: PrefixKey | None = None) -> bool:
        """Tell if ``count`` slots could be taken one after the other."""
        return self.order.make_room(count - len(self.free), self._chunks.is_unused, newcomer) is not None

    def take(self, newcomer: PrefixKey | None = None) -> int | None:
        """Return a free slot, evicting the least valuable unused chunk if there is none.

        Returns None if the newcomer is worth less than that chunk.
        """
        if not self.free:
            victims = self.order.make_room(1, self._chunks.is_unused, newcomer)
            if victims is None:
                return None
            for key in victims:
                self._chunks.counters.evicted_memory += 1
                self.drop(victim := self._chunks[key])
                self._chunks.note_evicted(victim)
        slot = self.free.pop()
        self._num_hung = min(self._num_hung, len(self.free))
        return slot

    def fill(self, chunk: Entry, slot: int, state: InMemory) -> None:
        """Assign a slot to a chunk in use, whose bytes are on their way."""
        chunk.slot = slot
        self._chunks.move(chunk, state)
        self.order.add(chunk.ref.prefix_key)

    def drop(self, chunk: Entry) -> None:
        """Release a chunk's slot."""
        assert chunk.memory is not NO_SLOT, "its number may be another chunk's by now"
        self._chunks.note_change(chunk)
        self.num_idle -= chunk.in_memory
        self.order.evict(chunk.ref.prefix_key)
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


@dataclass(slots=True)
class StagingRoom:
    """Slots, free or idle, that a load could still take. Idle ones of the load's own chunks are taken by it, too."""

    slots: int

    def has_place(self, chunk: Entry) -> bool:
        """Tell if the load has a slot for a chunk."""
        return self.slots > 0 or (chunk.uses > 0 and chunk.memory is not NO_SLOT)

    def takes(self, chunk: Entry | None) -> bool:
        """Count a chunk, or None for one that is not here; return False if the load would run out of slots."""
        if chunk is None or not chunk.uses or chunk.memory is NO_SLOT:
            if not self.slots:
                return False
            self.slots -= 1
        return True
