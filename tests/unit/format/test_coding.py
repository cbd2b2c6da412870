"""Images of chunk files after a codec: they are restored, and every fault in them is detected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.schedules import schedules

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage, Encoding, encode_header
from kvstore.format.codecs import open_codec
from kvstore.format.coding import ChunkCoder
from kvstore.format.images import check_image
from kvstore.model.keys import ChunkKey
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

LAYOUT = KVLayout((65536,) * 3, 1, 16, 64, element="bf16", page_axes=(4, 16, 512))
KEY = ChunkKey(bytes(range(8)), bytes(range(16, 32)))
PAYLOAD = (
    torch.from_numpy(np.random.default_rng(0).standard_normal(LAYOUT.payload_bytes(4) // 2, dtype=np.float32))
    .to(torch.bfloat16)
    .view(torch.uint8)
    .numpy()
)


def make_image(codec: str = "split") -> tuple[ChunkCoder, ByteArray]:
    coder = ChunkCoder(LAYOUT, open_codec(codec, LAYOUT))
    out = np.full(coder.image_bytes(4), 0xA5, np.uint8)
    return coder, out[: coder.encode(KEY, 4, PAYLOAD, out)]


def with_encoding(coder: ChunkCoder, image: ByteArray, encoding: Encoding) -> ByteArray:
    """Return the same layers under a header with other lengths; everything else in it is right."""
    changed = image.copy()
    parsed = chunkfile.parse_encoding(LAYOUT, 4, image[:4096], coder.codec_name)
    assert not isinstance(parsed, Damage)
    header = chunkfile.build_header(LAYOUT, KEY, 4, parsed[1], encoding=encoding)
    changed[:4096] = np.frombuffer(header, np.uint8)
    return changed


def test_an_image_comes_back() -> None:
    coder, image = make_image()
    payload = np.empty(LAYOUT.slot_bytes, np.uint8)
    assert coder.decode(KEY, 4, image, payload) is None
    assert np.array_equal(payload[: LAYOUT.payload_bytes(4)], PAYLOAD)
    other = ChunkKey(KEY.namespace_id, bytes(16))
    assert coder.decode(other, 4, image, payload) is Damage.KEY
    assert coder.decode(KEY, 3, image, payload) is not None
    assert coder.decode(KEY, 4, image[:-4096], payload) is Damage.SIZE
    assert coder.decode(KEY, 4, image[:-1], payload) is Damage.SIZE


@pytest.mark.parametrize("num_layers", [128, 160, 192, 193])
def test_a_header_that_a_codec_makes_longer(num_layers: int) -> None:
    """With many layers the begin of the payload depends on the codec that the header names, and not on the reader's."""
    layout = KVLayout((4096,) * num_layers, 1, 16, 16)
    coder = ChunkCoder(layout, open_codec("lz4", layout))
    payload = np.zeros(layout.slot_bytes, np.uint8)
    payload[:4096] = np.arange(4096) % 251
    coded = np.empty(coder.image_bytes(1), np.uint8)
    coded = coded[: coder.encode(KEY, 1, payload, coded)]
    header = encode_header(layout, KEY, 1, payload)
    plain = np.concatenate([np.frombuffer(header, np.uint8), payload])
    for image, codec in ((coded, "lz4"), (plain, "none")):
        assert chunkfile.codec_in(layout, image) == codec
        assert check_image(layout, KEY, 1, image) is None
        back = np.empty_like(payload)
        assert coder.decode(KEY, 1, image, back) is None
        assert np.array_equal(back, payload)
        image[-5000] ^= 1
        assert check_image(layout, KEY, 1, image) is Damage.CHECKSUM


def test_swapped_layers_and_lying_lengths_are_damage() -> None:
    coder, image = make_image()
    parsed = chunkfile.parse_encoding(LAYOUT, 4, image[:4096], "split")
    assert not isinstance(parsed, Damage)
    encoding = parsed[0]
    assert encoding is not None
    payload = np.empty(LAYOUT.slot_bytes, np.uint8)
    one, two, three = encoding.layer_bytes
    lies = [(two, one, three), (one - 1, two + 1, three), (one, two, three - 4096), (1, 1, one + two + three - 2)]
    for lie in lies:
        changed = with_encoding(coder, image, Encoding("split", lie))
        assert coder.decode(KEY, 4, changed, payload) in {Damage.CHECKSUM, Damage.SIZE, Damage.HEADER}
    assert coder.decode(KEY, 4, with_encoding(coder, image, Encoding("lz4", encoding.layer_bytes)), payload) is not None
    swapped = image.copy()
    (begin, end), (begin_two, _), _ = encoding.ranges()
    size = min(one, two)
    swapped[4096 + begin : 4096 + begin + size] = image[4096 + begin_two : 4096 + begin_two + size]
    assert end
    assert coder.decode(KEY, 4, swapped, payload) is Damage.CHECKSUM


def test_padding_that_is_not_zero_is_damage() -> None:
    coder, image = make_image()
    assert not image[-1], "this image ends with padding"
    image[-1] = 1
    assert coder.decode(KEY, 4, image, np.empty(LAYOUT.slot_bytes, np.uint8)) is Damage.HEADER


def test_what_size_an_image_can_have() -> None:
    coder, _ = make_image()
    most_bytes = coder.image_bytes(4)
    sizes = [coder.header_bytes, coder.header_bytes + 4096, most_bytes, most_bytes - 1, most_bytes + 4096]
    assert [coder.may_be(4, size) for size in sizes] == [False, True, True, False, False]


@schedules(80)
@given(offset=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_any_flipped_bit_of_an_image_is_seen(offset: int, bit: int) -> None:
    coder, image = make_image()
    image[offset % len(image) if offset % 3 else offset % 4096] ^= 1 << bit
    assert coder.decode(KEY, 4, image, np.empty(LAYOUT.slot_bytes, np.uint8)) is not None


@schedules(40)
@given(start=st.integers(0, 4095), garbage=st.binary(min_size=1, max_size=300))
def test_garbage_in_a_header_never_raises(start: int, garbage: bytes) -> None:
    coder, image = make_image()
    changed = image.copy()
    changed[start : start + len(garbage)] = np.frombuffer(garbage, np.uint8)[: 1 << 20]
    damage = coder.decode(KEY, 4, changed, np.empty(LAYOUT.slot_bytes, np.uint8))
    assert (damage is None) == np.array_equal(changed, image)


def test_golden_header() -> None:
    layout = KVLayout(page_bytes=(4, 8), planes=1, block_tokens=2, chunk_tokens=4)
    header = chunkfile.build_header(layout, KEY, 2, "0" * 15 + "1" + "0" * 15 + "2", encoding=Encoding("lz4", (7, 16)))
    text = (
        b'{"__metadata__":{"format_version":"1","namespace":"0001020304050607",'
        b'"prefix_key":"101112131415161718191a1b1c1d1e1f","tokens":"4","blocks":"2","codec":"lz4",'
        b'"layer_bytes":"0000000700000010","xxh3_64":"00000000000000010000000000000002"},'
        b'"kv":{"dtype":"U8","shape":[23],"data_offsets":[0,23]},'
        b'"_pad":{"dtype":"U8","shape":[4073],"data_offsets":[23,4096]}}'
    )
    assert header == (4088).to_bytes(8, "little") + text + b" " * (4088 - len(text))


@pytest.mark.parametrize(("layers", "expected"), [(1, 4096), (128, 4096), (129, 8192)])
def test_header_size_follows_from_the_layers(layers: int, expected: int) -> None:
    layout = KVLayout((64,) * layers, 2, 16, 1 << 24, element="bf16")
    coder = ChunkCoder(layout, open_codec("split", layout))
    out = np.empty(coder.image_bytes(1), np.uint8)
    size = coder.encode(KEY, 1, np.zeros(layout.payload_bytes(1), np.uint8), out)
    assert coder.header_bytes == expected
    assert len(bytes(out[:expected]).rstrip()) < expected - 200
    back = np.ones(layout.payload_bytes(1), np.uint8)
    assert coder.decode(KEY, 1, out[:size], back) is None
    assert not back.any()
