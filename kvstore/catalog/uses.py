"""What keeps a chunk where it is, and how it goes when nothing keeps it any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.catalog.entries import NO_FILE, NO_SLOT, READY, WRITING, Entries, Entry
from kvstore.catalog.leases import Leases
from kvstore.catalog.plans import MissReason, StoreStep
from kvstore.catalog.sequence import superseded_tails
from kvstore.catalog.slots import Slots
from kvstore.catalog.writebehind import DiskWrites
from kvstore.keys import PrefixHasher
from kvstore.policies import Policy


@dataclass(frozen=True, eq=False)
class Uses:
    """Counts the uses of chunks, and lets chunks go.

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
        """Keep a chunk from eviction until as many uses have ended."""
        if chunk.uses == 0 and chunk.memory is READY:
            self.slots.num_idle -= 1
        chunk.uses += count

    def end(self, chunk: Entry) -> None:
        """End a use; after the last one, a chunk that has no place or must not stay goes."""
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
        """Let a chunk go on purpose, so that nobody finds it again."""
        self.chunks.departed.note(chunk.ref.prefix_key, MissReason.REMOVED)
        self.discard(chunk)

    def discard(self, chunk: Entry) -> None:
        """Let a chunk go from everywhere, now or when its last use ends; leases do not keep it."""
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
        """Make a chunk in use unreachable at once, and its file go."""
        if chunk.forgotten:
            return
        chunk.forgotten = True
        self.chunks.break_checkpoint(chunk.ref.prefix_key)
        self.chunks.expiries.withdraw(chunk.ref.prefix_key)
        self.chunks.note_change(chunk)
        self._unlease(chunk)
        if chunk.disk is not NO_FILE:
            self.disk.removals.append(chunk.ref)

    def note_tails(self, steps: Iterable[StoreStep], hasher: PrefixHasher) -> None:
        """Whole chunks of a sequence are about to be stored: note the tails that they supersede."""
        for key, tails in superseded_tails(hasher, {step.ref.prefix_key for step in steps}).items():
            self.chunks[key].tails = tails

    def supersede(self, chunk: Entry) -> None:
        """Forget the tails of a chunk that has just been stored.

        A tail on disk stays until its whole chunk is there too, or a crash in between would lose both. One that is
        leased stays: it goes in its turn, like any other chunk.
        """
        if not self.chunks.is_known(chunk.ref.prefix_key):  # it was removed meanwhile
            return
        chunk.tails = tuple(key for key in chunk.tails if self.chunks.is_known(key))
        if chunk.disk is WRITING:
            return
        tails, chunk.tails = chunk.tails, ()
        for key in tails:
            tail = self.chunks[key]
            if key in self.leases or (chunk.expires_s is not None and tail.expires_s is None):
                continue  # held, or there for longer
            if chunk.on_disk or tail.disk is NO_FILE:
                self.chunks.counters.superseded_tails += 1
                self.remove(tail)

    def _unlease(self, chunk: Entry) -> None:
        """Take a chunk out of all leases: otherwise it could not be stored again before they end."""
        holders = self.leases.drop_chunk(chunk.ref.prefix_key)
        chunk.uses -= holders
        if holders and not chunk.uses and chunk.memory is READY:
            self.slots.num_idle += 1
