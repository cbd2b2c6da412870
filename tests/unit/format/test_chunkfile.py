"""The chunk format: its exact bytes, its reading by other tools, and every way in which bytes can be wrong."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage, encode_header
from kvstore.model.keys import ChunkKey, Namespace, PrefixHasher
from kvstore.model.layout import KVLayout

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

FORMAT_MD = Path(__file__).parents[3] / "docs" / "FORMAT.md"
EVEN = KVLayout(page_bytes=(4096,) * 4, planes=1, block_tokens=32, chunk_tokens=256)
ODD = KVLayout(page_bytes=(100, 36, 100), planes=2, block_tokens=16, chunk_tokens=64)
DEEP = KVLayout(page_bytes=(8,) * 400, planes=1, block_tokens=16, chunk_tokens=32)
KEY = ChunkKey(bytes(range(8)), bytes(range(16, 32)))


def make_payload(layout: KVLayout, num_blocks: int, seed: int = 0) -> ByteArray:
    """Return a slot: the payload in random bytes, then zeros."""
    slot = np.zeros(chunkfile.body_bytes(layout, num_blocks), np.uint8)
    size = layout.payload_bytes(num_blocks)
    slot[:size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return slot


def with_metadata(header: bytes, **changes: object) -> bytes:
    """Return the header with other metadata, as another writer would make it."""
    entries = json.loads(header[8:])
    entries["__metadata__"].update(changes)
    return header[:8] + json.dumps(entries, separators=(",", ":")).encode().ljust(len(header) - 8)


def test_golden_bytes() -> None:
    layout = KVLayout(page_bytes=(4, 8), planes=1, block_tokens=2, chunk_tokens=4)
    payload = np.arange(24, dtype=np.uint8)
    text = (
        b'{"__metadata__":{"format_version":"1","namespace":"0001020304050607",'
        b'"prefix_key":"101112131415161718191a1b1c1d1e1f","tokens":"4","blocks":"2","codec":"none",'
        b'"xxh3_64":"3a1c2d7c85af88f88c52cdbb503f90e1"},'
        b'"kv":{"dtype":"U8","shape":[24],"data_offsets":[0,24]},'
        b'"_pad":{"dtype":"U8","shape":[4072],"data_offsets":[24,4096]}}'
    )
    header = encode_header(layout, KEY, 2, payload)
    assert header == struct.pack("<Q", 4088) + text + b" " * (4088 - len(text))


@pytest.mark.parametrize(("layout", "num_blocks"), [(EVEN, 8), (EVEN, 1), (ODD, 4), (ODD, 3), (DEEP, 2)])
def test_safetensors_opens_it(layout: KVLayout, num_blocks: int) -> None:
    slot = make_payload(layout, num_blocks)
    raw = encode_header(layout, KEY, num_blocks, slot) + slot.tobytes()
    assert len(raw) == chunkfile.file_bytes(layout, num_blocks)
    assert len(raw) % 4096 == 0
    tensors = load_safetensors(raw)
    payload_bytes = layout.payload_bytes(num_blocks)
    assert np.array_equal(tensors["kv"], slot[:payload_bytes])
    assert ("_pad" in tensors) == bool(payload_bytes % 4096)


def test_checksums_cover_each_layer() -> None:
    slot = make_payload(ODD, 3)
    text = chunkfile.checksums(ODD, 3, slot)
    assert len(text) == 16 * ODD.num_layers
    for layer in range(ODD.num_layers):
        begin, end = ODD.layer_range(layer, 3)
        assert text[16 * layer : 16 * layer + 16] == xxhash.xxh3_64_hexdigest(slot[begin:end].tobytes())


@pytest.mark.parametrize("layer_bytes", [16, (64 << 10) - 16, 64 << 10, (64 << 10) + 16, 200 << 10, 256 << 10, 1 << 19])
def test_small_layers_are_hashed_like_large_ones(monkeypatch: pytest.MonkeyPatch, layer_bytes: int) -> None:
    """Other threads may run once per MiB, as xxhash releases the GIL for more than 64 KiB at once."""
    layout = KVLayout(page_bytes=(layer_bytes,) * 24, planes=1, block_tokens=16, chunk_tokens=16)
    payload = np.random.default_rng(0).integers(256, size=layout.payload_bytes(1), dtype=np.uint8)
    layers = [payload[begin:end].data for begin, end in layout.layer_ranges(1)]
    expected = [xxhash.xxh3_64_hexdigest(layer) for layer in layers]
    kept, longest = 0, 0

    def at_once(layer: memoryview) -> str:
        nonlocal kept
        kept = 0
        return hexdigest(layer)

    class Running:
        def __init__(self) -> None:
            self._running = running()

        def update(self, piece: memoryview) -> None:
            nonlocal kept, longest
            assert len(piece) <= 64 << 10
            kept += len(piece)
            longest = max(longest, kept)
            self._running.update(piece)

        def hexdigest(self) -> str:
            return str(self._running.hexdigest())

    hexdigest, running = xxhash.xxh3_64_hexdigest, xxhash.xxh3_64
    monkeypatch.setattr(xxhash, "xxh3_64_hexdigest", at_once)
    monkeypatch.setattr(xxhash, "xxh3_64", Running)
    assert chunkfile.checksums(layout, 1, payload) == "".join(expected)
    assert longest <= 1 << 20
    assert (longest > 0) == (64 << 10 < layer_bytes <= 256 << 10)
    assert chunkfile.checksums(layout, 1, payload, range(3, 5)) == "".join(expected[3:5])


@given(st.lists(st.integers(0, 300), max_size=12), st.sampled_from([(EVEN, 1), (ODD, 3), (DEEP, 2)]))
def test_checksums_of_pieces_are_those_of_the_whole(sizes: list[int], chunk: tuple[KVLayout, int]) -> None:
    layout, num_blocks = chunk
    view = make_payload(layout, num_blocks).data
    ends = sorted({min(size, 64) * layout.payload_bytes(num_blocks) // 64 for size in sizes})
    pieces = [view[begin:end] for begin, end in pairwise([0, *ends, len(view)])]
    sums = chunkfile.RunningSums(layout, num_blocks)
    assert list(sums.over(pieces)) == pieces
    assert sums.text() == chunkfile.checksums(layout, num_blocks, np.frombuffer(view, np.uint8))


def test_checksums_of_a_payload_cut_short_are_those_of_its_whole_layers() -> None:
    view = make_payload(ODD, 3).data
    sums = chunkfile.RunningSums(ODD, 3)
    sums.add(view[: ODD.layer_range(1, 3)[1] + 1])
    assert sums.text() == chunkfile.checksums(ODD, 3, np.frombuffer(view, np.uint8), range(2))


@pytest.mark.parametrize(("layers", "expected"), [(1, 4096), (80, 4096), (192, 4096), (193, 8192), (448, 8192)])
def test_header_size_follows_from_the_layout(layers: int, expected: int) -> None:
    layout = KVLayout(page_bytes=(8,) * layers, planes=2, block_tokens=16, chunk_tokens=1 << 30)
    assert chunkfile.header_bytes(layout) == expected
    # The longest numbers a header can hold still fit.
    entry = encode_header(layout, KEY, 1, make_payload(layout, 1))
    assert len(entry.rstrip()) < expected - 200


@pytest.mark.parametrize(("layout", "num_blocks"), [(EVEN, 8), (ODD, 3), (DEEP, 2)])
def test_whole_chunk_verifies(layout: KVLayout, num_blocks: int) -> None:
    slot = make_payload(layout, num_blocks)
    header = encode_header(layout, KEY, num_blocks, slot)
    assert chunkfile.verify(layout, KEY, num_blocks, header, slot) is None
    assert chunkfile.verify(layout, KEY, num_blocks, np.frombuffer(header, np.uint8), slot) is None
    longer = np.concatenate([slot, np.full(4096, 7, np.uint8)])
    assert chunkfile.verify(layout, KEY, num_blocks, header, longer) is None


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_flipped_payload(layer: int) -> None:
    slot = make_payload(ODD, 3)
    header = encode_header(ODD, KEY, 3, slot)
    slot[ODD.layer_range(layer, 3)[1] - 1] ^= 1
    assert chunkfile.verify(ODD, KEY, 3, header, slot) is Damage.CHECKSUM


def test_another_writers_reasons() -> None:
    slot = make_payload(EVEN, 8)
    header = encode_header(EVEN, KEY, 8, slot)

    def verdict(found: bytes) -> Damage | None:
        return chunkfile.verify(EVEN, KEY, 8, found, slot)

    assert verdict(with_metadata(header, format_version="2")) is Damage.VERSION
    assert verdict(with_metadata(header, format_version="0", namespace="ff" * 8)) is Damage.VERSION
    assert verdict(with_metadata(header, namespace="ff" * 8)) is Damage.NAMESPACE
    assert verdict(with_metadata(header, prefix_key="ff" * 16)) is Damage.KEY
    assert verdict(with_metadata(header, tokens="255")) is Damage.LENGTH
    assert verdict(with_metadata(header, blocks="7")) is Damage.LENGTH
    assert verdict(with_metadata(header, blocks=8)) is Damage.LENGTH
    assert verdict(with_metadata(header, codec="zstd")) is Damage.HEADER
    assert verdict(with_metadata(header, xxh3_64="0" * 64)) is Damage.CHECKSUM
    assert verdict(with_metadata(header, xxh3_64=None)) is Damage.CHECKSUM
    assert verdict(with_metadata(header, extra="field")) is Damage.HEADER


def test_reading_as_something_else() -> None:
    slot = make_payload(EVEN, 8)
    header = encode_header(EVEN, KEY, 8, slot)
    other_namespace = ChunkKey(b"\xff" * 8, KEY.prefix_key)
    other_key = ChunkKey(KEY.namespace_id, b"\xff" * 16)
    assert chunkfile.verify(EVEN, other_namespace, 8, header, slot) is Damage.NAMESPACE
    assert chunkfile.verify(EVEN, other_key, 8, header, slot) is Damage.KEY
    assert chunkfile.verify(EVEN, KEY, 7, header, slot) is Damage.LENGTH
    assert chunkfile.verify(EVEN, KEY, 8, header[:2048], slot) is Damage.SIZE
    assert chunkfile.verify(EVEN, KEY, 8, header, slot[: len(slot) // 2]) is Damage.SIZE
    assert chunkfile.verify(EVEN, KEY, 8, b"", slot[:0]) is Damage.SIZE


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[" * 4088,
        b'{"a":' * 800,
        b"null",
        b"[]",
        b"9" * 4088,
        b'{"__metadata__":null}',
        b'{"__metadata__":[1,2]}',
        b'{"kv":{"dtype":"U8","shape":[-1],"data_offsets":[0,99999999999999]}}',
    ],
)
def test_not_a_chunk(text: bytes) -> None:
    slot = make_payload(EVEN, 1)
    header = struct.pack("<Q", 4088) + text.ljust(4088)
    assert chunkfile.verify(EVEN, KEY, 1, header, slot) is Damage.NOT_A_CHUNK


def test_absurd_header_length() -> None:
    slot = make_payload(EVEN, 1)
    header = encode_header(EVEN, KEY, 1, slot)
    for length in (0, 1, 4087, 4089, 2**63, 2**64 - 1):
        assert chunkfile.verify(EVEN, KEY, 1, struct.pack("<Q", length) + header[8:], slot) is Damage.HEADER


@given(bit=st.integers(0, 8 * 4096 - 1))
def test_any_flipped_header_bit_is_seen(bit: int) -> None:
    slot = make_payload(ODD, 2)
    header = bytearray(encode_header(ODD, KEY, 2, slot))
    header[bit // 8] ^= 1 << bit % 8
    assert chunkfile.verify(ODD, KEY, 2, bytes(header), slot) is not None


@given(start=st.integers(0, 4095), garbage=st.binary(min_size=1, max_size=200))
def test_garbage_never_raises(start: int, garbage: bytes) -> None:
    slot = make_payload(ODD, 2)
    header = encode_header(ODD, KEY, 2, slot)
    mixed = (header[:start] + garbage + header[start + len(garbage) :])[:4096]
    assert (chunkfile.verify(ODD, KEY, 2, mixed, slot) is None) == (mixed == header)


def test_worked_example_of_the_document() -> None:
    text = FORMAT_MD.read_text()
    namespace = Namespace({"model": "example", "layout": "demo", "chunk_tokens": 4})
    hasher = PrefixHasher(chunk_tokens=4, block_tokens=2)
    hasher.update([1, 2, 3, 4])
    layout = KVLayout(page_bytes=(4, 8), planes=1, block_tokens=2, chunk_tokens=4)
    key = ChunkKey(namespace.id, hasher.chunk_keys()[0])
    header = encode_header(layout, key, 2, np.arange(24, dtype=np.uint8))
    block = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert block is not None
    documented = json.dumps(json.loads(block[1]), separators=(",", ":"))
    assert documented == header[8:].decode().rstrip()
    hashed = "090000006b7673746f72652f3101000000 02000000 03000000 04000000"
    assert hashlib.sha256(bytes.fromhex(hashed)).digest()[:16] == key.prefix_key
    for value in (namespace.to_json(), namespace.id.hex(), key.prefix_key.hex()):
        assert value in text


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("excess", "is_fine"), [(-1, True), (0, True), (1, False), (1 << 30, False)])
def test_an_encoded_layer_has_at_most_what_it_has_without_a_codec(layer: int, excess: int, is_fine: bool) -> None:
    """A longer layer would be decoded over the next one. No writer produces it: such a layer is stored as it is."""
    limits = [end - begin for begin, end in EVEN.layer_ranges(2)]
    lengths = [limit + excess * (number == layer) for number, limit in enumerate(limits)]
    encoding = chunkfile.Encoding("lz4", tuple(lengths))
    sums = "0123456789abcdef" * EVEN.num_layers
    header = chunkfile.build_header(EVEN, KEY, 2, sums, encoding=encoding)
    found = chunkfile.parse_encoding(EVEN, 2, header, "lz4")
    assert found == ((encoding, sums) if is_fine else Damage.HEADER)
