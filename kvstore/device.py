"""Whole blocks between a paged KV cache on a device and slots, in host memory or on the same device.

The same interface as ``pages.HostPagedKV``. On their way to host memory the blocks are gathered into one dense staging
buffer on the device and leave it in one copy: on PCIe the size of a copy decides its speed. A slot on the device needs
neither. Everything runs on the current stream, so a gather waits for the kernels that write the blocks, and kernels
launched after a scatter see it; what is moved ``beside`` the model has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvstore.layout import KVLayout
from kvstore.pages import BlockIds, ChunkBlocks, Moment, PagedKV, PlaneRows, check_block_ids
from kvstore.tiers.base import ByteArray


class DevicePagedKV:
    """A paged KV cache in device memory, with a staging buffer of one chunk."""

    def __init__(
        self,
        layers: Sequence[Sequence[PlaneRows]],
        layout: KVLayout,
        num_blocks: int,
        *,
        has_stream: bool = False,
    ) -> None:
        self._layers = layers
        self.layout = layout
        self.num_blocks = num_blocks
        rows = [plane.rows for planes in layers for plane in planes]
        word = min((part.dtype for part in rows), key=lambda dtype: dtype.itemsize)
        self._rows = [part.view(word) for part in rows]  # one width, so that every part of the staging is aligned to it
        self._planes = len(layers[0])
        self.device = rows[0].device
        self._staging = torch.empty(layout.slot_bytes, dtype=torch.uint8, device=self.device)
        has_stream = has_stream and self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if has_stream else None  # type: ignore[no-untyped-call]

    def beside(self) -> PagedKV:
        """See ``pages.PagedKV``."""
        return DevicePagedKV(self._layers, self.layout, self.num_blocks, has_stream=True)

    def moment(self) -> Moment:
        """See ``pages.PagedKV``."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def after(self, moment: Moment) -> None:
        """See ``pages.PagedKV``."""
        if self._stream is not None and moment is not None:
            torch.cuda.set_stream(self._stream)  # of this thread
            self._stream.wait_event(moment)

    def gather(self, block_ids: BlockIds, payload: ByteArray) -> None:
        """See ``pages.PagedKV``."""
        payload_bytes = self.layout.payload_bytes(len(block_ids))
        staged = self._staging[:payload_bytes]
        self.gather_on_device(block_ids, staged)
        torch.from_numpy(payload)[:payload_bytes].copy_(staged, non_blocking=True)
        self.wait()

    def scatter(self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int, first_block: int) -> None:
        """See ``pages.PagedKV``."""
        check_block_ids(block_ids, self.num_blocks)  # before anything is copied
        payload_bytes = self.layout.payload_bytes(chunk_blocks)
        staged = self._staging[:payload_bytes]
        staged.copy_(torch.from_numpy(payload)[:payload_bytes], non_blocking=True)
        self.scatter_on_device(block_ids, staged, chunk_blocks, first_block)
        self.wait()  # the slot may be given away as soon as this returns

    def gather_layer(self, layer: int, chunks: Sequence[ChunkBlocks]) -> None:
        """See ``pages.PagedKV``."""
        for batch in self._batches(layer, chunks):
            ids = self._ids_of(batch)
            for plane in range(self._planes):
                rows = self._rows[layer * self._planes + plane]
                staged = self._staged_rows(rows, len(ids))
                torch.index_select(rows, 0, ids, out=staged)
                for target, part in self._plane_parts(layer, plane, batch, staged):
                    target.copy_(part, non_blocking=True)

    def scatter_layer(self, layer: int, chunks: Sequence[ChunkBlocks]) -> None:
        """See ``pages.PagedKV``."""
        for batch in self._batches(layer, chunks):
            ids = self._ids_of(batch)
            for plane in range(self._planes):
                rows = self._rows[layer * self._planes + plane]
                staged = self._staged_rows(rows, len(ids))
                for source, part in self._plane_parts(layer, plane, batch, staged):
                    part.copy_(source, non_blocking=True)
                rows.index_copy_(0, ids, staged)

    def wait(self) -> None:
        """See ``pages.PagedKV``."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """See ``pages.PagedKV``."""
        ids = self._ids(block_ids)
        for rows, target in self._pages(payload, len(block_ids)):
            torch.index_select(rows, 0, ids, out=target)

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """See ``pages.PagedKV``."""
        ids = self._ids(block_ids)
        last_block = first_block + len(block_ids)
        for rows, source in self._pages(payload, chunk_blocks):
            rows.index_copy_(0, ids, source[first_block:last_block])

    def _ids(self, block_ids: BlockIds) -> torch.Tensor:
        """Checked ids, on the device.

        They are in ordinary memory, which the driver has copied from when the call returns, so nobody waits for it.
        """
        check_block_ids(block_ids, self.num_blocks)
        return torch.from_numpy(block_ids).to(self.device, non_blocking=True)

    def _pages(self, payload: torch.Tensor, chunk_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each plane's rows with its ``[chunk_blocks, words]`` part of a payload on the device."""
        pairs = []
        begin = 0
        for rows in self._rows:
            end = begin + chunk_blocks * rows.shape[1] * rows.element_size()
            pairs.append((rows, payload[begin:end].view(rows.dtype).view(chunk_blocks, rows.shape[1])))
            begin = end
        return pairs

    def _batches(self, layer: int, chunks: Sequence[ChunkBlocks]) -> Iterator[list[ChunkBlocks]]:
        """As many chunks at a time as have room in the staging buffer for one plane of a layer."""
        max_blocks = len(self._staging) // self.layout.page_bytes[layer]
        batch: list[ChunkBlocks] = []
        for chunk in chunks:
            if sum(len(other.block_ids) for other in batch) + len(chunk.block_ids) > max_blocks:
                yield batch
                batch = []
            batch.append(chunk)
        if batch:
            yield batch

    def _ids_of(self, chunks: Sequence[ChunkBlocks]) -> torch.Tensor:
        return self._ids(np.concatenate([chunk.block_ids for chunk in chunks]))

    def _staged_rows(self, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Room for that many blocks of a plane in the staging buffer."""
        staged = self._staging[: num_blocks * rows.shape[1] * rows.element_size()]
        return staged.view(rows.dtype).view(num_blocks, rows.shape[1])

    def _plane_parts(
        self, layer: int, plane: int, chunks: Sequence[ChunkBlocks], staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each chunk's blocks of a plane in host memory with their part of the staging buffer."""
        done = 0
        for block_ids, payload, chunk_blocks, first_block in chunks:
            begin = self.layout.layer_range(layer, chunk_blocks)[0]
            begin += (plane * chunk_blocks + first_block) * self.layout.page_bytes[layer]
            end = begin + len(block_ids) * self.layout.page_bytes[layer]
            part = torch.from_numpy(payload)[begin:end].view(staged.dtype).view(len(block_ids), -1)
            yield part, staged[done : done + len(block_ids)]
            done += len(block_ids)
