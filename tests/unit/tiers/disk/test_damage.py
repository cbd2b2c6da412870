"""Any damage to a chunk's file: reading it is a hit with the right bytes, or a miss."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.diskwork import (
    CAPACITY_BYTES,
    CHUNK_BYTES,
    EVEN,
    MINE,
    OTHER,
    Open,
    bytes_on_disk,
    cut,
    extend,
    flip,
    flip_header,
    flip_payload,
    get,
    make_ref,
    path_of,
    put,
)

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.model.chunks import Outcome
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk import chunkio
from kvstore.tiers.disk.chunkio import Body, ChunkIO
from kvstore.tiers.disk.tier import DiskTier

LARGE = KVLayout(page_bytes=(1 << 17,) * 4, planes=1, block_tokens=32, chunk_tokens=256)


# Faults of a chunk's file


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_length(path: Path) -> None:
    flip(path, 6)


def change_version(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"format_version":"1"', b'"format_version":"2"', 1))


def put_another_chunk(path: Path) -> None:
    shutil.copyfile(path_of(path.parents[2], make_ref(2)), path)


def put_another_models_chunk(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parents[3]) as other:
        tier = DiskTier(Path(other), OTHER, EVEN, CAPACITY_BYTES)
        put(tier, make_ref(1))
        tier.close()
        shutil.copyfile(path_of(Path(other), make_ref(1), OTHER), path)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("x")


def put_a_link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)
    target.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        empty,
        extend,
        flip_payload,
        flip_header,
        flip_length,
        change_version,
        put_another_chunk,
        put_another_models_chunk,
        put_a_folder,
        put_a_link,
    ],
)
@pytest.mark.parametrize("direct", [None, False])
def test_damage_is_a_counted_miss(
    open_tier: Open, folder: Path, damage: Callable[[Path], None], direct: bool | None
) -> None:
    tier = open_tier(direct=direct)
    ref, intact = make_ref(1), make_ref(2)
    put(tier, ref, intact)
    damage(path_of(folder, ref))
    assert get(tier, ref) is Outcome.CORRUPT
    assert tier.counters.corrupt == 1
    assert not os.path.lexists(path_of(folder, ref))
    assert get(tier, ref) is Outcome.MISS
    assert get(tier, intact) is Outcome.HIT
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    assert put(tier, ref) == [Outcome.STORED]
    assert get(tier, ref) is Outcome.HIT


def test_missing_file_is_a_miss(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2))
    path_of(folder, make_ref(1)).unlink()
    assert get(tier, make_ref(1)) is Outcome.MISS
    assert tier.contains([make_ref(1)]) == [False]
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES


def test_unreadable_sector_fails_one_chunk(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    put(tier, make_ref(1))

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert get(tier, make_ref(1)) is Outcome.FAILED
    assert tier.counters.failed == 1
    assert get(tier, make_ref(1)) is Outcome.HIT


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a large chunk be four pieces."""
    monkeypatch.setattr(chunkio, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(chunkio, "CACHED_BYTES", 1 << 20)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("direct", [None, False])
def test_large_chunks_that_several_threads_read_in_pieces(folder: Path, direct: bool | None) -> None:
    """Each read brings what its own file holds, on any thread, and none outlives its call."""
    refs = [make_ref(number) for number in range(6)]
    tier = DiskTier(folder, MINE, LARGE, len(refs) * chunkfile.file_bytes(LARGE, 8), direct=direct)
    put(tier, *refs, layout=LARGE)
    flip(path_of(folder, refs[1]), 30 << 17)
    os.truncate(path_of(folder, refs[2]), 20 << 17)
    path_of(folder, refs[4]).unlink()
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda ref: get(tier, ref, LARGE), refs))
    hit, corrupt = Outcome.HIT, Outcome.CORRUPT
    assert outcomes == [hit, corrupt, corrupt, hit, Outcome.MISS, hit]
    assert not any(future.running() for future, _ in tier._io._shared._waiting)
    tier.close()


@pytest.mark.parametrize("piece_bytes", [1 << 12, 3 << 16, 1 << 30])
def test_every_byte_counts_in_pieces_from_the_page_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Pieces may end inside a layer, and be smaller than one or larger than the chunk."""
    monkeypatch.setattr(chunkio, "CACHED_BYTES", piece_bytes)
    ref, payload_bytes = make_ref(1), LARGE.payload_bytes(8)
    tier = DiskTier(folder, MINE, LARGE, 2 * chunkfile.file_bytes(LARGE, 8), direct=False)
    put(tier, ref, layout=LARGE)
    assert get(tier, ref, LARGE) is Outcome.HIT
    begin = chunkfile.header_bytes(LARGE)
    for place in (0, 4095, (3 << 16) - 1, 3 << 16, payload_bytes - 1):
        put(tier, ref, layout=LARGE)
        flip(path_of(folder, ref), begin + place)
        assert get(tier, ref, LARGE) is Outcome.CORRUPT, place
    for end in (begin, begin + (3 << 16), begin + payload_bytes - 1):
        put(tier, ref, layout=LARGE)
        os.truncate(path_of(folder, ref), end)
        assert get(tier, ref, LARGE) is Outcome.CORRUPT, end
    tier.close()


@pytest.mark.usefixtures("in_pieces")
def test_an_unreadable_piece_fails_its_own_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(folder, MINE, LARGE, 4 * chunkfile.file_bytes(LARGE, 8))
    assert len(tier._io._pieces[8]) == 4
    refs = [make_ref(number) for number in range(4)]
    put(tier, *refs, layout=LARGE)
    broken, read = path_of(folder, refs[2]), os.preadv

    def refuse(fd: int, views: Sequence[memoryview], at: int) -> int:
        if at > 20 << 17 and os.path.samestat(os.fstat(fd), broken.stat()):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, views, at)

    monkeypatch.setattr(os, "preadv", refuse)
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda ref: get(tier, ref, LARGE), refs))
    assert outcomes == [Outcome.HIT, Outcome.HIT, Outcome.FAILED, Outcome.HIT]
    tier.close()


def test_recycled_while_it_is_read_is_a_miss(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    put(tier, make_ref(1))
    real_read = os.preadv

    def read_late(fd: int, views: Sequence[memoryview], at: int) -> int:
        monkeypatch.setattr(os, "preadv", real_read)
        tier.remove([make_ref(1)])
        put(tier, make_ref(2))  # overwrites the file that is open here
        return real_read(fd, views, at)

    monkeypatch.setattr(os, "preadv", read_late)
    assert get(tier, make_ref(1)) is Outcome.MISS
    assert tier.counters.corrupt == 0
    assert get(tier, make_ref(2)) is Outcome.HIT


@pytest.mark.parametrize("damage", [Damage.CHECKSUM, None], ids=["damaged", "gone"])
def test_damage_of_a_chunk_that_was_replaced_meanwhile(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage | None
) -> None:
    """The bytes read belong to the file of before, so the chunk that replaced it is not removed."""
    tier = open_tier()
    ref = make_ref(1)
    put(tier, ref)
    real = ChunkIO.read

    def replace_then_fail(self: ChunkIO, path: Path, body: Body, used_ns: int, layers: range | None) -> Damage | None:
        monkeypatch.setattr(ChunkIO, "read", real)
        assert put(tier, ref) == [Outcome.STORED]
        if damage is None:
            raise FileNotFoundError(path)
        return damage

    monkeypatch.setattr(ChunkIO, "read", replace_then_fail)
    assert get(tier, ref) is Outcome.MISS
    assert path_of(folder, ref).exists()
    assert get(tier, ref) is Outcome.HIT
    assert (tier.counters.corrupt, tier.used_bytes) == (0, bytes_on_disk(folder))
