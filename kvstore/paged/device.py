"""Copies of whole blocks between a paged KV cache on a device and slots, in host memory or on the same device.

On their way to host memory blocks pass through dense staging buffers on the device (``staging.py``); for a slot on the
device they need none. Gathers and scatters run on the current stream, so a gather waits for the kernels that write the
blocks, and kernels launched after a scatter see it. Copies to and from the host run on separate streams. ``for_thread``
gives another thread a separate stream instead of the current one.

All device memory is allocated at start (``device_bytes``): buffers, and rings for the places of blocks. Chunks that are
smaller than a buffer share one: one launch gathers all of them, and one call copies each to its slot in the host. Small
layers are moved together, until their copies are large enough to pay for a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial

import torch

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.paged.base import BlockIds, ChunkBlocks, PagedKV, check_block_ids, check_chunks
from kvstore.paged.footprint import BUFFERS, MAX_BLOCKS, STAGING_BYTES
from kvstore.paged.kernels import Kernels, Launch, kernels_for
from kvstore.paged.places import Part, Piece, PlaceRing
from kvstore.paged.planes import PlaneRows
from kvstore.paged.staging import COPY_BYTES, Staging, regions_of
from kvstore.paged.streams import Copy, DeviceEvent, Direction, Streams, streams_of

# Copies of so many bytes reach 98% of PCIe's bandwidth, those of 256 KiB 90%. A launch takes the host as long as
# copying several of them.
GROUP_BYTES = 1 << 20


class DevicePagedKV(PagedKV):
    """A paged KV cache in device memory.

    Args:
        layers: the planes of each layer.
        layout: of a payload.
        num_blocks: of the cache.
        reserved_blocks: see ``bind_paged_kv``.
        streams: the order of work on the device; None for the device's own streams.
        staging_bytes: of each buffer, at least ``piece_bytes``.
        piece_bytes: the most that is moved at once; 0 for a chunk of these layers.
        copy_bytes: see ``COPY_BYTES``.
        group_bytes: layers of a chunk that move together have at least so many bytes, if there are so many.
        beside: a cache whose streams and buffers are used, instead of new ones by the arguments above.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[PlaneRows]],
        layout: KVLayout,
        num_blocks: int,
        reserved_blocks: int = 0,
        *,
        streams: Streams | None = None,
        staging_bytes: int = STAGING_BYTES,
        piece_bytes: int = 0,
        copy_bytes: int = COPY_BYTES,
        group_bytes: int = GROUP_BYTES,
        beside: DevicePagedKV | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._allowed = range(reserved_blocks, num_blocks)
        rows = [plane.rows for planes in layers for plane in planes]
        word = min((part.dtype for part in rows), key=lambda dtype: dtype.itemsize)
        with torch.inference_mode(mode=False):  # in which engines start, and whose tensors are read-only outside
            rows = [part.view(word) for part in rows]  # one width: every part of the staging is aligned to it
        self._all_planes = range(len(rows))
        self._planes = [(plane.data_ptr(), plane.stride(0), plane.shape[1], word) for plane in rows]
        self._planes_per_layer = len(layers[0])
        self._all_layers = range(layout.num_layers)
        self._copy_bytes = copy_bytes
        self._together = [group for group in layout.layer_groups(group_bytes) for _ in group]
        self.device = rows[0].device
        self._gathered: dict[Streams, DeviceEvent] = {}  # the end of each thread's last gather
        if beside is None:
            streams = streams_of(self.device) if streams is None else streams
            self._settle_on(streams, max(staging_bytes, round_up(piece_bytes, ALIGNMENT_BYTES) or layout.slot_bytes))
        else:
            self._settle_beside(beside)
        self._kernels: Kernels = kernels_for(rows, self.streams, self._staging.buffers[0])

    def _settle_on(self, streams: Streams, staging_bytes: int) -> None:
        """Allocate the device memory that one thread needs."""
        self.streams = streams
        self._staging = Staging(staging_bytes, streams)
        self._ring = PlaceRing(max(MAX_BLOCKS, self.layout.blocks_per_chunk), streams)

    def _settle_beside(self, other: DevicePagedKV) -> None:
        """Share the streams and the device memory of another cache's thread."""
        self.streams, self._staging, self._ring = other.streams, other._staging, other._ring
        self._gathered = other._gathered

    @property
    def device_bytes(self) -> int:
        """See ``PagedKV``."""
        return BUFFERS * self._staging.size_bytes + self._ring.device_bytes + self._kernels.device_bytes

    def for_thread(self) -> PagedKV:
        """See ``PagedKV``."""
        other = copy(self)
        other._settle_on(self.streams.for_thread(), self._staging.size_bytes)  # noqa: SLF001 - its own
        return other

    def beside(self, other: PagedKV) -> PagedKV:
        """See ``PagedKV``."""
        assert isinstance(other, DevicePagedKV), "two caches on one device are of one class"
        same = copy(self)
        same._settle_beside(other)  # noqa: SLF001 - its own
        return same

    def has_planes_of(self, other: PagedKV) -> bool:
        """See ``PagedKV``."""
        return isinstance(other, DevicePagedKV) and self._planes == other._planes  # noqa: SLF001 - its own

    def fence(self) -> None:
        """See ``PagedKV``."""
        for event in list(self._gathered.values()):
            self.streams.hold(event)

    def settle(self) -> None:
        """See ``PagedKV``."""
        for event in (*self._staging.ends(), *self._ring.ends()):
            self.streams.reach(event)

    def restore(self) -> None:
        """See ``PagedKV``."""
        self._ring.forget()
        self._kernels.restore(self.streams)

    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """See ``PagedKV``."""
        check_block_ids(block_ids, self._allowed)
        return ChunkBlocks(block_ids, payload, chunk_blocks or len(block_ids), first_block)

    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        return self._carry_whole(Direction.OUT, chunks)

    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        return self._carry_whole(Direction.IN, chunks)

    def blank(self, parts: Sequence[ByteArray]) -> DeviceEvent:
        """See ``PagedKV``; each is at most as long as a payload."""
        most_bytes = max(map(len, parts))
        self._check_fits(most_bytes)
        copies = [Copy(part, 0, len(part), 0) for part in parts]
        copy_out = partial(self.streams.copy, Direction.OUT, copies)
        return self._staging.carry_out(lambda staged: staged[:most_bytes].zero_(), copy_out)

    def layers_with(self, layer: int) -> range:
        """See ``PagedKV``."""
        return self._together[layer]

    def gather_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        return self._carry_layers(Direction.OUT, layers, chunks)

    def scatter_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        return self._carry_layers(Direction.IN, layers, chunks)

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """See ``PagedKV``."""
        self._on_device(Piece(block_ids, len(block_ids), 0), payload, self._kernels.gather)

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """See ``PagedKV``."""
        self._on_device(Piece(block_ids, chunk_blocks, first_block), payload, self._kernels.scatter)

    def _on_device(self, piece: Piece, payload: torch.Tensor, move: Callable[[Launch, torch.Tensor], None]) -> None:
        check_block_ids(piece.block_ids, self._allowed)
        places = self._ring.write([[piece]])
        (part,) = places.parts()

        def work() -> None:
            self._ring.send(places)
            move(Launch(self._all_planes, part), payload)

        try:
            self.streams.run(work)
        finally:
            places.last_use = self.streams.now()

    def _carry_whole(self, direction: Direction, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """Carry whole chunks, a buffer's worth at once, by one thread at a time. Returns an event for each."""
        check_chunks(chunks, self._allowed)  # before any copy
        self._check_fits(max((chunk.chunk_blocks for chunk in chunks), default=0) * self.layout.block_bytes)
        events: list[DeviceEvent] = []
        with self._staging.lock:
            for some in self._batches(self._all_layers, chunks):
                places = self._ring.write([_pieces(own) for own in some])
                for own, part in zip(some, places.parts(), strict=True):
                    events += [self._carry(direction, self._all_layers, own, part)] * len(own)
        return events

    def _check_fits(self, size_bytes: int) -> None:
        """Refuse more bytes than a buffer holds, because a kernel would write behind it."""
        if size_bytes > self._staging.size_bytes:
            raise InvalidCallError(
                f"{size_bytes} bytes do not fit into a staging buffer of {self._staging.size_bytes}: use smaller chunks"
            )

    def _carry_layers(self, direction: Direction, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """Carry layers of some chunks' blocks. Returns the last event, because copies end in order."""
        last: DeviceEvent = None
        for some in self._batches(layers, chunks):
            places = self._ring.keep([_pieces(own) for own in some])
            self.streams.hold(places.last_use)  # of the layers before, maybe of another stream
            for own, part in zip(some, places.parts(), strict=True):
                last = self._carry(direction, layers, own, part)
        return last

    def _batches(self, layers: range, chunks: Sequence[ChunkBlocks]) -> Iterator[Sequence[Sequence[ChunkBlocks]]]:
        """Yield groups of launches whose places are sent together; each launch is a sequence of chunks."""
        launches: list[Sequence[ChunkBlocks]] = []
        blocks = 0
        for part in self._parts(layers, chunks):
            more_blocks = sum(len(chunk.block_ids) for chunk in part)
            if launches and blocks + more_blocks > self._ring.max_blocks:
                yield launches
                launches, blocks = [], 0
            launches.append(part)
            blocks += more_blocks
        if launches:
            yield launches

    def _parts(self, layers: range, chunks: Sequence[ChunkBlocks]) -> Iterator[Sequence[ChunkBlocks]]:
        """Yield consecutive chunks, as many as one buffer and one launch hold of these layers; at least one."""
        max_blocks = min(self._staging.size_bytes // self._block_bytes(layers), self._ring.max_blocks)
        begin = blocks = 0
        for number, chunk in enumerate(chunks):
            if number > begin and blocks + chunk.chunk_blocks > max_blocks:
                yield chunks[begin:number]
                begin, blocks = number, 0
            blocks += chunk.chunk_blocks
        if begin < len(chunks):
            yield chunks[begin:]

    def _block_bytes(self, layers: range) -> int:
        return self.layout.layer_range(layers[-1], 1)[1] - self.layout.layer_range(layers[0], 1)[0]

    def _carry(self, direction: Direction, layers: range, chunks: Sequence[ChunkBlocks], part: Part) -> DeviceEvent:
        """Carry chunks that fit into one buffer. On the way out only the blocks are written to payloads."""
        block_bytes, begin = self._block_bytes(layers), 0
        copies: list[Copy] = []
        for chunk in chunks:
            regions = regions_of(chunk, layers, self.layout, self._copy_bytes, exactly=direction is Direction.OUT)
            copies += [Copy(chunk.payload, region.begin, region.end, begin + region.staged) for region in regions]
            begin += chunk.chunk_blocks * block_bytes
        launch = Launch(range(layers.start * self._planes_per_layer, layers.stop * self._planes_per_layer), part)
        places, has_to_be_sent = part.places, not part.places.is_sent

        def send_places() -> None:
            if has_to_be_sent:
                self._ring.send(places)

        def gather(staged: torch.Tensor) -> None:
            send_places()
            self._kernels.gather(launch, staged)

        def copy_all(staged: torch.Tensor) -> None:
            if copies:
                self.streams.copy(direction, copies, staged)

        def copy_in(staged: torch.Tensor) -> None:
            send_places()
            copy_all(staged)

        try:
            if direction is Direction.OUT:
                event = self._staging.carry_out(gather, copy_all)
            else:
                event = self._staging.carry_in(copy_in, lambda staged: self._kernels.scatter(launch, staged))
        finally:
            places.last_use = self._staging.last_use
            if direction is Direction.OUT:
                self._gathered[self.streams] = self._staging.last_use
        places.is_sent = True
        return event


def _pieces(chunks: Sequence[ChunkBlocks]) -> list[Piece]:
    return [Piece(chunk.block_ids, chunk.chunk_blocks, chunk.first_block) for chunk in chunks]
