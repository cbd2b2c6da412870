"""Whole blocks between a paged KV cache on a device and slots, in host memory or on the same device.

On their way to host memory blocks pass through a dense staging buffer on the device (``staging.py``); to a slot on the
device they need none. Gathers and scatters run on the current stream, so a gather waits for the kernels that write the
blocks, and kernels launched after a scatter see it. Copies to and from the host run on streams of their own.
``for_thread`` gives another thread a stream of its own instead of the current one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvstore.chunks import ByteArray
from kvstore.layout import KVLayout
from kvstore.paged.base import BlockIds, ChunkBlocks, PagedKV, PlaneRows, check_block_ids
from kvstore.paged.copiers import Copiers
from kvstore.paged.staging import Staging, Use
from kvstore.paged.streams import Moment, Streams, streams_of


class DevicePagedKV:
    """A paged KV cache in device memory, with staging for two chunks."""

    def __init__(
        self,
        layers: Sequence[Sequence[PlaneRows]],
        layout: KVLayout,
        num_blocks: int,
        reserved_blocks: int = 0,
        *,
        streams: Streams | None = None,
        gathered: dict[Streams, Moment] | None = None,
    ) -> None:
        self._layers = layers
        self.layout = layout
        self.num_blocks = num_blocks
        self._allowed = range(reserved_blocks, num_blocks)
        rows = [plane.rows for planes in layers for plane in planes]
        word = min((part.dtype for part in rows), key=lambda dtype: dtype.itemsize)
        self._rows = [part.view(word) for part in rows]  # one width, so that every part of the staging is aligned to it
        self._planes = len(layers[0])
        self.device = rows[0].device
        self.streams = streams_of(self.device) if streams is None else streams
        self._staging = Staging(layout.slot_bytes, self.streams)
        self._gathered = {} if gathered is None else gathered
        self._uploaded: tuple[list[BlockIds], torch.Tensor] | None = None  # the ids of the last layer's chunks

    def for_thread(self) -> PagedKV:
        """See ``PagedKV``."""
        return DevicePagedKV(
            self._layers,
            self.layout,
            self.num_blocks,
            self._allowed.start,
            streams=self.streams.for_thread(),
            gathered=self._gathered,
        )

    def with_help(self, copiers: Copiers) -> PagedKV:  # noqa: ARG002 - of other caches
        """See ``PagedKV``: the device copies by itself."""
        return self

    def moment(self) -> Moment:
        """See ``PagedKV``."""
        return self.streams.now()

    def after(self, moment: Moment) -> None:
        """See ``PagedKV``."""
        self.streams.hold(moment)

    def fence(self) -> None:
        """See ``PagedKV``."""
        for moment in list(self._gathered.values()):
            self.streams.hold(moment)

    def gather(self, block_ids: BlockIds, payload: ByteArray) -> Moment:
        """See ``PagedKV``."""
        size_bytes = self.layout.payload_bytes(len(block_ids))
        target = torch.from_numpy(payload)[:size_bytes]
        ids = self._ids(block_ids)
        return self._carry_out(
            lambda staged: self._gather_into(staged[:size_bytes], ids),
            lambda staged: _copy(target, staged[:size_bytes]),
        )

    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[Moment]:
        """See ``PagedKV``."""
        return [self.gather(chunk.block_ids, chunk.payload) for chunk in chunks]

    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[Moment]:
        """See ``PagedKV``."""
        return [self.scatter(chunk.block_ids, chunk.payload, chunk.chunk_blocks, chunk.first_block) for chunk in chunks]

    def _carry_out(self, gather: Use, copy: Use) -> Moment:
        moment = self._staging.carry_out(gather, copy)
        self._gathered[self.streams] = self._staging.gathered
        return moment

    def scatter(self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int, first_block: int) -> Moment:
        """See ``PagedKV``."""
        ids = self._ids(block_ids)
        size_bytes = self.layout.payload_bytes(chunk_blocks)
        source = torch.from_numpy(payload)[:size_bytes]
        return self._staging.carry_in(
            lambda staged: _copy(staged[:size_bytes], source),
            lambda staged: self._scatter_from(staged[:size_bytes], ids, chunk_blocks, first_block),
        )

    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """See ``PagedKV``."""
        check_block_ids(block_ids, self._allowed)
        return ChunkBlocks(block_ids, payload, chunk_blocks or len(block_ids), first_block)

    def gather_layer(self, layer: int, chunks: Sequence[ChunkBlocks]) -> Moment:
        """See ``PagedKV``."""
        last: Moment = None  # copies leave one after the other
        for batch in self._batches(layer, chunks):
            for plane in range(self._planes):
                last = self._gather_plane(layer, plane, batch, self._ids_of(batch))
        return last

    def scatter_layer(self, layer: int, chunks: Sequence[ChunkBlocks]) -> Moment:
        """See ``PagedKV``."""
        last: Moment = None
        for batch in self._batches(layer, chunks):
            for plane in range(self._planes):
                last = self._scatter_plane(layer, plane, batch, self._ids_of(batch))
        return last

    def _gather_plane(self, layer: int, plane: int, batch: Sequence[ChunkBlocks], ids: torch.Tensor) -> Moment:
        rows = self._rows[layer * self._planes + plane]

        def copy(staged: torch.Tensor) -> None:
            for target, part in self._plane_parts(layer, plane, batch, _as_rows(staged, rows, len(ids))):
                _copy(target, part)

        return self._carry_out(
            lambda staged: torch.index_select(rows, 0, ids, out=_as_rows(staged, rows, len(ids))), copy
        )

    def _scatter_plane(self, layer: int, plane: int, batch: Sequence[ChunkBlocks], ids: torch.Tensor) -> Moment:
        rows = self._rows[layer * self._planes + plane]

        def copy(staged: torch.Tensor) -> None:
            for source, part in self._plane_parts(layer, plane, batch, _as_rows(staged, rows, len(ids))):
                _copy(part, source)

        return self._staging.carry_in(copy, lambda staged: rows.index_copy_(0, ids, _as_rows(staged, rows, len(ids))))

    def reach(self, moment: Moment) -> None:
        """See ``PagedKV``."""
        self.streams.reach(moment)

    def is_reached(self, moment: Moment) -> bool:
        """See ``PagedKV``."""
        return self.streams.is_reached(moment)

    def seconds_between(self, begin: Moment, end: Moment) -> float:
        """See ``PagedKV``."""
        return self.streams.seconds_between(begin, end)

    def wait(self) -> None:
        """See ``PagedKV``."""
        self.streams.wait()

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """See ``PagedKV``."""
        ids = self._ids(block_ids)
        self.streams.run(lambda: self._gather_into(payload, ids))

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """See ``PagedKV``."""
        ids = self._ids(block_ids)
        self.streams.run(lambda: self._scatter_from(payload, ids, chunk_blocks, first_block))

    def _gather_into(self, payload: torch.Tensor, ids: torch.Tensor) -> None:
        for rows, target in self._pages(payload, len(ids)):
            torch.index_select(rows, 0, ids, out=target)

    def _scatter_from(self, payload: torch.Tensor, ids: torch.Tensor, chunk_blocks: int, first_block: int) -> None:
        last_block = first_block + len(ids)
        for rows, source in self._pages(payload, chunk_blocks):
            rows.index_copy_(0, ids, source[first_block:last_block])

    def _ids(self, block_ids: BlockIds) -> torch.Tensor:
        """Checked ids, on the device."""
        check_block_ids(block_ids, self._allowed)
        source = torch.from_numpy(block_ids.copy())
        ids = torch.empty_like(source, device=self.device)
        self.streams.run(lambda: ids.copy_(source, non_blocking=True))
        return ids

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
        """Groups of as many chunks as fit into the staging buffer with one plane of a layer."""
        max_blocks = self._staging.size_bytes // self.layout.page_bytes[layer]
        batch: list[ChunkBlocks] = []
        for chunk in chunks:
            if sum(len(other.block_ids) for other in batch) + len(chunk.block_ids) > max_blocks:
                yield batch
                batch = []
            batch.append(chunk)
        if batch:
            yield batch

    def _ids_of(self, chunks: Sequence[ChunkBlocks]) -> torch.Tensor:
        """The ids of several chunks' blocks, on the device; kept there for the same chunks' next layer."""
        parts = [chunk.block_ids for chunk in chunks]
        if self._uploaded is not None:
            known, ids = self._uploaded
            if len(known) == len(parts) and all(one is other for one, other in zip(known, parts, strict=True)):
                return ids
        self._uploaded = parts, self._ids(np.concatenate(parts))
        return self._uploaded[1]

    def _plane_parts(
        self, layer: int, plane: int, chunks: Sequence[ChunkBlocks], staged: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each chunk's blocks of a plane in host memory with their part of the staging buffer."""
        done = 0
        for block_ids, payload, chunk_blocks, first_block, _ in chunks:
            begin = self.layout.layer_range(layer, chunk_blocks)[0]
            begin += (plane * chunk_blocks + first_block) * self.layout.page_bytes[layer]
            end = begin + len(block_ids) * self.layout.page_bytes[layer]
            part = torch.from_numpy(payload)[begin:end].view(staged.dtype).view(len(block_ids), -1)
            yield part, staged[done : done + len(block_ids)]
            done += len(block_ids)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _as_rows(staged: torch.Tensor, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The part of a staging buffer for that many blocks of a plane."""
    size_bytes = num_blocks * rows.shape[1] * rows.element_size()
    return staged[:size_bytes].view(rows.dtype).view(num_blocks, rows.shape[1])
