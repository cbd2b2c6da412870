"""Slots in device memory, and the order of work on them across CUDA streams.

The host launches work and runs ahead of the device, so uses of a slot are ordered on the device: each use records an
event, and the next one, on any stream, waits for it there and not on the host.

The memory belongs to PyTorch, whose allocator must know which streams use it. Otherwise the memory of a closed pool
could be allocated again while a kernel still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvstore.paged.streams import DeviceEvent, Streams


class DeviceSlots:
    """``num_slots`` slots of ``slot_bytes`` each on one device, allocated at once. For one thread at a time.

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
