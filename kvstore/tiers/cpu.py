"""The CPU tier: chunks in a pool of host memory, which is also the passage to every slower tier.

It is used in one of two ways. The mover works in the slots themselves (``claim``, ``publish``, ``read``): the index
says which slot a chunk has, and this end only remembers what each slot really holds. A load of a chunk from a slot
that holds something else fails: should index and pool ever disagree, the answer is a miss and not another's KV.

As a ``Tier`` like any other it chooses the slots itself, the lowest free one first, and copies. A slot may be given to
another chunk while it is read; its serial number has changed then, and the reader looks again.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.memory.slabs import SlabPool
from kvstore.tiers.base import BoundedTier, TierCounters, TierSetup, Transfer, payload_view


class Filling(NamedTuple):
    """One content of a slot: the next one has another serial number."""

    slot: int
    serial: int


class CpuTier(BoundedTier):
    """A slab pool with a label on every slot. Thread-safe; a view belongs to whoever the index gave the slot to.

    Args:
        pool: the memory. The tier closes it.
        layout: the geometry of the chunks; without it only the mover's methods work.
        namespace_id: whose chunks they are; None if nobody says so before the first ``reset``.
    """

    name = "cpu"

    def __init__(self, pool: SlabPool, layout: KVLayout | None = None, namespace_id: bytes | None = None) -> None:
        self.capacity_bytes = pool.num_slots * pool.slot_bytes
        self.counters = TierCounters()
        self._pool = pool
        self._layout = layout
        self._namespace_id = namespace_id
        self._lock = threading.Lock()
        self._labels: list[ChunkRef | None] = [None] * pool.num_slots
        self._serials = [0] * pool.num_slots  # how often each slot was taken or emptied
        self._slots: dict[ChunkRef, int] = {}  # the slot of each chunk, the longest untouched first
        self._filling: set[int] = set()  # slots that a put is copying into
        self._claimed: set[int] = set()  # and the mover
        self._free = list(range(pool.num_slots))  # a heap
        self._closed = False

    @classmethod
    def open(cls, setup: TierSetup) -> CpuTier:
        """Make a pool and a tier over it; the registry's factory.

        Raises:
            ConfigError: the capacity does not hold one chunk, or cannot be mapped, or there are options.
        """
        setup.require_known_options()
        slot_bytes = setup.layout.slot_bytes
        if setup.capacity_bytes < slot_bytes:
            raise ConfigError(f"{setup.capacity_bytes} bytes do not hold one chunk of {slot_bytes}: raise the capacity")
        pool = SlabPool(setup.capacity_bytes // slot_bytes, slot_bytes)
        return cls(pool, setup.layout, setup.namespace.id)

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._pool.num_slots

    @property
    def ready_slots(self) -> int:
        """Slots, from number 0 on, whose memory has been populated."""
        return self._pool.ready_slots

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
                self._label(slot, ref)

    def read(self, slot: int, ref: ChunkRef) -> ByteArray | None:
        """The bytes of a slot, or None if it does not hold ``ref``."""
        return self._pool.slot(slot) if self._labels[slot] == ref else None

    def filling(self, slot: int, ref: ChunkRef) -> Filling | None:
        """Which content of a slot ``ref`` is, for whoever copies it; None if the slot does not hold it."""
        with self._lock:
            return Filling(slot, self._serials[slot]) if self._labels[slot] == ref else None

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, with the bytes of its slot, the longest untouched first."""
        with self._lock:
            self._require_open()
            return [(ref, self._pool.slot_bytes) for ref in self._slots]

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether a slot holds it."""
        with self._lock:
            self._require_open()
            return [ref in self._slots for ref in refs]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy chunks into their buffers: HIT or MISS each."""
        payloads = [payload_view(self._geometry, transfer) for transfer in transfers]
        return [self._get(transfer.ref, payload) for transfer, payload in zip(transfers, payloads, strict=True)]

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy chunks from their buffers: STORED or FULL each, or FAILED if ``clear`` or ``reset`` came in between."""
        payloads = [payload_view(self._geometry, transfer) for transfer in transfers]
        return [self._put(transfer, payload) for transfer, payload in zip(transfers, payloads, strict=True)]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks, and free their slots."""
        with self._lock:
            self._require_open()
            for ref in refs:
                self._drop(ref)

    def clear(self) -> None:
        """Forget what every slot holds."""
        with self._lock:
            self._require_open()
            for slot in range(self.num_slots):
                self._empty(slot)
            self._free = [slot for slot in range(self.num_slots) if slot not in self._filling]

    def reset(self, namespace: Namespace) -> None:
        """Forget what every slot holds."""
        with self._lock:
            self._namespace_id = namespace.id  # first: what is being put now is taken away below
        self.clear()

    def stored_bytes(self, num_blocks: int) -> int:  # noqa: ARG002 - a tail takes a slot as well
        """The size of a slot, whatever the chunk's length."""
        return self._pool.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a chunk, or are being filled with one."""
        with self._lock:
            return (len(self._slots) + len(self._filling)) * self._pool.slot_bytes

    def close(self) -> None:
        """Stop the pool's background work. Idempotent."""
        with self._lock:
            self._closed = True
        self._pool.close()

    @property
    def _geometry(self) -> KVLayout:
        assert self._layout is not None, "a CPU tier without a layout does not know how long a chunk is"
        return self._layout

    def _get(self, ref: ChunkRef, payload: ByteArray) -> Outcome:
        while True:
            with self._lock:
                self._require_open()
                slot = self._slots.get(ref)
                if slot is None:
                    self.counters.count(Outcome.MISS, 0)
                    return Outcome.MISS
                serial = self._serials[slot]
            payload[:] = self._pool.slot(slot)[: len(payload)]
            with self._lock:
                if self._serials[slot] == serial:
                    self._slots[ref] = self._slots.pop(ref)  # the last to be named by scan
                    self.counters.count(Outcome.HIT, len(payload))
                    return Outcome.HIT

    def _put(self, transfer: Transfer, payload: ByteArray) -> Outcome:
        ref = transfer.ref
        with self._lock:
            self._require_open()
            if not transfer.belongs_to(self._namespace_id):
                self.counters.count(Outcome.FAILED, 0)
                return Outcome.FAILED
            slot = self._take_slot(ref)
            if slot is None:
                self.counters.count(Outcome.FULL, 0)
                return Outcome.FULL
            self._filling.add(slot)
            serial = self._serials[slot]
        self._pool.slot(slot)[: len(payload)] = payload
        with self._lock:
            self._filling.remove(slot)
            if self._serials[slot] == serial:
                self._drop(ref)
                self._label(slot, ref)
                outcome = Outcome.STORED
            else:
                heapq.heappush(self._free, slot)
                outcome = Outcome.FAILED
            self.counters.count(outcome, len(payload))
        return outcome

    def _take_slot(self, ref: ChunkRef) -> int | None:
        """The lowest free slot; without one, that of the chunk to be replaced. Needs the lock."""
        if not self._free:
            self._drop(ref)
        return heapq.heappop(self._free) if self._free else None

    def _drop(self, ref: ChunkRef) -> None:
        """Forget a chunk, if it is here, and free its slot. Needs the lock."""
        slot = self._slots.get(ref)
        if slot is not None:
            self._empty(slot)
            heapq.heappush(self._free, slot)

    def _label(self, slot: int, ref: ChunkRef) -> None:
        """Say what a slot holds. Needs the lock."""
        self._labels[slot] = ref
        self._slots[ref] = slot

    def _empty(self, slot: int) -> None:
        """Forget what a slot holds. Needs the lock."""
        ref = self._labels[slot]
        self._labels[slot] = None
        self._claimed.discard(slot)
        self._serials[slot] += 1
        if ref is not None and self._slots.get(ref) == slot:
            del self._slots[ref]

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the CPU tier was closed")
