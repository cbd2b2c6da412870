"""A mover over a device that does nothing until the host waits for it, for tests of the order of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.transfer.hot import HotChunks
from kvstore.transfer.lane import Lane
from kvstore.transfer.mover import LoadJob, Mover, StoreJob, as_block_ids
from support.gate import HANG_GUARD_S
from support.late_device import LateDevice, late_paged
from support.layer_calls import PartTier
from support.rig import BLOCK, BLOCKS_PER_CHUNK, CHUNK, SLOT_BYTES, Rig

TARGET = 60  # chunks are loaded to the blocks from here on downwards
LAYERS = 5
FULL = torch.OutOfMemoryError("CUDA out of memory")


class Bench:
    """A mover over a late device, in whose cache block ``b`` holds ``b`` in every byte."""

    @classmethod
    @contextmanager
    def running(cls, copy_bytes: int = 1, device: LateDevice | None = None) -> Iterator[Bench]:
        """Yield a bench for a test, and close it even if the test has held up or broken something."""
        bench = cls(copy_bytes, device or LateDevice(1, eagerness=0.0))
        yield bench
        bench.device.stalled = []
        bench.device.failures.clear()
        assert bench.mover.close(HANG_GUARD_S)

    def __init__(self, copy_bytes: int, device: LateDevice) -> None:
        self.device = device
        self.rig = Rig(num_layers=LAYERS)
        self.paged = late_paged(
            self.device, self.rig.caches, num_blocks=self.rig.num_blocks, block_tokens=BLOCK, chunk_tokens=CHUNK,
            staging_bytes=SLOT_BYTES, copy_bytes=copy_bytes,
        )  # fmt: skip
        self.cpu = LabelledPool(SlabPool(8, SLOT_BYTES), self.paged.streams)
        self.tier = PartTier(self.rig.layout)
        self.written: list[tuple[ChunkRef, bool]] = []
        lanes = {
            Place.DISK: Lane(
                self.cpu, self.tier, lambda ref, outcome: self.written.append((ref, outcome is Outcome.STORED))
            )
        }
        self.hot = HotChunks(self.paged, 4 * SLOT_BYTES)
        self.mover = Mover(self.paged, self.cpu, lanes, self.hot)
        for block in range(self.rig.num_blocks):
            self.model_writes(block, block)
        self.device.run_all()
        self.device.counts.clear()

    def drain(self, worker: StoreWorker) -> bool:
        """Drain the worker while the device continues."""
        self.device._eagerness = 0.7
        try:
            return worker.drain(5)
        finally:
            self.device._eagerness = 0.0

    def model_writes(self, block: int, value: int) -> None:
        """Launch kernels of the model that write a block."""
        for layer in range(LAYERS):
            self.model_computes(layer, block, value)

    def model_computes(self, layer: int, block: int, value: int) -> None:
        """Launch a kernel of the model that writes one layer."""
        self.device.current.launch(partial(self.rig.caches[f"layer.{layer}"][block].fill_, value))

    def overwrite(self, number: int) -> None:
        """Launch the model's next kernels, which write other tokens to the blocks of chunk ``number``."""
        for block in range(BLOCKS_PER_CHUNK * number, BLOCKS_PER_CHUNK * (number + 1)):
            self.model_writes(block, 0xEE)

    def held(self) -> list[int]:
        """Return the values in the target's blocks once all work is done; -1 for a mixture."""
        self.device.run_all()
        values = [set(self.rig.held(block).tolist()) for block in range(TARGET, TARGET - BLOCKS_PER_CHUNK, -1)]
        return [next(iter(value)) if len(value) == 1 else -1 for value in values]

    @property
    def host_waits(self) -> int:
        return self.device.counts["reach"] + self.device.counts["wait"]


def ref_of(number: int) -> ChunkRef:
    return ChunkRef(bytes([number]) * 16, BLOCKS_PER_CHUNK)


def blocks_of(number: int) -> list[int]:
    return list(range(BLOCKS_PER_CHUNK * number, BLOCKS_PER_CHUNK * (number + 1)))


def store_job(number: int, slot: int, *, write: bool = False) -> StoreJob:
    return StoreJob(StoreStep(ref_of(number), slot, (Place.DISK,) if write else ()), as_block_ids(blocks_of(number)))


def load_job(number: int, slot: int, source: Place = Place.MEMORY) -> LoadJob:
    ids = as_block_ids(range(TARGET, TARGET - BLOCKS_PER_CHUNK, -1))
    return LoadJob(LoadStep(ref_of(number), slot, source), ids, 0)
