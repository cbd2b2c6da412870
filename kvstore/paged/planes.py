"""Planes of a model's KV cache: the dense regions of bytes that hold its blocks, found from shapes and strides.

A backend may arrange a block in any way (vLLM's CPU backend transposes K inside it), so nothing here looks inside: a
block is the dense region of bytes that its strides span, found once when the caches are registered. Only with another
number of KV heads (``HeadedPages``) it matters where in a page the heads are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kvstore.model.errors import LayoutError
from kvstore.model.layout import KVLayout

LayerCache = torch.Tensor | Sequence[torch.Tensor]

_ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "f8",
    torch.float8_e5m2: "f8",
}
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_ONE_TENSOR_DIMS = 4  # [blocks, heads, tokens, K and V], in any order in memory


@dataclass(frozen=True)
class PlaneRows:
    """One plane of one layer: ``rows[b]`` is block ``b``'s dense region, as the widest integers that fit."""

    rows: torch.Tensor  # [num_blocks, page_bytes / itemsize], last dimension contiguous
    page_bytes: int
    physical: str
    element: str
    kernel_blocks: int  # in a page
    dims: tuple[tuple[int, int], ...]  # of a kernel block: size, and stride in elements, the outermost first

    def axes(self, page_tokens: int) -> tuple[int, int, int] | None:
        """Return the shape ``[a, tokens, b]`` of the rows in a page of ``page_tokens`` tokens.

        None if the shape does not show which dimension holds the tokens, or there are no heads, as with MLA.
        """
        tokens = [dim for dim in self.dims[:-1] if dim[0] * self.kernel_blocks == page_tokens]
        if len(tokens) != 1:
            return None
        size, stride = tokens[0]
        return math.prod(size for size, _ in self.dims) // (size * stride), size, stride


def find_planes(name: str, cache: LayerCache, num_blocks: int) -> list[PlaneRows]:
    """Find the dense regions that hold a block of layer ``name``.

    Supports blocks in dimension 0 with the others in any order (vLLM's ``[B, H, N, C]``, ``[B, 2, N, H, D]``, MLA's
    ``[B, N, C]``), K/V in front (``[2, B, N, H, D]``), a (key, value) pair of tensors, and kernel blocks that divide a
    block.

    Raises:
        LayoutError: any other layout; the message has the shape and the strides.
    """
    return [plane_rows(name, plane, num_blocks) for plane in planes_of(name, cache, num_blocks)]


def planes_of(name: str, cache: LayerCache, num_blocks: int) -> list[torch.Tensor]:
    """Return the tensors of layer ``name`` that have blocks in dimension 0, one for each plane.

    Raises:
        LayoutError: see ``find_planes``.
    """
    if not isinstance(cache, torch.Tensor):
        return [plane for part in cache for plane in planes_of(name, part, num_blocks)]
    if cache.dim() < 2:
        raise LayoutError(f"layer {name}: a KV cache of shape {tuple(cache.shape)} has no blocks")
    kv_first = cache.dim() == 5 and cache.shape[0] == 2 and cache.shape[1] % num_blocks == 0
    block_first = cache.shape[0] % num_blocks == 0 and cache.shape[0] > 0
    if kv_first and cache.shape[0] == num_blocks:
        raise LayoutError(f"layer {name}: with {num_blocks} blocks, shape {tuple(cache.shape)} is ambiguous")
    if kv_first:
        return [cache[0], cache[1]]
    if block_first:
        return [cache]
    raise LayoutError(
        f"layer {name}: cannot find {num_blocks} blocks in a KV cache of shape {tuple(cache.shape)} and strides "
        f"{cache.stride()}: this layout is not supported"
    )


def plane_rows(name: str, plane: torch.Tensor, num_blocks: int) -> PlaneRows:
    """View a tensor with blocks in dimension 0 as rows of integers, one row a block.

    Raises:
        LayoutError: a block is not one dense region.
    """
    if plane.numel() == 0:
        raise LayoutError(f"layer {name}: a KV cache of shape {tuple(plane.shape)} holds nothing")
    order = sorted((d for d in range(1, plane.dim()) if plane.shape[d] > 1), key=plane.stride)
    page_elements = 1
    for dim in order:
        if plane.stride(dim) != page_elements:
            raise LayoutError(
                f"layer {name}: a block of shape {tuple(plane.shape[1:])} with strides {plane.stride()[1:]} is not one "
                "dense region: this layout is not supported"
            )
        page_elements *= plane.shape[dim]
    kernel_blocks = plane.shape[0] // num_blocks  # kernels may use smaller blocks than the block manager
    if plane.stride(0) < page_elements or (kernel_blocks > 1 and plane.stride(0) != page_elements):
        raise LayoutError(
            f"layer {name}: blocks {plane.stride(0)} elements apart, {page_elements} long, {kernel_blocks} to a block "
            "of the block manager: this layout is not supported"
        )
    item_bytes = plane.element_size()
    page_bytes = page_elements * kernel_blocks * item_bytes
    stride_bytes = plane.stride(0) * kernel_blocks * item_bytes
    offset_bytes = plane.storage_offset() * item_bytes
    word_bytes, word = next(
        (size, dtype) for size, dtype in _WORDS if not (page_bytes % size or stride_bytes % size or offset_bytes % size)
    )
    rows = torch.empty(0, dtype=word, device=plane.device).set_(
        plane.untyped_storage(),
        offset_bytes // word_bytes,
        (num_blocks, page_bytes // word_bytes),
        (stride_bytes // word_bytes, 1),
    )
    inner = "x".join(f"{dim}:{plane.shape[dim]}" for dim in reversed(order))
    dims = tuple((plane.shape[dim], plane.stride(dim)) for dim in reversed(order)) if plane.dim() > 3 else ()
    return PlaneRows(
        rows,
        page_bytes,
        f"{plane.dtype}[{kernel_blocks}|{inner}]",
        _ELEMENTS.get(plane.dtype, "opaque"),
        kernel_blocks,
        dims,
    )


def layout_of(
    layers: Sequence[Sequence[PlaneRows]],
    device_type: str,
    block_tokens: int,
    chunk_tokens: int,
    packing: str,
    *,
    has_channels: bool,
) -> KVLayout:
    """Return the geometry of chunks of these layers, given the planes of each; other arguments as ``bind_paged_kv``.

    Raises:
        LayoutError: layers differ in a way a payload cannot hold.
    """
    planes = {len(found) for found in layers}
    sizes = [{plane.page_bytes for plane in found} for found in layers]
    devices = {plane.rows.device for found in layers for plane in found}
    if len(planes) != 1 or any(len(size) != 1 for size in sizes) or len(devices) != 1:
        raise LayoutError(f"layers differ in planes {planes}, or K and V in size {sizes}, or devices {devices}")
    elements = {plane.element for found in layers for plane in found}
    axes = {plane.axes(block_tokens) for found in layers for plane in found} if has_channels and not packing else {None}
    physical = sorted({plane.physical for found in layers for plane in found})
    return KVLayout(
        page_bytes=tuple(size.pop() for size in sizes),
        planes=planes.pop(),
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        physical=f"{device_type} {packing} {' '.join(physical)}",
        element=elements.pop() if len(elements) == 1 else "opaque",
        page_axes=axes.pop() if len(axes) == 1 else None,
    )


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
        return self.kernel_blocks * math.prod(self.sizes[dim - 1] for dim in outside)

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
        block_tokens, chunk_tokens, packing, device_type: see ``bind_paged_kv``.
    """

    layers: tuple[tuple[_Page, ...], ...]
    num_heads: int
    block_tokens: int
    chunk_tokens: int
    packing: str
    device_type: str

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
            planes, self.device_type, self.block_tokens, self.chunk_tokens, self.packing, has_channels=True
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
