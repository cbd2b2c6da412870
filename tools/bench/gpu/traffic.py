"""Saves and loads next to a computing model, on the background threads of a vLLM worker: their cost, and every byte.

As under vLLM, blocks are reused only after their save or load has been collected, and then immediately.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count as numbers
from time import sleep

import torch

from kvstore.adapters.vllm.plan import Fetch
from kvstore.adapters.vllm.worker.background import Background
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.bed import Bed, Model, Scale
from kvstore.tools.bench.gpu.figures import MS, Figure, count, duration, percentile
from kvstore.tools.bench.samples import require
from kvstore.tools.processes import wait_until
from kvstore.transfer.mover import LoadJob, StoreJob

P99_GOAL = 1.05
MODES = {"alone": (False, False), "with saves": (True, False), "with loads": (False, True), "with both": (True, True)}
_TURNS = 6  # counted turns of each mode, so that a machine that slows down affects all modes
_WARM_UP_STEPS = 5
_MOST_IN_FLIGHT = 2  # saves, and as many loads
_VALUES = 250  # byte values, which cycle with the step's number
_TIMEOUT_S = 30.0
_POLL_S = 0.0005


class _Moving:
    """Saves and loads in flight; a subclass says what follows when one has ended."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self._background = Background(bed.mover)
        self._numbers = numbers(1)
        self.saving = self.loading = 0

    def save(self, job: StoreJob) -> None:
        """Start to save a chunk."""
        self.saving += 1
        self._background.save(next(self._numbers), [job], ())

    def load(self, job: LoadJob) -> int:
        """Start to load a chunk, and return the number of the load."""
        self.loading += 1
        number = next(self._numbers)
        self._background.fetch(Fetch(number, "bench", [job]))
        return number

    def saved(self, *, failed: bool) -> None:
        """Note the end of the oldest save."""

    def loaded(self, number: int, *, failed: bool) -> None:
        """Note the end of a load."""

    def take(self) -> None:
        """Collect finished saves and loads, as a worker does once per step."""
        for saved in self._background.take_saved():
            self.saving -= 1
            self.saved(failed=bool(saved.failed))
        for fetched in self._background.take_fetched():
            self.loading -= 1
            self.loaded(fetched.fetch.number, failed=bool(fetched.result.failed))

    def drain(self) -> None:
        """Wait until nothing is in flight."""
        has_ended = wait_until(self._has_ended, _TIMEOUT_S, every_s=_POLL_S)
        require(has_ended, f"{self.saving} saves, {self.loading} loads did not end within {_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        """End the threads."""
        self._background.stop()
        self._background.wait(_TIMEOUT_S)

    def _has_ended(self) -> bool:
        self.take()
        return not (self.saving or self.loading)


class Traffic(_Moving):
    """Saves and loads of one chunk per step: saved blocks and loaded blocks are two halves of the cache."""

    def __init__(self, bed: Bed) -> None:
        super().__init__(bed)
        self.source = bed.new_batch()
        bed.store(0, self.source)
        self.target = bed.workbench.other_blocks(self.source)
        self._stores, self._loads = bed.stores(1, self.source), bed.loads(0, self.target)
        self.num_saved = self.num_loaded = 0

    def save_next(self) -> None:
        """Start to save the next chunk, unless enough saves are in flight."""
        if self.saving < _MOST_IN_FLIGHT:
            self.save(self._stores[(self.num_saved + self.saving) % len(self._stores)])

    def load_next(self) -> None:
        """Start to load the next chunk, unless enough loads are in flight."""
        if self.loading < _MOST_IN_FLIGHT:
            self.load(self._loads[(self.num_loaded + self.loading) % len(self._loads)])

    def saved(self, *, failed: bool) -> None:
        """Count a save."""
        require(not failed, "a chunk was not saved beside the model")
        self.num_saved += 1

    def loaded(self, number: int, *, failed: bool) -> None:
        """Count a load."""
        require(not failed, f"a chunk was not loaded beside the model, load {number}")
        self.num_loaded += 1

    def check(self) -> None:
        """Move the chunks that were not moved yet, and compare every byte."""
        while self.num_saved + self.saving < len(self._stores) or self.num_loaded + self.loading < len(self._loads):
            self.save_next()
            self.load_next()
            sleep(_POLL_S)
            self.take()
        self.drain()
        self.bed.workbench.check(self.source, self.target)
        self.bed.check_slots(1)


def measure_beside(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Measure p50 and p99 of a step alone, with saves, with loads, and with both; the step alone is the limit."""
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        traffic = opened.enter_context(closing(Traffic(bed)))
        model = Model(scale)
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        each = max(2, scale.model_steps // _TURNS)
        _freeze_garbage()
        opened.callback(gc.unfreeze)
        for turn in range(1 + _TURNS):
            for mode in MODES:
                taken = _steps(model, traffic, mode, each)
                times[mode] += taken if turn else []  # in the first turn the device's clock is settling
        saved, loaded = traffic.num_saved, traffic.num_loaded
        traffic.check()
    for mode in MODES:
        for share in (50, 99):
            goal = P99_GOAL if mode == "with saves" and share == 99 else None
            name = f"{geometry.name}: step {mode}, p{share}"
            value_s, limit_s = (percentile(times[of], share) for of in (mode, "alone"))
            yield duration(name, value_s, limit_s, MS, goal, more={"samples_s": times[mode]})
    steps = 2 * (1 + _TURNS) * (_WARM_UP_STEPS + each)
    yield count(f"{geometry.name}: chunks saved in steps with saves", saved, steps, None)
    yield count(f"{geometry.name}: chunks loaded in steps with loads", loaded, steps, None)


def _freeze_garbage() -> None:
    """Exempt all objects so far from garbage collection, as vLLM does when it has started: one takes over 0.1 s."""
    gc.collect()
    gc.freeze()


def _steps(model: Model, traffic: Traffic, mode: str, num_steps: int) -> list[float]:
    saves, loads = MODES[mode]

    def before() -> None:
        if loads:
            traffic.load_next()

    def behind() -> None:
        if saves:
            traffic.save_next()
        traffic.take()

    taken = [model.step(before=before, behind=behind) for _ in range(_WARM_UP_STEPS + num_steps)]
    traffic.drain()
    return taken[_WARM_UP_STEPS:]


class Stress(_Moving):
    """Model whose graph fills one chunk's blocks in each step, followed by the chunk's save and load.

    The chunks of a batch are filled, saved and loaded in turn. A chunk filled in a step is saved after that step. When
    the save has ended, its slot is loaded into other blocks, which are then read. Slot and blocks are right if they
    hold the value of the step that filled the chunk.
    """

    def __init__(self, bed: Bed, scale: Scale) -> None:
        super().__init__(bed)
        self._caches = [cache.view(torch.uint8).view(bed.paged.num_blocks, -1) for cache in bed.workbench.caches]
        source = bed.new_batch()
        target = bed.workbench.other_blocks(source)
        self._stores, self._loads = bed.stores(0, source), bed.loads(0, target)
        self._sources, self._targets = (
            [torch.from_numpy(ids).to(scale.device) for ids in bed.of_chunks(blocks)] for blocks in (source, target)
        )
        self._where = self._sources[0].clone()  # blocks that the graph fills, and below the value
        self._value = torch.zeros((), dtype=torch.uint8, device=scale.device)
        self._model = Model(scale, more=self._fill)
        self._step = 0
        self._free = list(range(bed.num_chunks))
        self._values: list[tuple[int, int]] = []  # chunk and value of the saves in flight, in order
        self._back: dict[int, tuple[int, int]] = {}  # and of the loads, by number
        self.checked = self.wrong = 0

    def step(self) -> None:
        """Fill and save a free chunk, if there is one, and continue with finished saves and loads."""
        if not self._free:
            self._model.step(behind=self.take)
            return
        chunk = self._free.pop(0)
        self._step += 1
        value = self._step % _VALUES + 1
        self._where.copy_(self._sources[chunk])
        self._value.fill_(value)

        def save() -> None:
            self._values.append((chunk, value))
            self.save(self._stores[chunk])
            self.take()

        self._model.step(behind=save)

    def saved(self, *, failed: bool) -> None:
        """Check the slot, and load it into other blocks."""
        chunk, value = self._values.pop(0)
        size_bytes = self.bed.workbench.geometry.chunk_bytes
        slot = torch.from_numpy(self.bed.payloads(0)[chunk])[:size_bytes]
        self._note(is_right=not failed and bool((slot == value).all()))
        self._back[self.load(self._loads[chunk])] = (chunk, value)

    def loaded(self, number: int, *, failed: bool) -> None:
        """Check the blocks, and free the chunk."""
        chunk, value = self._back.pop(number)
        parts = [cache.index_select(0, self._targets[chunk]) for cache in self._caches]
        edges = torch.stack([edge for part in parts for edge in (part.min(), part.max())])
        self._note(is_right=not failed and set(edges.tolist()) == {value})
        self._free.append(chunk)

    def _fill(self) -> None:
        for cache in self._caches:
            cache.index_copy_(0, self._where, self._value.expand(len(self._where), cache.shape[1]))

    def _note(self, *, is_right: bool) -> None:
        self.checked += 1
        self.wrong += not is_right


def check_stress(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Run the model with its saves and loads for ``scale.model_steps`` steps; each chunk must hold its step's value."""
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        stress = opened.enter_context(closing(Stress(bed, scale)))
        for _ in range(scale.model_steps):
            stress.step()
        stress.drain()
    is_right = bool(stress.checked) and not stress.wrong
    require(is_right, f"{stress.wrong} of {stress.checked} chunks saved and loaded beside a model were wrong")
    yield count("chunks right beside a model that writes", stress.checked, stress.checked)
