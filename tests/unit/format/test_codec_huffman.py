"""The encoder of exponents: whatever it writes, zstd decodes; what it leaves alone, zstd encodes."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import schedules

from kvstore.format.codecs import huffman, open_codec
from kvstore.format.codecs.huffman import HuffmanEncoder, huffman_kernels
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
zstandard = pytest.importorskip("zstandard")

MOST_BYTES = 1 << 17


@cache
def encoder() -> HuffmanEncoder:
    compiled = huffman_kernels()
    assert compiled is not None
    return HuffmanEncoder(compiled, MOST_BYTES)


def frame_of(data: ByteArray) -> bytes | None:
    """Encode into the middle of a larger buffer; no byte after the frame may change."""
    room = np.full(len(data) + 64, 0xA5, np.uint8)
    size = encoder().encode(data, room[32:-32])
    assert (room[:32] == 0xA5).all()
    assert (room[32 + (size or 0) :] == 0xA5).all() or size is None
    assert (room[-32:] == 0xA5).all()
    return None if size is None else room[32 : 32 + size].tobytes()


def drawn(counts: list[int], first: int, size: int, seed: int = 0) -> ByteArray:
    """Return shuffled values from ``first`` on, about in these proportions, each at least once."""
    values = np.arange(first, first + len(counts), dtype=np.uint8)
    shares = np.array(counts, float) / sum(counts)
    data = np.random.default_rng(seed).choice(values, size, p=shares)
    data[np.random.default_rng(seed).permutation(size)[: len(values)]] = values
    return data


def assert_decodes(data: ByteArray) -> bytes:
    frame = frame_of(data)
    assert frame is not None
    assert len(frame) < len(data)
    assert zstandard.frame_content_size(frame) == len(data)
    assert zstandard.ZstdDecompressor().decompress(frame) == data.tobytes()
    return frame


def test_a_code_that_is_wrong_is_no_content() -> None:
    frame = bytearray(assert_decodes(drawn([5, 3, 2, 1], 100, 8192, 1)))
    for place in range(200, len(frame)):
        frame[place] ^= 1
        with pytest.raises(zstandard.ZstdError):
            zstandard.ZstdDecompressor().decompress(frame)
        frame[place] ^= 1


@schedules(150)
@given(
    counts=st.lists(st.sampled_from([1, 1, 2, 5, 100, 10_000, 1_000_000]), min_size=3, max_size=64),
    first=st.integers(0, 255),
    size=st.sampled_from([4096, 4112, 20_000, 65_536, MOST_BYTES]),
    has_zeros=st.booleans(),
)
def test_zstd_decodes_it_or_is_left_to_it(counts: list[int], first: int, size: int, *, has_zeros: bool) -> None:
    data = drawn(counts, min(first, 256 - len(counts)), size, len(counts))
    if has_zeros:
        data[7 :: len(counts) * 50] = 0
    if (frame := frame_of(data)) is not None:
        assert len(frame) < size
        assert zstandard.ZstdDecompressor().decompress(frame) == data.tobytes()


@pytest.mark.parametrize("last", range(2, 256))
def test_any_last_value_is_described(last: int) -> None:
    """Weights of even and odd values are coded in turns, and end with either."""
    width = min(last + 1, 3 + last % 62)
    assert_decodes(drawn([3] * width, last - width + 1, 4096))


@pytest.mark.parametrize("size", [20, 30, 40, 64])
@pytest.mark.parametrize("base", [1.1, 1.5, 2, 3])
def test_codes_are_no_longer_than_zstd_allows(size: int, base: float) -> None:
    """Each value half as likely as the last would have a code of a bit more than the last."""
    counts = [int(min(base**n, 1e15)) + 1 for n in range(size)]
    counts[-1] = counts[-2]  # no value has most
    for order in (counts, counts[::-1], counts[::2] + counts[1::2][::-1]):
        data = drawn([*order[:-1], order[-1]], 90, MOST_BYTES)
        if 2 * np.bincount(data).max() < len(data) * 0.98:
            assert_decodes(data)


def test_values_that_no_sample_meets_have_codes() -> None:
    counted = np.zeros(MOST_BYTES, bool)
    counted[:: huffman._STRIDE] = True
    data = np.where(counted, 120 + np.arange(MOST_BYTES) % 4, 100 + np.arange(MOST_BYTES) % 60).astype(np.uint8)
    data[~counted & (np.arange(MOST_BYTES) % 9 == 0)] = 0
    assert_decodes(data)


def test_it_is_as_short_as_that_of_zstd() -> None:
    words = np.random.default_rng(0).standard_normal(MOST_BYTES, dtype=np.float32).view(np.uint32)
    exponents = ((words >> 23) & 0xFF).astype(np.uint8)
    assert len(assert_decodes(exponents)) < 1.01 * len(zstandard.ZstdCompressor().compress(exponents.tobytes()))


@pytest.mark.parametrize(
    "data",
    [
        drawn([1] * 65, 10, MOST_BYTES),
        drawn([1] * 256, 0, MOST_BYTES),
        drawn([60, 20, 20], 10, MOST_BYTES),
        np.zeros(MOST_BYTES, np.uint8),
        np.full(MOST_BYTES, 255, np.uint8),
        drawn([1] * 9, 10, 4096 + 8),
        drawn([1] * 9, 10, 4080),
        drawn([1] * 9, 10, MOST_BYTES + 16),
        drawn([1] * 9, 10, MOST_BYTES)[:0],
    ],
    ids=["wide", "any byte", "one most", "zeros", "ones", "odd size", "short", "long", "empty"],
)
def test_it_leaves_the_rest_to_zstd(data: ByteArray) -> None:
    assert frame_of(data) is None


def test_a_frame_that_does_not_fit_is_not_begun() -> None:
    data = drawn([1] * 9, 10, MOST_BYTES)
    size = len(assert_decodes(data))
    for short in (0, 1, 8, size // 2, size - 1):
        out = np.full(short + 8, 0xA5, np.uint8)
        assert encoder().encode(data, out[:short]) is None
        assert (out == 0xA5).all()
    assert encoder().encode(data, np.empty(size, np.uint8)) == size


@pytest.mark.parametrize(("element", "item_bytes"), [("bf16", 2), ("f32", 4)])
def test_a_codec_without_it_decodes_what_one_with_it_encodes(element: str, item_bytes: int) -> None:
    layout = KVLayout((4096,), 1, 16, 256, element=element)
    values = np.random.default_rng(0).standard_normal(300_000, dtype=np.float32).view(np.uint8)
    layer = values if item_bytes == 4 else np.ascontiguousarray(values.reshape(-1, 2)[1::2]).reshape(-1)
    with mock.patch("kvstore.format.codecs.kernels.compiled", return_value=None):
        by_numpy = open_codec("split", layout)
    by_numpy._huffman = None  # type: ignore[attr-defined]
    fast = open_codec("split", layout)
    sizes = []
    for codec, other in ((fast, by_numpy), (by_numpy, fast)):
        out, back = np.empty_like(layer), np.empty_like(layer)
        sizes.append(codec.encode(layer, out))
        other.decode(out[: sizes[-1]], back)
        assert np.array_equal(back, layer)
    assert sizes[0] < 1.01 * sizes[1] < len(layer)
