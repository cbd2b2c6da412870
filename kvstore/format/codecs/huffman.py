"""Encoder of zstd frames (RFC 8878) that hold Huffman codes only, for exponents.

In exponents nothing repeats but by chance, and zstd spends half of its time to look for it, and codes one byte at a
time. This one counts every eleventh byte to choose codes, and writes two bytes at a time, in four streams at once. Any
zstd decodes its frames: one block, all of whose content is literals. It leaves to zstd what it cannot do well: more
than 64 neighbouring values, one value that makes up half, or a number of bytes that is no multiple of 16.

The lengths of codes are themselves coded by FSE. Its distribution is always the same, so its tables are constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.chunks import ByteArray
from kvstore.model.compiling import Kernel, compiled

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

_MIN_BYTES = 4096  # below, zstd is as good
_MOST_VALUES = 64
_MOST_BITS = 11  # of a code: zstd's limit
_SUM_BYTES = 4  # of a frame's checksum, which decoders compare
_STRIDE = 11  # of the bytes that are counted; odd, as channels repeat at powers of two

# FSE of weights (0: no code; otherwise greater for shorter codes). No weight has more than half of the 64 states, so
# that each one costs a bit, by whose absence the decoder notices the end.
_FSE_BITS = 6
_FSE_STATES = 1 << _FSE_BITS
_FSE_COUNTS = (32, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2)


def count_values(data: Array, counts: Array, span: Array) -> bool:
    """Count some of the values, after setting ``span`` to the least one, the least that is not 0, and the largest.

    False if they are too far apart.
    """
    least, low, high = np.uint8(255), np.uint8(255), np.uint8(0)
    for i in range(len(data)):
        least = min(least, data[i])
        low = min(low, np.uint8(data[i] - 1))  # a zero becomes 255
        high = max(high, data[i])
    span[0], span[1], span[2] = least, int(low) + 1, high
    if span[2] < span[1] or span[2] - span[1] >= _MOST_VALUES:
        return False
    counts[:] = 0
    for i in range(0, len(data) - 3 * _STRIDE, 4 * _STRIDE):
        counts[0, data[i]] += 1  # a table each, as the next addition to the same counter has to wait
        counts[1, data[i + _STRIDE]] += 1
        counts[2, data[i + 2 * _STRIDE]] += 1
        counts[3, data[i + 3 * _STRIDE]] += 1
    return True


def sort_values(counts: Array, span: Array, values: Array, sums: Array) -> int:
    """Sort all values that may occur by their counts; returns their number, or 0 if they don't deserve codes."""
    size, total = 0, np.int64(0)
    for value in range(span[2] + 1):
        if value >= span[1] or (value == 0 and span[0] == 0):
            found = np.int64(0)
            for table in range(4):
                found += np.int64(counts[table, value])
            found = max(np.int64(1), found)
            total += found
            at = size
            while at > 0 and sums[at - 1] > found:
                values[at], sums[at] = values[at - 1], sums[at - 1]
                at -= 1
            values[at], sums[at] = value, found
            size += 1
    return size if size > 1 and 2 * sums[size - 1] <= total else 0


def choose_lengths(sums: Array, size: int, parents: Array, depths: Array) -> None:
    """Set ``depths`` to the lengths of codes of ``size`` values with ascending ``sums``: a complete, bounded code."""
    leaf, inner = 0, size  # Huffman's tree: leaves, then inner nodes, which come into being in ascending order
    for node in range(size, 2 * size - 1):
        sums[node] = 0
        for _ in range(2):
            if leaf < size and (inner >= node or sums[leaf] <= sums[inner]):
                child = leaf
                leaf += 1
            else:
                child = inner
                inner += 1
            parents[child] = node
            sums[node] += sums[child]
    depths[2 * size - 2] = 0
    for node in range(2 * size - 3, -1, -1):
        depths[node] = depths[parents[node]] + 1
    spare = 1 << _MOST_BITS
    for at in range(size):
        depths[at] = min(depths[at], _MOST_BITS)
        spare -= 1 << (_MOST_BITS - depths[at])
    while spare < 0:  # too many short codes: lengthen the longest of those that may grow
        at = 0
        while depths[at] == _MOST_BITS:
            at += 1
        depths[at] += 1
        spare += 1 << (_MOST_BITS - depths[at])
    while spare > 0:  # room is left, a multiple of what the longest codes take: shorten those that fit into it
        at = size - 1
        while 1 << (_MOST_BITS - depths[at]) > spare:
            at -= 1
        spare -= 1 << (_MOST_BITS - depths[at])
        depths[at] -= 1


def weigh(values: Array, size: int, depths: Array, weights: Array) -> int:
    """Set the weights of values with these lengths of codes; returns the longest."""
    longest = 0
    for at in range(size):
        longest = max(longest, depths[at])
    weights[:] = 0
    for at in range(size):
        weights[values[at]] = longest + 1 - depths[at]
    return longest


def describe_codes(weights: Array, last: int, fse: Array, states: Array, out: Array) -> int:
    """Code the weights of all values below ``last`` by FSE; returns the bytes used. Even and odd values alternate.

    ``fse[weight]`` is its count of states, their offset in ``states``, and the bits of its larger steps.
    """
    held, num_held, end = np.uint64(0), 0, 0
    even, odd = 0, 0
    for value in range(last - 1, -1, -1):
        count, offset, bits = fse[weights[value]]
        state = odd if value & 1 else even
        if state == 0:
            state = states[offset]
        else:
            if state < count << bits:
                bits -= 1
            held |= np.uint64(state & ((1 << bits) - 1)) << np.uint64(num_held)
            num_held += bits
            state = states[offset + (state >> bits) - count]
        if value & 1:
            odd = state
        else:
            even = state
        while num_held >= 8:
            out[end] = np.uint8(held)
            held >>= np.uint64(8)
            num_held -= 8
            end += 1
    for state in (odd, even, _FSE_STATES + 1):  # the last one is the mark of the end
        held |= np.uint64(state - _FSE_STATES) << np.uint64(num_held)
        num_held += _FSE_BITS
    num_held -= _FSE_BITS - 1
    while num_held > 0:
        out[end] = np.uint8(held)
        held >>= np.uint64(8)
        num_held -= 8
        end += 1
    return end


def fill_pairs(weights: Array, longest: int, pairs: Array) -> None:
    """Set the codes of every two values that may follow each other: at most 22 bits, above 6 with their number."""
    codes, lengths, used = np.empty(256, np.uint32), np.empty(256, np.uint32), np.empty(256, np.int64)
    size, begin = 0, 0
    for weight in range(1, longest + 1):
        for value in range(256):
            if weights[value] == weight:
                codes[value] = begin >> (weight - 1)
                lengths[value] = longest + 1 - weight
                begin += 1 << (weight - 1)
                used[size] = value
                size += 1
    for upper in used[:size]:  # the second byte, which is written first
        for lower in used[:size]:
            code = codes[upper] | (codes[lower] << lengths[upper])
            pairs[(upper << 8) | lower] = (code << 6) | (lengths[upper] + lengths[lower])


def write_streams(data: Array, pairs: Array, streams: Array, ends: Array) -> None:
    """Code each quarter of ``data``, pairs of bytes, from its end to its begin, into ``streams[i]``.

    ``streams`` has a 64-bit word at every byte, so words overlap. ``ends`` gets the bytes used of each. Two quarters
    at a time fit into the registers of a CPU.
    """
    quarter = np.uint64(len(data) // 4)
    one, six, seven, three, mask = np.uint64(1), np.uint64(6), np.uint64(7), np.uint64(3), np.uint64(63)
    for i in range(0, 4, 2):
        a, b = np.uint64(i) * quarter, np.uint64(i + 1) * quarter
        held_a = held_b = np.uint64(0)
        bits_a = bits_b = np.uint64(0)  # from the begin of the stream
        at = quarter
        while at > 0:
            at -= np.uint64(2)
            a1, a0 = np.uint64(pairs[data[a + at + one]]), np.uint64(pairs[data[a + at]])
            b1, b0 = np.uint64(pairs[data[b + at + one]]), np.uint64(pairs[data[b + at]])
            two_a = (a1 >> six) | ((a0 >> six) << (a1 & mask))
            two_b = (b1 >> six) | ((b0 >> six) << (b1 & mask))
            held_a |= two_a << (bits_a & seven)
            held_b |= two_b << (bits_b & seven)
            streams[i, bits_a >> three] = held_a
            streams[i + 1, bits_b >> three] = held_b
            more_a, more_b = (a0 + a1) & mask, (b0 + b1) & mask
            held_a >>= ((bits_a & seven) + more_a) & ~seven
            held_b >>= ((bits_b & seven) + more_b) & ~seven
            bits_a += more_a
            bits_b += more_b
        for stream, held, bits in ((i, held_a, bits_a), (i + 1, held_b, bits_b)):
            streams[stream, bits >> three] = held | (one << (bits & seven))
            ends[stream] = int(bits >> three) + 1


class HuffmanKernels(NamedTuple):
    """Compiled kernels of an encoder."""

    count_values: Kernel
    sort_values: Kernel
    choose_lengths: Kernel
    weigh: Kernel
    describe_codes: Kernel
    fill_pairs: Kernel
    write_streams: Kernel


class HuffmanEncoder:
    """Encoder for up to ``most_bytes`` bytes, with buffers for one thread."""

    def __init__(self, kernels: HuffmanKernels, most_bytes: int) -> None:
        self._kernels = kernels
        self._most_bytes = most_bytes
        self._counts = np.empty((4, 256), np.uint32)
        self._span = np.empty(3, np.int64)
        self._values, self._sums, self._parents, self._depths = np.empty((4, 2 * _MOST_VALUES + 2), np.int64)
        self._weights = np.empty(256, np.uint8)
        self._description = np.empty(256, np.uint8)
        self._pairs = np.zeros(1 << 16, np.uint32)
        self._streams = np.empty((4, most_bytes * _MOST_BITS // 32 + 8), np.uint8)
        shape = (4, self._streams.shape[1] - 7)
        self._words = np.ndarray(shape, np.uint64, self._streams, strides=self._streams.strides)  # at every byte
        self._ends = np.empty(4, np.int64)

    def encode(self, data: ByteArray, out: ByteArray) -> int | None:
        """Write a frame of ``data``, shorter than it, to the front of ``out``; returns its length.

        None if it doesn't fit, or zstd would do better.
        """
        if len(data) % 16 or not _MIN_BYTES <= len(data) <= self._most_bytes:
            return None
        longest = self._choose_codes(data)
        if not longest:
            return None
        last = int(self._span[2])
        described = self._kernels.describe_codes(self._weights, last, _FSE, _STATES, self._description)
        if last < 2 or len(_FSE_HEADER) + described > 127:
            return None
        self._kernels.fill_pairs(self._weights, longest, self._pairs)
        self._kernels.write_streams(data.view(np.uint16), self._pairs, self._words, self._ends)
        ends: list[int] = self._ends.tolist()
        tree = bytes([len(_FSE_HEADER) + described]) + _FSE_HEADER + self._description[:described].tobytes()
        begin = tree + b"".join(end.to_bytes(2, "little") for end in ends[:3])
        literals = len(begin) + sum(ends)
        begin = _headers(len(data), literals) + begin
        end = len(begin)
        total = end + sum(ends) + 1 + _SUM_BYTES
        if total > len(out) or total >= len(data):
            return None
        out[:end] = np.frombuffer(begin, np.uint8)
        for stream, length in zip(self._streams, ends, strict=True):
            out[end : end + length] = stream[:length]
            end += length
        out[end] = 0  # sequences
        checksum = xxhash.xxh64_intdigest(data.data) & 0xFFFFFFFF  # a mistake in here cannot become wrong content
        out[end + 1 : total] = np.frombuffer(checksum.to_bytes(_SUM_BYTES, "little"), np.uint8)
        return total

    def _choose_codes(self, data: ByteArray) -> int:
        """Set the weight of each value; returns the bits of the longest code, or 0 to leave the data to zstd."""
        if not self._kernels.count_values(data, self._counts, self._span):
            return 0
        size = self._kernels.sort_values(self._counts, self._span, self._values, self._sums)
        if not size:
            return 0
        self._kernels.choose_lengths(self._sums, size, self._parents, self._depths)
        return int(self._kernels.weigh(self._values, size, self._depths, self._weights))


def _headers(size_bytes: int, literals_bytes: int) -> bytes:
    """Return the headers of a frame with size and checksum, of its only block, and of four streams of literals."""
    block = 1 | 2 << 1 | (5 + literals_bytes + 1) << 3
    literals = 2 | 3 << 2 | size_bytes << 4 | literals_bytes << 22
    frame = b"\x28\xb5\x2f\xfd\xa4" + size_bytes.to_bytes(4, "little")
    return frame + block.to_bytes(3, "little") + literals.to_bytes(5, "little")


def _fse_tables() -> tuple[Array, Array, bytes]:
    """Return for each weight its count of states, their offset and bits; the states; and the header that tells all."""
    step = (_FSE_STATES >> 1) + (_FSE_STATES >> 3) + 3
    spread = [weight for weight, count in enumerate(_FSE_COUNTS) for _ in range(count)]
    weight_at = {step * number % _FSE_STATES: weight for number, weight in enumerate(spread)}
    states = sorted(range(_FSE_STATES), key=lambda at: (weight_at[at], at))
    table, offset = [], 0
    for count in _FSE_COUNTS:
        table.append((count, offset, _FSE_BITS + 1 - (count - 1).bit_length()))
        offset += count
    held, num_held, left = _FSE_BITS - 5, 4, _FSE_STATES + 1
    for count in _FSE_COUNTS:
        bits = left.bit_length()
        short = (1 << bits) - 1 - left  # so many values take a bit less
        value = count + 1
        is_short = value < short
        if not is_short and value >= 1 << (bits - 1):
            value += short
        held |= value << num_held
        num_held += bits - is_short
        left -= count
    header = held.to_bytes((num_held + 7) // 8, "little")
    return np.array(table, np.int64), np.array(states, np.int64) + _FSE_STATES, header


_FSE, _STATES, _FSE_HEADER = _fse_tables()


def huffman_kernels() -> HuffmanKernels | None:
    """Compile what ``HuffmanEncoder`` needs, which takes seconds the first time; None if numba cannot."""
    octets, words, longs = "Array(uint8, 1, 'C')", "Array(uint32, {}, 'C')", "Array(int64, 1, 'C')"
    table = words.format(1)
    kernels = compiled(
        (count_values, f"boolean({octets}, {words.format(2)}, {longs})"),
        (sort_values, f"intp({words.format(2)}, {longs}, {longs}, {longs})"),
        (choose_lengths, f"void({longs}, intp, {longs}, {longs})"),
        (weigh, f"intp({longs}, intp, {longs}, {octets})"),
        (describe_codes, f"intp({octets}, intp, Array(int64, 2, 'C'), {longs}, {octets})"),
        (fill_pairs, f"void({octets}, intp, {table})"),
        (write_streams, f"void(Array(uint16, 1, 'C'), {table}, Array(uint64, 2, 'A', aligned=False), {longs})"),
    )
    return None if kernels is None else HuffmanKernels(*kernels)
