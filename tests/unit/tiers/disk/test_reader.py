"""Folders of disk tiers with another owner, or none: their chunks are read, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.format.chunkfile import Damage, chunk_name
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, OTHER, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.chunkio import Body, ChunkIO
from kvstore.tiers.disk.reader import FolderReader
from kvstore.tiers.disk.tier import DiskTier

REFS = [make_ref(number) for number in range(1, 5)]


def trail_of(ref: ChunkRef) -> bytes:
    return b"\xff" * 16 * (ref.num_blocks - 1) + ref.prefix_key


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "one", MINE, EVEN, 1 << 20)
    tier.scan()
    tier.put([make_transfer(EVEN, ref)._replace(trail=trail_of(ref)) for ref in REFS[:2]])
    yield tier
    tier.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[FolderReader]:
    """Yield a reader of two folders, of which the second appears later, or never."""
    made = FolderReader([tmp_path / "one", tmp_path / "two"], MINE, EVEN)
    yield made
    made.close()


def read(reader: FolderReader, *refs: ChunkRef) -> list[Outcome]:
    transfers = [Transfer(ref, make_buffer(EVEN.slot_bytes)) for ref in refs]
    outcomes = reader.get(transfers)
    for outcome, transfer in zip(outcomes, transfers, strict=True):
        if outcome is Outcome.HIT:
            payload = make_payload(EVEN, transfer.ref)
            assert transfer.buffer[: len(payload)].tobytes() == payload
    return outcomes


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_an_owner_has_is_read_while_it_works(owner: DiskTier, reader: FolderReader, tmp_path: Path) -> None:
    before = files(tmp_path)
    assert reader.contains(REFS) == [True, True, False, False]
    assert read(reader, *REFS) == [Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.MISS]
    assert files(tmp_path) == before
    owner.put([make_transfer(EVEN, REFS[2])])
    owner.remove([REFS[0]])
    assert reader.contains(REFS) == [False, True, True, False]
    assert read(reader, *REFS[:3]) == [Outcome.MISS, Outcome.HIT, Outcome.HIT]


def test_a_chunk_is_in_any_of_the_folders(owner: DiskTier, reader: FolderReader, tmp_path: Path) -> None:
    second = DiskTier(tmp_path / "two", MINE, EVEN, 1 << 20)
    second.scan()
    second.put([make_transfer(EVEN, REFS[3])])
    second.close()
    assert owner.contains([REFS[3]]) == [False]
    assert reader.contains(REFS) == [True, True, False, True]
    assert read(reader, REFS[3], REFS[0]) == [Outcome.HIT] * 2


def test_damage_is_no_hit_and_stays_where_it_is(owner: DiskTier, reader: FolderReader, tmp_path: Path) -> None:
    path = tmp_path / "one" / MINE.id.hex() / chunk_name(REFS[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:4100] + bytes([whole[4100] ^ 1]) + whole[4101:])
    assert read(reader, REFS[0], REFS[1]) == [Outcome.CORRUPT, Outcome.HIT]
    path.write_bytes(whole[:-1])
    assert read(reader, REFS[0]) == [Outcome.CORRUPT]
    assert path.exists()
    path.unlink()
    os.mkfifo(path)
    assert reader.contains(REFS[:1]) == [False]
    assert read(reader, REFS[0]) == [Outcome.CORRUPT]
    assert owner.counters.corrupt == 0


def test_what_looks_damaged_is_read_again(
    owner: DiskTier, reader: FolderReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner had removed it and overwritten the file, and has stored it again."""
    found = [Damage.CHECKSUM]
    read_file = ChunkIO.read

    def read_recycled(io: ChunkIO, path: Path, body: Body, used_ns: int) -> Damage | None:
        return found.pop() if found else read_file(io, path, body, used_ns)

    monkeypatch.setattr(ChunkIO, "read", read_recycled)
    assert owner.contains(REFS[:1]) == [True]
    assert read(reader, REFS[0]) == [Outcome.HIT]
    assert not found


def test_another_namespace_has_nothing(owner: DiskTier, tmp_path: Path) -> None:
    assert owner.contains(REFS[:1]) == [True]
    for namespace in (OTHER, Namespace(MINE.fields).at_epoch("1")):
        other = FolderReader([tmp_path / "one"], namespace, EVEN)
        assert other.contains(REFS) == [False] * 4
        assert other.nearest([trail_of(REFS[0])]) == [()]
        other.close()


def test_a_folder_that_cannot_be_looked_into_is_a_broken_tier(
    owner: DiskTier, reader: FolderReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another user is such a one, but an engine that runs as root would see no difference."""

    def refuse(_: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    assert owner.contains(REFS[:1]) == [True]
    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(TierError, match="one cannot be looked into: Permission denied"):
        reader.contains(REFS)
    assert read(reader, REFS[0]) == [Outcome.FAILED]


def test_trails_are_those_that_were_noted(owner: DiskTier, reader: FolderReader) -> None:
    assert owner.trails()
    near = reader.nearest([trail_of(REFS[0]), bytes(range(16))])
    assert set(near[0]) == {trail_of(ref) for ref in REFS[:2]}
    assert near[1] == ()


def test_a_chunk_encoded_by_a_codec_is_read_with_it(tmp_path: Path) -> None:
    owner = DiskTier(tmp_path / "one", MINE, EVEN, 1 << 20, codec="lz4")
    owner.scan()
    owner.put([make_transfer(EVEN, REFS[0])])
    owner.close()
    for codec, outcome in (("lz4", Outcome.HIT), ("none", Outcome.CORRUPT)):
        reader = FolderReader([tmp_path / "one"], MINE, EVEN, codec=codec)
        assert read(reader, REFS[0]) == [outcome]
        reader.close()


def test_nothing_is_stored_or_removed(owner: DiskTier, reader: FolderReader, tmp_path: Path) -> None:
    before = files(tmp_path)
    assert reader.put([make_transfer(EVEN, REFS[3])]) == [Outcome.FAILED]
    reader.remove(REFS)
    reader.clear()
    reader.reset(OTHER)
    assert files(tmp_path) == before
    assert owner.contains(REFS[:2]) == [True, True]
    reader.close()
    with pytest.raises(ClosedError):
        reader.contains(REFS)
