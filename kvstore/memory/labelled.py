"""The CPU pool: slots of host memory, each labelled with the chunk it holds; also the passage to every slower tier.

The index decides which slot a chunk gets. The label says what the slot really holds, so a load from a slot that holds
something else fails: should index and pool ever disagree, the answer is a miss and not another chunk's KV.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvstore.chunks import ByteArray, ChunkRef
from kvstore.memory.slabs import SlabPool


class Filling(NamedTuple):
    """One content of a slot: the next one has another serial number."""

    slot: int
    serial: int


class LabelledPool:
    """A slab pool with a label on every slot. Thread-safe; a view belongs to whoever the index gave the slot to.

    Args:
        pool: the memory; ``close`` closes it.
    """

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._labels: list[ChunkRef | None] = [None] * pool.num_slots
        self._serials = [0] * pool.num_slots  # how often each slot was claimed or emptied
        self._claimed: set[int] = set()

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._pool.num_slots

    def claim(self, slot: int) -> ByteArray:
        """Take a slot to fill it: what it held is gone. Returns its bytes."""
        with self._lock:
            self._empty(slot)
            self._claimed.add(slot)
        return self._pool.slot(slot)

    def publish(self, slot: int, ref: ChunkRef) -> None:
        """Declare that a claimed slot now holds all of ``ref``; if it was emptied meanwhile, it holds nothing."""
        with self._lock:
            if slot in self._claimed:
                self._claimed.remove(slot)
                self._labels[slot] = ref

    def read(self, slot: int, ref: ChunkRef) -> ByteArray | None:
        """The bytes of a slot, or None if it does not hold ``ref``."""
        return self._pool.slot(slot) if self._labels[slot] == ref else None

    def filling(self, slot: int, ref: ChunkRef) -> Filling | None:
        """Which content of a slot ``ref`` is, for whoever copies it; None if the slot does not hold it."""
        with self._lock:
            return Filling(slot, self._serials[slot]) if self._labels[slot] == ref else None

    def clear(self) -> None:
        """Forget what every slot holds, and what it was claimed for."""
        with self._lock:
            for slot in range(self.num_slots):
                self._empty(slot)

    def close(self) -> None:
        """Stop the pool's background work. Idempotent."""
        self._pool.close()

    def _empty(self, slot: int) -> None:
        """Needs the lock."""
        self._labels[slot] = None
        self._claimed.discard(slot)
        self._serials[slot] += 1
