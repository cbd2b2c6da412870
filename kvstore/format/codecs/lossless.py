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

from kvstore.format.codecs.base import Codec, require
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
        _fill(out, piece)


class _Buffers(NamedTuple):
    """A thread's buffers for one piece, and its compressor."""

    words: npt.NDArray[Any]
    shifted: npt.NDArray[Any]
    exponents: ByteArray
    low: npt.NDArray[np.uint16]
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
        self._thread = threading.local()

    def _pack_piece(self, piece: ByteArray, out: ByteArray) -> int | None:
        size = self._item_bytes
        count = len(piece) // size
        buffers = self._buffers()
        exponents, words = piece, None
        if size > 1:
            words, exponents = buffers.words[:count], buffers.exponents[:count]
            self._rotate_left(piece[: count * size].view(self._word), words, buffers)
            _first_bytes(words, exponents, buffers)
        packed: bytes = buffers.compressor.compress(exponents.data)
        end = _place(packed if len(packed) < count else exponents, out)
        if end is None or words is None:
            return end
        total = end + len(piece) - count
        if total > len(out):
            return None
        if size == 4:
            second = out[end : end + count]
            np.right_shift(words, 16, out=buffers.shifted[:count])
            np.copyto(second, buffers.shifted[:count], casting="unsafe")
            np.copyto(buffers.low[:count], words, casting="unsafe")
            out[end + count : end + 3 * count] = buffers.low[:count].view(np.uint8)
        else:
            np.copyto(out[end : end + count], words, casting="unsafe")
        out[end + (size - 1) * count : total] = piece[count * size :]
        return total

    def _unpack_piece(self, data: ByteArray, out: ByteArray) -> None:
        size = self._item_bytes
        count = len(out) // size
        packed_bytes = len(data) - (len(out) - count)
        if not 0 <= packed_bytes <= count:
            raise CodecError(f"a piece of {len(data)} bytes does not hold {count} elements of {size} bytes")
        buffers = self._buffers()
        if size == 1:
            self._expand(data, out, buffers)
            return
        exponents = buffers.exponents[:count]
        self._expand(data[:packed_bytes], exponents, buffers)
        rest = data[packed_bytes:]
        words, shifted = buffers.words[:count], buffers.shifted[:count]
        np.copyto(words, exponents)
        np.left_shift(words, 8, out=words)
        np.copyto(shifted, rest[:count])
        np.bitwise_or(words, shifted, out=words)
        if size == 4:
            buffers.low[:count].view(np.uint8)[:] = rest[count : 3 * count]
            np.left_shift(words, 16, out=words)
            np.copyto(shifted, buffers.low[:count])
            np.bitwise_or(words, shifted, out=words)
        np.left_shift(words, 8 * size - 1, out=shifted)
        np.right_shift(words, 1, out=words)
        np.bitwise_or(words, shifted, out=out[: count * size].view(self._word))
        out[count * size :] = rest[(size - 1) * count :]

    def _rotate_left(self, elements: npt.NDArray[Any], words: npt.NDArray[Any], buffers: _Buffers) -> None:
        shifted = buffers.shifted[: len(words)]
        np.left_shift(elements, 1, out=words)
        np.right_shift(elements, 8 * self._item_bytes - 1, out=shifted)
        np.bitwise_or(words, shifted, out=words)

    def _expand(self, packed: ByteArray, out: ByteArray, buffers: _Buffers) -> None:
        """Decompress ``packed`` into ``out``.

        Raises:
            CodecError: it is no compressed piece of that length.
        """
        if len(packed) == len(out):
            out[:] = packed
            return
        try:
            if self._zstd.frame_content_size(packed.data) != len(out):  # so that nothing larger is allocated
                raise CodecError(f"{len(packed)} bytes are no compressed piece of {len(out)} bytes")
            piece: bytes = buffers.decompressor.decompress(packed.data)
        except self._zstd.ZstdError as error:
            raise CodecError(f"a piece of {len(packed)} bytes is not zstd") from error
        _fill(out, piece)

    def _buffers(self) -> _Buffers:
        """Return this thread's buffers."""
        buffers: _Buffers | None = getattr(self._thread, "buffers", None)
        if buffers is None:
            buffers = self._thread.buffers = _Buffers(
                np.empty(_SPLIT_PIECE_ELEMENTS, self._word),
                np.empty(_SPLIT_PIECE_ELEMENTS, self._word),
                np.empty(_SPLIT_PIECE_ELEMENTS, np.uint8),
                np.empty(_SPLIT_PIECE_ELEMENTS if self._item_bytes == 4 else 0, np.uint16),
                self._zstd.ZstdCompressor(compression_params=self._parameters()),
                self._zstd.ZstdDecompressor(),
            )
        return buffers

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


def _first_bytes(words: npt.NDArray[Any], out: ByteArray, buffers: _Buffers) -> None:
    shifted = buffers.shifted[: len(words)]
    np.right_shift(words, 8 * words.itemsize - 8, out=shifted)
    np.copyto(out, shifted, casting="unsafe")


def _place(data: bytes | ByteArray, out: ByteArray) -> int | None:
    """Copy ``data`` to the front of ``out``; returns its length, or None if it does not fit."""
    if len(data) > len(out):
        return None
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def _fill(out: ByteArray, piece: bytes) -> None:
    """Copy a decompressed piece to ``out``.

    Raises:
        CodecError: it has another length.
    """
    if len(piece) != len(out):
        raise CodecError(f"a piece has {len(piece)} bytes, not {len(out)}")
    out[:] = np.frombuffer(piece, np.uint8)
