"""Copies of whole blocks between a paged KV cache and slab slots, as opaque bytes.

A backend may arrange a block in any way (vLLM's CPU backend transposes K inside it), so nothing here looks inside: a
block is the dense region of bytes that its strides span, found once when the caches are registered. Copies use numpy,
without allocations: ``take`` reached 0.86 and fancy assignment 1.0 of memcpy's bandwidth, torch's indexing 0.2 to 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import InvalidCallError, LayoutError
from kvstore.model.layout import KVLayout
from kvstore.paged.copiers import ALONE, Copiers
from kvstore.paged.streams import DeviceEvent, Streams

BlockIds = npt.NDArray[np.int64]
LayerCache = torch.Tensor | Sequence[torch.Tensor]
_ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float8_e4m3fn: "f8",
    torch.float8_e5m2: "f8",
}
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Page = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""A plane's rows of all blocks, and the rows of some of them in a payload."""

_Copy = tuple[npt.NDArray[Any], BlockIds, npt.NDArray[Any]]
"""A plane's rows of all blocks, the ids of some blocks, and their rows in a payload."""


class ChunkBlocks(NamedTuple):
    """Some blocks of a chunk: from ``first_block`` on in its payload, and ``block_ids`` in the paged cache.

    Created by ``PagedKV.chunk``, which checks the ids. ``pages`` holds every plane's pages in order, in host memory.
    """

    block_ids: BlockIds
    payload: ByteArray
    chunk_blocks: int
    first_block: int
    pages: Sequence[Page] = ()


class PagedKV(Protocol):
    """Paged KV cache of one worker, addressed by block ids.

    ``payload`` below is a row of ``layout.payload_bytes(n)`` uint8 in the order of ``layout``, in host memory or on the
    cache's ``device``; ``block_ids`` are int64 in ordinary host memory, each in ``[0, num_blocks)`` and none reserved
    by the serving engine. Not thread-safe against a running model: call between forward passes.
    """

    layout: KVLayout
    num_blocks: int
    device: torch.device
    streams: Streams  # of the device
    moves_layers: bool  # True if chunks can be moved layer by layer

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use in addition to the cache; each ``for_thread`` takes as many again."""

    def for_thread(self) -> PagedKV:
        """Return the same cache for one other thread, which may move blocks that no kernel uses, while the model runs.

        On a device it has a separate current stream, which only ``streams.hold`` and ``fence`` order with the model's.
        """

    def beside(self, other: PagedKV) -> PagedKV:
        """Return the same cache for the thread of ``other`` on the same device; both share streams and buffers."""

    def has_planes_of(self, other: PagedKV) -> bool:
        """Tell if both have the same planes at the same addresses, so that one launch can move blocks of both."""

    def with_help(self, copiers: Copiers) -> PagedKV:
        """Return the same cache, whose blocks several threads copy if the CPU does the copying."""

    def bytes_of(self, block_ids: BlockIds) -> int:
        """Return the bytes of these blocks in all layers."""

    def fence(self) -> None:
        """Order later work of the current stream after all gathers so far, including those of any ``for_thread()``.

        For blocks that are overwritten before their gather has been waited for. The host does not wait.
        """

    def gather(self, block_ids: BlockIds, payload: ByteArray) -> DeviceEvent:
        """Copy ``n = len(block_ids)`` blocks of every layer into ``payload``, which is valid once ``reach`` returns."""

    def scatter(self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int, first_block: int) -> DeviceEvent:
        """Copy blocks ``first_block ... first_block + len(block_ids)`` of a payload of ``chunk_blocks`` blocks.

        Kernels launched after the call see the blocks. The payload must not change before the returned event.
        """

    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """Gather several whole chunks, in fewer launches. Returns an event for each; ``pages`` are not used."""

    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """Scatter several chunks, in fewer launches. Returns an event for each; ``pages`` are not used."""

    def blank(self, parts: Sequence[ByteArray]) -> DeviceEvent:
        """Zero parts of payloads, ordered with gathers because the device may still read the former bytes."""

    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """Describe blocks to move by layer. ``chunk_blocks`` are in the payload, by default ``len(block_ids)``.

        Raises:
            InvalidCallError: names the first id that is outside the cache.
        """

    def layers_with(self, layer: int) -> range:
        """Return the layers that are moved together with this one, because alone they are too small for fast copies."""

    def gather_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """Copy layers of several chunks' blocks into their payloads, which are valid once ``reach`` returns.

        The returned event also covers all layers gathered before.
        """

    def scatter_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """Copy layers of several chunks into their blocks, where kernels launched later see them.

        The payloads must not change before the returned event, which also covers all layers before.
        """

    def settle(self) -> None:
        """Let the host wait until the device no longer uses the buffers, so that they can be freed.

        Covers all streams that used them, of which the device's allocator knows only the first.
        """

    def restore(self) -> None:
        """Restore tables after the device's memory was discarded and mapped again at the same addresses, when idle."""

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """Copy ``n = len(block_ids)`` blocks of every layer into a payload on the cache's own device.

        Runs in the order of the current stream, like a kernel. Launches and does not wait.
        """

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """Scatter from a payload on the cache's own device, in the order of the current stream."""


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
        raise LayoutError(f"layer {name}: with {num_blocks} blocks, shape {tuple(cache.shape)} can be read in two ways")
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


class _Run(NamedTuple):
    """Consecutive planes whose blocks are equally long: one view of a payload serves them all."""

    rows: list[npt.NDArray[Any]]  # each [num_blocks, words]
    word: np.dtype[Any]
    block_bytes: int  # of one block in all these planes


class HostPagedKV:
    """A paged KV cache in host memory."""

    moves_layers = True

    def __init__(
        self, layers: Sequence[Sequence[PlaneRows]], layout: KVLayout, num_blocks: int, reserved_blocks: int = 0
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._allowed = range(reserved_blocks, num_blocks)
        self.device = torch.device("cpu")
        self.streams = Streams(self.device)
        self.device_bytes = 0
        self._copiers = ALONE
        planes = [plane.rows.numpy() for layer in layers for plane in layer]
        self._planes_per_layer = len(layers[0])
        self._dense = all(rows.flags.c_contiguous for rows in planes)
        self._runs = []
        for (word, words), alike in groupby(planes, lambda rows: (rows.dtype, rows.shape[1])):
            run = list(alike)
            self._runs.append(_Run(run, word, len(run) * words * word.itemsize))

    def for_thread(self) -> PagedKV:
        """See ``PagedKV``. It copies without helpers, because the other cores belong to the model."""
        return self.with_help(ALONE)

    def beside(self, other: PagedKV) -> PagedKV:  # noqa: ARG002 - there is nothing to share
        """See ``PagedKV``."""
        return self.for_thread()

    def bytes_of(self, block_ids: BlockIds) -> int:
        """See ``PagedKV``."""
        return self.layout.payload_bytes(len(block_ids))

    def has_planes_of(self, other: PagedKV) -> bool:  # noqa: ARG002 - nothing is launched
        """See ``PagedKV``."""
        return False

    def with_help(self, copiers: Copiers) -> PagedKV:
        """See ``PagedKV``."""
        same = copy(self)
        same._copiers = copiers  # noqa: SLF001 - its own
        return same

    def fence(self) -> None:
        """See ``PagedKV``."""

    def gather(self, block_ids: BlockIds, payload: ByteArray) -> DeviceEvent:
        """See ``PagedKV``."""
        check_block_ids(block_ids, self._allowed)
        pages = self._pages(payload, len(block_ids))
        self._copiers.each(((rows, block_ids, target) for rows, target in pages), self._take)
        return None

    def scatter(self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int, first_block: int) -> DeviceEvent:
        """See ``PagedKV``."""
        check_block_ids(block_ids, self._allowed)
        last_block, pages = first_block + len(block_ids), self._pages(payload, chunk_blocks)
        self._copiers.each(((rows, block_ids, source[first_block:last_block]) for rows, source in pages), _put)
        return None

    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        return [self.gather(chunk.block_ids, chunk.payload) for chunk in chunks]

    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        return [self.scatter(chunk.block_ids, chunk.payload, chunk.chunk_blocks, chunk.first_block) for chunk in chunks]

    def blank(self, parts: Sequence[ByteArray]) -> DeviceEvent:
        """See ``PagedKV``."""
        for part in parts:
            part[:] = 0
        return None

    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """See ``PagedKV``."""
        check_block_ids(block_ids, self._allowed)
        chunk_blocks, last_block = chunk_blocks or len(block_ids), first_block + len(block_ids)
        pages = [(rows, part[first_block:last_block]) for rows, part in self._pages(payload, chunk_blocks)]
        return ChunkBlocks(block_ids, payload, chunk_blocks, first_block, pages)

    def layers_with(self, layer: int) -> range:
        """See ``PagedKV``: each layer is moved alone."""
        return range(layer, layer + 1)

    def gather_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        self._copiers.each(self._copies_of(layers, chunks), self._take)
        return None

    def scatter_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        self._copiers.each(self._copies_of(layers, chunks), _put)
        return None

    def settle(self) -> None:
        """See ``PagedKV``: there are no buffers."""

    def restore(self) -> None:
        """See ``PagedKV``: host memory keeps its content."""

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """See ``PagedKV``."""
        self.gather(block_ids, payload.numpy())

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """See ``PagedKV``."""
        self.scatter(block_ids, payload.numpy(), chunk_blocks, first_block)

    def _take(self, one: _Copy) -> None:
        rows, block_ids, target = one
        if self._dense:
            rows.take(block_ids, axis=0, out=target, mode="clip")
        else:  # take() would first copy the whole cache if its blocks are not adjacent
            for number, block in enumerate(block_ids):
                target[number] = rows[block]

    def _copies_of(self, layers: range, chunks: Sequence[ChunkBlocks]) -> Iterator[_Copy]:
        planes = slice(layers.start * self._planes_per_layer, layers.stop * self._planes_per_layer)
        return ((rows, chunk.block_ids, part) for chunk in chunks for rows, part in chunk.pages[planes])

    def _pages(self, payload: ByteArray, chunk_blocks: int) -> Iterator[Page]:
        """Pair each plane's rows with its ``[chunk_blocks, words]`` part of the payload.

        Iterating over one view of a run takes 0.14 us a plane. Slicing, viewing and reshaping for each plane took
        1.1 us: for the 24 layers of a small model 26 us a chunk instead of 3.
        """
        begin = 0
        for run in self._runs:
            end = begin + chunk_blocks * run.block_bytes
            parts = payload[begin:end].view(run.word).reshape(len(run.rows), chunk_blocks, -1)
            yield from zip(run.rows, parts, strict=True)
            begin = end


def _put(one: _Copy) -> None:
    rows, block_ids, source = one
    rows[block_ids] = source


def check_block_ids(block_ids: BlockIds, allowed: range) -> None:
    """Refuse ids outside the cache, and reserved ones; numpy would wrap negative ones and clip the rest.

    Raises:
        InvalidCallError: names the first bad id.
    """
    bad = (block_ids - allowed.start).view(np.uint64) >= len(allowed)  # a negative id is a huge unsigned one
    if bad.any():
        raise InvalidCallError(f"block id {int(block_ids[bad.argmax()])} is not in {allowed.start}..{allowed.stop - 1}")
