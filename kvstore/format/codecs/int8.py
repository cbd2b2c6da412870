"""The codec ``int8``: half of the bytes, for a small error. The only lossy codec.

Every channel (one element of K or V of one head, over all tokens of the chunk) is scaled by its largest magnitude to
-127 ... 127 and rounded. So no value changes by more than 1/254 of the largest one in its channel, apart from the
rounding to the element type. Scaling by channel, because a few channels of K are much larger than the others, is known
from the literature on quantised KV caches.

An encoded layer is the scales as float32, ``[plane][a][b]``, then the numbers as int8 in the order of the elements. A
layer with a value that is not finite, or whose scales would cost more than they save, is stored as it is.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.format.codecs import kernels
from kvstore.format.codecs.base import Codec
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import CodecError, ConfigError
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    Floats = npt.NDArray[np.float32]
    Words = npt.NDArray[Any]

_LEVELS = 127
_ROUNDING = np.float32(1.5 * 2**23)  # added to a small number, it leaves the nearest integer in the low bits


class _Element(NamedTuple):
    """An element type as unsigned integers: finite magnitudes are below ``infinity``, and keep their order."""

    word: np.dtype[Any]
    infinity: int
    kind: int


_ELEMENTS = {
    "bf16": _Element(np.dtype("<u2"), 0x7F80, kernels.BF16),
    "f16": _Element(np.dtype("<u2"), 0x7C00, kernels.F16),
    "f32": _Element(np.dtype("<u4"), 0x7F7F0000, kernels.F32),  # a little less: the largest values could overflow
}


class Int8Codec(Codec):
    """Eight bits an element, scaled by channel."""

    name = "int8"
    is_lossless = False

    def __init__(self, layout: KVLayout) -> None:
        if layout.element not in _ELEMENTS:
            raise ConfigError(
                "the codec 'int8' needs elements of bfloat16, float16 or float32, and this KV cache holds "
                f"{layout.element} ({layout.physical}): use another codec"
            )
        if layout.page_axes is None:
            raise ConfigError(
                "the codec 'int8' scales by channel, and this KV cache does not show where its channels are (MLA, "
                f"blocks packed for a CPU, layers that differ, or a shape that can be read in two ways; "
                f"{layout.physical}): use the codec 'split' or 'none'"
            )
        self._word, self._infinity, self._kind = _ELEMENTS[layout.element]
        self._float = np.dtype("<f4" if self._word.itemsize == 4 else "<f2")  # unused for bf16
        self._planes = layout.planes
        self._axes = layout.page_axes
        row_bytes = math.prod(layout.page_axes) * self._word.itemsize
        if any(page_bytes % row_bytes for page_bytes in layout.page_bytes):
            raise ConfigError(f"pages of {layout.page_bytes} bytes do not consist of rows of {row_bytes} bytes")
        self._scale_bytes = 4 * layout.planes * layout.page_axes[0] * layout.page_axes[2]
        self._rest = self._word.type((1 << (8 * self._word.itemsize - 1)) - 1)  # of a word but for the sign
        by_numpy = kernels.Int8Kernels(self._find_largest, self._quantise, self._dequantise)
        self._kernels = kernels.int8_kernels(self._word.itemsize) or by_numpy
        self._thread = threading.local()

    def _pack(self, layer: ByteArray, out: ByteArray) -> int | None:
        words = layer.view(self._word).reshape(self._planes, -1, *self._axes)
        end = self._scale_bytes + words.size
        if end >= len(out):
            return None
        largest = np.zeros((self._planes, self._axes[0], self._axes[2]), self._word)
        self._kernels.find_largest(words, self._rest, largest)
        if int(largest.max()) >= self._infinity:
            return None
        scales = self._to_floats(largest, self._kind, np.empty(largest.shape, np.float32)) / np.float32(_LEVELS)
        out[: self._scale_bytes] = np.ascontiguousarray(scales).view(np.uint8).reshape(-1)
        numbers = out[self._scale_bytes : end].view(np.int8).reshape(words.shape)
        with np.errstate(divide="ignore", over="ignore"):
            factors = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        factors[~np.isfinite(factors)] = 0  # of channels that are nearly zero
        self._kernels.quantise(words, self._kind, factors, numbers)
        return end

    def _unpack(self, data: ByteArray, out: ByteArray) -> None:
        words = out.view(self._word).reshape(self._planes, -1, *self._axes)
        if len(data) != self._scale_bytes + words.size:
            raise CodecError(f"{len(data)} bytes are not {words.size} numbers and their scales")
        a, _, b = self._axes
        scales = data[: self._scale_bytes].copy().view(np.float32).reshape(self._planes, a, b)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise CodecError("a channel's scale is no finite number")
        numbers = data[self._scale_bytes :].view(np.int8).reshape(words.shape)
        self._kernels.dequantise(numbers, scales, self._kind, words)

    def _find_largest(self, words: Words, rest: int, largest: Words) -> None:
        """Do what ``kernels.find_largest`` does."""
        magnitudes = np.empty(self._axes, self._word)
        for plane, row in np.ndindex(words.shape[:2]):
            np.bitwise_and(words[plane, row], rest, out=magnitudes)
            np.maximum(largest[plane], magnitudes.max(axis=1), out=largest[plane])

    def _quantise(self, words: Words, kind: int, factors: Floats, numbers: npt.NDArray[np.int8]) -> None:
        """Do what ``kernels.quantise`` does."""
        for (plane, row), floats in self._rows(words):
            self._to_floats(words[plane, row], kind, floats)
            np.multiply(floats, factors[plane][:, None, :], out=floats)
            np.add(floats, _ROUNDING, out=floats)
            np.copyto(numbers[plane, row], floats.view(np.int32), casting="unsafe")

    def _dequantise(self, numbers: npt.NDArray[np.int8], scales: Floats, kind: int, words: Words) -> None:
        """Do what ``kernels.dequantise`` does."""
        with np.errstate(over="ignore"):  # of scales that this encoder never writes
            for (plane, row), floats in self._rows(words):
                np.copyto(floats, numbers[plane, row])
                np.multiply(floats, scales[plane][:, None, :], out=floats)
                self._from_floats(floats, kind, words[plane, row])

    def _rows(self, words: Words) -> Iterator[tuple[tuple[int, int], Floats]]:
        """Yield the index of every row of a layer, with this thread's float32 buffer."""
        floats: Floats | None = getattr(self._thread, "floats", None)
        if floats is None:
            floats = self._thread.floats = np.empty(self._axes, np.float32)
        for plane, row in np.ndindex(words.shape[:2]):
            yield (plane, row), floats

    def _to_floats(self, words: Words, kind: int, out: Floats) -> Floats:
        if kind == kernels.BF16:
            bits = out.view(np.uint32)
            np.copyto(bits, words)
            np.left_shift(bits, 16, out=bits)
        else:
            np.copyto(out, words.view(self._float))
        return out

    def _from_floats(self, floats: Floats, kind: int, out: Words) -> None:
        """Round to the element type. Overwrites ``floats``."""
        if kind != kernels.BF16:
            np.copyto(out.view(self._float), floats, casting="same_kind")
            return
        bits = floats.view(np.uint32)
        np.add(bits, 0x8000, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
