"""Sizes of the GPU steps: full sizes on a GPU, and small ones for tests of the bench itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvstore.tools.bench.geometry import Geometry

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes and numbers of rounds.

    Attributes:
        device: device of the paged cache.
        batch_bytes: bytes moved by one call, in whole chunks.
        rounds: samples of each path, warm-up excluded.
        model_steps: steps of the computing model in each mode.
        model_side: rows of the model's matrices.
        products: matrix products in one step.
        pool_bytes: bytes pinned while graphs are captured.
        pinned_bytes: bytes pinned in pieces of each size.
        seeds: number of random orders.
        layers: maximum layers of a geometry; None for no limit.
    """

    device: torch.device
    batch_bytes: int = 192 * MIB
    rounds: int = 9
    model_steps: int = 300
    model_side: int = 4096
    products: int = 48
    pool_bytes: int = 16 << 30
    pinned_bytes: int = 2 << 30
    seeds: int = 24
    layers: int | None = None

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


def make_scale(device: torch.device, *, small: bool) -> Scale:
    """Return the scale of a GPU, or a small one that takes seconds on a CPU."""
    if not small:
        return Scale(device)
    return Scale(
        device,
        batch_bytes=2 * MIB,
        rounds=3,
        model_steps=12,
        model_side=32,
        products=2,
        pool_bytes=8 * MIB,
        pinned_bytes=8 * MIB,
        seeds=2,
        layers=2,
    )
