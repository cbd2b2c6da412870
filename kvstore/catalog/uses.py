"""Use counts, which keep chunks from eviction, and the removal of chunks without uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.catalog.diskwrites import DiskWrites
from kvstore.catalog.entries import LOADING, NO_FILE, NO_SLOT, READY, STORED, Entries, Entry
from kvstore.catalog.leases import Leases
from kvstore.catalog.plans import MissReason
from kvstore.catalog.slots import Slots
from kvstore.catalog.trails import keys_of
from kvstore.keys import PREFIX_KEY_BYTES
from kvstore.policies import Policy


@dataclass(frozen=True, eq=False)
class Uses:
    """Counts the uses of chunks, and removes chunks.

    Attributes:
        chunks, slots, disk, leases: the parts of the index.
        orders: the policies in use.
        keep_in_memory: False drops a chunk from memory when its last use ends.
    """

    chunks: Entries
    slots: Slots
    disk: DiskWrites
    leases: Leases
    orders: Sequence[Policy]
    keep_in_memory: bool

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
