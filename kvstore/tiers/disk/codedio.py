"""Transfer of chunks between buffers and files through a codec or encryption.

A chunk is encoded into a scratch buffer before room is claimed for it, as its size is unknown before. When a chunk is
read, it is decoded layer by layer while the rest arrives, on the threads that otherwise compute checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

from kvstore.format.chunkfile import Damage
from kvstore.format.coding import ChunkCoder
from kvstore.format.wholeio import read_whole
from kvstore.memory.scratch import Scratch
from kvstore.model.chunks import ByteArray
from kvstore.model.layout import KVLayout
from kvstore.model.threads import start
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.chunkio import PIECE_BYTES, Body, ChunkIO, Writable


class CodedIO(ChunkIO):
    """Reader and writer of files whose layers are encoded; also reads those that are not. Thread-safe.

    It allocates up to ``SCRATCH_BUFFERS`` buffers of a chunk each, as many as were needed at once. A call waits while
    all of them are in use.

    Args:
        layout: of the chunks.
        coder: encodes them.
    """

    def __init__(self, layout: KVLayout, coder: ChunkCoder) -> None:
        super().__init__(layout)
        self._coder = coder
        self.file_bytes = tuple(self._coder.image_bytes(blocks) for blocks in range(layout.blocks_per_chunk + 1))
        self._scratch = Scratch(self.file_bytes[-1])

    def check(self, transfer: Transfer) -> Body:
        """See ``ChunkIO``: all I/O uses scratch buffers, which are aligned."""
        return super().check(transfer)._replace(is_aligned=True)

    def may_be(self, num_blocks: int, size_bytes: int) -> bool:
        """See ``ChunkIO``: any size up to that of the chunk without a codec."""
        return num_blocks < len(self.file_bytes) and self._coder.may_be(num_blocks, size_bytes)

    @contextmanager
    def prepared(self, body: Body) -> Iterator[Writable]:
        """See ``ChunkIO``: encodes the chunk."""
        with self._scratch.borrowed() as scratch:
            key, num_blocks = self._key(body.ref), body.ref.num_blocks
            size_bytes = self._coder.encode(key, num_blocks, body.array, scratch, tenant=body.tenant)
            yield Writable(body, size_bytes, scratch[:size_bytes])

    def _read_file(self, fd: int, size_bytes: int, body: Body, layers: range | None) -> Damage | None:  # noqa: ARG002
        """See ``ChunkIO``: always reads all layers."""
        with self._scratch.borrowed() as scratch:
            return self._read_image(fd, body, scratch[:size_bytes])

    def _read_image(self, fd: int, body: Body, data: ByteArray) -> Damage | None:
        """Read a file piece by piece, and start to decode layers as they are complete.

        Raises:
            OSError: the system refused.
        """
        ends = [*range(PIECE_BYTES, len(data), PIECE_BYTES), len(data)]
        if not read_whole(fd, [data.data[: ends[0]]], 0):
            return Damage.SIZE
        image = self._coder.open(self._key(body.ref), body.ref.num_blocks, data)
        if isinstance(image, Damage):
            return image
        jobs: list[Future[Damage | None]] = []
        damages: list[Damage | None] = []
        done = 0
        try:
            for begin, end in zip([0, *ends], ends, strict=False):
                if begin and not read_whole(fd, [data.data[begin:end]], begin):
                    return Damage.SIZE
                layers = image.layers_within(done, end - len(data) + image.body_bytes)
                done = layers.stop
                for layer in layers:
                    decode = partial(image.decode, layer, body.array)
                    if len(ends) > 1:
                        jobs.append(start(self._aside, decode, decode))
                    else:
                        damages.append(decode())
        finally:
            wait(jobs)  # they write to the caller's buffer
        damages += [job.result() for job in jobs]
        return next((damage for damage in damages if damage), image.check_padding())
