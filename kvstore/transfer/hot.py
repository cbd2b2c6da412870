"""The GPU tier: copies of frequently loaded chunks on the device, so that a load does not pass through the host.

The index does not know these copies of chunks in memory, so a copy makes a load faster but never decides its result.
Each worker decides for itself. A copy is valid for one content of one slot: removing a chunk, or storing or loading it
again, changes that content, so removals need not be reported here.

``gather`` and ``scatter`` are launched on the caller's current stream, in order with the model's kernels, and the host
does not wait for them. With a paged cache in host memory the same code runs there, for tests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final, NamedTuple

from kvstore.memory.slabs import DeviceSlots, Filling
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError, DeviceFullError
from kvstore.paged.base import BlockIds, PagedKV

logger = logging.getLogger(__name__)

PROMOTE_AT: Final = 2  # loads of a chunk from memory after which it gets a slot
_REMEMBERED_PER_SLOT: Final = 8


class _Copy(NamedTuple):
    slot: int
    filling: Filling  # the content that was copied


class HotChunks:
    """Bounded set of copies, and counts of the loads of other chunks. For the model's thread only.

    Args:
        paged: the model's KV cache; the copies are on its device.
        max_bytes: bound of the device memory, which is allocated at once.

    Attributes:
        size_bytes: device memory in use.

    Raises:
        ConfigError: the bound does not hold a chunk, or the device has no room.
    """

    def __init__(self, paged: PagedKV, max_bytes: int) -> None:
        slot_bytes = paged.layout.slot_bytes
        num_slots = max_bytes // slot_bytes
        if num_slots < 1:
            raise ConfigError(
                f"{max_bytes} bytes of device memory do not hold one chunk of {slot_bytes}: "
                "raise max_local_gpu_size, or set it to 0"
            )
        self.size_bytes = num_slots * slot_bytes
        self._paged = paged
        self._slots = DeviceSlots(num_slots, slot_bytes, paged.streams)
        self._free = list(range(num_slots))
        self._copies: OrderedDict[ChunkRef, _Copy] = OrderedDict()  # the longest unused first
        self._loads: OrderedDict[ChunkRef, int] = OrderedDict()  # of chunks without a copy
        self._max_loads = _REMEMBERED_PER_SLOT * num_slots

    def scatter(self, ref: ChunkRef, filling: Filling, block_ids: BlockIds, first_block: int) -> bool:
        """Load a chunk's blocks from a copy of ``filling``, its slot's content. False if memory must be used."""
        copy = self._copies.get(ref)
        if copy is None:
            return False
        if copy.filling != filling:  # it was removed since, or stored again
            self._drop(ref)
            return False
        payload_bytes = self._paged.layout.payload_bytes(ref.num_blocks)
        try:
            with self._slots.using(copy.slot) as memory:
                self._paged.scatter_on_device(block_ids, memory[:payload_bytes], ref.num_blocks, first_block)
        except (RuntimeError, DeviceFullError) as error:
            self._give_up("scatter", error)
            return False
        self._copies.move_to_end(ref)
        return True

    def note_load(self, ref: ChunkRef, filling: Filling, block_ids: BlockIds) -> None:
        """Note that a whole chunk has been loaded from memory to these blocks, and copy it the second time."""
        loads = self._loads.pop(ref, 0) + 1
        if loads >= PROMOTE_AT:
            self._gather(ref, filling, block_ids)
            return
        self._loads[ref] = loads
        if len(self._loads) > self._max_loads:
            self._loads.popitem(last=False)

    def clear(self) -> None:
        """Drop all copies and counts."""
        for ref in list(self._copies):
            self._drop(ref)
        self._loads.clear()

    def close(self) -> None:
        """Return the device's memory."""
        self._leave_out()
        self._slots.close()

    def _gather(self, ref: ChunkRef, filling: Filling, block_ids: BlockIds) -> None:
        """Copy a chunk from its blocks to a free slot, or else to that of the least recently used copy."""
        self._drop(ref)
        if not self._free and self._copies:
            self._drop(next(iter(self._copies)))
        if not self._free:
            return
        slot = self._free[-1]
        payload_bytes = self._paged.layout.payload_bytes(ref.num_blocks)
        try:
            with self._slots.using(slot) as memory:
                self._paged.gather_on_device(block_ids, memory[:payload_bytes])
        except (RuntimeError, DeviceFullError) as error:
            self._give_up("gather", error)
            return
        self._free.pop()
        self._copies[ref] = _Copy(slot, filling)

    def _drop(self, ref: ChunkRef) -> None:
        """Drop a copy, if there is one. Its slot can be filled again at once, because the device works in order."""
        if ref in self._copies:
            self._free.append(self._copies.pop(ref).slot)

    def _give_up(self, what: str, error: Exception) -> None:
        """Stop using the tier after an error, because a failed device keeps failing."""
        self._leave_out()
        logger.warning(
            "the GPU tier is left out from now on: cannot %s a chunk on %s: %s", what, self._paged.device, error
        )

    def _leave_out(self) -> None:
        """Drop all slots, so that no more chunks are copied."""
        self._copies.clear()
        self._free.clear()
