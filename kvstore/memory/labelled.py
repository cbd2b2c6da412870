"""The CPU pool: slots of host memory, each labelled with the chunk it holds. All slower tiers read and write slots.

The index decides which slot a chunk gets. The label is the slot's real content, so a load from a slot with other
content fails. If index and pool disagree, the result is a miss and not another chunk's KV.

A device copies to and from slots after the call that launched the copy, so a slot may be given to another chunk while
it is still read or written there. Each slot records the ends of such copies, and the next writer waits for them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.paged.streams import DeviceEvent, Streams


class Filling(NamedTuple):
    """One content of a slot; every new content has another serial number."""

    slot: int
    serial: int


class LabelledPool:
    """A slab pool with a label on every slot. Thread-safe; a view belongs to the chunk that the index put there.

    Args:
        pool: the memory; ``close`` closes it.
        streams: of the device that copies to and from the slots; None if the host does.
    """

    def __init__(self, pool: SlabPool, streams: Streams | None = None) -> None:
        self._pool = pool
        self._streams = streams or Streams(torch.device("cpu"))
        self._lock = threading.Lock()
        self._labels: list[ChunkRef | None] = [None] * pool.num_slots
        self._serials = [0] * pool.num_slots  # number of claims and removals of each slot
        self._claimed: set[int] = set()
        self._uses: dict[int, list[DeviceEvent]] = {}  # the ends of a device's copies, by slot

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._pool.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot."""
        return self._pool.slot_bytes

    def claim(self, slot: int) -> ByteArray:
        """Take a slot to fill it, which drops its content. Returns its bytes, to be written after ``settle``."""
        with self._lock:
            self._empty(slot)
            self._claimed.add(slot)
        return self._pool.slot(slot)

    def claim_on_device(self, slot: int, streams: Streams) -> ByteArray:
        """Claim a slot for a copy by the device, to be launched next on the current stream of ``streams``."""
        for event in self._uses_of(slot):
            streams.hold(event)
        return self.claim(slot)

    def note_use(self, slot: int, event: DeviceEvent) -> None:
        """Record that a launched copy of the device reads or writes a slot until ``event``."""
        if event is not None:
            with self._lock:
                under_way = [former for former in self._uses.get(slot, ()) if not self._streams.is_reached(former)]
                self._uses[slot] = [*under_way, event]

    def settle(self, slot: int) -> None:
        """Wait until no copy by the device uses a slot. Not for the model's thread: it may have to wait for a step."""
        for event in self._uses_of(slot):
            self._streams.reach(event)

    @property
    def is_settled(self) -> bool:
        """True if no copy by the device uses any slot. Never waits."""
        with self._lock:
            uses = [event for events in self._uses.values() for event in events]
        return all(self._streams.is_reached(event) for event in uses)

    def publish(self, slot: int, ref: ChunkRef) -> bool:
        """Declare that a claimed slot now holds all of ``ref``. False if it was emptied in between, and stays empty."""
        with self._lock:
            if slot in self._claimed:
                self._claimed.remove(slot)
                self._labels[slot] = ref
                return True
            return False

    def read(self, slot: int, ref: ChunkRef) -> ByteArray | None:
        """Return the bytes of a slot, or None if it does not hold ``ref``."""
        return self._pool.slot(slot) if self._labels[slot] == ref else None

    def filling(self, slot: int, ref: ChunkRef) -> Filling | None:
        """Return the identity of a slot's content, for later copies of it; None if the slot does not hold ``ref``."""
        with self._lock:
            return Filling(slot, self._serials[slot]) if self._labels[slot] == ref else None

    def clear(self) -> None:
        """Remove the label and the claim of every slot."""
        with self._lock:
            for slot in range(self.num_slots):
                self._empty(slot)

    def close(self) -> None:
        """Wait until no slot is in use, and stop the pool's background work. Idempotent."""
        try:
            for slot in list(self._uses):
                self.settle(slot)
        finally:  # also if the device is broken
            self._pool.close()

    def _uses_of(self, slot: int) -> list[DeviceEvent]:
        with self._lock:
            return list(self._uses.get(slot, ()))

    def _empty(self, slot: int) -> None:
        """Remove a slot's label and claim. Needs the lock."""
        self._labels[slot] = None
        self._claimed.discard(slot)
        self._serials[slot] += 1
