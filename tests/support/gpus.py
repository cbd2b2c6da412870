"""A paged cache on a device that runs asynchronously to the host: a real GPU, or one that a CPU simulates.

Tests of the order of work are written once and run on both: on the CPU everywhere, on CUDA where there is a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from kvstore.memory.slabs import SlabPool
from kvstore.model.chunks import ByteArray
from kvstore.paged.base import BlockIds, PagedKV
from kvstore.paged.binding import bind_paged_kv
from support.late_device import LateDevice, late_paged

BLOCKS, BLOCK_TOKENS, CHUNK_BLOCKS, LAYERS, SLOTS = 64, 16, 4, 3, 10
WAIT_CYCLES = 40_000_000  # 20 to 40 ms
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS


class Gpu(ABC):
    """A cache in which every byte of a block is one number, and slots in host memory.

    Args:
        dtype: of the cache's elements.
        device: where its tensors are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        shape = (BLOCKS, 2, BLOCK_TOKENS, 8, 64)
        caches = {f"l{n}": torch.zeros(shape, dtype=torch.uint8, device=device).to(dtype) for n in range(LAYERS)}
        self._bytes = [cache.view(torch.uint8).view(BLOCKS, -1) for cache in caches.values()]
        self.paged = self._bind(caches)
        self.layout = self.paged.layout
        self.size_bytes = self.layout.payload_bytes(CHUNK_BLOCKS)

    @abstractmethod
    def _bind(self, caches: Mapping[str, torch.Tensor]) -> PagedKV: ...

    @abstractmethod
    def launch(self, work: Callable[[], object]) -> None:
        """Give work to the current stream."""

    @abstractmethod
    def hold_up(self) -> None:
        """Delay the current stream."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all work."""

    @abstractmethod
    def slots(self) -> list[ByteArray]:
        """Return slots in host memory, pinned on a real device."""

    @property
    @abstractmethod
    def is_behind(self) -> bool:
        """True if nothing has waited for the work of the current stream."""

    def fill(self, ids: BlockIds, value: int, layers: range = range(LAYERS)) -> None:
        """Launch the model's writes to some blocks."""
        where = [int(block) for block in ids]
        for layer in layers:
            for block in where:
                row = self._bytes[layer][block]
                self.launch(lambda row=row: row.fill_(value))  # type: ignore[misc]

    def read(self, ids: BlockIds, layers: range = range(LAYERS)) -> Callable[[], set[int]]:
        """Launch kernels that read blocks. Returns a function that, after ``wait``, gives the numbers they saw."""
        edges = []
        for layer in layers:
            for block in ids:
                row = self._bytes[layer][int(block)]
                found = torch.zeros(2, dtype=torch.uint8, device=row.device)
                self.launch(lambda row=row, found=found: found.copy_(torch.stack((row.min(), row.max()))))  # type: ignore[misc]
                edges.append(found)
        return lambda: {number for found in edges for number in found.tolist()}


class CudaGpu(Gpu):
    """A cache on a CUDA device. Every kernel has been loaded, as loading one would wait for the whole device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("cuda", torch.cuda.current_device()))
        self._pool = SlabPool(SLOTS, self.layout.slot_bytes, self.paged.device)
        assert self._pool.wait_populated(60.0)
        slots, ids = self.slots(), np.arange(CHUNK_BLOCKS, dtype=np.int64)
        self.fill(ids, 1)
        self.paged.gather(ids, slots[0])
        self.paged.scatter(ids[:2], slots[0], CHUNK_BLOCKS, 1)
        self.paged.gather_layers(range(1), [self.paged.chunk(ids, slots[0])])
        self.paged.scatter_layers(range(1), [self.paged.chunk(ids, slots[0])])
        self.read(ids)()
        self.wait()

    def _bind(self, caches: Mapping[str, torch.Tensor]) -> PagedKV:
        return bind_paged_kv(caches, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS)

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def hold_up(self) -> None:
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.synchronize()

    def slots(self) -> list[ByteArray]:
        return [self._pool.slot(number) for number in range(SLOTS)]

    @property
    def is_behind(self) -> bool:
        return not torch.cuda.current_stream().query()

    def close(self) -> None:
        self.wait()
        self._pool.close()


class LateGpu(Gpu):
    """A cache on a device that a CPU simulates, always late."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.late = LateDevice(seed, eagerness=0.1)
        self._waits: int | None = None
        super().__init__(dtype, torch.device("cpu"))
        self._slots = [np.zeros(self.layout.slot_bytes, np.uint8) for _ in range(SLOTS)]

    def _bind(self, caches: Mapping[str, torch.Tensor]) -> PagedKV:
        return late_paged(self.late, caches, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS)

    def launch(self, work: Callable[[], object]) -> None:
        self.late.current.launch(work)

    def hold_up(self) -> None:
        """Note the waits so far, for ``is_behind``; the device is late anyway."""
        if self._waits is None:
            self._waits = self._num_waits

    def wait(self) -> None:
        self.late.run_all()

    def slots(self) -> list[ByteArray]:
        return self._slots

    @property
    def is_behind(self) -> bool:
        return self._waits == self._num_waits

    @property
    def _num_waits(self) -> int:
        return self.late.counts["reach"] + self.late.counts["wait"]


@contextmanager
def opened(kind: str, dtype: torch.dtype, seed: int = 0) -> Iterator[Gpu]:
    """Open a cache on a device of a kind, ``cuda`` or ``late``."""
    if kind == "late":
        yield LateGpu(dtype, seed)
        return
    gpu = CudaGpu(dtype)
    try:
        yield gpu
    finally:
        gpu.close()
