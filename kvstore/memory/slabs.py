"""Pool of memory cut into equal slots, populated before it is needed, and pinned if a GPU copies to and from it.

The pool is mapped once, requests huge pages on the GPU's NUMA node, and is prepared piece by piece (``preparing.py``).
Slots start at page boundaries, as direct I/O requires. The index decides which chunk owns a slot.
"""

from __future__ import annotations

import math
import mmap

import torch

from kvstore.memory.mapped import keep_from_children, map_bytes
from kvstore.memory.numa import node_near, prefer_node
from kvstore.memory.pinning import Pinner, find_pinner
from kvstore.memory.preparing import Pace, Preparation, pace_for
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ConfigError
from kvstore.model.layout import ALIGNMENT_BYTES, round_up

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
