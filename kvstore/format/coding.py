"""Encoding, encryption and decoding of chunks layer by layer, in buffers of the caller, for every storage of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage, Encoding
from kvstore.format.codecs import STORED_NAMES, Codec, open_codec
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import CodecError
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing
    from kvstore.format.sealing.seal import Seal


class ChunkCoder:
    """Converter of payloads of one layout into chunk files, and back. Thread-safe.

    An *image* is the content of a chunk file: header, encoded layers, padding. It is read in steps, so that layers are
    decoded while the next ones arrive, and in parallel: ``open`` with the header, then ``Image.decode`` for each layer.
    A layer is decoded only after its checksum agreed.

    Args:
        layout: of the chunks.
        codec: opened for that layout; None for encryption alone.
        keys: encrypt every chunk, and then only encrypted ones are read; None for no encryption.
    """

    def __init__(self, layout: KVLayout, codec: Codec | None, keys: KeyRing | None = None) -> None:
        self.layout = layout
        self.keys = keys
        name = codec.name if codec else "none"
        self.codec_name = name if keys is None else chunkfile.sealed_name(name)
        self._packer = _Packer(codec)
        self.header_bytes = chunkfile.header_bytes(layout, self.codec_name)
        self._plain_header_bytes = chunkfile.header_bytes(layout)

    def image_bytes(self, num_blocks: int) -> int:
        """Return the largest size of an image of a chunk of ``num_blocks`` blocks."""
        return chunkfile.file_bytes(self.layout, num_blocks, self.codec_name)

    def may_be(self, num_blocks: int, size_bytes: int) -> bool:
        """Tell if an image of a chunk of ``num_blocks`` blocks can have this size."""
        return self.header_bytes < size_bytes <= self.image_bytes(num_blocks) and size_bytes % ALIGNMENT_BYTES == 0

    def encode(
        self,
        key: ChunkKey,
        num_blocks: int,
        payload: ByteArray,
        out: ByteArray,
        *,
        tenant: bytes = b"",
        end_s: int | None = None,
    ) -> int:
        """Write the image of a chunk to the front of ``out``; returns its size, a multiple of 4096.

        ``payload`` may be longer than the chunk (a slab slot); ``out`` has at least ``image_bytes(num_blocks)``.
        ``tenant`` chooses the key. ``end_s`` is that of ``chunkfile.build_header``.
        """
        layers, sums = self.encode_layers(key, num_blocks, payload, out[self.header_bytes :], tenant=tenant)
        end = self.header_bytes + layers.total_bytes
        size_bytes = round_up(end, ALIGNMENT_BYTES)
        out[end:size_bytes] = 0
        header = chunkfile.build_header(self.layout, key, num_blocks, sums, encoding=layers, end_s=end_s)
        out.data[: len(header)] = header
        return size_bytes

    def encode_layers(
        self, key: ChunkKey, num_blocks: int, payload: ByteArray, out: ByteArray, *, tenant: bytes = b""
    ) -> tuple[Encoding, str]:
        """Encode all layers into the front of ``out``, without gaps; returns their lengths and checksums.

        ``payload`` may be longer than the chunk (a slab slot); ``out`` has at least ``image_bytes(num_blocks)``
        without a header. ``tenant`` chooses the key.
        """
        seal = self._new_seal(key, num_blocks, tenant)
        lengths, sums = [], []
        end = 0
        for layer, (begin_raw, end_raw) in enumerate(self.layout.layer_ranges(num_blocks)):
            length = self._packer.pack(layer, payload[begin_raw:end_raw], out[end:], seal)
            sums.append(xxhash.xxh3_64_hexdigest(out.data[end : end + length]))
            lengths.append(length)
            end += length
        return Encoding(self.codec_name, tuple(lengths), seal.text if seal else ""), "".join(sums)

    def _new_seal(self, key: ChunkKey, num_blocks: int, tenant: bytes) -> Seal | None:
        if self.keys is None:
            return None
        from kvstore.format.sealing.seal import Seal  # noqa: PLC0415 - an extra

        return Seal.new(self.keys, tenant, key, num_blocks, self.codec_name)

    def _seal_of(self, key: ChunkKey, num_blocks: int, encoding: Encoding) -> Seal | Damage | None:
        """Return the seal of a chunk to be read, or the damage; None without encryption."""
        if self.keys is None:
            return None
        from kvstore.format.sealing.seal import Seal  # noqa: PLC0415 - an extra

        return Seal.parse(self.keys, encoding.seal, key, num_blocks, self.codec_name)

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
        parsed = chunkfile.parse_encoding(self.layout, num_blocks, header, self.codec_name)
        if isinstance(parsed, Damage):
            return self._explained(parsed, header)
        encoding, sums = parsed
        damage = chunkfile.compare(self.layout, key, num_blocks, header, sums, encoding=encoding)
        if damage is not None:
            return damage
        raw = self.layout.layer_ranges(num_blocks)
        seal = self._seal_of(key, num_blocks, encoding) if encoding else None
        if isinstance(seal, Damage):
            return seal
        unpack = partial(self._packer.unpack, seal=seal)
        return Image(unpack, body, encoding.ranges() if encoding else raw, raw, sums)

    def _explained(self, damage: Damage, header: ByteArray | bytes) -> Damage:
        """Return the damage of a header that cannot be parsed: that of a sound chunk may only lack our encryption."""
        found = chunkfile.codec_of(header)
        is_other = found in STORED_NAMES and chunkfile.is_sealed(found) != chunkfile.is_sealed(self.codec_name)
        return Damage.SEAL if damage is Damage.HEADER and is_other else damage

    def decode(self, key: ChunkKey, num_blocks: int, image: ByteArray, payload: ByteArray) -> Damage | None:
        """Fill ``payload`` from a complete image; returns its damage, if any, and then ``payload`` is undefined."""
        opened = self.open(key, num_blocks, image)
        if isinstance(opened, Damage):
            return opened
        damages = (opened.decode(layer, payload) for layer in range(self.layout.num_layers))
        return next((damage for damage in damages if damage), opened.check_padding())


class _Packer:
    """Codec and encryption of single layers, one after the other. Thread-safe: every thread has a buffer between both.

    Args:
        codec: None for encryption alone.
    """

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._thread = threading.local()

    def pack(self, layer: int, raw: ByteArray, out: ByteArray, seal: Seal | None) -> int:
        """Encode and encrypt a layer into the front of ``out``; returns the number of bytes used."""
        if self._codec is None:
            assert seal is not None
            return seal.close(layer, raw, out)
        if seal is None:
            return self._codec.encode(raw, out)
        between = self._between(len(raw))
        return seal.close(layer, between[: self._codec.encode(raw, between)], out)

    def unpack(self, layer: int, data: ByteArray, raw: ByteArray, *, seal: Seal | None) -> Damage | None:
        """Decrypt and decode a layer into ``raw``; returns the damage, if any, and then ``raw`` is undefined."""
        if seal is not None:
            size_bytes = len(data) - chunkfile.TAG_BYTES
            if self._codec is None or not 0 < size_bytes <= len(raw):
                return None if seal.open(layer, data, raw) else Damage.SEAL
            between = self._between(len(raw))[:size_bytes]
            if not seal.open(layer, data, between):
                return Damage.SEAL
            data = between
        try:
            assert self._codec is not None
            self._codec.decode(data, raw)
        except CodecError:
            return Damage.CODEC
        return None

    def _between(self, size_bytes: int) -> ByteArray:
        """Return this thread's buffer, of ``size_bytes``."""
        buffer: ByteArray | None = getattr(self._thread, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._thread.buffer = np.empty(size_bytes, np.uint8)
        return buffer[:size_bytes]


class Image:
    """An image with a valid header; its layers may still be arriving."""

    def __init__(
        self,
        unpack: Callable[[int, ByteArray, ByteArray], Damage | None],
        body: ByteArray,
        ranges: list[tuple[int, int]],
        raw_ranges: list[tuple[int, int]],
        layer_sums: str,
    ) -> None:
        self._unpack = unpack
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
        return self._unpack(layer, self._body[begin:end], payload[begin_raw:end_raw])

    def check_padding(self) -> Damage | None:
        """Check that all bytes after the last layer are zero."""
        return Damage.HEADER if self._body[self.size_bytes :].any() else None


def open_coder(layout: KVLayout, codec: str, keys: KeyRing | None = None) -> ChunkCoder | None:
    """Return the coder of a codec and keys; None if chunks are stored as they are.

    Raises:
        ConfigError: there is no such codec, it cannot work on such a layout, or the package it needs is missing.
    """
    if codec == "none" and keys is None:
        return None
    return ChunkCoder(layout, None if codec == "none" else open_codec(codec, layout), keys)


def is_foreign(header: ByteArray | bytes, codec_name: str) -> bool:
    """Tell if a header is that of a sound chunk that a reader of ``codec_name`` does not read."""
    codec = chunkfile.codec_of(header)
    plain = set() if chunkfile.is_sealed(codec_name) else {"none"}
    return codec in STORED_NAMES and codec not in {codec_name, *plain}
