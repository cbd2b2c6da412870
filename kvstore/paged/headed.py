"""Positions of the KV heads in a page, and the layout of the same cache with another number of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from kvstore.model.errors import LayoutError
from kvstore.model.layout import KVLayout
from kvstore.paged.base import LayerCache, PlaneRows, plane_rows, planes_of
from kvstore.paged.binding import layout_of

_ONE_TENSOR_DIMS = 4  # [blocks, heads, tokens, K and V], in any order in memory


class _Page(NamedTuple):
    """A page of one plane.

    Attributes:
        dtype: of its elements.
        kernel_blocks: in it, each of ``sizes``.
        sizes: of the dimensions behind that of the blocks.
        order: these dimensions, as numbers from 1 on, the outermost in memory first.
        head_dim: that of the KV heads.
    """

    dtype: torch.dtype
    kernel_blocks: int
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    head_dim: int

    @property
    def rows(self) -> int:
        """Number of rows of heads."""
        outside = self.order[: self.order.index(self.head_dim)]
        return self.kernel_blocks * prod(self.sizes[dim - 1] for dim in outside)

    def with_heads(self, num_heads: int) -> PlaneRows:
        """Return the plane that a worker with ``num_heads`` heads finds, using the same code as that worker."""
        sizes = {dim: num_heads if dim == self.head_dim else self.sizes[dim - 1] for dim in self.order}
        page = torch.empty(self.kernel_blocks, *(sizes[dim] for dim in self.order), dtype=self.dtype)
        in_order = (1 + self.order.index(dim) for dim in sorted(self.order))
        return plane_rows("with other heads", page.permute(0, *in_order), 1)


@dataclass(frozen=True)
class HeadedPages:
    """Pages of one worker's layers, by their KV heads.

    Attributes:
        layers: the pages of each layer's planes.
        num_heads: in each page.
        block_tokens, chunk_tokens, packing, device_type, has_channels: see ``bind_paged_kv``.
    """

    layers: tuple[tuple[_Page, ...], ...]
    num_heads: int
    block_tokens: int
    chunk_tokens: int
    packing: str
    device_type: str
    has_channels: bool = True

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of heads in a page, for each layer.

        Raises:
            LayoutError: K and V differ.
        """
        rows = [{page.rows for page in pages} for pages in self.layers]
        if any(len(found) != 1 for found in rows):
            raise LayoutError("K and V are ordered differently in their pages: KV heads cannot be taken out")
        return tuple(found.pop() for found in rows)

    def layout(self, num_heads: int) -> KVLayout:
        """Return the layout of a worker with ``num_heads`` heads, whose cache is otherwise like this one.

        Raises:
            LayoutError: layers would differ in a way a payload cannot hold.
        """
        planes = [[page.with_heads(num_heads) for page in pages] for pages in self.layers]
        return layout_of(
            planes,
            self.device_type,
            self.block_tokens,
            self.chunk_tokens,
            self.packing,
            has_channels=self.has_channels,
        )


def find_heads(
    kv_caches: Mapping[str, LayerCache],
    num_heads: int,
    *,
    num_blocks: int,
    block_tokens: int,
    chunk_tokens: int,
    packing: str = "",
) -> HeadedPages:
    """Find the KV heads in the pages of all layers; the arguments are those of ``bind_paged_kv``.

    Raises:
        LayoutError: the shapes do not show which dimension holds the heads.
    """
    layers, device_type = [], "cpu"
    for name, cache in kv_caches.items():
        planes = planes_of(name, cache, num_blocks)
        device_type = planes[0].device.type
        is_one = isinstance(cache, torch.Tensor) and cache.dim() == _ONE_TENSOR_DIMS
        layers.append(tuple(_page(name, plane, num_heads, num_blocks, block_tokens, is_one=is_one) for plane in planes))
    return HeadedPages(tuple(layers), num_heads, block_tokens, chunk_tokens, packing, device_type)


def _page(name: str, plane: torch.Tensor, num_heads: int, num_blocks: int, block_tokens: int, *, is_one: bool) -> _Page:
    kernel_blocks = plane.shape[0] // num_blocks
    head_dim = _head_dim(name, plane, num_heads, block_tokens // kernel_blocks, is_one=is_one)
    # Of two dimensions with equal strides one has size 1: if that is the heads', it is placed after the tokens.
    strides = plane.stride()
    order = sorted(range(1, plane.dim()), key=lambda dim: (-strides[dim], dim == head_dim))
    return _Page(plane.dtype, kernel_blocks, tuple(plane.shape[1:]), tuple(order), head_dim)


def _head_dim(name: str, plane: torch.Tensor, num_heads: int, num_tokens: int, *, is_one: bool) -> int:
    """Return the dimension of the heads, which is never the innermost nor the one that separates K from V."""
    shape = plane.shape
    if is_one:
        fitting = {1} if tuple(shape[1:3]) == (num_heads, num_tokens) else set()
    else:
        first = 2 if plane.dim() > _ONE_TENSOR_DIMS and shape[1] == 2 else 1
        dims = range(first, plane.dim() - 1)
        fitting = {
            dim
            for dim in dims
            if shape[dim] == num_heads and any(shape[other] == num_tokens for other in dims if other != dim)
        }
    if len(fitting) != 1:
        raise LayoutError(
            f"layer {name}: a KV cache of shape {tuple(shape)} does not tell which dimension has its {num_heads} KV "
            "heads: they cannot be taken out"
        )
    return fitting.pop()
