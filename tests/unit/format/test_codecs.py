"""Codecs: lossless ones return the same bytes, no layer grows, and malformed input ends cleanly."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.schedules import schedules

from kvstore.format.codecs import Codec, open_codec
from kvstore.model.errors import CodecError, ConfigError
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.model.chunks import ByteArray

ELEMENTS = {"bf16": 2, "f16": 2, "f32": 4, "f8": 1}
LOSSLESS = [("lz4", "opaque"), *(("split", element) for element in ELEMENTS)]
SEVERAL_PIECES = 1_100_001  # bytes; more than two pieces of any codec, and a remainder
by_codec = pytest.mark.parametrize(("name", "element"), LOSSLESS)


def layout_of(element: str, axes: tuple[int, int, int], planes: int = 1) -> KVLayout:
    page_bytes = int(np.prod(axes)) * ELEMENTS[element]
    return KVLayout((page_bytes,) * 2, planes, 16, 256, physical="a test", element=element, page_axes=axes)


def layout_of_any(element: str) -> KVLayout:
    return KVLayout((4096,) * 2, 1, 16, 256, element=element)


def round_trip(codec: Codec, layer: ByteArray) -> tuple[int, ByteArray]:
    """Encode and decode in the middle of larger buffers, at odd addresses; no byte outside them may change."""
    room = np.full(len(layer) + 35, 0xA5, np.uint8)
    size = codec.encode(layer, room[19 : 19 + len(layer)])
    assert (room[:19] == 0xA5).all()
    assert (room[19 + len(layer) :] == 0xA5).all()
    assert 0 < size <= len(layer)
    back = np.full(len(layer) + 20, 0xA5, np.uint8)
    codec.decode(room[19 : 19 + size].copy(), back[7 : 7 + len(layer)])
    assert (back[:7] == 0xA5).all()
    assert (back[7 + len(layer) :] == 0xA5).all()
    return size, back[7 : 7 + len(layer)]


def as_element(values: np.ndarray, element: str) -> ByteArray:
    """Return numbers as the bytes of an element type."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    types = {
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "f32": torch.float32,
        "f8": torch.float8_e4m3fn,
        "opaque": torch.bfloat16,
    }
    return tensor.to(types[element]).view(torch.uint8).numpy().reshape(-1)


def normal(count: int, element: str = "bf16", seed: int = 0) -> ByteArray:
    return as_element(np.random.default_rng(seed).standard_normal(count, dtype=np.float32), element)


def kv_like(tokens: int, channels: int, element: str = "bf16") -> ByteArray:
    """Return channels of unequal size and with different means, as in K."""
    dice = np.random.default_rng(3)
    scales, means = np.exp(dice.normal(0, 1, channels)), dice.normal(0, 1, channels)
    return as_element(dice.standard_normal((tokens, channels)) * scales + means, element)


# Lossless


def random_bytes() -> ByteArray:
    return np.random.default_rng(1).integers(0, 256, SEVERAL_PIECES, dtype=np.uint8)


def nans(element: str) -> ByteArray:
    layer = as_element(np.full(80_000, np.nan), element)
    layer[::7] ^= 1  # with payloads
    return layer


KINDS: dict[str, Callable[[str], ByteArray]] = {
    "zeros": lambda _: np.zeros(SEVERAL_PIECES, np.uint8),
    "random": lambda _: random_bytes(),
    "normal": lambda element: normal(600_000, element)[:SEVERAL_PIECES],
    "kv": lambda element: kv_like(256, 1500, element),
    "nan": nans,
    "inf": lambda element: as_element(np.full(80_000, -np.inf), element),
    "denormal": lambda element: as_element(np.random.default_rng(1).standard_normal(80_000) * 1e-39, element),
    "half": lambda _: np.concatenate([np.zeros(SEVERAL_PIECES // 2, np.uint8), random_bytes()]),
}


@by_codec
@schedules(40)
@given(layer=npst.arrays(np.uint8, st.integers(1, 600)))
def test_any_bytes_come_back(name: str, element: str, layer: ByteArray) -> None:
    assert np.array_equal(round_trip(open_codec(name, layout_of_any(element)), layer)[1], layer)


@by_codec
@schedules()
@given(
    pattern=st.binary(min_size=1, max_size=9),
    size=st.integers(1, 40_000),
    noise=st.lists(st.tuples(st.integers(0, 39_999), st.integers(0, 255)), max_size=20),
)
def test_repeating_bytes_come_back(
    name: str, element: str, pattern: bytes, size: int, noise: list[tuple[int, int]]
) -> None:
    layer = np.resize(np.frombuffer(pattern, np.uint8), size)
    for offset, value in noise:
        layer[offset % size] = value
    assert np.array_equal(round_trip(open_codec(name, layout_of_any(element)), layer)[1], layer)


@by_codec
@pytest.mark.parametrize("what", KINDS)
def test_every_kind_of_layer_comes_back(name: str, element: str, what: str) -> None:
    layer = KINDS[what](element)
    size, back = round_trip(open_codec(name, layout_of_any(element)), layer)
    assert np.array_equal(back, layer)
    if what == "zeros":
        assert size < len(layer) / 10 if name == "lz4" or element == "f8" else size < len(layer)
    if what == "random":
        assert size == len(layer)  # stored as it is


class Swollen(Codec):
    """Codec whose packed layers are as long as before."""

    name = "swollen"

    def _pack(self, layer: ByteArray, out: ByteArray) -> int:
        out[: len(layer)] = 0xEE
        return len(layer)

    def _unpack(self, data: ByteArray, out: ByteArray) -> None:
        raise AssertionError("nothing was stored packed")


def test_a_layer_that_did_not_shrink_is_stored_as_it_is() -> None:
    layer = normal(100)
    size, back = round_trip(Swollen(), layer)
    assert size == len(layer)
    assert np.array_equal(back, layer)


def test_a_piece_that_did_not_shrink_is_stored_as_it_is() -> None:
    """The length tells that it was not compressed, so a compressed one of the same length would be read as it is."""

    class Lz4:
        """Codec that compresses only zeros."""

        def compress(self, data: memoryview, *, store_size: bool) -> bytes:
            return bytes(data)[::-1] if any(data) else b"zeros"

        def decompress(self, data: memoryview, *, uncompressed_size: int) -> bytes:
            assert bytes(data) == b"zeros"
            return bytes(uncompressed_size)

    codec = open_codec("lz4", layout_of_any("opaque"))
    codec._lz4 = Lz4()  # type: ignore[attr-defined]
    layer = np.concatenate([np.zeros(128 << 10, np.uint8), normal(32 << 10)])
    size, back = round_trip(codec, layer)
    assert size < len(layer)
    assert np.array_equal(back, layer)


@pytest.mark.parametrize(("element", "ratio"), [("bf16", 1.35), ("f16", 1.1), ("f32", 1.1), ("f8", 1.1)])
def test_split_saves_what_exponents_are_worth(element: str, ratio: float) -> None:
    codec = open_codec("split", layout_of_any(element))
    for layer in (normal(1 << 19, element), kv_like(256, 1024, element)):
        assert len(layer) / round_trip(codec, layer)[0] > ratio


def test_lz4_costs_nothing_on_kv() -> None:
    layer = normal(1 << 17)
    size, back = round_trip(open_codec("lz4", layout_of_any("bf16")), layer)
    assert size == len(layer)
    assert np.array_equal(back, layer)


def test_one_codec_serves_many_threads() -> None:
    codec = open_codec("split", layout_of_any("bf16"))
    layers = [kv_like(64 + number, 300) for number in range(24)]
    with ThreadPoolExecutor(6) as threads:
        backs = list(threads.map(lambda layer: round_trip(codec, layer)[1], layers))
    assert all(np.array_equal(back, layer) for back, layer in zip(backs, layers, strict=True))


# Malformed


@pytest.mark.parametrize(("name", "element"), [*LOSSLESS, ("int8", "bf16"), ("int8", "f32")])
@schedules(50)
@given(data=st.data())
def test_malformed_input_ends_cleanly(name: str, element: str, data: st.DataObject) -> None:
    """A flipped bit, a cut, an insertion, or garbage gives a layer or a ``CodecError``, and changes nothing outside."""
    codec = open_codec(name, layout_of(element, (2, 16, 32)) if name == "int8" else layout_of_any(element))
    if name == "lz4":
        layer = np.resize(np.arange(97, dtype=np.uint8), 4096)
    else:
        layer = normal(1024 * (4 if name == "int8" else 1), element)
    out = np.empty_like(layer)
    encoded = bytearray(out[: codec.encode(layer, out)].tobytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "garbage"]))
    offset = data.draw(st.integers(0, min(len(encoded), data.draw(st.sampled_from([40, 10_000]))) - 1))
    if kind == "flip":
        encoded[offset] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        encoded = encoded[:offset]
    elif kind == "insert":
        encoded[offset:offset] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        encoded = bytearray(data.draw(st.binary(max_size=200)))
    back = np.full(len(layer) + 16, 0xA5, np.uint8)
    with suppress(CodecError):
        codec.decode(np.frombuffer(bytes(encoded), np.uint8), back[8:-8])
    assert (back[:8] == 0xA5).all()
    assert (back[-8:] == 0xA5).all()


@pytest.mark.parametrize(("name", "element"), [("lz4", "opaque"), ("split", "bf16")])
def test_a_cut_layer_is_refused(name: str, element: str) -> None:
    codec = open_codec(name, layout_of_any(element))
    layer = np.zeros(SEVERAL_PIECES, np.uint8)
    out = np.empty_like(layer)
    size = codec.encode(layer, out)
    for wrong in (out[: size - 1], out[: size // 2], out[:3], out[:0], np.append(out[:size], np.uint8(0))):
        with pytest.raises(CodecError):
            codec.decode(wrong, np.empty_like(layer))
    with pytest.raises(CodecError):
        codec.decode(out[:size], np.empty(len(layer) + 4, np.uint8))


def test_a_frame_that_claims_to_be_huge_allocates_nothing() -> None:
    import zstandard

    codec = open_codec("split", layout_of_any("f8"))
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    encoded = np.frombuffer(len(frame).to_bytes(4, "little") + frame, np.uint8)
    with pytest.raises(CodecError, match="no compressed piece"):
        codec.decode(encoded, np.empty(60_000, np.uint8))


# int8


@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("axes", "planes"), [((1, 16, 64), 1), ((4, 16, 32), 2), ((2, 8, 16), 1)])
def test_int8_keeps_to_its_error(element: str, axes: tuple[int, int, int], planes: int) -> None:
    blocks = 8
    dice = np.random.default_rng(5)
    a, tokens, b = axes
    shape = (planes, blocks, a, tokens, b)
    values = dice.standard_normal(shape) * np.exp(dice.normal(0, 2, (planes, 1, a, 1, b)))
    values[0, :, 0, :, 0] = 0
    layer = as_element(values, element)
    size, back = round_trip(open_codec("int8", layout_of(element, axes, planes)), layer)
    assert size == 4 * planes * a * b + values.size
    before, after = (decoded(array, element).reshape(shape) for array in (layer, back))
    largest = np.abs(before).max(axis=(1, 3), keepdims=True)
    rounding = {"bf16": 2**-8, "f16": 2**-11, "f32": 2**-23}[element]
    bound = largest / 254 * 1.001 + np.abs(before) * rounding + largest * rounding / 64
    assert (np.abs(before - after) <= bound).all()
    assert not after[0, :, 0, :, 0].any()


def decoded(data: ByteArray, element: str) -> np.ndarray:
    types = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    return torch.from_numpy(data.copy()).view(types[element]).double().numpy()


@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_int8_leaves_what_is_not_finite(element: str, value: float) -> None:
    values = np.random.default_rng(5).standard_normal(4 * 16 * 64)
    values[77] = value
    layer = as_element(values, element)
    size, back = round_trip(open_codec("int8", layout_of(element, (1, 16, 64))), layer)
    assert size == len(layer)
    assert np.array_equal(back, layer)


@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
def test_int8_of_extremes_stays_finite(element: str) -> None:
    largest = {"bf16": 3.3895e38, "f16": 65504, "f32": 3.4028234e38}[element]
    values = np.tile([largest, -largest, 1e-44, 0.0], 1024)
    _, back = round_trip(open_codec("int8", layout_of(element, (1, 16, 64))), as_element(values, element))
    assert np.isfinite(decoded(back, element)).all()


def test_int8_of_few_tokens_is_stored_as_it_is() -> None:
    layer = normal(64)
    layout = KVLayout((128,), 1, 1, 16, element="bf16", page_axes=(1, 1, 64))
    size, back = round_trip(open_codec("int8", layout), layer)
    assert size == len(layer)
    assert np.array_equal(back, layer)


def test_int8_refuses_scales_that_are_no_numbers() -> None:
    codec = open_codec("int8", layout_of("bf16", (1, 16, 64)))
    layer, out = normal(4 * 1024), np.empty(8 * 1024, np.uint8)
    size = codec.encode(layer, out)
    out[:4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    with pytest.raises(CodecError, match="finite"):
        codec.decode(out[:size], np.empty_like(layer))


# Refusals


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("split", KVLayout((4096,), 1, 16, 256, physical="torch.uint8[1|x]"), "packed or mixed data .*uint8"),
        ("int8", KVLayout((4096,), 1, 16, 256, physical="torch.uint8[1|x]"), "holds opaque .*uint8"),
        ("int8", KVLayout((4096,), 1, 16, 256, element="f8"), "holds f8"),
        ("int8", KVLayout((4096,), 1, 16, 256, element="bf16"), "where its channels are .MLA"),
        ("int8", KVLayout((100,), 1, 16, 256, element="bf16", page_axes=(1, 16, 64)), "do not consist of rows"),
        ("lz4", KVLayout((1 << 30,), 1, 16, 256), "up to 4 GiB"),
        ("zstd", KVLayout((4096,), 1, 16, 256), "no codec 'zstd'.*none, lz4, split, int8"),
        ("splitt", KVLayout((4096,), 1, 16, 256), "did you mean 'split'"),
    ],
)
def test_refusals_say_why(name: str, layout: KVLayout, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_codec(name, layout)


@pytest.mark.parametrize(("name", "package"), [("lz4", "lz4.block"), ("split", "zstandard")])
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    layout = layout_of_any("bf16")
    with pytest.raises(ConfigError, match=r"needs the package .*vllm-kvstore\[codecs\]"):
        open_codec(name, layout)
