"""Slowdown of a computing model by concurrent saves and loads: step times with and without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count as numbers
from time import sleep

from kvstore.adapters.vllm.plan import Fetch
from kvstore.adapters.vllm.worker.background import Background
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.bed import Bed
from kvstore.tools.bench.gpu.figures import MS, Figure, count, duration, percentile
from kvstore.tools.bench.gpu.model import Model
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.samples import BenchError, require
from kvstore.tools.processes import wait_until

P99_GOAL = 1.05
MODES = ("alone", "with saves", "with loads", "with both")
_TURNS = 6  # turns of each mode, so that a machine that slows down affects all modes
_WARM_UP_STEPS = 5
_TIMEOUT_S = 20.0
_POLL_S = 0.001


class Traffic:
    """Saves and loads of one chunk per step, on the background threads that a vLLM worker uses.

    Saved blocks and loaded blocks are two halves of the cache. At most two saves and two loads are in flight.
    """

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._background = Background(bed.mover)
        self.source = bed.new_batch()
        bed.store(0, self.source)
        self.target = bed.workbench.other_blocks(self.source)
        self._stores, self._loads = bed.stores(1, self.source), bed.loads(0, self.target)
        self._numbers = numbers(1)
        self._saving = self._loading = 0
        self.saved = self.loaded = 0

    def save(self) -> None:
        """Start to save the next chunk, unless two saves are in flight."""
        if self._saving < 2:
            job = self._stores[(self.saved + self._saving) % len(self._stores)]
            self._saving += 1
            self._background.save(next(self._numbers), [job], ())

    def load(self) -> None:
        """Start to load the next chunk, unless two loads are in flight."""
        if self._loading < 2:
            job = self._loads[(self.loaded + self._loading) % len(self._loads)]
            self._loading += 1
            self._background.fetch(Fetch(next(self._numbers), "bench", [job]))

    def take(self) -> None:
        """Collect finished saves and loads, as a worker does once per step.

        Raises:
            BenchError: a chunk was not moved.
        """
        saved, fetched = self._background.take_saved(), self._background.take_fetched()
        require(not any(ended.failed for ended in saved), "a chunk was not saved beside the model")
        require(not any(ended.result.failed for ended in fetched), "a chunk was not loaded beside the model")
        self._saving, self.saved = self._saving - len(saved), self.saved + len(saved)
        self._loading, self.loaded = self._loading - len(fetched), self.loaded + len(fetched)

    def drain(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            BenchError: a save or load did not end.
        """
        if not wait_until(self._has_ended, _TIMEOUT_S, every_s=_POLL_S):
            raise BenchError(f"{self._saving} saves, {self._loading} loads did not end within {_TIMEOUT_S:.0f} s")

    def _has_ended(self) -> bool:
        self.take()
        return not (self._saving or self._loading)

    def check(self) -> None:
        """Move the chunks that were not moved yet, and compare every byte.

        Raises:
            BenchError: something differs.
        """
        while self.saved + self._saving < len(self._stores) or self.loaded + self._loading < len(self._loads):
            self.save()
            self.load()
            sleep(_POLL_S)
            self.take()
        self.drain()
        self._bed.workbench.check(self.source, self.target)
        self._bed.check_slots(1)

    def close(self) -> None:
        """End the threads."""
        self._background.stop()
        self._background.wait(_TIMEOUT_S)


def measure_beside(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Measure p50 and p99 of a step alone, with saves, with loads, and with both; the step alone is the limit.

    Raises:
        BenchError: a chunk was not moved, or a byte differs.
    """
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        traffic = opened.enter_context(closing(Traffic(bed)))
        model = Model(scale)
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        each = max(2, scale.model_steps // _TURNS)
        for _ in range(_TURNS):
            for mode in MODES:
                times[mode] += _steps(model, traffic, mode, each)
        saved, loaded = traffic.saved, traffic.loaded
        traffic.check()
    for mode in MODES:
        for share in (50, 99):
            goal = P99_GOAL if mode == "with saves" and share == 99 else None
            name = f"{geometry.name}: step {mode}, p{share}"
            value_s, limit_s = (percentile(times[of], share) for of in (mode, "alone"))
            yield duration(name, value_s, limit_s, MS, goal, more={"samples_s": times[mode]})
    steps = 2 * _TURNS * (_WARM_UP_STEPS + each)
    yield count(f"{geometry.name}: chunks saved in steps with saves", saved, steps, None)
    yield count(f"{geometry.name}: chunks loaded in steps with loads", loaded, steps, None)


def _steps(model: Model, traffic: Traffic, mode: str, num_steps: int) -> list[float]:
    saves, loads = mode in {"with saves", "with both"}, mode in {"with loads", "with both"}

    def before() -> None:
        if loads:
            traffic.load()

    def behind() -> None:
        if saves:
            traffic.save()
        traffic.take()

    taken = [model.step(before=before, behind=behind) for _ in range(_WARM_UP_STEPS + num_steps)]
    traffic.drain()
    return taken[_WARM_UP_STEPS:]
