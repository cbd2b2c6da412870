"""Tests of the disk tier with codecs: it counts the real sizes of files, and never serves chunks of another codec."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors
from support.diskwork import MINE, bytes_on_disk, make_slot, path_of
from support.schedules import schedules

from kvstore.format import chunkfile
from kvstore.format.pack import PackWriter, Shard, open_pack
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError
from kvstore.model.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import BoundedTier, Tier, TierSetup, Transfer
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import GuardOptions, guarded
from kvstore.tiers.pack import PackTier

if TYPE_CHECKING:
    from kvstore.model.chunks import ByteArray

LAYOUT = KVLayout((65536,) * 3, 1, 16, 64, element="bf16", page_axes=(4, 16, 512))
LARGE = KVLayout((1 << 20,) * 5, 1, 16, 64, element="bf16", page_axes=(8, 16, 4096))
CODECS = ["lz4", "split", "int8"]
LOSSLESS = ["lz4", "split"]
CAPACITY_BYTES = 8 * chunkfile.file_bytes(LAYOUT, 4)


def make_ref(number: int, num_blocks: int = 4) -> ChunkRef:
    return ChunkRef(number.to_bytes(2, "little") * 8, num_blocks)


def payload_of(ref: ChunkRef, layout: KVLayout = LAYOUT) -> ByteArray:
    """Return KV-like bfloat16 with magnitudes that differ by chunk, and a layer of zeros."""
    seed = int.from_bytes(ref.prefix_key, "little")
    values = torch.from_numpy(
        np.random.default_rng(seed).standard_normal(layout.payload_bytes(ref.num_blocks) // 2, dtype=np.float32)
    )
    values *= torch.linspace(0.5, 1 + seed % 5, len(values))
    payload = values.to(torch.bfloat16).view(torch.uint8).numpy()
    begin, end = layout.layer_range(seed % 3, ref.num_blocks)
    payload[begin : end - 4096 * (seed % 7)] = 0
    return payload


def transfer_of(ref: ChunkRef, layout: KVLayout = LAYOUT) -> Transfer:
    slot = make_slot(layout)
    slot[:] = 0xAA
    payload = payload_of(ref, layout)
    slot[: len(payload)] = payload
    return Transfer(ref, slot)


def put(tier: Tier, *refs: ChunkRef, layout: KVLayout = LAYOUT) -> list[Outcome]:
    return tier.put([transfer_of(ref, layout) for ref in refs])


def get(tier: Tier, ref: ChunkRef, layout: KVLayout = LAYOUT) -> Outcome:
    """Read a chunk; a hit must have the right bytes, or nearly the same values if the codec is lossy."""
    slot = make_slot(layout)
    (outcome,) = tier.get([Transfer(ref, slot)])
    if outcome is Outcome.HIT:
        found, payload = slot[: layout.payload_bytes(ref.num_blocks)], payload_of(ref, layout)
        if getattr(tier, "codec_name", "") == "int8":
            values, expected = (torch.from_numpy(a.copy()).view(torch.bfloat16).float() for a in (found, payload))
            assert (values - expected).abs().max() <= expected.abs().max() / 64
        else:
            assert np.array_equal(found, payload)
    return outcome


def open_disk(folder: Path, codec: str, layout: KVLayout = LAYOUT, capacity_bytes: int = CAPACITY_BYTES) -> DiskTier:
    tier = DiskTier(folder, MINE, layout, capacity_bytes, codec=codec)
    tier.codec_name = codec  # type: ignore[attr-defined] # for get
    return tier


def test_headers_that_a_codec_makes_longer(tmp_path: Path) -> None:
    """Chunks of many layers, with and without a codec, are found on disk and in a pack."""
    layout = KVLayout((4096,) * 160, 1, 16, 16)
    capacity_bytes = 4 * chunkfile.file_bytes(layout, 1, "any")
    refs = {codec: make_ref(number, 1) for number, codec in enumerate(("none", "lz4"))}
    for codec, ref in refs.items():
        tier = open_disk(tmp_path, codec, layout, capacity_bytes)
        assert put(tier, ref, layout=layout) == [Outcome.STORED]
        tier.close()
    tier = open_disk(tmp_path, "lz4", layout, capacity_bytes)
    with PackWriter(tmp_path / "pack", [Shard(MINE, layout)]) as writer:
        for ref in refs.values():
            assert get(tier, ref, layout) is Outcome.HIT
            writer.add(0, ref, np.frombuffer(path_of(tmp_path, ref).read_bytes(), np.uint8))
        writer.finish()
    tier.close()
    pack = open_pack(tmp_path / "pack")
    assert [pack.check(0, ref) for ref in refs.values()] == [None, None]
    packed = PackTier(pack, MINE, layout)
    assert [get(packed, ref, layout) for ref in refs.values()] == [Outcome.HIT] * 2
    packed.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direct", [None, False])
def test_files_have_the_sizes_that_are_counted(tmp_path: Path, codec: str, direct: bool | None) -> None:
    options = {"folder": tmp_path, "direct": direct, "codec": codec}
    tier = open_tier("disk", TierSetup(MINE, LAYOUT, CAPACITY_BYTES, options))
    assert isinstance(tier, BoundedTier)
    tier.codec_name = codec  # type: ignore[attr-defined]
    refs = [make_ref(number, 1 + number % 4) for number in range(8)]
    assert put(tier, *refs) == [Outcome.STORED] * 8
    assert [get(tier, ref) for ref in refs] == [Outcome.HIT] * 8
    sizes = {ref: path_of(tmp_path, ref).stat().st_size for ref in refs}
    assert dict(tier.scan()) == sizes == {ref: tier.size_of(ref) for ref in refs}
    assert tier.used_bytes == sum(sizes.values()) == bytes_on_disk(tmp_path)
    assert tier.counters.bytes_written == tier.counters.bytes_read == sum(sizes.values())
    assert all(size < tier.stored_bytes(ref.num_blocks) for ref, size in sizes.items())
    assert all(size % 4096 == 0 for size in sizes.values())
    tier.close()
    again = open_disk(tmp_path, codec)
    assert dict(again.scan()) == sizes
    assert [get(again, ref) for ref in refs] == [Outcome.HIT] * 8
    assert again.counters.swept == 0
    again.close()


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_is_what_safetensors_reads(tmp_path: Path, codec: str) -> None:
    tier = open_disk(tmp_path, codec)
    put(tier, make_ref(1))
    raw = path_of(tmp_path, make_ref(1)).read_bytes()
    metadata = json.loads(raw[8:4096])["__metadata__"]
    lengths = [int(metadata["layer_bytes"][i : i + 8], 16) for i in range(0, 24, 8)]
    assert metadata["codec"] == codec
    tensors = load_safetensors(raw)
    assert len(tensors["kv"]) == sum(lengths) < LAYOUT.payload_bytes(4)
    assert not tensors.get("_pad", np.zeros(1)).any()
    tier.close()


@pytest.mark.parametrize("codec", CODECS)
def test_more_fits_than_without(tmp_path: Path, codec: str) -> None:
    tier = open_disk(tmp_path, codec)
    outcomes = [put(tier, make_ref(number))[0] for number in range(30)]
    held = outcomes.count(Outcome.STORED)
    assert 8 < held < 30
    assert tier.used_bytes == bytes_on_disk(tmp_path) <= CAPACITY_BYTES
    assert len(tier.scan()) == held
    tier.close()


@pytest.mark.parametrize("codec", CODECS)
def test_large_chunks_are_decoded_while_they_arrive(tmp_path: Path, codec: str) -> None:
    tier = open_disk(tmp_path, codec, LARGE, 3 * chunkfile.file_bytes(LARGE, 4))
    assert put(tier, make_ref(1), make_ref(2, 3), layout=LARGE) == [Outcome.STORED] * 2
    assert get(tier, make_ref(1), LARGE) is get(tier, make_ref(2, 3), LARGE) is Outcome.HIT
    path = path_of(tmp_path, make_ref(1))
    raw = bytearray(path.read_bytes())
    raw[-9000] ^= 1  # in the last layer
    path.write_bytes(raw)
    assert get(tier, make_ref(1), LARGE) is Outcome.CORRUPT
    tier.close()


def test_spare_files_of_about_the_size_are_used_again(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, "split", capacity_bytes=2 * CAPACITY_BYTES)
    first, seen = make_ref(0), set()
    put(tier, first)
    last = first
    for number in range(1, 12):
        seen.add(path_of(tmp_path, last).stat().st_ino)
        tier.remove([last])
        last = make_ref(number)
        assert put(tier, last) == [Outcome.STORED]
        assert get(tier, last) is Outcome.HIT
        assert path_of(tmp_path, last).stat().st_size == tier.size_of(last)
        assert tier.used_bytes == bytes_on_disk(tmp_path)
    assert len(seen) < 11
    tier.close()


def test_chunks_without_a_codec_are_read_with_any(tmp_path: Path) -> None:
    plain = open_disk(tmp_path, "none")
    put(plain, make_ref(1), make_ref(2))
    plain.close()
    for codec in CODECS:
        tier = open_disk(tmp_path, codec)
        tier.codec_name = "none"  # type: ignore[attr-defined]
        assert get(tier, make_ref(1)) is get(tier, make_ref(2)) is Outcome.HIT
        assert tier.used_bytes == bytes_on_disk(tmp_path)
        tier.close()


@pytest.mark.parametrize(
    ("writer", "reader"), [("int8", "split"), ("split", "int8"), ("lz4", "none"), ("int8", "none")]
)
def test_chunks_of_another_codec_are_none(tmp_path: Path, writer: str, reader: str) -> None:
    tier = open_disk(tmp_path, writer)
    put(tier, make_ref(1), make_ref(2, 1))
    tier.close()
    tier = open_disk(tmp_path, reader)
    assert Outcome.HIT not in {get(tier, make_ref(1)), get(tier, make_ref(2, 1))}
    assert not path_of(tmp_path, make_ref(1)).exists()
    assert tier.used_bytes == bytes_on_disk(tmp_path) == 0
    tier.close()


def guard(tier: BoundedTier) -> BoundedTier:
    return guarded(tier, GuardOptions(timeout_s=60.0))


@pytest.mark.parametrize("codec", LOSSLESS)
def test_striped_folders(tmp_path: Path, codec: str) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    tier = open_folders(folders, MINE, LAYOUT, 2 * CAPACITY_BYTES, codec=codec, wrap=guard)
    refs = [make_ref(number) for number in range(12)]
    assert put(tier, *refs) == [Outcome.STORED] * 12
    assert all(get(tier, ref) is Outcome.HIT for ref in refs)
    assert tier.used_bytes == bytes_on_disk(*folders) == sum(size for _, size in tier.scan())
    assert tier.used_bytes == sum(tier.size_of(ref) for ref in refs) == tier.counters.bytes_written
    tier.close()


def test_a_codec_that_cannot_work_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packed or mixed data"):
        DiskTier(tmp_path, MINE, KVLayout((4096,), 1, 16, 64), CAPACITY_BYTES, codec="split")
    DiskTier(tmp_path, MINE, LAYOUT, CAPACITY_BYTES).close()  # the folder is not locked any more


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "remove", "restart", "clear"]),
        st.integers(0, 7),
        st.sampled_from([1, 4]),
    ),
    max_size=30,
)


@schedules()
@given(actions=ACTIONS, codec=st.sampled_from(LOSSLESS))
def test_counts_exactly_in_any_order(actions: list[tuple[str, int, int]], codec: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, capacity_bytes = Path(name), CAPACITY_BYTES // 2
        tier = open_disk(folder, codec, capacity_bytes=capacity_bytes)
        held: set[ChunkRef] = set()
        for action, number, blocks in actions:
            ref = make_ref(number, blocks)
            if action == "put":
                room_bytes = capacity_bytes - sum(tier.size_of(other) for other in held - {ref})
                (outcome,) = put(tier, ref)
                assert outcome is Outcome.STORED or room_bytes < tier.stored_bytes(blocks)
                held = held | {ref} if outcome is Outcome.STORED else held - {ref}
            elif action == "get":
                assert get(tier, ref) is (Outcome.HIT if ref in held else Outcome.MISS)
            elif action == "remove":
                tier.remove([ref])
                held.discard(ref)
            elif action == "clear":
                tier.clear()
                held.clear()
            else:
                tier.close()
                tier = open_disk(folder, codec, capacity_bytes=capacity_bytes)
            assert {listed for listed, _ in tier.scan()} == held
            assert tier.used_bytes == bytes_on_disk(folder) <= capacity_bytes
        tier.close()
