"""A step's loads and stores, advanced by the model's own layers as it comes to them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.keys import PrefixKey
from kvstore.transfer.layerwise import LayerLoad, LayerStore
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StoreJob


class LayeredLoad:
    """Loads that a model's forward pass waits for, layer by layer. For the model's thread."""

    def __init__(self, mover: Mover, jobs: list[LoadJob]) -> None:
        self.jobs = jobs
        self.waited_s = 0.0
        self._num_layers = mover.paged.layout.num_layers
        self._done_layers = 0
        self._load = LayerLoad(mover, jobs)

    def reach(self, layer: int) -> None:
        """Bring all layers up to this one, which the model is about to use."""
        begin_s = time.perf_counter()
        for number in range(self._done_layers, layer + 1):
            self._load.move(number)
            self._done_layers = number + 1
        self.waited_s += time.perf_counter() - begin_s

    def finish(self) -> LoadResult:
        """End it, after the forward pass: if that did not ask for every layer, it computed on what was not there."""
        result = self._load.finish()
        if self._done_layers < self._num_layers:
            return LoadResult({job.step.ref.prefix_key for job in self.jobs}, result.lost)
        return result


class LayeredStore:
    """Stores of what a forward pass computes, layer by layer. For the model's thread."""

    def __init__(self, mover: Mover, jobs: Sequence[StoreJob]) -> None:
        self._store = LayerStore(mover, jobs)
        self._num_layers = mover.paged.layout.num_layers
        self._computed: set[int] = set()
        self._done_layers = 0

    def reach(self, layer: int) -> None:
        """Take what can be taken in order, now that this layer has been computed."""
        self._computed.add(layer)
        while self._done_layers in self._computed:
            self._move()

    def finish(self, *, trusted: bool) -> set[PrefixKey]:
        """Take what is left, after the forward pass; all of it fails if it is not to be ``trusted``."""
        while trusted and self._done_layers < self._num_layers:
            self._move()
        return self._store.finish(trusted=trusted)

    def _move(self) -> None:
        self._store.move(self._done_layers)
        self._done_layers += 1
