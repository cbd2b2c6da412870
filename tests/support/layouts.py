"""Paged KV caches of every layout, and the effect of a move between blocks, element by element.

The reference knows nothing of pages or rows of bytes: it walks a tensor's logical indices and takes the place of each
element from the strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore.paged.planes import LayerCache

B, H, N, D = 12, 3, 4, 5  # blocks, KV heads, tokens in a block, head size; odd ones on purpose
C = 2 * D
LAYERS = 3
Memory = npt.NDArray[np.uint8]
Caches = dict[str, LayerCache]


class Plane(NamedTuple):
    """One tensor of a layer, and its dimension that counts blocks: ``ratio`` of them to a manager's block."""

    tensor: torch.Tensor
    axis: int = 0
    ratio: int = 1


class Paged(NamedTuple):
    """The caches of a model, as they are registered, and the places of their blocks for the reference."""

    caches: Caches
    axis: int = 0
    ratio: int = 1

    def planes(self) -> list[Plane]:
        """Return all tensors."""
        return [
            Plane(part, self.axis, self.ratio)
            for cache in self.caches.values()
            for part in ([cache] if isinstance(cache, torch.Tensor) else cache)
        ]

    def memories(self) -> list[Memory]:
        """Return the bytes of every storage once, including gaps between the blocks."""
        storages = {plane.tensor.untyped_storage().data_ptr(): plane.tensor for plane in self.planes()}
        return [memory_of(tensor) for tensor in storages.values()]

    def fill(self, seed: int) -> None:
        """Put random bytes everywhere, NaNs included, as no code may look at values."""
        rng = np.random.default_rng(seed)
        for memory in self.memories():
            memory[:] = rng.integers(0, 256, len(memory), dtype=np.uint8)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the bytes of a tensor's whole storage."""
    memory: Memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return memory


def snapshot(paged: Paged) -> list[bytes]:
    """Return the contents of all storages."""
    return [memory.tobytes() for memory in paged.memories()]


def elements(plane: Plane, block: int) -> dict[tuple[int, ...], bytes]:
    """Return each element of a manager's block, by its place inside the block."""
    memory, item = memory_of(plane.tensor), plane.tensor.element_size()
    return {
        place: memory[begin : begin + item].tobytes()
        for place, begin in ((place, address * item) for place, address in _addresses(plane, block))
    }


def put_elements(plane: Plane, block: int, values: Mapping[tuple[int, ...], bytes]) -> None:
    """Write each element to its place in a manager's block."""
    memory, item = memory_of(plane.tensor), plane.tensor.element_size()
    for place, address in _addresses(plane, block):
        memory[address * item : (address + 1) * item] = np.frombuffer(values[place], np.uint8)


def _addresses(plane: Plane, block: int) -> list[tuple[tuple[int, ...], int]]:
    """Return the place inside the block, and the address in the storage, of each of a block's elements."""
    tensor, axis, ratio = plane
    first = int(tensor.storage_offset()) + block * ratio * int(tensor.stride(axis))
    return [(place, first + offset) for place, offset in _offsets(tensor.shape, tensor.stride(), axis, ratio)]


@cache  # the same for every block, and for all layers of a model
def _offsets(
    shape: tuple[int, ...], strides: tuple[int, ...], axis: int, ratio: int
) -> list[tuple[tuple[int, ...], int]]:
    """Return the place of each of a block's elements, and its distance from the first."""
    inner = [range(ratio) if dim == axis else range(size) for dim, size in enumerate(shape)]
    return [(place, sum(map(math.prod, zip(place, strides, strict=True)))) for place in itertools.product(*inner)]


def take_blocks(paged: Paged, blocks: Sequence[int]) -> list[list[dict[tuple[int, ...], bytes]]]:
    """Return the elements of some blocks, by plane and block."""
    return [[elements(plane, block) for block in blocks] for plane in paged.planes()]


def put_blocks(paged: Paged, blocks: Sequence[int], values: list[list[dict[tuple[int, ...], bytes]]]) -> None:
    """Do what a load must do: put the elements into these blocks and change nothing else."""
    for plane, by_block in zip(paged.planes(), values, strict=True):
        for block, held in zip(blocks, by_block, strict=True):
            put_elements(plane, block, held)


# -- layouts -----------------------------------------------------------------------------------------------------------


def ordered(order: str, dtype: torch.dtype, ratio: int = 1) -> Caches:
    """Make logical ``[B, H, N, C]`` per layer, all layers in one buffer whose dimensions are in memory as ``order``."""
    sizes = {"L": LAYERS, "B": B * ratio, "H": H, "N": N // ratio, "C": C}
    whole = empty([sizes[letter] for letter in order], dtype).permute([order.index(letter) for letter in "LBHNC"])
    return {f"layer.{number}": whole[number] for number in range(LAYERS)}


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of zero bytes, of any type that torch can view."""
    item = torch.empty(0, dtype=dtype).element_size()
    return torch.zeros((*shape[:-1], shape[-1] * item), dtype=torch.uint8).view(dtype)


def alike(shape: Sequence[int], dtype: torch.dtype, *, pair: bool = False) -> Caches:
    """Make layers of one shape, each a separate tensor, or a (key, value) pair of such."""
    return {
        f"layer.{number}": (empty(shape, dtype), empty(shape, dtype)) if pair else empty(shape, dtype)
        for number in range(LAYERS)
    }


def with_draft(dtype: torch.dtype) -> Caches:
    """Make two layers of the target, and a draft's with other heads, in another type and order."""
    target = alike((B, H, N, C), dtype)
    draft = empty((B, N, 1, 6), torch.float32).permute(0, 2, 1, 3)
    return {"layer.0": target["layer.0"], "layer.1": target["layer.1"], "draft.0": draft}


def packed_with_draft(dtype: torch.dtype) -> Caches:
    """Make the same in one buffer with blocks outermost; the draft's page is padded."""
    item = torch.empty(0, dtype=dtype).element_size()
    page_bytes, draft_bytes, padding_bytes = H * N * C * item, N * 6 * 4, 8
    block_bytes = 2 * page_bytes + draft_bytes + padding_bytes
    whole = torch.zeros(B * block_bytes, dtype=torch.uint8)

    def layer(begin_bytes: int, shape: tuple[int, int, int], kind: torch.dtype) -> torch.Tensor:
        size = torch.empty(0, dtype=kind).element_size()
        strides = (block_bytes // size, shape[1] * shape[2], shape[2], 1)
        return whole.view(kind).as_strided((B, *shape), strides, begin_bytes // size)

    return {
        "layer.0": layer(0, (H, N, C), dtype),
        "layer.1": layer(page_bytes, (H, N, C), dtype),
        "draft.0": layer(2 * page_bytes, (1, N, 6), torch.float32),
    }


LAYOUTS: dict[str, Callable[[torch.dtype], Paged]] = {
    "LBNHC": lambda t: Paged(ordered("LBNHC", t)),
    "LBHNC": lambda t: Paged(ordered("LBHNC", t)),
    "BLHNC": lambda t: Paged(ordered("BLHNC", t)),
    "BLNHC": lambda t: Paged(ordered("BLNHC", t)),
    "LBNHC, kernel blocks": lambda t: Paged(ordered("LBNHC", t, 2), ratio=2),
    "LBHNC, kernel blocks": lambda t: Paged(ordered("LBHNC", t, 2), ratio=2),
    "2BNHD": lambda t: Paged(alike((2, B, N, H, D), t), axis=1),
    "2BNHD, kernel blocks": lambda t: Paged(alike((2, 4 * B, N // 4, H, D), t), axis=1, ratio=4),
    "B2NHD": lambda t: Paged(alike((B, 2, N, H, D), t)),
    "MLA B1NC": lambda t: Paged(alike((B, 1, N, 9), t)),
    "MLA BNC": lambda t: Paged(alike((B, N, 9), t)),
    "a pair of tensors": lambda t: Paged(alike((B, N, H, D), t, pair=True)),
    "a pair of tensors, kernel blocks": lambda t: Paged(alike((B * 2, N // 2, H, D), t, pair=True), ratio=2),
    "with a draft": lambda t: Paged(with_draft(t)),
    "packed, with a draft": lambda t: Paged(packed_with_draft(t)),
}
