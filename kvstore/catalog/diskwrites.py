"""Disk writes after a store, and the accounting of the disk tier's space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.catalog.entries import NO_FILE, NO_SLOT, STORED, WRITING, Entries, Entry
from kvstore.chunks import ChunkRef
from kvstore.keys import PrefixKey
from kvstore.policies import Policy


@dataclass(eq=False)
class DiskWrites:
    """The chunks on disk, those being written included, and the writes in flight.

    Attributes:
        chunks: all entries of the index.
        order: the policy for the disk; it also counts the bytes.
        stored_bytes: maps a chunk's number of blocks to its bytes on disk; None without a disk tier.
        max_writes: maximum of concurrent writes.
        num_writes: writes in flight.
        answers: True if the disk can be read now.
        removals: chunks dropped from the disk and not announced yet.
    """

    chunks: Entries
    order: Policy
    stored_bytes: Callable[[int], int] | None
    max_writes: int
    num_writes: int = 0
    answers: bool = True
    removals: list[ChunkRef] = field(default_factory=list)

    def adopt(self, survivors: Iterable[tuple[ChunkRef, int]], trails: Mapping[PrefixKey, bytes]) -> None:
        """Register the chunks that the tier held at start, with their trails where the tier knows them."""
        for ref, stored_bytes in survivors if self.stored_bytes is not None else ():
            self.chunks[ref.prefix_key] = Entry(ref, disk=STORED)
            self.order.add(ref.prefix_key, stored_bytes)
        self.chunks.learn_all(trails)

    def reserve(self, chunk: Entry) -> bool:
        """Make room for a chunk about to be stored; False if it will not be written."""
        if self.stored_bytes is None or chunk.disk is not NO_FILE or chunk.expires_s is not None:
            return False
        need_bytes = self.stored_bytes(chunk.ref.num_blocks)
        if self.num_writes >= self.max_writes or not self._make_room(chunk, need_bytes):
            self.chunks.counters.writes_dropped += 1
            return False
        chunk.disk = WRITING
        self.order.add(chunk.ref.prefix_key, need_bytes)
        self.num_writes += 1
        return True

    def complete(self, chunk: Entry, *, stored: bool, size_bytes: int | None) -> None:
        """Take the result of a write, and its size if that differs from the bytes reserved."""
        self.num_writes -= 1
        if not stored:
            self.chunks.counters.writes_failed += 1
            self.drop(chunk, announce=False)
            return
        self.chunks.counters.writes_done += 1
        chunk.disk = STORED
        self.chunks.note_change(chunk)
        if size_bytes is not None:
            self.order.resize(chunk.ref.prefix_key, size_bytes)
        if chunk.forgotten:  # its removal may have been carried out before the write began
            self.removals.append(chunk.ref)

    def drop(self, chunk: Entry, *, announce: bool) -> None:
        """Remove a chunk from the disk."""
        self.chunks.note_change(chunk)
        self.order.evict(chunk.ref.prefix_key)
        if announce:
            self.removals.append(chunk.ref)
        chunk.disk = NO_FILE
        if chunk.memory is NO_SLOT:
            self.chunks.vanish(chunk)

    def _make_room(self, newcomer: Entry, need_bytes: int) -> bool:
        """Evict until the bytes fit, if the newcomer is worth more than the victims. Evicts enough or nothing."""
        missing_bytes = self.order.used_bytes + need_bytes - self.order.capacity_bytes
        victims = self.order.make_room(missing_bytes, self.chunks.is_unused, newcomer.ref.prefix_key)
        for key in victims or ():
            self.chunks.counters.evicted_disk += 1
            self.drop(victim := self.chunks[key], announce=True)
            self.chunks.note_evicted(victim)
        return victims is not None
