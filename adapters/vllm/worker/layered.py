"""A step's loads and stores layer by layer, as the model reaches its layers."""

from __future__ import annotations

from kvstore.transfer.layerwise import LayerLoad
from kvstore.transfer.mover import LoadJob, LoadResult, Mover
from kvstore.transfer.stopwatch import Stopwatch


class LayeredLoad:
    """Loads that a model's forward pass waits for, layer by layer. For the model's thread."""

    def __init__(self, mover: Mover, jobs: list[LoadJob]) -> None:
        self.jobs = jobs
        self.watch = Stopwatch(mover.paged)
        self._num_layers = mover.paged.layout.num_layers
        self._done_layers = 0
        self._load = LayerLoad(mover, jobs)

    def reach(self, layer: int) -> None:
        """Load all layers up to this one, which the model is about to use."""
        with self.watch:
            for number in range(self._done_layers, layer + 1):
                self._load.move(number)
                self._done_layers = number + 1

    def finish(self) -> LoadResult:
        """End the load after the forward pass; all of it fails if the model computed without asking for every layer."""
        result = self._load.finish()
        if self._done_layers < self._num_layers:
            return LoadResult({job.step.ref.prefix_key for job in self.jobs}, result.lost)
        return result


class LayerOrder:
    """The layers of one forward pass, put into the order of the layout."""

    def __init__(self) -> None:
        self._computed: set[int] = set()
        self._done_layers = 0

    def reach(self, layer: int) -> range:
        """Return the layers that can be taken now that this one has been computed."""
        first_layer = self._done_layers
        self._computed.add(layer)
        while self._done_layers in self._computed:
            self._done_layers += 1
        return range(first_layer, self._done_layers)

    def rest(self, num_layers: int) -> range:
        """Return the layers that are left when all have been computed."""
        return range(self._done_layers, num_layers)
