"""Times to live of chunks in a folder, which lie in the names of their files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.diskwork import (
    CAPACITY_BYTES,
    EVEN,
    MINE,
    OTHER,
    Open,
    bytes_on_disk,
    get,
    make_ref,
    make_transfer,
    path_of,
    put,
)

from kvstore.format.chunkfile import chunk_name, parse_chunk_name
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.lifetime import LAST_END_S, Lifetime
from kvstore.tiers.disk.chunkio import Body, ChunkIO
from kvstore.tiers.disk.inventory import Inventory
from kvstore.tiers.disk.opening import open_folders
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker

A, B, C = (make_ref(number) for number in range(1, 4))
END_S = 4e9  # in the next century, so that no clock of a test machine is beyond it


def put_until(tier: DiskTier, ref: ChunkRef, until_s: float) -> None:
    assert tier.put([make_transfer(ref)._replace(until_s=until_s)]) == [Outcome.STORED]


def ends(tier: DiskTier) -> dict[ChunkRef, float | None]:
    return dict(tier.lifetimes())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/??/*.safetensors"))


@pytest.mark.parametrize("until_s", [None, 1, 1_795_868_834, LAST_END_S])
def test_names(until_s: int | None) -> None:
    shard, _, name = chunk_name(A, until_s).partition("/")
    assert parse_chunk_name(shard, name) == (A, until_s)


@pytest.mark.parametrize("end", ["-0", "-01", "-", "-1-2", "--1", "-1.5", f"-{LAST_END_S + 1}", "-1" + 12 * "0", "-٣"])
def test_names_that_are_none(end: str) -> None:
    shard, _, name = chunk_name(A).partition("/")
    assert parse_chunk_name(shard, name.replace(".", f"{end}.")) is None


def test_a_restart_knows_until_when_chunks_may_stay(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put_until(tier, A, END_S + 0.2)
    put_until(tier, B, END_S + 100)
    assert put(tier, C) == [Outcome.STORED]
    tier.close()
    tier = open_tier()
    assert {ref for ref, _ in tier.scan()} == {A, B, C}
    assert ends(tier) == {A: END_S + 1, B: END_S + 100}, "in whole seconds"
    assert [get(tier, ref) for ref in (A, B, C)] == [Outcome.HIT] * 3
    tier.remove([A])
    assert (get(tier, A), get(tier, B)) == (Outcome.MISS, Outcome.HIT)
    assert ends(tier) == {B: END_S + 100}
    assert tier.used_bytes == bytes_on_disk(folder)


def test_times_become_longer_by_a_new_name(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    for ref in (A, B):
        put_until(tier, ref, END_S)
    tier.limit([Lifetime(A, END_S + 50), Lifetime(B, None), Lifetime(C, END_S)])
    assert ends(tier) == {A: END_S + 50}
    assert files(folder) == sorted(Path(chunk_name(*item)).name for item in [(A, int(END_S) + 50), (B, None)])
    assert [get(tier, ref) for ref in (A, B)] == [Outcome.HIT] * 2
    tier.close()
    tier = open_tier()
    assert ends(tier) == {A: END_S + 50}
    assert tier.used_bytes == bytes_on_disk(folder)


@pytest.mark.parametrize(("before_s", "after_s"), [(None, END_S), (END_S, None), (END_S, END_S + 9), (END_S, END_S)])
def test_a_chunk_that_is_stored_again_has_its_new_time(
    open_tier: Open, folder: Path, before_s: float | None, after_s: float | None
) -> None:
    tier = open_tier()
    for until_s in (before_s, after_s):
        assert tier.put([make_transfer(A)._replace(until_s=until_s)]) == [Outcome.STORED]
    assert ends(tier) == ({} if after_s is None else {A: after_s})
    assert len(files(folder)) == 1
    assert get(tier, A) is Outcome.HIT
    assert tier.used_bytes == bytes_on_disk(folder)


def test_a_read_finds_a_file_that_has_just_been_renamed(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    real = ChunkIO.read

    def rename_first(self: ChunkIO, path: Path, body: Body, used_ns: int, layers: range | None) -> object:
        monkeypatch.setattr(ChunkIO, "read", real)
        tier.limit([Lifetime(A, None)])
        return real(self, path, body, used_ns, layers)

    monkeypatch.setattr(ChunkIO, "read", rename_first)
    assert get(tier, A) is Outcome.HIT
    assert path_of(folder, A).exists()


def test_a_read_finds_a_file_that_is_being_renamed(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its new name, and not yet its new record."""
    tier = open_tier()
    put_until(tier, A, END_S)
    reading, renamed, missed = threading.Event(), threading.Event(), threading.Event()
    rename, read = Path.rename, ChunkIO.read

    def rename_slowly(path: Path, target: Path) -> Path:
        found = rename(path, target)
        renamed.set()
        assert missed.wait(30)
        time.sleep(0.05)
        return found

    def read_and_tell(self: ChunkIO, path: Path, body: Body, used_ns: int, layers: range | None) -> object:
        reading.set()
        assert renamed.wait(30)
        try:
            return read(self, path, body, used_ns, layers)
        except FileNotFoundError:
            missed.set()
            raise

    monkeypatch.setattr(Path, "rename", rename_slowly)
    monkeypatch.setattr(ChunkIO, "read", read_and_tell)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(get, tier, A)
        assert reading.wait(30)
        tier.limit([Lifetime(A, None)])
        assert found.result() is Outcome.HIT
    assert path_of(folder, A).exists()


def test_a_new_name_takes_that_of_a_file_that_could_not_be_removed(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, A)
    rename = Path.rename

    def refuse_spares(path: Path, target: Path) -> Path:
        if target.parent.name == ".free":
            raise OSError(5, "broken")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse_spares)
        tier.remove([A])
    assert get(tier, A) is Outcome.MISS
    tier._space.stuck_files.update(dict.fromkeys(stuck := [*tier._space.stuck_files], 1 << 20))
    assert stuck == [path_of(folder, A)]
    with monkeypatch.context() as patch:
        patch.setattr(tier._chunks, "retry_failed", lambda: None)
        put_until(tier, A, END_S)
    tier.limit([Lifetime(A, None)])
    assert not tier._space.stuck_files
    put(tier, B)
    assert get(tier, A) is Outcome.HIT


@pytest.mark.parametrize("until_s", [float("inf"), 1e300, -5.0])
def test_ends_beyond_all_calendars(open_tier: Open, until_s: float) -> None:
    tier = open_tier()
    put_until(tier, A, until_s)
    tier.close()
    assert all(open_tier().contains([A]))


def test_a_file_that_is_gone_is_a_miss(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    next(folder.glob("*/??/*.safetensors")).unlink()
    assert get(tier, A) is Outcome.MISS
    assert tier.used_bytes == bytes_on_disk(folder)


def test_a_late_call_does_not_change_what_was_stored_again(open_tier: Open) -> None:
    """Or a call that hung would let a chunk stay that must end."""
    tier = open_tier()
    put_until(tier, A, END_S)

    def late() -> Iterator[Lifetime]:
        yield Lifetime(A, None)
        tier.remove([A])
        put_until(tier, A, END_S + 5)

    tier._chunks.limit(late())
    assert ends(tier) == {A: END_S + 5}


def test_a_name_that_cannot_be_changed_stays(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)

    def refuse(_path: Path, _target: Path) -> Path:
        raise PermissionError(13, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        tier.limit([Lifetime(A, None)])
    assert ends(tier) == {A: END_S}
    assert get(tier, A) is Outcome.HIT


@pytest.mark.parametrize("other_s", [None, int(END_S) + 1, int(END_S) - 1])
def test_of_two_files_of_a_chunk_the_one_used_last_counts(open_tier: Open, folder: Path, other_s: int | None) -> None:
    """A crash leaves two if the old one could not be renamed."""
    tier = open_tier()
    put_until(tier, A, END_S)
    tier.close()
    (path,) = folder.glob("*/??/*.safetensors")
    other = folder / MINE.id.hex() / chunk_name(A, other_s)
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns - 1))
    tier = open_tier()
    assert tier.scan() == [(A, path.stat().st_size)]
    assert (ends(tier), tier.counters.swept) == ({A: END_S}, 1)
    assert files(folder) == [path.name]
    assert tier.used_bytes == bytes_on_disk(folder)


@pytest.mark.parametrize(("end_s", "left"), [(END_S, 2), (1.0, 1)])
def test_what_has_ended_in_another_namespace_is_deleted(open_tier: Open, folder: Path, end_s: float, left: int) -> None:
    """The engine that knows until when may never come back."""
    tier = open_tier()
    put_until(tier, A, end_s)
    put(tier, B)
    tier.close()
    tier = open_tier(namespace=OTHER)
    assert tier.scan() == []
    assert len(files(folder)) == left
    assert tier.used_bytes == bytes_on_disk(folder)
    assert len(list(folder.glob("*/??"))) == left, "no empty folder stays"


def test_a_clock_that_was_set_back_gives_no_time(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    tier = open_tier()
    put_until(tier, A, now_s + 60)
    tier.close()
    for reads in (False, True):
        monkeypatch.setattr(time, "time_ns", lambda: int((now_s - 1000) * 1e9))
        tier = open_tier()
        (until_s,) = ends(tier).values()
        assert until_s is not None
        assert until_s - (now_s - 1000) == pytest.approx(60, abs=2)
        assert not reads or get(tier, A) is Outcome.HIT
        assert tier.used_bytes == bytes_on_disk(folder)


def test_a_read_does_not_hide_that_a_clock_was_set_back(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    tier = open_tier()
    put_until(tier, A, now_s + 60)
    monkeypatch.setattr(time, "time_ns", lambda: int((now_s - 1000) * 1e9))
    assert get(tier, A) is Outcome.HIT
    tier.close()
    (until_s,) = ends(open_tier()).values()
    assert until_s is not None
    assert until_s - (now_s - 1000) == pytest.approx(60, abs=2)


def test_several_folders(tmp_path: Path) -> None:
    folders = [tmp_path / f"disk{number}" for number in range(3)]
    refs = [make_ref(number) for number in range(9)]
    with closing(open_folders(folders, MINE, EVEN, 3 * CAPACITY_BYTES, wrap=CircuitBreaker)) as tier:
        tier.scan()
        assert tier.keeps_lifetimes
        tier.put([make_transfer(ref)._replace(until_s=END_S + number) for number, ref in enumerate(refs)])
        tier.limit([Lifetime(refs[0], None), Lifetime(refs[1], END_S + 100)])
    with closing(open_folders(folders, MINE, EVEN, 3 * CAPACITY_BYTES, wrap=CircuitBreaker)) as tier:
        tier.scan()
        expected = {ref: END_S + number for number, ref in enumerate(refs)} | {refs[1]: END_S + 100}
        del expected[refs[0]]
        assert dict(tier.lifetimes()) == expected
        assert all(get(tier, ref) is Outcome.HIT for ref in refs)


def test_tools_find_the_file(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put_until(tier, A, END_S)
    put(tier, B)
    inventory = Inventory(folder / MINE.id.hex())
    assert {place.ref: place.until_s for place in inventory.places()} == {A: END_S, B: None}
    assert isinstance(inventory.read(A, int(END_S)), np.ndarray)
    assert isinstance(inventory.read(B), np.ndarray)
    assert inventory.read(A) is None
    assert inventory.read(B, int(END_S)) is None
