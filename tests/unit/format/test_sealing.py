"""Encrypted images: they come back with their key only, as a whole, in their place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.key_files import write_keys
from support.schedules import schedules

from kvstore.format import chunkfile
from kvstore.format.chunkfile import TAG_BYTES, Damage, Encoding
from kvstore.format.codecs import CODEC_NAMES, open_codec
from kvstore.format.coding import ChunkCoder, is_foreign, open_coder
from kvstore.format.images import check_image, read_facts
from kvstore.format.sealing.keyring import KeyRing
from kvstore.model.keys import ChunkKey, KeyExtras
from kvstore.model.layout import KVLayout, round_up

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

LAYOUT = KVLayout((65536,) * 3, 1, 16, 64, element="bf16", page_axes=(4, 16, 512))
KEY = ChunkKey(bytes(range(8)), bytes(range(16, 32)))
PAYLOAD = np.tile(np.arange(251, dtype=np.uint8), 1 + LAYOUT.payload_bytes(4) // 251)[: LAYOUT.payload_bytes(4)]
ACME = KeyExtras(cache_salt="acme").tenant()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(write_keys(tmp_path_factory.mktemp("keys") / "keys", "old", "new", acme="acme"))


def coder_of(keys: KeyRing | None, codec: str = "none") -> ChunkCoder:
    coder = open_coder(LAYOUT, codec, keys)
    assert coder is not None
    return coder


def sealed(coder: ChunkCoder, *, key: ChunkKey = KEY, num_blocks: int = 4, tenant: bytes = b"") -> ByteArray:
    out = np.full(coder.image_bytes(num_blocks), 0xA5, np.uint8)
    payload = PAYLOAD[: LAYOUT.payload_bytes(num_blocks)]
    return out[: coder.encode(key, num_blocks, payload, out, tenant=tenant)]


def opened(coder: ChunkCoder, image: ByteArray, key: ChunkKey = KEY, num_blocks: int = 4) -> Damage | None:
    """Return the damage of an image; without one the payload is compared, if the codec is lossless."""
    payload = np.empty(LAYOUT.payload_bytes(num_blocks), np.uint8)
    damage = coder.decode(key, num_blocks, image, payload)
    if damage is None and "int8" not in coder.codec_name:
        assert np.array_equal(payload, PAYLOAD[: len(payload)])
    return damage


def with_body(image: ByteArray, body: ByteArray) -> ByteArray:
    """Return an image with other layers of the same lengths, and with their checksums: what a forger can make."""
    parsed = chunkfile.parse_encoding(LAYOUT, 4, image[:4096], chunkfile.codec_in(LAYOUT, image))
    assert not isinstance(parsed, Damage)
    encoding = parsed[0]
    assert encoding is not None
    sums = "".join(xxhash.xxh3_64_hexdigest(body.data[begin:end]) for begin, end in encoding.ranges())
    header = chunkfile.build_header(LAYOUT, KEY, 4, sums, encoding=encoding)
    return np.concatenate([np.frombuffer(header, np.uint8), body])


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_sealed_image_comes_back(keys: KeyRing, codec: str) -> None:
    coder = coder_of(keys, codec)
    for num_blocks in (1, 4):
        image = sealed(coder, num_blocks=num_blocks)
        assert coder.may_be(num_blocks, len(image))
        assert check_image(LAYOUT, KEY, num_blocks, image) is None
        assert opened(coder, image, num_blocks=num_blocks) is None
    facts = read_facts(image.tobytes())
    assert facts is not None
    assert facts.codec == chunkfile.sealed_name(codec)
    assert chunkfile.plain_name(facts.codec) == codec


def test_nothing_of_the_payload_is_in_the_image(keys: KeyRing) -> None:
    image = sealed(coder_of(keys)).tobytes()
    assert PAYLOAD[:16].tobytes() not in image
    assert len(image) == 4096 + round_up(len(PAYLOAD) + 3 * TAG_BYTES, 4096)


def test_two_writes_of_one_chunk_are_different_bytes(keys: KeyRing) -> None:
    first, second = (sealed(coder_of(keys))[4096:] for _ in range(2))
    equal = np.count_nonzero(first[: len(PAYLOAD)] == second[: len(PAYLOAD)])
    assert equal < len(PAYLOAD) / 128  # one byte of 256 by chance


def test_the_key_follows_from_the_tenant(keys: KeyRing) -> None:
    coder = coder_of(keys)
    for tenant, name in ((b"", "new"), (ACME, "acme"), (KeyExtras(cache_salt="else").tenant(), "new")):
        image = sealed(coder, tenant=tenant)
        assert chunkfile.seal_of(image[:4096]).startswith(f"{name} ")
        assert opened(coder, image) is None


def test_chunks_of_an_older_key_are_read_until_it_leaves_the_file(keys: KeyRing, tmp_path: Path) -> None:
    image = sealed(coder_of(KeyRing(write_keys(tmp_path / "before", "old"))))
    assert opened(coder_of(keys), image) is None
    without = coder_of(KeyRing(write_keys(tmp_path / "after", "new")))
    assert opened(without, image) is Damage.SEAL


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_key_with_the_name_of_another_opens_nothing(keys: KeyRing, tmp_path: Path, codec: str) -> None:
    swapped = KeyRing(write_keys(tmp_path / "keys", "new", secrets={"new": "acme", "acme": "new"}, acme="acme"))
    for tenant in (b"", ACME):
        assert opened(coder_of(swapped, codec), sealed(coder_of(keys, codec), tenant=tenant)) is Damage.SEAL


def test_a_damaged_name_of_a_key_is_damage(keys: KeyRing) -> None:
    coder = coder_of(keys)
    image = sealed(coder)
    at = image.tobytes().index(b'"seal":"new') + len(b'"seal":"')
    image[at] ^= 1
    assert opened(coder, image) is Damage.HEADER


def test_keys_read_nothing_that_is_not_sealed(keys: KeyRing) -> None:
    """Otherwise whoever can write to the storage could place KV in it without a key."""
    plain = np.zeros(chunkfile.file_bytes(LAYOUT, 4), np.uint8)
    plain[:4096] = np.frombuffer(chunkfile.encode_header(LAYOUT, KEY, 4, PAYLOAD), np.uint8)
    plain[4096:] = PAYLOAD
    assert check_image(LAYOUT, KEY, 4, plain) is None
    assert opened(coder_of(None, "lz4"), plain) is None
    for image in (plain, sealed(coder_of(None, "lz4"))):
        for codec in ("none", "lz4"):
            assert opened(coder_of(keys, codec), image) is Damage.SEAL
            assert is_foreign(image[:4096], coder_of(keys, codec).codec_name)
    image = sealed(coder_of(keys))
    assert opened(coder_of(None, "lz4"), image) is Damage.SIZE
    assert opened(coder_of(None, "lz4"), sealed(coder_of(keys, "lz4"))) is Damage.SEAL
    assert is_foreign(image[:4096], "none")
    assert not is_foreign(image[:4096], "aes-gcm")


def test_a_chunk_under_another_name_is_refused(keys: KeyRing) -> None:
    """Also if its header is made to fit: the key is derived from the name, too."""
    coder = coder_of(keys)
    image = sealed(coder)
    for other in (KEY._replace(prefix_key=bytes(16)), KEY._replace(namespace_id=bytes(8))):
        parsed = chunkfile.parse_encoding(LAYOUT, 4, image[:4096], coder.codec_name)
        assert not isinstance(parsed, Damage)
        header = chunkfile.build_header(LAYOUT, other, 4, parsed[1], encoding=parsed[0])
        renamed = np.concatenate([np.frombuffer(header, np.uint8), image[4096:]])
        assert check_image(LAYOUT, other, 4, renamed) is None
        assert opened(coder, renamed, other) is Damage.SEAL


def test_layers_are_valid_in_their_place_and_their_write_only(keys: KeyRing) -> None:
    coder = coder_of(keys)
    image, again = sealed(coder)[4096:], sealed(coder)
    size = len(PAYLOAD) // 3 + TAG_BYTES
    assert opened(coder, with_body(again, again[4096:])) is None
    mixed, swapped = again[4096:].copy(), again[4096:].copy()
    mixed[:size] = image[:size]
    swapped[:size], swapped[size : 2 * size] = again[4096 + size : 4096 + 2 * size], again[4096 : 4096 + size]
    for body in (mixed, swapped):
        forged = with_body(again, body)
        assert check_image(LAYOUT, KEY, 4, forged) is None
        assert opened(coder, forged) is Damage.SEAL


@pytest.mark.parametrize("codec", ["none", "split"])
def test_lengths_that_no_layer_has_are_refused(keys: KeyRing, codec: str) -> None:
    coder = coder_of(keys, codec)
    image = sealed(coder)
    parsed = chunkfile.parse_encoding(LAYOUT, 4, image[:4096], coder.codec_name)
    assert not isinstance(parsed, Damage)
    encoding = parsed[0]
    assert encoding is not None
    one, two, three = encoding.layer_bytes
    body = image[4096:]
    for lengths in ((one + 1, two - 1, three), (1, one + two - 1, three), (TAG_BYTES, one - TAG_BYTES + two, three)):
        lie = Encoding(encoding.codec, lengths, encoding.seal)
        sums = "".join(xxhash.xxh3_64_hexdigest(body.data[begin:end]) for begin, end in lie.ranges())
        header = chunkfile.build_header(LAYOUT, KEY, 4, sums, encoding=lie)
        forged = np.concatenate([np.frombuffer(header, np.uint8), body])
        assert opened(coder, forged) in {Damage.SEAL, Damage.HEADER}


@schedules(60)
@given(offset=st.integers(0, 1 << 20), bit=st.integers(0, 7), codec=st.sampled_from(["none", "lz4"]))
def test_any_flipped_bit_is_seen(keys: KeyRing, offset: int, bit: int, codec: str) -> None:
    coder = coder_of(keys, codec)
    image = sealed(coder)
    changed = image.copy()
    changed[offset % len(image) if offset % 3 else offset % 4096] ^= 1 << bit
    assert opened(coder, changed) is not None
    facts = read_facts(image.tobytes())
    assert facts is not None
    body = image[4096:].copy()
    body[offset % facts.payload_bytes] ^= 1 << bit
    assert opened(coder, with_body(image, body)) is Damage.SEAL  # with checksums that fit


@schedules(40)
@given(seal=st.text(max_size=100))
def test_any_text_in_the_place_of_a_seal_is_no_key(keys: KeyRing, seal: str) -> None:
    coder = coder_of(keys)
    image = sealed(coder)
    parsed = chunkfile.parse_encoding(LAYOUT, 4, image[:4096], coder.codec_name)
    assert not isinstance(parsed, Damage)
    encoding = parsed[0]
    assert encoding is not None
    header = chunkfile.build_header(LAYOUT, KEY, 4, parsed[1], encoding=encoding._replace(seal=seal))
    if len(header) == 4096:
        forged = np.concatenate([np.frombuffer(header, np.uint8), image[4096:]])
        assert opened(coder, forged) in {Damage.SEAL, Damage.HEADER}


def test_the_largest_header(tmp_path: Path) -> None:
    """128 layers, the longest name of a codec, and that of a key."""
    layout = KVLayout((4096,) * 128, 1, 16, 16, element="bf16")
    keys = KeyRing(write_keys(tmp_path / "keys", "k" * 32))
    coder = ChunkCoder(layout, open_codec("split", layout), keys)
    payload = np.arange(layout.slot_bytes, dtype=np.int64).view(np.uint8)[: layout.slot_bytes]
    out = np.empty(coder.image_bytes(1), np.uint8)
    out = out[: coder.encode(KEY, 1, payload, out)]
    back = np.empty_like(payload)
    assert coder.header_bytes == 4096
    assert len(bytes(out[:4096]).rstrip()) < 4096 - 200
    assert coder.decode(KEY, 1, out, back) is None
    assert np.array_equal(back, payload)
