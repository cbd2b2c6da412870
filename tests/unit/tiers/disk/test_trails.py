"""The note of trails in a folder, as read after a restart, a crash and damage."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from support.diskwork import CAPACITY_BYTES, EVEN, MINE, OTHER, bytes_on_disk, get, make_ref, make_transfer

from kvstore.format import notes
from kvstore.format.trailrecords import TRAILS_FILE, TrailNote
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.tiers.disk.tier import DiskTier


def trail_of(number: int, num_blocks: int = 3) -> bytes:
    return b"".join((number * 100 + block + 1).to_bytes(PREFIX_KEY_BYTES, "little") for block in range(num_blocks))


def key_of(number: int, num_blocks: int = 3) -> PrefixKey:
    return trail_of(number, num_blocks)[-PREFIX_KEY_BYTES:]


def keys(*numbers: int) -> set[PrefixKey]:
    return {key_of(number) for number in numbers}


@pytest.fixture
def note() -> TrailNote:
    return TrailNote(EVEN)


def fill(note: TrailNote, home: Path, *numbers: int) -> None:
    for number in numbers:
        note.add(home, trail_of(number), len(numbers), lambda: keys(*numbers))


def test_what_was_noted_is_read(note: TrailNote, tmp_path: Path) -> None:
    fill(note, tmp_path, 1, 2, 3)
    note.add(tmp_path, trail_of(4, EVEN.blocks_per_chunk), 4, set)
    whole = key_of(4, EVEN.blocks_per_chunk)
    assert TrailNote(EVEN).read(tmp_path, {*keys(1, 3), whole}) == {
        key_of(1): trail_of(1),
        key_of(3): trail_of(3),
        whole: trail_of(4, EVEN.blocks_per_chunk),
    }


def test_without_a_note(note: TrailNote, tmp_path: Path) -> None:
    assert note.read(tmp_path, keys(1)) == {}
    with pytest.raises(OSError, match="No such file"):
        note.add(tmp_path / "gone", trail_of(1), 1, set)


@pytest.mark.parametrize("num_blocks", [0, 1, EVEN.blocks_per_chunk + 1])
def test_what_says_nothing_or_cannot_be_is_not_noted(note: TrailNote, tmp_path: Path, num_blocks: int) -> None:
    note.add(tmp_path, trail_of(1, num_blocks), 1, set)
    assert not (tmp_path / TRAILS_FILE).exists()


@pytest.mark.parametrize("torn", [1, 8, 40])
def test_a_torn_record_spoils_no_other(note: TrailNote, tmp_path: Path, torn: int) -> None:
    fill(note, tmp_path, 1, 2)
    path = tmp_path / TRAILS_FILE
    os.truncate(path, path.stat().st_size - torn)
    assert note.read(tmp_path, keys(1, 2)).keys() == keys(1)
    note.add(tmp_path, trail_of(3), 2, set)
    assert note.read(tmp_path, keys(1, 2, 3)).keys() == keys(1, 3)


def test_no_flipped_bit_leads_anywhere(note: TrailNote, tmp_path: Path) -> None:
    fill(note, tmp_path, 1, 2)
    path = tmp_path / TRAILS_FILE
    whole = path.read_bytes()
    for at in range(0, len(whole) // 2, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert note.read(tmp_path, keys(1, 2)) == {key_of(2): trail_of(2)}


def test_it_is_shortened_to_what_is_held(note: TrailNote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_SLACK", 4)
    path = tmp_path / TRAILS_FILE
    sizes = []
    for number in range(40):
        note.add(tmp_path, trail_of(number), 2, partial(keys, number - 1, number))
        sizes.append(path.stat().st_size)
    record_bytes = sizes[0]
    assert max(sizes) <= (2 * 2 + 4 + 1) * record_bytes
    assert note.read(tmp_path, keys(*range(40))).keys() >= keys(38, 39)


def test_it_is_read_in_pieces(note: TrailNote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_PIECE_RECORDS", 2)
    fill(note, tmp_path, 1, 2, 3, 4, 5)
    assert note.read(tmp_path, keys(1, 2, 3, 4, 5)).keys() == keys(1, 2, 3, 4, 5)


def test_a_tier_keeps_trails_of_what_it_holds(tmp_path: Path) -> None:
    trail = trail_of(1, EVEN.blocks_per_chunk)
    one, other = ChunkRef(trail[-PREFIX_KEY_BYTES:], EVEN.blocks_per_chunk), make_ref(2)
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        tier.put([make_transfer(one)._replace(trail=trail), make_transfer(other)])
        assert tier.trails() == {one.prefix_key: trail}
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        assert tier.trails() == {one.prefix_key: trail}
        assert tier.used_bytes == bytes_on_disk(tmp_path)
        tier.remove([one])
        assert tier.trails() == {}
        tier.put([make_transfer(one)._replace(trail=trail)])
        tier.clear()
        assert tier.trails() == {}
        assert tier.put([make_transfer(one)._replace(trail=trail)]) == [Outcome.STORED]
        assert tier.trails() == {one.prefix_key: trail}
        tier.reset(OTHER)
        assert tier.trails() == {}


@pytest.mark.parametrize("what", ["a folder", "a link", "a pipe"])
def test_a_note_that_cannot_be_used_costs_trails_only(tmp_path: Path, what: str) -> None:
    trail = trail_of(1, EVEN.blocks_per_chunk)
    one = ChunkRef(trail[-PREFIX_KEY_BYTES:], EVEN.blocks_per_chunk)
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        note = tmp_path / MINE.id.hex() / TRAILS_FILE
        if what == "a folder":
            note.mkdir()
        elif what == "a pipe":
            os.mkfifo(note)
        else:
            note.symlink_to(tmp_path / "elsewhere")
        assert tier.put([make_transfer(one)._replace(trail=trail)]) == [Outcome.STORED]
        assert tier.trails() == {}
        assert get(tier, one) is Outcome.HIT
    assert not (tmp_path / "elsewhere").exists()


def test_of_a_note_that_is_too_long_the_end_is_read(
    note: TrailNote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(note, tmp_path, *range(20))
    monkeypatch.setattr(notes, "_SLACK", 1)
    assert note.read(tmp_path, keys(19)).keys() == keys(19)
    assert note.read(tmp_path, keys(0)) == {}
