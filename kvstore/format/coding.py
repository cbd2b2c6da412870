"""Encoding and decoding of chunks layer by layer, in buffers of the caller, for every storage of chunk files."""

from __future__ import annotations

import xxhash

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage, Encoding
from kvstore.format.codecs.base import Codec
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import CodecError
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up


class ChunkCoder:
    """Converter of payloads of one layout into chunk files, and back. Thread-safe.

    An *image* is the content of a chunk file: header, encoded layers, padding. It is read in steps, so that layers are
    decoded while the next ones arrive, and in parallel: ``open`` with the header, then ``Image.decode`` for each layer.
    A layer is decoded only after its checksum agreed.
    """

    def __init__(self, layout: KVLayout, codec: Codec) -> None:
        self.layout = layout
        self.codec = codec
        self.header_bytes = chunkfile.header_bytes(layout, codec.name)
        self._plain_header_bytes = chunkfile.header_bytes(layout)

    def image_bytes(self, num_blocks: int) -> int:
        """Return the largest size of an image of a chunk of ``num_blocks`` blocks."""
        return chunkfile.file_bytes(self.layout, num_blocks, self.codec.name)

    def may_be(self, num_blocks: int, size_bytes: int) -> bool:
        """Tell if an image of a chunk of ``num_blocks`` blocks can have this size."""
        return self.header_bytes < size_bytes <= self.image_bytes(num_blocks) and size_bytes % ALIGNMENT_BYTES == 0

    def encode(self, key: ChunkKey, num_blocks: int, payload: ByteArray, out: ByteArray) -> int:
        """Write the image of a chunk to the front of ``out``; returns its size, a multiple of 4096.

        ``payload`` may be longer than the chunk (a slab slot); ``out`` has at least ``image_bytes(num_blocks)``.
        """
        layers, sums = self.encode_layers(num_blocks, payload, out[self.header_bytes :])
        end = self.header_bytes + layers.total_bytes
        size_bytes = round_up(end, ALIGNMENT_BYTES)
        out[end:size_bytes] = 0
        header = chunkfile.build_header(self.layout, key, num_blocks, sums, encoding=layers)
        out.data[: len(header)] = header
        return size_bytes

    def encode_layers(self, num_blocks: int, payload: ByteArray, out: ByteArray) -> tuple[Encoding, str]:
        """Encode all layers into the front of ``out``, without gaps; returns their lengths and checksums.

        ``payload`` may be longer than the chunk (a slab slot); ``out`` is at least as long as the chunk.
        """
        lengths, sums = [], []
        end = 0
        for begin_raw, end_raw in self.layout.layer_ranges(num_blocks):
            length = self.codec.encode(payload[begin_raw:end_raw], out[end:])
            sums.append(xxhash.xxh3_64_hexdigest(out.data[end : end + length]))
            lengths.append(length)
            end += length
        return Encoding(self.codec.name, tuple(lengths)), "".join(sums)

    def open(self, key: ChunkKey, num_blocks: int, image: ByteArray) -> Image | Damage:
        """Check the header of an image, whose layers may still be missing; returns the damage if it is wrong."""
        if not self.may_be(num_blocks, len(image)):
            return Damage.SIZE
        header_bytes = self.header_bytes
        if header_bytes > self._plain_header_bytes:  # one without a codec may be shorter
            is_plain = chunkfile.codec_of(image[: self._plain_header_bytes]) == "none"
            header_bytes = self._plain_header_bytes if is_plain else header_bytes
        opened = self.open_layers(key, num_blocks, image[:header_bytes], image[header_bytes:])
        if isinstance(opened, Image) and round_up(opened.size_bytes, ALIGNMENT_BYTES) != len(image) - header_bytes:
            return Damage.SIZE
        return opened

    def open_layers(self, key: ChunkKey, num_blocks: int, header: ByteArray | bytes, body: ByteArray) -> Image | Damage:
        """Check a header like ``open``, for layers that do not follow their header.

        ``body`` must be at least as long as the raw chunk, or the caller compares it with ``Image.size_bytes``.
        """
        parsed = chunkfile.parse_encoding(self.layout, num_blocks, header, self.codec.name)
        if isinstance(parsed, Damage):
            return parsed
        encoding, sums = parsed
        damage = chunkfile.compare(self.layout, key, num_blocks, header, sums, encoding=encoding)
        if damage is not None:
            return damage
        raw = self.layout.layer_ranges(num_blocks)
        return Image(self.codec, body, encoding.ranges() if encoding else raw, raw, sums)

    def decode(self, key: ChunkKey, num_blocks: int, image: ByteArray, payload: ByteArray) -> Damage | None:
        """Fill ``payload`` from a complete image; returns its damage, if any, and then ``payload`` is undefined."""
        opened = self.open(key, num_blocks, image)
        if isinstance(opened, Damage):
            return opened
        damages = (opened.decode(layer, payload) for layer in range(self.layout.num_layers))
        return next((damage for damage in damages if damage), opened.check_padding())


class Image:
    """An image with a valid header; its layers may still be arriving."""

    def __init__(
        self,
        codec: Codec,
        body: ByteArray,
        ranges: list[tuple[int, int]],
        raw_ranges: list[tuple[int, int]],
        layer_sums: str,
    ) -> None:
        self._codec = codec
        self._body = body
        self._ranges = ranges
        self._raw_ranges = raw_ranges
        self._layer_sums = layer_sums

    @property
    def size_bytes(self) -> int:
        """Bytes of all layers together."""
        return self._ranges[-1][1]

    @property
    def body_bytes(self) -> int:
        """Bytes after the header."""
        return len(self._body)

    def layers_within(self, done: int, end_bytes: int) -> range:
        """Return the layers from ``done`` on that are complete once ``end_bytes`` after the header have arrived."""
        last = done
        while last < len(self._ranges) and self._ranges[last][1] <= end_bytes:
            last += 1
        return range(done, last)

    def decode(self, layer: int, payload: ByteArray) -> Damage | None:
        """Decode a layer to its place in ``payload``; returns its damage, if any."""
        begin, end = self._ranges[layer]
        wanted = self._layer_sums[16 * layer : 16 * layer + 16]
        if xxhash.xxh3_64_hexdigest(self._body.data[begin:end]) != wanted:
            return Damage.CHECKSUM
        begin_raw, end_raw = self._raw_ranges[layer]
        try:
            self._codec.decode(self._body[begin:end], payload[begin_raw:end_raw])
        except CodecError:
            return Damage.CODEC
        return None

    def check_padding(self) -> Damage | None:
        """Check that all bytes after the last layer are zero."""
        return Damage.HEADER if self._body[self.size_bytes :].any() else None
