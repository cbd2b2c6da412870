"""The CPU tier: chunks in a pool of host memory, which is also the passage to every slower tier.

The index says which slot a chunk gets. This end only remembers what each slot really holds, and a load of a chunk from
a slot that holds something else fails: should index and pool ever disagree, the answer is a miss and not another's KV.
"""

from __future__ import annotations

from kvstore.slabs import SlabPool
from kvstore.tiers.base import ByteArray, ChunkRef


class CpuTier:
    """A slab pool with a label on every slot. Different slots may be used by different threads."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._labels: list[ChunkRef | None] = [None] * pool.num_slots

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._pool.num_slots

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.num_slots * self._pool.slot_bytes

    def claim(self, slot: int) -> ByteArray:
        """Take a slot to fill it: what it held is gone. Returns its bytes."""
        self._labels[slot] = None
        return self._pool.slot(slot)

    def publish(self, slot: int, ref: ChunkRef) -> None:
        """Declare that a claimed slot now holds all of ``ref``."""
        self._labels[slot] = ref

    def read(self, slot: int, ref: ChunkRef) -> ByteArray | None:
        """The bytes of a slot, or None if it does not hold ``ref``."""
        return self._pool.slot(slot) if self._labels[slot] == ref else None

    def clear(self) -> None:
        """Forget what every slot holds."""
        self._labels = [None] * self._pool.num_slots

    def close(self) -> None:
        """Stop the pool's background work. Idempotent."""
        self._pool.close()
