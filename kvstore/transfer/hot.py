"""Chunks that are loaded again and again, kept on the device: such a load does not pass the host.

A copy of what memory holds, and nothing else knows of it: not the index, so it can only make a load faster, and never
right or wrong. Each worker decides for itself. A copy counts for one content of one slot: whatever removes a chunk, or
stores or loads it again, gives it another, so that no removal has to be told here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import TierError

if TYPE_CHECKING:
    from kvstore.paged.base import BlockIds, PagedKV
    from kvstore.tiers.cpu import Filling
    from kvstore.tiers.gpu.tier import GpuTier

logger = logging.getLogger(__name__)

PROMOTE_AT = 2  # loads of a chunk from memory after which it is worth a place
_REMEMBERED_PER_SLOT = 8


class HotChunks:
    """What the GPU tier holds, and what is on its way to deserve it. For the model's thread only.

    Args:
        gpu: a tier on the device of ``paged``; ``close`` closes it.
        paged: the model's KV cache.
    """

    def __init__(self, gpu: GpuTier, paged: PagedKV) -> None:
        self._gpu = gpu
        self._paged = paged
        self._order: OrderedDict[ChunkRef, Filling] = OrderedDict()  # held: copies of what; the longest unused first
        self._loads: OrderedDict[ChunkRef, int] = OrderedDict()  # of chunks that are not held
        self._max_loads = _REMEMBERED_PER_SLOT * (gpu.capacity_bytes // paged.layout.slot_bytes)
        self._is_broken = False

    def scatter(self, ref: ChunkRef, filling: Filling, block_ids: BlockIds, first_block: int) -> bool:
        """Load a chunk's blocks if what memory holds of it now was copied. False if it must come from memory."""
        if self._is_broken or ref not in self._order:
            return False
        if self._order[ref] != filling:  # it was removed since, or came again
            del self._order[ref]
            self._gpu.remove([ref])
            return False
        try:
            outcome = self._gpu.scatter(ref, self._paged, block_ids, first_block)
        except TierError as error:
            self._give_up(error)
            return False
        self._order.move_to_end(ref)
        return outcome is Outcome.HIT

    def note_load(self, ref: ChunkRef, filling: Filling, block_ids: BlockIds) -> None:
        """A whole chunk has just been loaded from memory to these blocks: the second time, keep it."""
        loads = self._loads.pop(ref, 0) + 1
        if loads >= PROMOTE_AT:
            self._promote(ref, filling, block_ids)
            return
        self._loads[ref] = loads
        if len(self._loads) > self._max_loads:
            self._loads.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self._loads.clear()
        self._gpu.clear()

    def close(self) -> None:
        """Give the device's memory back."""
        self._order.clear()
        self._gpu.close()

    def _promote(self, ref: ChunkRef, filling: Filling, block_ids: BlockIds) -> None:
        if self._is_broken:
            return
        try:
            outcome = self._gpu.gather(ref, self._paged, block_ids)
            if outcome is Outcome.FULL and self._order:
                oldest, _ = self._order.popitem(last=False)
                self._gpu.remove([oldest])
                outcome = self._gpu.gather(ref, self._paged, block_ids)
        except TierError as error:
            self._give_up(error)
            return
        if outcome is Outcome.STORED:
            self._order[ref] = filling

    def _give_up(self, error: TierError) -> None:
        """A device that fails once goes on failing."""
        self._is_broken = True
        self._order.clear()
        logger.warning("the GPU tier is left out from now on: %s", error)
