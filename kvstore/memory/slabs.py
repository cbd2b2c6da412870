"""Pools of memory cut into equal slots. The index decides which chunk owns a slot.

``SlabPool`` is host memory. It is mapped once, requests huge pages on the GPU's NUMA node, and is prepared piece by
piece (``preparing.py``). Slots start at page boundaries, as direct I/O requires.

``LabelledPool`` is the CPU pool: each slot has the chunk that it really holds as a label, so a load from a slot with
other content fails. If index and pool disagree, the result is a miss and not another chunk's KV.

``DeviceSlots`` are in device memory. The host launches work and runs ahead of the device, so a slot of either pool may
be given to another chunk while the device still uses it. Each slot records the ends of such uses; the next one waits
for them, on the device if possible.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kvstore.memory.mapped import keep_from_children, map_bytes, node_near, prefer_node
from kvstore.memory.pinning import Pinner, find_pinner
from kvstore.memory.preparing import Pace, Preparation, pace_for
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.model.layout import ALIGNMENT_BYTES, round_up
from kvstore.paged.streams import DeviceEvent, Streams

_CPU = torch.device("cpu")


class SlabPool:
    """``num_slots`` slots of ``slot_bytes`` each, in one anonymous mapping, which a forked child does not have.

    Different threads may use different slots. ``close`` ends the background threads and unpins; the memory itself is
    released with its last view.

    Attributes:
        memory: all slots, one after the other: uint8 ``[num_slots * slot_bytes]`` at least.

    Args:
        num_slots: at least one.
        slot_bytes: a multiple of 4096.
        device: the one that copies to and from the slots. For a GPU they are pinned before this returns.
        pin_in_background: for a GPU, pin them later if that is safe while it captures graphs.
        pinner: None for the one that ``device`` needs.
        pace: parameters of preparing them; None for suitable ones. A piece consists of whole slots.

    Raises:
        ConfigError: the sizes cannot be used, or the memory cannot be mapped.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device = _CPU,
        *,
        pin_in_background: bool = False,
        pinner: Pinner | None = None,
        pace: Pace | None = None,
    ) -> None:
        if num_slots <= 0 or slot_bytes <= 0 or slot_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"a pool needs at least one slot of a multiple of {ALIGNMENT_BYTES} bytes, "
                f"not {num_slots} x {slot_bytes}: raise max_local_cpu_size"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        memory = _map(round_up(num_slots * slot_bytes, mmap.PAGESIZE))
        self.memory = memory
        self._slots = [memory[i * slot_bytes : (i + 1) * slot_bytes] for i in range(num_slots)]
        node = node_near(device)
        if node is not None:
            prefer_node(memory, node)
        pinner = pinner or find_pinner(device)
        pace = pace or pace_for(pinner, in_background=pin_in_background)
        self._preparation = Preparation(memory, self._pieces(pace.piece_bytes), pinner, pace)

    def slot(self, number: int) -> ByteArray:
        """Return the bytes of slot ``number``: uint8 ``[slot_bytes]``, page-aligned, the same view each time."""
        return self._slots[number]

    def wait_populated(self, timeout_s: float) -> bool:
        """Wait until the threads have ended and all slots are ready; for benchmarks and tests."""
        return self._preparation.wait(timeout_s)

    def close(self) -> None:
        """Stop populating, and unpin. No copy may be under way. Idempotent."""
        self._preparation.close()

    def _pieces(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Return begin and end of groups of whole slots and whole pages of the machine, so no page is pinned twice."""
        end_bytes = self.num_slots * self.slot_bytes
        unit_bytes = math.lcm(self.slot_bytes, mmap.PAGESIZE)
        step_bytes = max(1, piece_bytes // unit_bytes) * unit_bytes
        return [(begin, min(begin + step_bytes, end_bytes)) for begin in range(0, end_bytes, step_bytes)]


def _map(num_bytes: int) -> ByteArray:
    """Map ``num_bytes`` of address space, without memory behind it yet.

    Raises:
        ConfigError: the system refused.
    """
    try:
        memory = map_bytes(num_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot map {num_bytes / 2**30:.1f} GiB for the CPU pool ({error}): lower max_local_cpu_size"
        ) from error
    keep_from_children(memory)
    return memory


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
        self._streams = streams or Streams(_CPU)
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


class DeviceSlots:
    """``num_slots`` slots of ``slot_bytes`` each on one device, allocated at once. For one thread at a time.

    The memory belongs to PyTorch, whose allocator must know which streams use it. Otherwise the memory of a closed pool
    could be allocated again while a kernel still reads it.

    Args:
        num_slots: number of slots.
        slot_bytes: size of each.
        streams: the device, and the order of work there.

    Raises:
        ConfigError: the device has no room.
    """

    def __init__(self, num_slots: int, slot_bytes: int, streams: Streams) -> None:
        self._streams = streams
        self._pool = streams.allocate(num_slots * slot_bytes).view(num_slots, slot_bytes)
        allocated: DeviceEvent = streams.now()  # the memory may still be in use by work launched earlier
        self._last_uses = [allocated] * num_slots  # the end of each slot's last use, which implies earlier ones

    @contextmanager
    def using(self, slot: int) -> Iterator[torch.Tensor]:
        """Yield a slot's memory. Work launched inside, on the current stream, follows all former work on the slot."""
        memory = self._pool[slot]
        self._streams.hold(self._last_uses[slot])
        self._streams.keep(memory)
        try:
            yield memory
        finally:  # also after an exception, as part of the work may have been launched
            self._last_uses[slot] = self._streams.now()

    def close(self) -> None:
        """Return the memory to torch's allocator, which reuses it once the last work on it is done."""
        self._pool = torch.empty(0, dtype=torch.uint8)
