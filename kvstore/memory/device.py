"""Slots in device memory, and the order of work on them across CUDA streams.

The host launches work and runs ahead of the device, so uses of a slot are put in order on the device: each use leaves
an event behind, and the next one, on whatever stream, waits for it there and not on the host.

The memory is PyTorch's, whose allocator must be told which streams use it: otherwise the memory of a pool that was
closed could be given to somebody else while a kernel still reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvstore.errors import ConfigError

_GIB = 2**30


class DeviceSlots:
    """``num_slots`` slots of ``slot_bytes`` each on one device, allocated at once. For one thread at a time.

    On the CPU work is done when its call returns, and there is nothing to put in order.

    Raises:
        ConfigError: the device has no room.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self._device = device
        self._pool = _allocate(num_slots, slot_bytes, device)
        self._last_uses: list[torch.cuda.Event] = []  # the end of each slot's last use, which implies earlier ones
        if device.type != "cpu":
            self._last_uses = [torch.cuda.Event() for _ in range(num_slots)]  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(device).synchronize()  # the memory may still be in use by work launched earlier

    @contextmanager
    def using(self, slot: int) -> Iterator[torch.Tensor]:
        """A slot's memory. What is launched inside, on the current stream, comes after all former work on the slot."""
        memory = self._pool[slot]
        if not self._last_uses:
            yield memory
            return
        stream, last_use = torch.cuda.current_stream(self._device), self._last_uses[slot]
        stream.wait_event(last_use)
        memory.record_stream(stream)
        try:
            yield memory
        finally:  # also if something raises: part of the work may have been launched
            last_use.record(stream)

    def close(self) -> None:
        """Give the memory back to torch's allocator, which lends it again when the last work on it is done."""
        self._pool = torch.empty(0, dtype=torch.uint8)


def _allocate(num_slots: int, slot_bytes: int, device: torch.device) -> torch.Tensor:
    """Device memory as uint8 ``[num_slots, slot_bytes]``.

    Outside inference mode, in which engines like to start: its tensors could not be written to by other threads.

    Raises:
        ConfigError: it says how much is free.
    """
    try:
        with torch.inference_mode(mode=False):
            return torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device)
    except (RuntimeError, TypeError) as error:  # a TypeError if the size is no 64-bit number
        free = f", of which {torch.cuda.mem_get_info(device)[0] / _GIB:.1f} are free" if device.type == "cuda" else ""
        raise ConfigError(
            f"cannot take {num_slots * slot_bytes / _GIB:.1f} GiB of the memory of {device}{free}: lower "
            "max_local_gpu_size, or what the engine takes (vLLM: --gpu-memory-utilization)"
        ) from error
