"""The note of retained chunks in a folder, as read after a restart, a crash and damage."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from support.diskwork import CAPACITY_BYTES, CHUNK_BYTES, EVEN, MINE, OTHER, make_ref, put

from kvstore.format import notes
from kvstore.format.retentions import RETAINED_FILE, RetentionNote, RetentionRecords
from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.model.retention import Retention
from kvstore.tiers.disk.notes import retained_in
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker

REFS = [make_ref(number) for number in range(9)]
TENANT = bytes(range(16))


def until(number: int, at_s: float, tenant: bytes = b"") -> Retention:
    return Retention(REFS[number], at_s, tenant)


def held(*numbers: int) -> set[bytes]:
    return {REFS[number].prefix_key for number in numbers}


def test_the_last_word_of_each_chunk_counts(tmp_path: Path) -> None:
    note = RetentionNote()
    said = [until(0, 5.0), until(1, 1e9, TENANT), until(0, 7.5), until(2, 3.0)]
    note.add_all(tmp_path, said[:2], 3, lambda: held(0, 1, 2))
    note.add_all(tmp_path, said[2:], 3, lambda: held(0, 1, 2))
    assert RetentionNote().read(tmp_path, held(0, 1)) == {ref.prefix_key: one for one in said[1:3] for ref in [one.ref]}
    assert RetentionNote().read(tmp_path / "gone", held(0)) == {}


def test_what_cannot_be_is_neither_noted_nor_read(tmp_path: Path) -> None:
    note, records = RetentionNote(), RetentionRecords()
    note.add(tmp_path, until(0, 5.0, b"short"), 1, lambda: held(0))
    assert not (tmp_path / RETAINED_FILE).exists()
    endless = records.record(until(0, float("inf"))) + records.record(until(1, float("nan")))
    (tmp_path / RETAINED_FILE).write_bytes(endless + records.record(until(2, 5.0)))
    assert note.read(tmp_path, held(0, 1, 2)).keys() == held(2)


@pytest.mark.parametrize("torn", [1, 8, 30, RetentionRecords.record_bytes - 1])
def test_a_torn_record_spoils_no_other(tmp_path: Path, torn: int) -> None:
    note = RetentionNote()
    note.add_all(tmp_path, [until(0, 5.0), until(1, 5.0)], 2, lambda: held(0, 1))
    path = tmp_path / RETAINED_FILE
    path.write_bytes(path.read_bytes()[:-torn])
    assert note.read(tmp_path, held(0, 1)).keys() == held(0)
    note.add(tmp_path, until(2, 5.0), 3, lambda: held(0, 1, 2))
    assert note.read(tmp_path, held(0, 1, 2)).keys() == held(0, 2)


def test_it_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_SLACK", 4)
    note = RetentionNote()
    for number in range(200):
        note.add(tmp_path, until(number % 2, number), 2, lambda: held(0, 1))
        assert (tmp_path / RETAINED_FILE).stat().st_size <= (2 * 2 + 4 + 1) * RetentionRecords.record_bytes
    assert {one.until_s for one in note.read(tmp_path, held(0, 1)).values()} == {198.0, 199.0}


def test_a_tier_keeps_the_retention_of_what_it_holds(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        assert put(tier, *REFS[:3]) == [Outcome.STORED] * 3
        tier.retain([until(0, 5.0), until(1, 6.0, TENANT), until(8, 7.0)])
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        assert set(tier.retained()) == {until(0, 5.0), until(1, 6.0, TENANT)}
        tier.remove([REFS[0]])
        assert tier.retained() == [until(1, 6.0, TENANT)]
        tier.clear()
        put(tier, *REFS[:3])
        assert tier.retained() == [], "a clear removes the note, too"
        tier.retain([until(2, 9.0)])
        tier.reset(OTHER)
        put(tier, *REFS[:3])
        assert tier.retained() == []
    with closing(DiskTier(tmp_path, OTHER, EVEN, CAPACITY_BYTES)) as tier:
        assert len(tier.scan()) == 3, "the note is no leftover"


def test_several_folders(tmp_path: Path) -> None:
    folders = [tmp_path / f"disk{number}" for number in range(3)]
    said = [until(number, 10.0 + number) for number in range(9)]
    with closing(open_folders(folders, MINE, EVEN, 3 * CAPACITY_BYTES, wrap=CircuitBreaker)) as tier:
        tier.scan()
        put(tier, *REFS)
        tier.retain(said)
    with closing(open_folders(folders, MINE, EVEN, 3 * CAPACITY_BYTES, wrap=CircuitBreaker)) as tier:
        tier.scan()
        assert set(tier.retained()) == set(said)


def test_a_chunk_that_becomes_a_stray_after_it_was_noted(tmp_path: Path) -> None:
    folders = [tmp_path / f"disk{number}" for number in range(3)]
    said = [until(number, 10.0) for number in range(9)]
    share_bytes = 3 * CHUNK_BYTES  # so some homes are too small
    with closing(open_folders(folders, MINE, EVEN, 3 * share_bytes)) as tier:
        tier.scan()
        tier.retain(said)
        assert put(tier, *REFS) == [Outcome.STORED] * 9
        assert tier._strays  # type: ignore[attr-defined]
    with closing(open_folders(folders, MINE, EVEN, 3 * share_bytes)) as tier:
        tier.scan()
        assert set(tier.retained()) == set(said)


@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_a_note_that_cannot_be_used_costs_no_chunk(tmp_path: Path, what: str) -> None:
    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        note = tmp_path / MINE.id.hex() / RETAINED_FILE
        note.mkdir() if what == "a folder" else note.symlink_to(tmp_path / "elsewhere")
        put(tier, *REFS[:2])
        tier.retain([until(0, 5.0)])
        assert tier.retained() == []
        assert tier.contains(REFS[:2]) == [True, True]
    assert not (tmp_path / "elsewhere").exists()


def test_a_tier_that_fails_retains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_tier: DiskTier) -> list[Retention]:
        raise TierError("broken")

    with closing(DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)) as tier:
        monkeypatch.setattr(DiskTier, "retained", broken)
        assert retained_in(tier) == []
