"""The note of owners in a folder, as read after a restart, a crash and damage."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from support.diskwork import CAPACITY_BYTES, EVEN, MINE, OTHER, make_ref, make_transfer

from kvstore.format.ownerrecords import OWNERS_FILE, Owned, OwnerNote, OwnerRecords
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import BoundedTier
from kvstore.tiers.disk.notes import owners_in
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker

REFS = [make_ref(number) for number in range(6)]
OWNER, ANOTHER = bytes(range(16)), bytes(range(16, 32))


def put(tier: BoundedTier, *owned: tuple[ChunkRef, bytes]) -> None:
    transfers = [make_transfer(ref)._replace(owner=owner) for ref, owner in owned]
    assert tier.put(transfers) == [Outcome.STORED] * len(transfers)


def expected(*owned: tuple[ChunkRef, bytes]) -> dict[bytes, bytes]:
    return {ref.prefix_key: owner for ref, owner in owned}


def test_a_tier_knows_the_owners_of_what_it_holds(tmp_path: Path) -> None:
    owned = [(REFS[0], OWNER), (REFS[1], ANOTHER)]
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        put(tier, *owned, (REFS[2], b""))
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        assert tier.owners() == expected(*owned)
        tier.remove([REFS[0]])
        assert tier.owners() == expected(owned[1])
        put(tier, (REFS[1], OWNER))
        assert tier.owners() == expected((REFS[1], OWNER)), "the last word counts"
        tier.clear()
        put(tier, (REFS[1], b""))
        assert tier.owners() == {}, "a clear removes the note, too"
        put(tier, (REFS[2], OWNER))
        tier.reset(OTHER)
        put(tier, (REFS[2], b""))
        assert tier.owners() == {}
    with closing(DiskTier(tmp_path, OTHER, EVEN, CAPACITY_BYTES)) as tier:
        assert len(tier.scan()) == 1, "the note is no leftover"


def test_several_folders(tmp_path: Path) -> None:
    folders = [tmp_path / f"disk{number}" for number in range(3)]
    owned = [(ref, OWNER if number % 2 else ANOTHER) for number, ref in enumerate(REFS)]
    with closing(open_folders(folders, MINE, EVEN, 3 * CAPACITY_BYTES, wrap=CircuitBreaker)) as tier:
        tier.scan()
        put(tier, *owned)
    with closing(open_folders(folders, MINE, EVEN, 3 * CAPACITY_BYTES, wrap=CircuitBreaker)) as tier:
        tier.scan()
        assert tier.owners() == expected(*owned)


def test_what_is_torn_or_damaged_spoils_no_other(tmp_path: Path) -> None:
    note, keys = OwnerNote(), {ref.prefix_key for ref in REFS}
    for ref in REFS[:3]:
        note.add(tmp_path, Owned(ref.prefix_key, OWNER), 3, lambda: keys)
    note.add(tmp_path, Owned(REFS[3].prefix_key, b"short"), 3, lambda: keys)
    path, size = tmp_path / OWNERS_FILE, OwnerRecords.record_bytes
    data = bytearray(path.read_bytes())
    assert len(data) == 3 * size
    data[size + 20] ^= 1
    path.write_bytes(data[:-1])
    assert note.read(tmp_path, keys).keys() == {REFS[0].prefix_key}


@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_a_note_that_cannot_be_used_costs_no_chunk(tmp_path: Path, what: str) -> None:
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        note = tmp_path / MINE.id.hex() / OWNERS_FILE
        note.mkdir() if what == "a folder" else note.symlink_to(tmp_path / "elsewhere")
        put(tier, (REFS[0], OWNER))
        assert (tier.owners(), tier.contains(REFS[:1])) == ({}, [True])
    assert not (tmp_path / "elsewhere").exists()


def test_a_tier_that_fails_knows_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_tier: DiskTier) -> dict[bytes, bytes]:
        raise TierError("broken")

    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        monkeypatch.setattr(DiskTier, "owners", broken)
        assert owners_in(tier) == {}
