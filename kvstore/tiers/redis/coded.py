"""Chunks in Redis through a codec, with fewer parts, and the length of each layer in the commit.

A chunk is encoded before a connection is taken, and decoded after it was returned. A chunk that its codec cannot make
smaller is stored as without a codec.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Encoding
from kvstore.format.codecs import Codec
from kvstore.format.coding import ChunkCoder, Image
from kvstore.memory.scratch import Scratch
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import KVLayout
from kvstore.tiers.redis.chunk import WRITE_ID_BYTES, ChunkIO, Fetched, Home, Incoming, Outgoing, split


class CodedIO(ChunkIO):
    """Transfer of chunks whose layers are encoded; also reads those that are not. Thread-safe.

    It keeps one buffer for each chunk that moved at the same time, up to ``SCRATCH_BUFFERS``.

    Args:
        layout: the geometry of the chunks.
        ttl_s: lifetime of a chunk in seconds, or None.
        codec: opened for that layout.
        timeout_s: longest wait for one of those buffers.
    """

    def __init__(self, layout: KVLayout, ttl_s: int | None, codec: Codec, timeout_s: float) -> None:
        super().__init__(layout, ttl_s)
        self.codec_name = codec.name
        self._coder = ChunkCoder(layout, codec)
        self._scratch = Scratch(layout.slot_bytes, timeout_s)

    @contextmanager
    def outgoing(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Iterator[Outgoing]:
        """See ``ChunkIO``: encodes the chunk."""
        with self._scratch.borrowed() as scratch:
            layers, sums = self._coder.encode_layers(ref.num_blocks, payload, scratch)
            header = self._coded_header(ChunkKey(home.namespace_id, ref.prefix_key), ref.num_blocks, layers, sums)
            yield Outgoing(ref, scratch[: layers.total_bytes], header)

    def _coded_header(self, key: ChunkKey, num_blocks: int, layers: Encoding, sums: str) -> bytes:
        is_smaller = layers.total_bytes < self._layout.payload_bytes(num_blocks)
        encoding = layers if is_smaller else None
        return chunkfile.build_header(self._layout, key, num_blocks, sums, encoding=encoding).rstrip()

    @contextmanager
    def incoming(self, ref: ChunkRef, payload: ByteArray) -> Iterator[Incoming]:
        """See ``ChunkIO``."""
        with self._scratch.borrowed() as scratch:
            yield Incoming(ref, payload, scratch[: len(payload)])

    def _views(self, home: Home, chunk: Incoming, commit: bytes | None) -> list[memoryview]:
        """See ``ChunkIO``: the commit has their length."""
        image = self._image(home, chunk, commit) if commit is not None else None
        return split(chunk.data[: image.size_bytes]) if image is not None else []

    def is_sound(self, home: Home, chunk: Incoming, found: Fetched) -> bool:
        """See ``ChunkIO``: decodes every layer whose checksum agrees."""
        image = self._image(home, chunk, found.commit) if found.is_whole and found.commit is not None else None
        if image is None:
            return False
        return all(image.decode(layer, chunk.payload) is None for layer in range(self._layout.num_layers))

    def _image(self, home: Home, chunk: Incoming, commit: bytes) -> Image | None:
        """Return the layers that the commit describes; None if it is not this chunk's, or of another codec."""
        text = commit[WRITE_ID_BYTES:]
        header_bytes = chunkfile.header_bytes(self._layout, chunkfile.codec_of(text) or self.codec_name)
        if len(text) > header_bytes or text != text.rstrip():
            return None
        key = ChunkKey(home.namespace_id, chunk.ref.prefix_key)
        image = self._coder.open_layers(key, chunk.ref.num_blocks, text.ljust(header_bytes), chunk.data)
        return image if isinstance(image, Image) else None
