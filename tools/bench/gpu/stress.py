"""Stress test of background saves and loads while a model's graph keeps writing the blocks; every byte must be right.

As under vLLM, blocks are reused only after their save or load has been collected, and then immediately.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count as numbers

import torch

from kvstore.adapters.vllm.plan import Fetch
from kvstore.adapters.vllm.worker.background import Background
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.bed import Bed
from kvstore.tools.bench.gpu.figures import Figure, count
from kvstore.tools.bench.gpu.model import Model
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.samples import BenchError
from kvstore.tools.processes import wait_until

_VALUES = 250  # byte values, which cycle with the step's number
_TIMEOUT_S = 30.0
_POLL_S = 0.0005


class Stress:
    """Model that fills one chunk's blocks in each step, followed by the chunk's save and load.

    The chunks of a batch are filled, saved and loaded in turn. A chunk filled in a step is saved after that step. When
    the save has ended, its slot is loaded into other blocks, which are then read. Slot and blocks are right if they
    hold the value of the step that filled the chunk.
    """

    def __init__(self, bed: Bed, scale: Scale) -> None:
        self._bed, self._scale = bed, scale
        self._caches = [cache.view(torch.uint8).view(bed.paged.num_blocks, -1) for cache in bed.workbench.caches]
        source = bed.new_batch()
        target = bed.workbench.other_blocks(source)
        self._stores, self._loads = bed.stores(0, source), bed.loads(0, target)
        self._sources = [torch.from_numpy(ids).to(scale.device) for ids in bed.of_chunks(source)]
        self._targets = [torch.from_numpy(ids).to(scale.device) for ids in bed.of_chunks(target)]
        self._where = self._sources[0].clone()  # blocks that the graph fills, and below the value
        self._value = torch.zeros((), dtype=torch.uint8, device=scale.device)
        self._model = Model(scale, more=self._fill)
        self._background = Background(bed.mover)
        self._numbers = numbers(1)
        self._step = 0
        self._free = list(range(bed.num_chunks))
        self._saving: list[tuple[int, int]] = []  # chunk and value, in order
        self._loading: dict[int, tuple[int, int]] = {}  # by the number of the fetch
        self.checked = self.wrong = 0

    def step(self) -> None:
        """Fill and save a free chunk, if there is one, and continue with finished saves and loads."""
        chunk = self._free.pop(0) if self._free else None
        if chunk is None:
            self._model.step(behind=self._take)
            return
        self._step += 1
        value = self._step % _VALUES + 1
        self._where.copy_(self._sources[chunk])
        self._value.fill_(value)

        def save() -> None:
            self._saving.append((chunk, value))
            self._background.save(self._step, [self._stores[chunk]], ())
            self._take()

        self._model.step(behind=save)

    def drain(self) -> None:
        """Wait until everything has been saved, loaded and compared.

        Raises:
            BenchError: a save or load did not end.
        """
        if not wait_until(self._has_ended, _TIMEOUT_S, every_s=_POLL_S):
            raise BenchError(f"{len(self._saving)} saves, {len(self._loading)} loads do not end")

    def _has_ended(self) -> bool:
        self._take()
        return not (self._saving or self._loading)

    def close(self) -> None:
        """End the threads."""
        self._background.stop()
        self._background.wait(_TIMEOUT_S)

    def _fill(self) -> None:
        for cache in self._caches:
            cache.index_copy_(0, self._where, self._value.expand(len(self._where), cache.shape[1]))

    def _take(self) -> None:
        for saved in self._background.take_saved():
            chunk, value = self._saving.pop(0)
            self._note(is_right=not saved.failed and bool((self._slot(chunk) == value).all()))
            number = next(self._numbers)
            self._loading[number] = (chunk, value)
            self._background.fetch(Fetch(number, "stress", [self._loads[chunk]]))
        for fetched in self._background.take_fetched():
            chunk, value = self._loading.pop(fetched.fetch.number)
            parts = [cache.index_select(0, self._targets[chunk]) for cache in self._caches]
            edges = torch.stack([edge for part in parts for edge in (part.min(), part.max())])
            self._note(is_right=not fetched.result.failed and set(edges.tolist()) == {value})
            self._free.append(chunk)

    def _slot(self, chunk: int) -> torch.Tensor:
        size_bytes = self._bed.workbench.geometry.chunk_bytes
        return torch.from_numpy(self._bed.payloads(0)[chunk])[:size_bytes]

    def _note(self, *, is_right: bool) -> None:
        self.checked += 1
        self.wrong += not is_right


def check_stress(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Run the model with its saves and loads for ``scale.model_steps`` steps.

    Raises:
        BenchError: a chunk did not hold the value that its step had written.
    """
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        stress = opened.enter_context(closing(Stress(bed, scale)))
        for _ in range(scale.model_steps):
            stress.step()
        stress.drain()
    if stress.wrong or not stress.checked:
        raise BenchError(f"{stress.wrong} of {stress.checked} chunks saved and loaded beside a model were wrong")
    yield count("chunks right beside a model that writes", stress.checked, stress.checked)
