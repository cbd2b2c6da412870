"""Synthetic model: a loop of matrix products, as one CUDA graph on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from kvstore.tools.bench.gpu.scale import Scale

_WARM_UP_STEPS = 3


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
