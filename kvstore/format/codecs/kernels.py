"""Inner loops of the codecs ``int8`` and ``split``, for numba; without it, the codecs do the same with numpy.

The results are those of numpy, bit for bit, so either decodes what the other has encoded. Hence no "fast" arithmetic:
operations keep their order and their rounding. Each kernel is one pass over its arrays, writes only into them, and gets
arrays whose shapes its caller has checked. They may be read-only (sources) and lie at odd addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.model.compiling import Kernel, compiled

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

BF16, F16, F32 = range(3)
_ROUNDING = np.float32(1.5 * 2**23)  # added to a small number, it leaves the nearest integer in the low bits
_F16_BIAS = np.float32(2.0**112)  # between the exponents of float16 and float32


def find_largest(words: Array, rest: int, largest: Array) -> None:
    """Raise ``largest[plane, a, b]`` to the magnitudes in ``words[plane, row, a, token, b]``; ``rest`` has no sign."""
    planes, rows, heads, tokens, channels = words.shape
    for plane in range(planes):
        for row in range(rows):
            for head in range(heads):
                peaks = largest[plane, head]
                for token in range(tokens):
                    line = words[plane, row, head, token]
                    for i in range(channels):
                        peaks[i] = max(peaks[i], line[i] & rest)


def quantise(words: Array, kind: int, factors: Array, numbers: Array) -> None:
    """Multiply elements by the factors of their channels, and round to int8."""
    planes, rows, heads, tokens, channels = words.shape
    for plane in range(planes):
        for row in range(rows):
            for head in range(heads):
                factor = factors[plane, head]
                for token in range(tokens):
                    line = words[plane, row, head, token]
                    out = numbers[plane, row, head, token]
                    for i in range(channels):
                        word = np.uint32(line[i])
                        if kind == BF16:
                            value = np.uint32(word << np.uint32(16)).view(np.float32)
                        elif kind == F16:  # also denormal ones: as float32 they are exact
                            sign = np.uint32((word & np.uint32(0x8000)) << np.uint32(16))
                            bits = np.uint32(sign | ((word & np.uint32(0x7FFF)) << np.uint32(13)))
                            value = np.float32(bits.view(np.float32) * _F16_BIAS)
                        else:
                            value = word.view(np.float32)
                        out[i] = np.int8(np.float32(np.float32(value * factor[i]) + _ROUNDING).view(np.int32))


def dequantise(numbers: Array, scales: Array, kind: int, words: Array) -> None:
    """Multiply int8 by the scales of their channels, and round to elements: to even as float16, up as bfloat16."""
    planes, rows, heads, tokens, channels = words.shape
    for plane in range(planes):
        for row in range(rows):
            for head in range(heads):
                scale = scales[plane, head]
                for token in range(tokens):
                    line = numbers[plane, row, head, token]
                    out = words[plane, row, head, token]
                    for i in range(channels):
                        bits = np.float32(np.float32(line[i]) * scale[i]).view(np.uint32)
                        if kind == BF16:
                            out[i] = np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16)
                        elif kind == F16:
                            size = np.uint32(bits & np.uint32(0x7FFFFFFF))
                            if size >= np.uint32(0x47800000):  # 65536 and more
                                half = np.uint32(0x7C00)
                            elif size < np.uint32(0x38800000):  # denormal: adding 0.5 rounds at its last bit
                                half = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32)
                                half = np.uint32(half - np.uint32(0x3F000000))
                            else:
                                odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
                                half = np.uint32(size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd)
                                half = np.uint32(half >> np.uint32(13))
                            out[i] = half | ((bits >> np.uint32(16)) & np.uint32(0x8000))
                        else:
                            out[i] = bits


def take_high_2(words: Array, high: Array) -> None:
    """Take the higher byte of each element of 2 bytes, rotated left by one bit."""
    for i in range(len(high)):
        high[i] = np.uint8(words[i] >> 7)


def take_high_4(words: Array, high: Array) -> None:
    """Take the highest byte of each element of 4 bytes, rotated left by one bit."""
    for i in range(len(high)):
        high[i] = np.uint8(words[i] >> 23)


def take_low_2(words: Array, low: Array) -> None:
    """Take the lower byte of each element of 2 bytes, rotated left by one bit."""
    for i in range(len(low)):
        low[i] = np.uint8((words[i] << 1) | (words[i] >> 15))


def take_low_4(words: Array, second: Array, low: Array) -> None:
    """Take the second highest byte and the lower half of each element of 4 bytes, rotated left by one bit."""
    for i in range(len(low)):
        word = np.uint32(words[i])
        second[i] = np.uint8(word >> np.uint32(15))
        low[i] = np.uint16((word << np.uint32(1)) | (word >> np.uint32(31)))


def join_2(high: Array, low: Array, words: Array) -> None:
    """Put elements of 2 bytes together again."""
    for i in range(len(words)):
        word = np.uint32((np.uint32(high[i]) << np.uint32(8)) | np.uint32(low[i]))
        words[i] = np.uint16((word >> np.uint32(1)) | (word << np.uint32(15)))


def join_4(high: Array, second: Array, low: Array, words: Array) -> None:
    """Put elements of 4 bytes together again."""
    for i in range(len(words)):
        upper = np.uint32((np.uint32(high[i]) << np.uint32(24)) | (np.uint32(second[i]) << np.uint32(16)))
        word = np.uint32(upper | np.uint32(low[i]))
        words[i] = np.uint32((word >> np.uint32(1)) | (word << np.uint32(31)))


class Int8Kernels(NamedTuple):
    """Compiled kernels of the codec ``int8``."""

    find_largest: Kernel
    quantise: Kernel
    dequantise: Kernel


class SplitKernels(NamedTuple):
    """Compiled kernels of the codec ``split``."""

    take_high: Kernel
    take_low: Kernel
    join: Kernel


def int8_kernels(item_bytes: int) -> Int8Kernels | None:
    """Compile for elements of this size, which takes seconds the first time; None if numba cannot."""
    word = f"uint{8 * item_bytes}"
    words, floats, numbers = _read(word, 5), _read("float32", 3), _read("int8", 5)
    kernels = compiled(
        (find_largest, f"void({words}, {word}, {_written(word, 3)})"),
        (quantise, f"void({words}, intp, {floats}, {_written('int8', 5)})"),
        (dequantise, f"void({numbers}, {floats}, intp, {_written(word, 5)})"),
    )
    return None if kernels is None else Int8Kernels(*kernels)


def split_kernels(item_bytes: int) -> SplitKernels | None:
    """Compile for elements of this size, as ``int8_kernels`` does."""
    if item_bytes == 1:
        return None  # compressed whole
    word = f"uint{8 * item_bytes}"
    by_two, by_four = (take_high_2, take_low_2, join_2), (take_high_4, take_low_4, join_4)
    take_high, take_low, join = by_two if item_bytes == 2 else by_four
    parts = ["uint8"] if item_bytes == 2 else ["uint8", "uint16"]
    kernels = compiled(
        (take_high, f"void({_read(word)}, {_written('uint8')})"),
        (take_low, f"void({_read(word)}, {', '.join(map(_written, parts))})"),
        (join, f"void({', '.join(map(_read, ['uint8', *parts]))}, {_written(word)})"),
    )
    return None if kernels is None else SplitKernels(*kernels)


def _read(element: str, axes: int = 1) -> str:
    return f"Array({element}, {axes}, 'C', True, aligned=False)"


def _written(element: str, axes: int = 1) -> str:
    return f"Array({element}, {axes}, 'C', aligned=False)"
