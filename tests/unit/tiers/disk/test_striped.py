"""Several folders as one tier: spread by key, served at once, and a failed one loses only its own chunks."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.diskwork import (
    CHUNK_BYTES,
    EVEN,
    MINE,
    bytes_on_disk,
    get,
    make_ref,
    make_slot,
    make_transfer,
    path_of,
    put,
)
from support.faults import Fault, FaultInjector, FaultKind

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import (
    ClosedError,
    ConfigError,
    FolderOwnedError,
    InvalidCallError,
    TierError,
    TierTimeoutError,
)
from kvstore.tiers.base import BoundedTier, Transfer
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.striped import StripedTier
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import Guard

CAPACITY_BYTES = 36 * CHUNK_BYTES
SMALL_BYTES = 12 * CHUNK_BYTES
REFS = [make_ref(number) for number in range(24)]

Open = Callable[..., BoundedTier]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"disk{number}" for number in range(3)]


@pytest.fixture
def open_tier(folders: list[Path]) -> Iterator[Open]:
    """Yield a function that opens tiers and closes the last one; opening again is a restart."""
    opened: list[BoundedTier] = []

    def open_(names: list[Path] = folders, capacity_bytes: int = CAPACITY_BYTES) -> BoundedTier:
        if opened:
            opened[-1].close()
        opened.append(open_folders(names, MINE, EVEN, capacity_bytes))
        opened[-1].scan()
        return opened[-1]

    yield open_
    if opened:
        opened[-1].close()


def counts(folders: list[Path]) -> list[int]:
    return [len(list(folder.rglob("*.safetensors"))) for folder in folders]


def test_chunks_are_spread_and_found_again(open_tier: Open, folders: list[Path]) -> None:
    tier = open_tier()
    assert set(put(tier, *REFS)) == {Outcome.STORED}
    assert sum(counts(folders)) == len(REFS)
    assert min(counts(folders)) > 2
    assert all(get(tier, ref) is Outcome.HIT for ref in REFS)
    assert tier.contains([*REFS, make_ref(99)]) == [True] * len(REFS) + [False]
    assert tier.used_bytes == bytes_on_disk(*folders) == len(REFS) * CHUNK_BYTES
    assert tier.counters.stored == tier.counters.hits == len(REFS)
    tier = open_tier()
    assert {ref for ref, _ in tier.scan()} == set(REFS)
    assert all(get(tier, ref) is Outcome.HIT for ref in REFS)


def test_a_batch_is_answered_in_its_order(open_tier: Open) -> None:
    tier = open_tier()
    put(tier, *REFS[::2])
    transfers = [Transfer(ref, make_slot()) for ref in REFS]
    assert tier.get(transfers) == [Outcome.HIT, Outcome.MISS] * (len(REFS) // 2)
    for transfer in transfers[::2]:
        assert (transfer.buffer == make_transfer(transfer.ref).buffer).all()


def test_the_folders_are_scanned_at_once(open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    put(tier, *REFS)
    everyone = threading.Barrier(len(folders))
    original = DiskTier.scan

    def meet(self: DiskTier) -> list[tuple[ChunkRef, int]]:
        everyone.wait(30)  # breaks unless all folders are inside
        return original(self)

    monkeypatch.setattr(DiskTier, "scan", meet)
    assert {ref for ref, _ in tier.scan()} == set(REFS)


def test_a_broken_folder_fails_only_its_own_chunks(
    open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    assert isinstance(tier, StripedTier)
    put(tier, *REFS)
    broken = tier._disks[1]
    mine = {ref for ref, _ in broken.scan()}

    def refuse(*_: object) -> None:
        raise TierError("the disk is gone")

    with monkeypatch.context() as patch:
        for name in ("get", "put", "remove", "contains"):
            patch.setattr(broken, name, refuse)
        outcomes = tier.get([Transfer(ref, make_slot()) for ref in REFS])
        assert [outcome is Outcome.FAILED for outcome in outcomes] == [ref in mine for ref in REFS]
        assert tier.contains(REFS) == [ref not in mine for ref in REFS]
        outcomes = put(tier, *REFS)
        assert [outcome is Outcome.FAILED for outcome in outcomes] == [ref in mine for ref in REFS]
        tier.remove([REFS[0]])
    assert len(caplog.records) == 1
    assert tier.counters.failed == 2 * len(mine)
    assert all(get(tier, ref) is Outcome.HIT for ref in REFS[1:])


def test_a_deleted_folder(open_tier: Open, folders: list[Path]) -> None:
    tier = open_tier()
    put(tier, *REFS)
    lost = counts(folders)[2]
    shutil.rmtree(folders[2])
    outcomes = [get(tier, ref) for ref in REFS]
    assert (outcomes.count(Outcome.MISS), outcomes.count(Outcome.HIT)) == (lost, len(REFS) - lost)
    assert set(put(tier, *REFS)) == {Outcome.STORED}
    assert tier.used_bytes == bytes_on_disk(*folders)


def test_all_usable_bytes_can_be_filled(open_tier: Open, folders: list[Path]) -> None:
    """This holds however unevenly the keys fall: a chunk whose home is full is put elsewhere, and found again."""
    tier = open_tier()
    room = tier.usable_bytes // CHUNK_BYTES
    refs = [make_ref(number) for number in range(room)]
    assert room == 34
    assert [put(tier, ref) for ref in refs] == [[Outcome.STORED]] * room
    assert max(counts(folders)) <= 12
    assert tier.counters.full == 0
    assert tier.used_bytes == bytes_on_disk(*folders) <= tier.capacity_bytes
    for restart in (False, True):
        tier = open_tier() if restart else tier
        assert all(get(tier, ref) is Outcome.HIT for ref in refs)
        assert set(put(tier, *refs)) == {Outcome.STORED}  # replaced where they are
        assert sum(counts(folders)) == room
    tier.remove(refs)
    assert not any(tier.contains(refs))
    assert sum(counts(folders)) == 0
    more = [make_ref(number) for number in range(100, 140)]
    assert put(tier, *more).count(Outcome.FULL) == 4
    tier.clear()
    assert tier.used_bytes == bytes_on_disk(*folders) == 0


def test_folders_may_come_and_go(open_tier: Open, folders: list[Path]) -> None:
    put(open_tier(folders[:2]), *REFS[:20])
    tier = open_tier(folders[::-1])  # one more, in another order
    assert {ref for ref, _ in tier.scan()} == set(REFS[:20])
    assert all(get(tier, ref) is Outcome.HIT for ref in REFS[:20])
    kept = counts(folders)[0]
    tier = open_tier(folders[:1])
    assert len(tier.scan()) == kept


@pytest.mark.parametrize("newer", [0, 1])
def test_a_chunk_in_two_folders_is_one(open_tier: Open, folders: list[Path], newer: int) -> None:
    for number, folder in enumerate(folders[:2]):
        put(open_tier([folder]), REFS[0])
        os.utime(path_of(folder, REFS[0]), (2000 if number == newer else 1000,) * 2)
    tier = open_tier(folders[:2])
    assert [ref for ref, _ in tier.scan()] == [REFS[0]]
    assert counts(folders[:2]) == [newer == 0, newer == 1]
    assert get(tier, REFS[0]) is Outcome.HIT


def test_a_start_walks_each_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk has no room left for the bound, the files in the folders are added up and count as room."""
    folders = [tmp_path / f"disk{number}" for number in range(8)]
    for folder in folders:
        (folder / ".free").mkdir(parents=True)
        (folder / ".free" / "7").write_bytes(bytes(2 * CHUNK_BYTES))
    walked: list[Path] = []
    real_walk, real_statvfs = survey.held_bytes, os.statvfs

    def count(folder: Path) -> int:
        walked.append(folder)
        return real_walk(folder)

    def without_room(path: Path) -> Any:
        status = real_statvfs(path)
        return SimpleNamespace(f_bavail=0, f_frsize=status.f_frsize)

    monkeypatch.setattr(survey, "held_bytes", count)
    monkeypatch.setattr(os, "statvfs", without_room)
    open_folders(folders, MINE, EVEN, 16 * CHUNK_BYTES).close()
    assert sorted(walked) == folders
    (folders[7] / ".free" / "8").write_bytes(b"")
    with pytest.raises(ConfigError, match="does not fit"):  # the close has swept the rest
        open_folders(folders, MINE, EVEN, 16 * CHUNK_BYTES)


def test_two_puts_of_one_chunk_do_not_end_in_two_folders(
    open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is refused while the first is on its way from its full home to another folder."""
    tier = open_tier(folders[:2], capacity_bytes=2 * CHUNK_BYTES)
    assert isinstance(tier, StripedTier)
    neighbour, stray = [ref for ref in REFS if tier._home(ref) == 0][:2]
    put(tier, neighbour)
    began, go_on = threading.Event(), threading.Event()
    original = DiskTier.put

    def hold_up(self: DiskTier, transfers: list[Transfer]) -> list[Outcome]:
        if self is tier._disks[1]:
            began.set()
            assert go_on.wait(30)
        return original(self, transfers)

    monkeypatch.setattr(DiskTier, "put", hold_up)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(put, tier, stray)
        assert began.wait(30)
        tier.remove([neighbour])
        assert put(tier, stray, neighbour) == [Outcome.FAILED, Outcome.STORED]
        go_on.set()
        assert first.result() == [Outcome.STORED]
    assert put(tier, stray) == [Outcome.STORED]
    assert counts(folders[:2]) == [1, 1]
    assert {ref for ref, _ in tier.scan()} == {neighbour, stray}
    tier.remove([stray])
    assert tier.contains([neighbour, stray]) == [True, False]
    assert tier.used_bytes == bytes_on_disk(*folders[:2])


def test_a_chunk_finds_the_room_that_moves_while_the_folders_are_tried(
    open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its home is full at first, and the other folder when it comes there, although there is room at any time."""
    tier = open_tier(folders[:2], capacity_bytes=4 * CHUNK_BYTES)
    assert isinstance(tier, StripedTier)
    first, second, late = [ref for ref in REFS if tier._home(ref) == 0][:3]
    others = [ref for ref in REFS if tier._home(ref) == 1][:2]
    put(tier, first, second)
    original = DiskTier.put

    def put_and_move_the_room(self: DiskTier, transfers: list[Transfer]) -> list[Outcome]:
        outcomes = original(self, transfers)
        monkeypatch.undo()
        assert outcomes == [Outcome.FULL]
        tier.remove([first, second])
        assert put(tier, *others) == [Outcome.STORED] * 2
        return outcomes

    monkeypatch.setattr(DiskTier, "put", put_and_move_the_room)
    assert put(tier, late) == [Outcome.STORED]
    assert get(tier, late) is Outcome.HIT
    assert counts(folders[:2]) == [1, 2]


def test_a_full_tier_is_tried_once(open_tier: Open, folders: list[Path]) -> None:
    tier = open_tier(folders[:2], capacity_bytes=2 * CHUNK_BYTES)
    assert isinstance(tier, StripedTier)
    put(tier, *REFS[:9])
    asked = sum(disk.counters.full for disk in tier._disks)
    assert put(tier, REFS[10]) == [Outcome.FULL]
    assert sum(disk.counters.full for disk in tier._disks) == asked + 2


def test_a_stray_removed_while_it_is_replaced_is_not_lost_from_sight(
    open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(folders[:2], capacity_bytes=2 * CHUNK_BYTES)
    assert isinstance(tier, StripedTier)
    neighbour, stray = [ref for ref in REFS if tier._home(ref) == 0][:2]
    put(tier, neighbour, stray)
    original = DiskTier.put

    def put_and_remove(self: DiskTier, transfers: list[Transfer]) -> list[Outcome]:
        outcomes = original(self, transfers)
        monkeypatch.undo()
        tier.remove([stray])
        return original(self, transfers) if outcomes == [Outcome.STORED] else outcomes

    monkeypatch.setattr(DiskTier, "put", put_and_remove)
    assert put(tier, stray) == [Outcome.STORED]
    assert get(tier, stray) is Outcome.HIT
    tier.remove([stray])
    assert counts(folders[:2]) == [1, 0]


def test_a_put_that_clear_overtakes_does_not_say_that_it_stored(
    open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, real_put = open_tier(), DiskTier.put

    def put_and_clear(disk: DiskTier, transfers: list[Transfer]) -> list[Outcome]:
        outcomes = real_put(disk, transfers)
        monkeypatch.undo()
        tier.clear()
        return outcomes

    monkeypatch.setattr(DiskTier, "put", put_and_clear)
    assert put(tier, REFS[0]) == [Outcome.FAILED]
    assert (counts(folders), tier.scan()) == ([0, 0, 0], [])


def test_restart_orders_over_all_folders(open_tier: Open, folders: list[Path]) -> None:
    put(open_tier(), *REFS)
    for age, ref in enumerate(REFS):
        for folder in folders:
            if path_of(folder, ref).exists():
                os.utime(path_of(folder, ref), (10_000 - 100 * age,) * 2)
    open_tier().close()
    tier = open_folders(folders, MINE, EVEN, CAPACITY_BYTES)
    assert [ref for ref, _ in tier.scan()] == REFS[::-1]
    tier.close()


def test_later_scans_order_over_all_folders(open_tier: Open, folders: list[Path]) -> None:
    """The order is by later touches, in any folder."""
    put(open_tier(), *REFS)
    for age, ref in enumerate(REFS):
        path = next(path_of(folder, ref) for folder in folders if path_of(folder, ref).exists())
        os.utime(path, (10_000 - 100 * age,) * 2)
    tier = open_tier()
    touched = [REFS[20], REFS[3], REFS[11]]
    for ref in touched:
        assert get(tier, ref) is Outcome.HIT
    untouched = [ref for ref in REFS[::-1] if ref not in touched]
    assert [ref for ref, _ in tier.scan()] == untouched + touched[::-1]


def test_the_first_look_is_guarded(folders: list[Path]) -> None:
    """A hung folder makes the start fail instead of hang."""
    injectors: list[FaultInjector] = []

    def wrap(disk: DiskTier) -> BoundedTier:
        injectors.append(FaultInjector(disk, [Fault(FaultKind.HANG, "scan")] if len(injectors) == 1 else []))
        return Guard(injectors[-1], 30.0, slow_timeout_s=0.05)

    tier = open_folders(folders, MINE, EVEN, CAPACITY_BYTES, wrap=wrap)
    with pytest.raises(TierTimeoutError, match="scan"):
        tier.scan()
    injectors[1].heal()
    tier.close()


def test_overlapping_folders_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    for names in ([real, real], [real, link], [real, real / "." / "x" / ".."]):
        with pytest.raises(ConfigError, match=f"the folder {real} twice"):
            open_folders(names, MINE, EVEN, CAPACITY_BYTES)
    for names in ([real, real / "inside"], [link / "inside", real]):
        with pytest.raises(ConfigError, match="one lies inside the other"):
            open_folders(names, MINE, EVEN, CAPACITY_BYTES)
    assert not any(real.iterdir())
    with pytest.raises(ConfigError, match="at least one folder"):
        open_folders([], MINE, EVEN, CAPACITY_BYTES)


def test_a_failing_start_releases_the_other_folders(folders: list[Path]) -> None:
    owner = open_folders(folders[2:], MINE, EVEN, CAPACITY_BYTES)
    with pytest.raises(FolderOwnedError, match=str(folders[2])):
        open_folders(folders, MINE, EVEN, CAPACITY_BYTES)
    owner.close()
    open_folders(folders, MINE, EVEN, CAPACITY_BYTES).close()
    with pytest.raises(ConfigError, match="does not hold a single chunk"):
        open_folders(folders, MINE, EVEN, 2 * CHUNK_BYTES)


def test_folders_on_one_filesystem_must_fit_together(folders: list[Path]) -> None:
    free_bytes = shutil.disk_usage(folders[0].parent).free
    with pytest.raises(ConfigError, match="does not fit"):
        open_folders(folders, MINE, EVEN, 2 * free_bytes)
    open_folders(folders, MINE, EVEN, CAPACITY_BYTES).close()


def test_contract_and_close(open_tier: Open, folders: list[Path]) -> None:
    tier = open_tier()
    good = make_transfer(REFS[0])
    with pytest.raises(InvalidCallError):
        tier.put([good, Transfer(REFS[1], make_slot()[:-4096])])
    assert tier.used_bytes == 0
    assert tier.get([]) == tier.put([]) == []
    tier.close()
    tier.close()
    with pytest.raises(ClosedError):
        tier.get([good])
    with pytest.raises(ClosedError):
        tier.scan()
    open_folders(folders, MINE, EVEN, CAPACITY_BYTES).close()


def test_what_is_put_around_each_folder(folders: list[Path]) -> None:
    seen = []

    def wrap(disk: DiskTier) -> BoundedTier:
        seen.append(disk)
        return disk

    open_folders(folders, MINE, EVEN, CAPACITY_BYTES, wrap=wrap).close()
    open_folders(folders[:1], MINE, EVEN, CAPACITY_BYTES, wrap=wrap).close()
    assert len(seen) == 4


def test_a_stray_is_removed_where_it_is_though_its_folder_refused_to_be_cleared(
    open_tier: Open, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(capacity_bytes=SMALL_BYTES)
    assert isinstance(tier, StripedTier)
    for number in range(100):
        put(tier, make_ref(number))
        if tier._strays:
            break
    (stray, place) = next(iter(tier._strays.items()))
    with monkeypatch.context() as patch:
        patch.setattr(tier._tiers[place.folder], "clear", Mock(side_effect=TierError("no")))
        with pytest.raises(TierError):
            tier.clear()
    assert tier.contains([stray]) == [True]
    tier.remove([stray])
    assert open_tier(capacity_bytes=SMALL_BYTES).contains([stray]) == [False]
    tier = open_tier(capacity_bytes=SMALL_BYTES)
    tier.clear()
    assert not tier._strays  # type: ignore[attr-defined]
