"""The lossless codecs: ``lz4``, and ``split``, which compresses exponents only.

Both cut a layer into pieces that fit into a core's cache. An encoded layer is a table of the pieces' lengths (uint32
each), then the pieces, each compressed or raw, whichever is shorter. The layer's length determines the number of pieces
and their raw lengths. If the first piece shows no gain, the layer is stored raw.

Separating exponents is an old idea for compressing floating-point numbers. Mantissas and signs are nearly random and
stay as they are; the exponents of KV vary little, so entropy coding more than halves them.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.format.codecs import kernels
from kvstore.format.codecs.base import Codec, require
from kvstore.format.codecs.huffman import HuffmanEncoder, huffman_kernels
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import CodecError, ConfigError
from kvstore.model.layout import KVLayout

_LENGTH_BYTES = 4
_PROBE_GAIN = 1 / 32  # the first piece has to shrink by this much
_LZ4_PIECE_BYTES = 128 << 10
_SPLIT_PIECE_ELEMENTS = 128 << 10

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8": 1}


class _PieceCodec(Codec):
    """A codec that encodes piece by piece."""

    _piece_bytes: int

    def _pack(self, layer: ByteArray, out: ByteArray) -> int | None:
        starts = range(0, len(layer), self._piece_bytes)
        end = _LENGTH_BYTES * len(starts)
        if end >= len(out):
            return None
        lengths = out[:end].view(np.uint32)
        for number, start in enumerate(starts):
            piece = layer[start : start + self._piece_bytes]
            length = self._pack_piece(piece, out[end:])
            if length is None or (number == 0 and length > (1 - _PROBE_GAIN) * len(piece)):
                return None
            lengths[number] = length
            end += length
        return end

    def _unpack(self, data: ByteArray, out: ByteArray) -> None:
        starts = range(0, len(out), self._piece_bytes)
        begin = _LENGTH_BYTES * len(starts)
        lengths = data[:begin].view(np.uint32).tolist() if len(data) >= begin else []
        if begin + sum(lengths) != len(data) or not lengths:
            raise CodecError(f"the pieces of an encoded layer do not add up to its {len(data)} bytes")
        for start, length in zip(starts, lengths, strict=True):
            self._unpack_piece(data[begin : begin + length], out[start : start + self._piece_bytes])
            begin += length

    @abstractmethod
    def _pack_piece(self, piece: ByteArray, out: ByteArray) -> int | None:
        """Encode a piece into the front of ``out``, in at most its own length; None if ``out`` is too short."""

    @abstractmethod
    def _unpack_piece(self, data: ByteArray, out: ByteArray) -> None:
        """Undo ``_pack_piece``.

        Raises:
            CodecError: ``data`` is no encoded piece of ``len(out)`` bytes.
        """


class Lz4Codec(_PieceCodec):
    """Codec that compresses repeated bytes, in any layout. KV hardly repeats, but pages that were never filled do."""

    name = "lz4"
    _piece_bytes = _LZ4_PIECE_BYTES

    def __init__(self, layout: KVLayout) -> None:  # noqa: ARG002 - works on any
        self._lz4 = require("lz4.block", self.name)

    def _pack_piece(self, piece: ByteArray, out: ByteArray) -> int | None:
        packed: bytes = self._lz4.compress(piece.data, store_size=False)
        return _place(packed if len(packed) < len(piece) else piece, out)

    def _unpack_piece(self, data: ByteArray, out: ByteArray) -> None:
        if len(data) == len(out):
            out[:] = data
            return
        try:
            piece: bytes = self._lz4.decompress(data.data, uncompressed_size=len(out))
        except self._lz4.LZ4BlockError as error:
            raise CodecError(f"a piece of {len(data)} bytes is not lz4") from error
        out[:] = _checked(piece, len(out))


class _Tools(NamedTuple):
    """A thread's buffer for the exponents of a piece, and its compressors; the first, if any, is for exponents only."""

    exponents: ByteArray
    encoder: HuffmanEncoder | None
    compressor: Any
    decompressor: Any


class SplitCodec(_PieceCodec):
    """Codec that compresses the exponents, and leaves everything else as it is.

    Each element is rotated left by one bit, which moves the sign to its end and the exponent into its first byte (with
    the first bits of the mantissa if the exponent is shorter). The first bytes are compressed; the second bytes of
    4-byte elements follow, and then the rest. Elements of one byte are compressed whole.
    """

    name = "split"

    def __init__(self, layout: KVLayout) -> None:
        if layout.element not in ITEM_BYTES:
            raise ConfigError(
                "the codec 'split' needs to know where exponents are, and this KV cache holds packed or mixed data "
                f"({layout.physical}): use the codec 'lz4' or 'none'"
            )
        self._zstd = require("zstandard", self.name)
        self._item_bytes = ITEM_BYTES[layout.element]
        self._piece_bytes = self._item_bytes * _SPLIT_PIECE_ELEMENTS
        self._word = np.dtype(f"<u{self._item_bytes}")
        self._kernels = kernels.split_kernels(self._item_bytes) or _by_numpy(self._word)
        self._huffman = huffman_kernels() if self._item_bytes > 1 else None
        self._thread = threading.local()

    def _pack_piece(self, piece: ByteArray, out: ByteArray) -> int | None:
        size = self._item_bytes
        count = len(piece) // size
        tools = self._tools()
        words, exponents = piece[: count * size].view(self._word), piece
        if size > 1:
            exponents = tools.exponents[:count]
            self._kernels.take_high(words, exponents)
        end = tools.encoder.encode(exponents, out) if tools.encoder else None
        if end is None:
            packed: bytes = tools.compressor.compress(exponents.data)
            end = _place(packed if len(packed) < count else exponents, out)
        if end is None or size == 1:
            return end
        total = end + len(piece) - count
        if total > len(out):
            return None
        self._kernels.take_low(words, *self._low_parts(out[end:total], count))
        out[end + (size - 1) * count : total] = piece[count * size :]
        return total

    def _unpack_piece(self, data: ByteArray, out: ByteArray) -> None:
        size = self._item_bytes
        count = len(out) // size
        packed_bytes = len(data) - (len(out) - count)
        if not 0 <= packed_bytes <= count:
            raise CodecError(f"a piece of {len(data)} bytes does not hold {count} elements of {size} bytes")
        exponents = self._expand(data[:packed_bytes], count)
        if size == 1:
            out[:] = exponents
            return
        rest = data[packed_bytes:]
        self._kernels.join(exponents, *self._low_parts(rest, count), out[: count * size].view(self._word))
        out[count * size :] = rest[(size - 1) * count :]

    def _low_parts(self, rest: ByteArray, count: int) -> list[npt.NDArray[Any]]:
        """Return what follows the exponents: the lower bytes, or the second highest bytes and the lower halves."""
        if self._item_bytes == 2:
            return [rest[:count]]
        return [rest[:count], rest[count : 3 * count].view(np.uint16)]

    def _expand(self, packed: ByteArray, count: int) -> ByteArray:
        """Return ``packed`` decompressed to ``count`` bytes, which may be read only.

        Raises:
            CodecError: it is no compressed piece of that length.
        """
        if len(packed) == count:
            return packed
        try:
            if self._zstd.frame_content_size(packed.data) != count:  # so that nothing larger is allocated
                raise CodecError(f"{len(packed)} bytes are no compressed piece of {count} bytes")
            piece: bytes = self._tools().decompressor.decompress(packed.data)
        except self._zstd.ZstdError as error:
            raise CodecError(f"a piece of {len(packed)} bytes is not zstd") from error
        return _checked(piece, count)

    def _tools(self) -> _Tools:
        """Return this thread's tools."""
        tools: _Tools | None = getattr(self._thread, "tools", None)
        if tools is None:
            tools = self._thread.tools = _Tools(
                np.empty(_SPLIT_PIECE_ELEMENTS if self._item_bytes > 1 else 0, np.uint8),
                HuffmanEncoder(self._huffman, _SPLIT_PIECE_ELEMENTS) if self._huffman else None,
                self._zstd.ZstdCompressor(compression_params=self._parameters()),
                self._zstd.ZstdDecompressor(),
            )
        return tools

    def _parameters(self) -> Any:  # noqa: ANN401 - zstandard's
        """Return parameters for entropy coding with hardly any search for repetitions: a tiny table, growing steps.

        Twice as fast as level 1 on exponents, and with a better ratio. Negative levels would skip the entropy coding.
        """
        return self._zstd.ZstdCompressionParameters(
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=self._zstd.STRATEGY_FAST,
        )


def _by_numpy(word: np.dtype[Any]) -> kernels.SplitKernels:
    """Return what does the same as the compiled kernels, with two buffers a thread."""
    thread = threading.local()
    bits = 8 * word.itemsize

    def buffers(count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if not hasattr(thread, "buffers"):
            thread.buffers = np.empty((2, _SPLIT_PIECE_ELEMENTS), word)
        return thread.buffers[0, :count], thread.buffers[1, :count]

    def take_high(words: npt.NDArray[Any], high: ByteArray) -> None:
        shifted, _ = buffers(len(words))
        np.right_shift(words, bits - 9, out=shifted)
        np.copyto(high, shifted, casting="unsafe")

    def take_low(words: npt.NDArray[Any], *parts: npt.NDArray[Any]) -> None:
        rotated, shifted = buffers(len(words))
        np.left_shift(words, 1, out=rotated)
        np.right_shift(words, bits - 1, out=shifted)
        np.bitwise_or(rotated, shifted, out=rotated)
        for part in reversed(parts):
            np.copyto(part, rotated, casting="unsafe")
            np.right_shift(rotated, bits // 2, out=rotated)

    def join(high: ByteArray, *parts_and_words: npt.NDArray[Any]) -> None:
        *parts, words = parts_and_words
        rotated, shifted = buffers(len(words))
        np.copyto(rotated, high)
        for part in parts:
            np.left_shift(rotated, 8 * part.itemsize, out=rotated)
            np.copyto(shifted, part)
            np.bitwise_or(rotated, shifted, out=rotated)
        np.left_shift(rotated, bits - 1, out=shifted)
        np.right_shift(rotated, 1, out=rotated)
        np.bitwise_or(rotated, shifted, out=words)

    return kernels.SplitKernels(take_high, take_low, join)


def _place(data: bytes | ByteArray, out: ByteArray) -> int | None:
    """Copy ``data`` to the front of ``out``; returns its length, or None if it does not fit."""
    if len(data) > len(out):
        return None
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def _checked(piece: bytes, count: int) -> ByteArray:
    """Return a decompressed piece as an array.

    Raises:
        CodecError: it has another length than ``count``.
    """
    if len(piece) != count:
        raise CodecError(f"a piece has {len(piece)} bytes, not {count}")
    return np.frombuffer(piece, np.uint8)
