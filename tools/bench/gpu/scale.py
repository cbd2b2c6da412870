"""How much the steps of a visit move: all of it on a GPU, little where only the bench itself is tested."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvstore.tools.bench.geometry import Geometry

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes and numbers of rounds.

    Attributes:
        device: where the paged cache is.
        batch_bytes: moved by one call, in whole chunks.
        rounds: samples of each path, warm-up excluded.
        model_steps: steps of the computing model in each mode.
        model_side: rows of the model's matrices.
        products: of matrices in one step.
        pool_bytes: pinned while graphs are captured.
        pinned_bytes: pinned in pieces of each size.
        seeds: random orders that are tried.
        layers: layers of every geometry at most; None leaves them.
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
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def fit(self, geometry: Geometry) -> Geometry:
        """A geometry with no more layers than this scale takes."""
        return geometry if self.layers is None else replace(geometry, layers=min(self.layers, geometry.layers))

    def batch_chunks(self, geometry: Geometry) -> int:
        """Chunks that one call moves: at least two, and no more than 64."""
        return min(max(2, self.batch_bytes // geometry.chunk_bytes), 64)

    def wait(self) -> None:
        """Wait for everything that the device was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def make_scale(device: torch.device, *, small: bool) -> Scale:
    """The scale of a GPU, or one that takes seconds on a CPU."""
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
