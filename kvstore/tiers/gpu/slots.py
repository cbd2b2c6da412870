"""Which slot of a pool holds which chunk, and who is at work in it.

Pure bookkeeping, without a lock: the tier that owns it holds one. A slot that is being read is never given to another
chunk: what it held may be forgotten meanwhile, and then it is free when its last reader leaves.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kvstore.chunks import ChunkRef


class Fill(NamedTuple):
    """A slot taken for a chunk that is on its way, in the epoch that ``clear`` had begun last."""

    ref: ChunkRef
    slot: int
    epoch: int


class SlotLedger:
    """Slots numbered from 0, each free, being filled, or labelled with a chunk. Hands out the lowest free one."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[ChunkRef, int] = {}  # the longest untouched first
        self._readers = [0] * num_slots
        self._free = list(range(num_slots))  # a heap
        self._epoch = 0

    def __contains__(self, ref: ChunkRef) -> bool:
        return ref in self._slots

    @property
    def slots_in_use(self) -> int:
        """Slots that hold a chunk, are being filled with one, or are still being read."""
        return self._num_slots - len(self._free)

    def refs(self) -> list[ChunkRef]:
        """The chunks held, the longest untouched first."""
        return list(self._slots)

    def begin_read(self, ref: ChunkRef) -> int | None:
        """The slot of a chunk, kept for its reader until ``end_read``; None if no slot holds it."""
        slot = self._slots.get(ref)
        if slot is not None:
            self._readers[slot] += 1
        return slot

    def end_read(self, ref: ChunkRef, slot: int) -> None:
        """Take leave of a slot; the chunk, if it is still held, is the last one touched."""
        self._readers[slot] -= 1
        if self._slots.get(ref) == slot:
            self._slots[ref] = self._slots.pop(ref)
        else:
            self._release(slot)

    def begin_fill(self, ref: ChunkRef) -> Fill | None:
        """Take a free slot; without one, that of the chunk to be replaced, unless it is being read. None if full."""
        if not self._free:
            former = self._slots.get(ref)
            if former is None or self._readers[former]:
                return None
            self.drop(ref)
        return Fill(ref, heapq.heappop(self._free), self._epoch)

    def end_fill(self, fill: Fill, *, is_whole: bool) -> bool:
        """Label the slot if all of the chunk is there, and nothing was cleared since; else give it back."""
        is_held = is_whole and fill.epoch == self._epoch
        if is_held:
            self.drop(fill.ref)
            self._slots[fill.ref] = fill.slot
        else:
            self._release(fill.slot)
        return is_held

    def drop(self, ref: ChunkRef) -> None:
        """Forget a chunk, if it is here."""
        slot = self._slots.pop(ref, None)
        if slot is not None:
            self._release(slot)

    def clear(self) -> None:
        """Forget every chunk, and those on their way."""
        self._epoch += 1
        for ref in self.refs():
            self.drop(ref)

    def _release(self, slot: int) -> None:
        """Free a slot without a label, unless somebody is reading it still."""
        if not self._readers[slot]:
            heapq.heappush(self._free, slot)
