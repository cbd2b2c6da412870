"""Test bed of the GPU paths: a paged cache, a pool of pinned slots, and a mover between them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvstore.catalog.plans import LoadStep, Place, StoreStep
from kvstore.chunks import ByteArray, ChunkRef
from kvstore.memory.labelled import LabelledPool
from kvstore.memory.slabs import SlabPool
from kvstore.paged.base import BlockIds
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.samples import BenchError, require
from kvstore.tools.bench.workbench import Workbench
from kvstore.transfer.mover import LoadJob, Mover, StoreJob

_TIMEOUT_S = 60.0
_KEY_BYTES = 16


class Bed:
    """A workbench on the device, and a mover over a pool with room for two batches.

    A batch is stored into one half of the pool's slots, 0 or 1. ``close`` ends the mover's threads.
    """

    def __init__(self, geometry: Geometry, scale: Scale) -> None:
        fitted = scale.fit(geometry)
        self.workbench = Workbench(fitted, scale.batch_chunks(fitted), device=scale.device)
        self.paged = self.workbench.paged
        self.num_chunks = self.workbench.num_chunks
        self._pool = SlabPool(2 * self.num_chunks, self.paged.layout.slot_bytes, self.paged.device)
        if not self._pool.wait_populated(_TIMEOUT_S):
            raise BenchError(f"the pool was not there within {_TIMEOUT_S:.0f} s")
        self.mover = Mover(self.paged, LabelledPool(self._pool, self.paged.streams), {})
        self._refs = [[self._new_ref() for _ in range(self.num_chunks)] for _ in range(2)]

    def close(self) -> None:
        """End the mover and its pool."""
        self.mover.close(_TIMEOUT_S)

    def new_batch(self) -> torch.Tensor:
        """Put new random KV into random blocks, and return their ids."""
        slots = self.workbench.new_batch().view(-1, self.workbench.geometry.block_tokens)
        self._refs = [[self._new_ref() for _ in refs] for refs in self._refs]
        return slots[:, 0] // self.workbench.geometry.block_tokens

    def stores(self, half: int, block_ids: torch.Tensor) -> list[StoreJob]:
        """Return jobs that store a batch from its blocks into half of the pool."""
        return [
            StoreJob(StoreStep(ref, slot, ()), ids)
            for ref, slot, ids in zip(self._refs[half], self._slots(half), self.of_chunks(block_ids), strict=True)
        ]

    def loads(self, half: int, block_ids: torch.Tensor) -> list[LoadJob]:
        """Return jobs that load a batch from half of the pool into these blocks."""
        return [
            LoadJob(LoadStep(ref, slot, Place.MEMORY), ids, 0)
            for ref, slot, ids in zip(self._refs[half], self._slots(half), self.of_chunks(block_ids), strict=True)
        ]

    def payloads(self, half: int) -> list[ByteArray]:
        """Return the slots of half of the pool."""
        return [self._pool.slot(slot) for slot in self._slots(half)]

    def of_chunks(self, block_ids: torch.Tensor) -> list[BlockIds]:
        """Return the blocks of a batch, grouped by chunk."""
        return list(block_ids.view(self.num_chunks, -1).numpy())

    def store(self, half: int, block_ids: torch.Tensor) -> None:
        """Store a batch, and wait until all of it is in host memory.

        Raises:
            BenchError: a chunk was not stored.
        """
        require(not self.mover.store(self.stores(half, block_ids)), "a chunk was not stored")
        self.paged.streams.wait()

    def load(self, half: int, block_ids: torch.Tensor) -> None:
        """Load a batch, and wait until all of it is in its blocks.

        Raises:
            BenchError: a chunk was not loaded.
        """
        require(not self.mover.load(self.loads(half, block_ids)).failed, "a chunk was not loaded")
        self.paged.streams.wait()

    def check_slots(self, half: int) -> None:
        """Load half of the pool to random blocks, and compare every byte of the cache.

        Raises:
            BenchError: something differs.
        """
        block_ids, _ = self.workbench.destination()
        self.load(half, block_ids)
        self.workbench.check(block_ids)

    def _slots(self, half: int) -> Sequence[int]:
        return range(half * self.num_chunks, (half + 1) * self.num_chunks)

    def _new_ref(self) -> ChunkRef:
        return ChunkRef(os.urandom(_KEY_BYTES), self.workbench.geometry.blocks_per_chunk)
