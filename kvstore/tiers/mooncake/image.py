"""Chunks in the form of their files, in slots."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Final, NamedTuple

import numpy as np
import xxhash

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.coding import ChunkCoder, is_foreign
from kvstore.model.chunks import ByteArray
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.tiers.abandonable_threads import start_aside

_SPLIT_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 8 << 20
_PIECE_BYTES: Final = 1 << 18  # copied and hashed while it is in the processor's cache


class Chunk(NamedTuple):
    """Chunk to be moved between its payload and a slot."""

    key: ChunkKey
    num_blocks: int
    payload: ByteArray
    tenant: bytes = b""


class Images:
    """Writer and reader of the images of chunks of one layout. Thread-safe.

    Args:
        layout: of the chunks.
        coder: encodes and encrypts them; None stores them as they are.
    """

    def __init__(self, layout: KVLayout, coder: ChunkCoder | None) -> None:
        self._layout = layout
        self._coder = coder
        self._header_bytes = chunkfile.header_bytes(layout)
        self._codec_name = coder.codec_name if coder else "none"
        self.slot_bytes = chunkfile.file_bytes(layout, layout.blocks_per_chunk)
        if coder is not None:
            self.slot_bytes = max(self.slot_bytes, coder.image_bytes(layout.blocks_per_chunk))

    @property
    def have_layers(self) -> bool:
        """True if a layer can be read alone."""
        return self._coder is None

    def write(self, chunk: Chunk, slot: ByteArray) -> int:
        """Write the image of a chunk to the front of a slot; returns its size."""
        if self._coder is not None:
            image = np.empty(len(slot), np.uint8)  # private, so that its checksums are of what was encoded
            size_bytes = self._coder.encode(chunk.key, chunk.num_blocks, chunk.payload, image, tenant=chunk.tenant)
            slot[:size_bytes] = image[:size_bytes]
            return size_bytes
        sums = self._copy(chunk.payload, slot[self._header_bytes :], chunk.num_blocks, chunk.payload)
        size_bytes = chunkfile.file_bytes(self._layout, chunk.num_blocks)
        slot[self._header_bytes + len(chunk.payload) : size_bytes] = 0
        slot.data[: self._header_bytes] = chunkfile.build_header(self._layout, chunk.key, chunk.num_blocks, sums)
        return size_bytes

    def read(self, chunk: Chunk, image: ByteArray, layers: range | None = None) -> Damage | None:
        """Fill the payload of a chunk from an image; only without damage it is the KV.

        A failed transfer may write to the image late, so what is verified is a copy.
        With ``layers``, the image has no others, and only they are filled.
        """
        if layers is not None:
            return self._read_layers(chunk, image, layers)
        if self._coder is not None:
            return self._coder.decode(chunk.key, chunk.num_blocks, image.copy(), chunk.payload)
        if len(image) != chunkfile.file_bytes(self._layout, chunk.num_blocks):
            return Damage.SIZE
        header, body = image[: self._header_bytes].copy(), image[self._header_bytes :][: len(chunk.payload)]
        sums = self._copy(body, chunk.payload, chunk.num_blocks, chunk.payload)
        return chunkfile.compare(self._layout, chunk.key, chunk.num_blocks, header, sums)

    def extents(self, num_blocks: int, layers: range) -> list[tuple[int, int]]:
        """Return offset and length of the parts of an image that hold its header and some layers."""
        ranges = self._layout.layer_ranges(num_blocks, layers)
        return [(0, self._header_bytes), (self._header_bytes + ranges[0][0], ranges[-1][1] - ranges[0][0])]

    def pieces(self, num_blocks: int) -> list[tuple[int, int]]:
        """Return offset and length of the parts in which an image is read: two, if it is large enough."""
        size_bytes = chunkfile.file_bytes(self._layout, num_blocks)
        half = round_up(size_bytes // 2, ALIGNMENT_BYTES) if size_bytes >= _SPLIT_BYTES else size_bytes
        return [(begin, min(half, size_bytes - begin)) for begin in range(0, size_bytes, half)]

    def fingerprint(self, image: ByteArray, num_blocks: int, layers: range | None) -> str:
        """Return a hash of what was read of an image, that tells if it changes."""
        parts = [(0, len(image))] if layers is None else self.extents(num_blocks, layers)
        return "".join(xxhash.xxh3_64_hexdigest(image.data[begin : begin + size]) for begin, size in parts)

    def _read_layers(self, chunk: Chunk, image: ByteArray, layers: range) -> Damage | None:
        body, header = image[self._header_bytes :], image[: self._header_bytes].copy()
        ranges = self._layout.layer_ranges(chunk.num_blocks, layers)
        sums = _copy_layers(body, chunk.payload, ranges, chunk.payload)
        return chunkfile.compare(self._layout, chunk.key, chunk.num_blocks, header, sums, layers=layers)

    def is_foreign(self, image: ByteArray) -> bool:
        """Tell if an image was encoded with a codec that this reader does not have."""
        return is_foreign(bytes(image[: self._header_bytes]), self._codec_name)

    def _copy(self, source: ByteArray, target: ByteArray, num_blocks: int, payload: ByteArray) -> str:
        """Copy to or from a payload, a large one on two threads; returns the checksums of the payload."""
        ranges = self._layout.layer_ranges(num_blocks)
        half = len(ranges) // 2 if len(source) >= _LARGE_BYTES else 0
        one, other = ranges[:half], ranges[half:]
        first = start_aside("mooncake", "copy", lambda: _copy_layers(source, target, one, payload)) if half else None
        try:
            second = _copy_layers(source, target, other, payload)
        finally:
            if first is not None:
                wait([first])  # or it would write to a buffer that is the caller's again
        return (first.result() if first is not None else "") + second


def _copy_layers(source: ByteArray, target: ByteArray, ranges: list[tuple[int, int]], payload: ByteArray) -> str:
    """Copy layers, and hash the side that is the payload, not a slot, while it is in the processor's cache."""
    sums = []
    for begin, end in ranges:
        layer = xxhash.xxh3_64()
        for at in range(begin, end, _PIECE_BYTES):
            piece = slice(at, min(at + _PIECE_BYTES, end))
            target[piece] = source[piece]
            layer.update(payload.data[piece])
        sums.append(layer.hexdigest())
    return "".join(sums)
