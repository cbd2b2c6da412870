"""Ground of the GPU steps: their sizes, a paged cache with a pool of pinned slots, and a model that computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from kvstore.index.plans import LoadStep, Place, StoreStep
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.paged.base import BlockIds
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.samples import require
from kvstore.tools.bench.workbench import Workbench
from kvstore.transfer.mover import LoadJob, Mover, StoreJob

MIB = 1 << 20
_TIMEOUT_S = 60.0
_KEY_BYTES = 16
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Scale:
    """Device, sizes and numbers of rounds of a run, and its folder.

    Attributes:
        device: device of the paged cache.
        batch_bytes: bytes moved by one call, in whole chunks.
        long_batch_bytes: the same for a long prompt.
        rounds: samples of each path, warm-up excluded.
        model_steps: steps of the computing model in each mode.
        model_side: rows of the model's matrices.
        products: matrix products in one step.
        pool_bytes: bytes pinned while graphs are captured.
        pinned_bytes: bytes pinned in pieces of each size.
        seeds: number of random orders.
        layers: maximum layers of a geometry; None for no limit.
        is_small: little data, for tests of the bench itself.
        folder: folder of results and traces.
    """

    device: torch.device
    batch_bytes: int = 192 * MIB
    long_batch_bytes: int = 1024 * MIB
    rounds: int = 9
    model_steps: int = 300
    model_side: int = 4096
    products: int = 48
    pool_bytes: int = 16 << 30
    pinned_bytes: int = 2 << 30
    seeds: int = 24
    layers: int | None = None
    is_small: bool = False
    folder: Path = Path("bench-results")

    @property
    def is_cuda(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    def fit(self, geometry: Geometry) -> Geometry:
        """Return the geometry, with its layers reduced to the limit of this scale."""
        return geometry if self.layers is None else replace(geometry, layers=min(self.layers, geometry.layers))

    def batch_chunks(self, geometry: Geometry) -> int:
        """Return the chunks that one call moves, at least 2 and at most 64."""
        return min(max(2, self.batch_bytes // geometry.chunk_bytes), 64)

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def make_scale(device: torch.device, *, small: bool, folder: Path = Path("bench-results")) -> Scale:
    """Return the scale of a GPU, or a small one that takes seconds on a CPU."""
    if not small:
        return Scale(device, folder=folder)
    batches = {"batch_bytes": 2 * MIB, "long_batch_bytes": 4 * MIB}
    sizes = {**batches, "pool_bytes": 8 * MIB, "pinned_bytes": 8 * MIB, "layers": 2, "seeds": 2}
    return Scale(device, **sizes, rounds=3, model_steps=12, model_side=32, products=2, is_small=True, folder=folder)


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
        require(self._pool.wait_populated(_TIMEOUT_S), f"the pool was not there within {_TIMEOUT_S:.0f} s")
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
        return [StoreJob(StoreStep(ref, slot, ()), ids) for ref, slot, ids in self._chunks(half, block_ids)]

    def loads(self, half: int, block_ids: torch.Tensor) -> list[LoadJob]:
        """Return jobs that load a batch from half of the pool into these blocks."""
        return [LoadJob(LoadStep(ref, slot, Place.MEMORY), ids, 0) for ref, slot, ids in self._chunks(half, block_ids)]

    def payloads(self, half: int) -> list[ByteArray]:
        """Return the slots of half of the pool."""
        return [self._pool.slot(slot) for slot in self._slots(half)]

    def of_chunks(self, block_ids: torch.Tensor) -> list[BlockIds]:
        """Return the blocks of a batch, grouped by chunk."""
        return list(block_ids.view(self.num_chunks, -1).numpy())

    def store(self, half: int, block_ids: torch.Tensor) -> None:
        """Store a batch, and wait until all of it is in host memory."""
        require(not self.mover.store(self.stores(half, block_ids)), "a chunk was not stored")
        self.paged.streams.wait()

    def load(self, half: int, block_ids: torch.Tensor) -> None:
        """Load a batch, and wait until all of it is in its blocks."""
        require(not self.mover.load(self.loads(half, block_ids)).failed, "a chunk was not loaded")
        self.paged.streams.wait()

    def check_slots(self, half: int) -> None:
        """Load half of the pool to random blocks, and compare every byte of the cache."""
        block_ids, _ = self.workbench.destination()
        self.load(half, block_ids)
        self.workbench.check(block_ids)

    def _slots(self, half: int) -> Sequence[int]:
        return range(half * self.num_chunks, (half + 1) * self.num_chunks)

    def _chunks(self, half: int, block_ids: torch.Tensor) -> Iterator[tuple[ChunkRef, int, BlockIds]]:
        return zip(self._refs[half], self._slots(half), self.of_chunks(block_ids), strict=True)

    def _new_ref(self) -> ChunkRef:
        return ChunkRef(os.urandom(_KEY_BYTES), self.workbench.geometry.blocks_per_chunk)


class Model:
    """Model that steps like a decoding engine: it launches a whole step, and waits for its end before the next one.

    Args:
        scale: size of a step.
        more: work launched in every step after the products, as part of the graph.
    """

    def __init__(self, scale: Scale, more: Callable[[], object] = lambda: None) -> None:
        side = scale.model_side
        dtype = torch.bfloat16 if scale.is_cuda else torch.float32
        self._products = scale.products
        self._weights = torch.randn(side, side, device=scale.device, dtype=dtype) / side**0.5
        self._state = torch.randn(side, side, device=scale.device, dtype=dtype)
        self._next = torch.empty_like(self._state)
        self._more = more
        self._graph = _captured(self._compute, scale.device) if scale.is_cuda else None

    def step(
        self, *, before: Callable[[], object] = lambda: None, behind: Callable[[], object] = lambda: None
    ) -> float:
        """Take one step, and return the seconds until its end, the host work of the callbacks included.

        Args:
            before: called before the step is launched, as a worker starts its loads.
            behind: called after the launch, as a worker starts its saves.
        """
        begin_s = perf_counter()
        before()
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        behind()
        if self._graph is not None:
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # a spinning host would take a core
            end.record()
            end.synchronize()
        return perf_counter() - begin_s

    def _compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._state, self._weights, out=self._next)
            self._state.copy_(self._next)
        self._more()


def _captured(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture ``work`` as a graph, after the warm-up runs on a side stream that torch requires."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_STEPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
