"""The disk tier: every fault a disk, a crash or a neighbour can produce is a miss, and the bytes counted stay true."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import chunkfile
from kvstore.errors import ClosedError, ConfigError, FolderOwnedError, InvalidCallError, TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.tiers import _folder
from kvstore.tiers.base import ByteArray, ChunkRef, Outcome, Transfer
from kvstore.tiers.disk import DiskTier

EVEN = KVLayout(page_bytes=(4096,) * 4, planes=1, block_tokens=32, chunk_tokens=256)
ODD = KVLayout(page_bytes=(1000, 36, 1000), planes=2, block_tokens=16, chunk_tokens=64)
MINE = Namespace({"model": "mine"})
OTHER = Namespace({"model": "other"})
CHUNK_BYTES = chunkfile.file_bytes(EVEN, 8)
CAPACITY_BYTES = 16 * CHUNK_BYTES

Open = Callable[..., DiskTier]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_tier(folder: Path) -> Iterator[Open]:
    """Opens tiers in one folder and closes the last one; opening again is a restart."""
    opened: list[DiskTier] = []

    def open_(
        namespace: Namespace = MINE,
        layout: KVLayout = EVEN,
        capacity_bytes: int = CAPACITY_BYTES,
        direct: bool | None = None,
    ) -> DiskTier:
        if opened:
            opened[-1].close()
        opened.append(DiskTier(folder, namespace, layout, capacity_bytes, direct=direct))
        opened[-1].scan()
        return opened[-1]

    yield open_
    if opened:
        opened[-1].close()


def make_ref(number: int, num_blocks: int = 8) -> ChunkRef:
    return ChunkRef(number.to_bytes(2, "little") * 8, num_blocks)


def make_slot(layout: KVLayout = EVEN) -> ByteArray:
    """An empty, page-aligned buffer for one chunk."""
    return np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)


def make_transfer(ref: ChunkRef, layout: KVLayout = EVEN, salt: int = 0) -> Transfer:
    """A chunk whose payload follows from its ref; the padding is dirty."""
    slot = make_slot(layout)
    size = layout.payload_bytes(ref.num_blocks)
    seed = int.from_bytes(ref.prefix_key, "little") + ref.num_blocks + (salt << 130)
    slot[:] = 0xAA
    slot[:size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return Transfer(ref, slot)


def put(tier: DiskTier, *refs: ChunkRef, layout: KVLayout = EVEN) -> list[Outcome]:
    return tier.put([make_transfer(ref, layout) for ref in refs])


def get(tier: DiskTier, ref: ChunkRef, layout: KVLayout = EVEN) -> Outcome:
    """Read a chunk; a hit must have the right bytes."""
    slot = make_slot(layout)
    (outcome,) = tier.get([Transfer(ref, slot)])
    if outcome is Outcome.HIT:
        size = layout.payload_bytes(ref.num_blocks)
        assert np.array_equal(slot[:size], make_transfer(ref, layout).buffer[:size])
    return outcome


def bytes_on_disk(folder: Path) -> int:
    """The sum over the folder, found independently of the tier."""
    total = 0
    for parent, _, names in os.walk(folder):
        total += sum(os.lstat(Path(parent, n)).st_size for n in names if n not in {".lock", "namespace.json"})
    return total


def path_of(folder: Path, ref: ChunkRef, namespace: Namespace = MINE) -> Path:
    return folder / namespace.id.hex() / _folder.chunk_name(ref)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


# Storing and reading


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize(("layout", "blocks"), [(EVEN, 8), (EVEN, 3), (ODD, 4), (ODD, 1)])
def test_round_trip(open_tier: Open, folder: Path, layout: KVLayout, blocks: int, direct: bool | None) -> None:
    tier = open_tier(layout=layout, direct=direct)
    ref = make_ref(1, blocks)
    assert get(tier, ref, layout) is Outcome.MISS
    assert put(tier, ref, layout=layout) == [Outcome.STORED]
    assert tier.contains([ref, make_ref(2, blocks)]) == [True, False]
    assert get(tier, ref, layout) is Outcome.HIT
    assert tier.used_bytes == tier.stored_bytes(blocks) == bytes_on_disk(folder)
    assert tier.counters.bytes_read == tier.counters.bytes_written == tier.stored_bytes(blocks)


def test_two_lengths_under_one_key_are_two_chunks(open_tier: Open) -> None:
    tier = open_tier()
    put(tier, make_ref(1, 8), make_ref(1, 3))
    assert get(tier, make_ref(1, 8)) is get(tier, make_ref(1, 3)) is Outcome.HIT


def test_padding_on_disk_is_zero(open_tier: Open, folder: Path) -> None:
    tier = open_tier(layout=ODD)
    put(tier, make_ref(1, 4), layout=ODD)
    raw = path_of(folder, make_ref(1, 4)).read_bytes()
    assert not any(raw[4096 + ODD.payload_bytes(4) :])


@pytest.mark.parametrize("direct", [None, False])
def test_unaligned_buffers(open_tier: Open, direct: bool | None) -> None:
    tier = open_tier(direct=direct)
    ref = make_ref(1)
    spacious = np.frombuffer(mmap.mmap(-1, EVEN.slot_bytes + 4096), np.uint8)
    unaligned = spacious[24 : 24 + EVEN.slot_bytes]
    unaligned[:] = make_transfer(ref).buffer
    assert tier.put([Transfer(ref, unaligned)]) == [Outcome.STORED]
    assert get(tier, ref) is Outcome.HIT
    unaligned[:] = 0
    assert tier.get([Transfer(ref, unaligned)]) == [Outcome.HIT]
    assert np.array_equal(unaligned, make_transfer(ref).buffer)


def test_replacing_serves_the_new_bytes_and_counts_once(open_tier: Open, folder: Path) -> None:
    tier = open_tier(capacity_bytes=CHUNK_BYTES)  # no room for old and new at once
    ref = make_ref(1)
    for salt in range(3):
        new = make_transfer(ref, salt=salt)
        assert tier.put([new]) == [Outcome.STORED]
        slot = make_slot()
        assert tier.get([Transfer(ref, slot)]) == [Outcome.HIT]
        assert np.array_equal(slot, new.buffer)
        assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES


def test_short_reads_and_writes_are_continued(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:4096]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][:4096]], at))
    assert put(tier, make_ref(1)) == [Outcome.STORED]
    assert get(tier, make_ref(1)) is Outcome.HIT


def test_contract_of_buffers_and_refs(open_tier: Open) -> None:
    tier = open_tier()
    slot = make_slot()
    for ref, buffer in [
        (make_ref(1), slot[:-4096]),
        (make_ref(1), slot[::2]),
        (make_ref(1), slot.view(np.int8)),
        (make_ref(1, 0), slot),
        (make_ref(1, 9), slot),
        (ChunkRef(b"short", 8), slot),
    ]:
        with pytest.raises(InvalidCallError):
            tier.get([Transfer(ref, buffer)])  # type: ignore[arg-type, unused-ignore]
    assert tier.used_bytes == 0


# Faults of a chunk's file


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def flip_payload(path: Path) -> None:
    flip(path, 4096 + 20_000)


def flip_header(path: Path) -> None:
    flip(path, 100)


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


# Restart


def test_restart_finds_everything_in_order_of_use(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    refs = [make_ref(number) for number in range(4)]
    put(tier, *refs, make_ref(9, 3))
    for age, ref in enumerate(refs):
        os.utime(path_of(folder, ref), (1000 - age, 1000 - age))
    assert get(tier, refs[3]) is Outcome.HIT  # the oldest becomes the newest
    tier = open_tier()
    listed = tier.scan()
    assert [ref for ref, _ in listed][:3] == [refs[2], refs[1], refs[0]]
    assert {ref for ref, _ in listed} == {*refs, make_ref(9, 3)}
    assert all(size == tier.stored_bytes(ref.num_blocks) for ref, size in listed)
    assert all(get(tier, ref) is Outcome.HIT for ref, _ in listed)
    assert tier.used_bytes == bytes_on_disk(folder) == sum(size for _, size in listed)


def test_restart_sweeps_leftovers(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2), make_ref(3))
    tier.remove([make_ref(3)])
    tier.close()
    home, shard = folder / MINE.id.hex(), path_of(folder, make_ref(1)).parent
    (folder / ".free").mkdir(exist_ok=True)
    (folder / ".free" / "7").write_bytes(b"half a chunk")
    (folder / ".dead-5" / "ab").mkdir(parents=True)
    (folder / ".dead-5" / "ab" / "old").write_bytes(b"x" * 5000)
    (home / "stray").write_bytes(b"x")
    (shard / "stray").write_bytes(b"x")
    (shard / path_of(folder, make_ref(1, 9)).name).write_bytes(b"too many blocks")
    (shard / path_of(folder, make_ref(4)).name).write_bytes(b"wrong shard")
    (shard / path_of(folder, make_ref(1, 4)).name).touch()
    (shard / path_of(folder, make_ref(1, 5)).name).mkdir()
    cut(path_of(folder, make_ref(2)))
    (folder / "not-ours").write_text("keep me")
    tier = open_tier()
    assert [ref for ref, _ in tier.scan()] == [make_ref(1)]
    assert tier.counters.swept == 9
    assert (folder / "not-ours").read_text() == "keep me"
    (folder / "not-ours").unlink()
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES


def test_lowered_capacity_drops_foreign_chunks_then_the_oldest(open_tier: Open, folder: Path) -> None:
    put(open_tier(OTHER), make_ref(7))
    tier = open_tier()
    put(tier, *(make_ref(number) for number in range(4)))
    for number in range(4):
        os.utime(path_of(folder, make_ref(number)), (number, number))
    tier = open_tier(capacity_bytes=2 * CHUNK_BYTES)
    assert [ref for ref, _ in tier.scan()] == [make_ref(2), make_ref(3)]
    assert tier.used_bytes == bytes_on_disk(folder) == 2 * CHUNK_BYTES
    assert not (folder / OTHER.id.hex()).exists()


def test_namespace_is_described(open_tier: Open, folder: Path) -> None:
    open_tier()
    text = (folder / MINE.id.hex() / "namespace.json").read_text()
    assert json.loads(text) == {"model": "mine"}


def test_many_names(tmp_path: Path) -> None:
    tiny = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=16)
    home = tmp_path / MINE.id.hex()
    for shard in range(256):
        (home / f"{shard:02x}").mkdir(parents=True)
    for number in range(2_000):
        ref = ChunkRef((number % 256).to_bytes(1, "little") + number.to_bytes(15, "little"), 1)
        fd = os.open(home / _folder.chunk_name(ref), os.O_CREAT | os.O_WRONLY)
        os.ftruncate(fd, 8192)
        os.close(fd)
    tier = DiskTier(tmp_path, MINE, tiny, 2_000 * 8192)
    assert len(tier.scan()) == 2_000
    assert tier.used_bytes == 2_000 * 8192
    tier.close()


# Room


def test_full_is_an_answer(open_tier: Open, folder: Path) -> None:
    tier = open_tier(capacity_bytes=2 * CHUNK_BYTES)
    outcomes = put(tier, make_ref(1), make_ref(2), make_ref(3))
    assert outcomes == [Outcome.STORED, Outcome.STORED, Outcome.FULL]
    assert tier.counters.full == 1
    tier.remove([make_ref(1)])
    assert put(tier, make_ref(3)) == [Outcome.STORED]
    assert [get(tier, make_ref(number)) for number in (1, 2, 3)] == [Outcome.MISS, Outcome.HIT, Outcome.HIT]
    assert tier.used_bytes == bytes_on_disk(folder) == 2 * CHUNK_BYTES


def test_removed_files_are_overwritten(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1))
    inode = path_of(folder, make_ref(1)).stat().st_ino
    tier.remove([make_ref(1), make_ref(5)])
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    put(tier, make_ref(2))
    assert path_of(folder, make_ref(2)).stat().st_ino == inode
    assert get(tier, make_ref(2)) is Outcome.HIT


def test_a_spare_file_of_another_size_is_put_right(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1))
    for damage in (extend, cut):
        tier.remove([make_ref(1)])
        (spare,) = (folder / ".free").iterdir()
        damage(spare)
        put(tier, make_ref(1))
        assert get(tier, make_ref(1)) is Outcome.HIT
        assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES


def test_spare_files_are_bounded_and_give_way(open_tier: Open, folder: Path) -> None:
    tier = open_tier(capacity_bytes=80 * CHUNK_BYTES)
    refs = [make_ref(number) for number in range(80)]
    put(tier, *refs)
    tier.remove(refs)
    assert len(list((folder / ".free").iterdir())) == _folder.SPARE_FILES
    assert tier.used_bytes == bytes_on_disk(folder)
    tails = [make_ref(number, 1) for number in range(500)]  # of another size: no spare file fits
    assert set(put(tier, *tails)) == {Outcome.STORED}
    assert tier.used_bytes == bytes_on_disk(folder) <= tier.capacity_bytes


def test_foreign_chunks_are_counted_and_give_way_oldest_first(open_tier: Open, folder: Path) -> None:
    tier = open_tier(OTHER, capacity_bytes=3 * CHUNK_BYTES)
    put(tier, *(make_ref(number) for number in range(3)))
    for number in range(3):
        os.utime(path_of(folder, make_ref(number), OTHER), (number, number))
    tier = open_tier(capacity_bytes=3 * CHUNK_BYTES)
    assert tier.scan() == []
    assert tier.used_bytes == bytes_on_disk(folder) == 3 * CHUNK_BYTES
    assert put(tier, make_ref(9)) == [Outcome.STORED]
    assert not path_of(folder, make_ref(0), OTHER).exists()
    tier = open_tier(OTHER, capacity_bytes=3 * CHUNK_BYTES)
    assert [ref for ref, _ in tier.scan()] == [make_ref(1), make_ref(2)]
    assert get(tier, make_ref(1)) is Outcome.HIT


def test_no_space_on_the_device_is_full(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    real_write = os.pwritev

    def half(fd: int, views: Sequence[memoryview], at: int) -> int:
        if at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, [views[0]], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half)
        assert put(tier, make_ref(1), make_ref(2)) == [Outcome.FULL, Outcome.FULL]
    assert tier.used_bytes == bytes_on_disk(folder) == 0
    assert len(caplog.records) == 1  # one line for a cause, not one for a chunk
    assert make_ref(1).prefix_key.hex() not in caplog.text
    assert put(tier, make_ref(1)) == [Outcome.STORED]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_refused_writes_fail_one_chunk(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tier = open_tier()

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert put(tier, make_ref(1)) == [Outcome.FAILED]
    assert tier.counters.failed == 1
    assert tier.used_bytes == bytes_on_disk(folder) == 0
    assert not tier.contains([make_ref(1)])[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own that has room for about four chunks beside a file that can be deleted."""
    mountpoint = tmp_path / "small"
    mountpoint.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mountpoint)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small filesystem is not permitted here")
    yield mountpoint
    subprocess.run(["umount", str(mountpoint)], check=True)


def test_really_full_filesystem(small_disk: Path) -> None:
    tier = DiskTier(small_disk / "cache", MINE, EVEN, 8 * CHUNK_BYTES)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (1 << 20) + b"x" * (400 << 10))
    outcomes = put(tier, *(make_ref(number) for number in range(8)))
    assert Outcome.STORED in outcomes
    assert Outcome.FULL in outcomes
    assert set(outcomes) == {Outcome.STORED, Outcome.FULL}
    assert tier.used_bytes == bytes_on_disk(small_disk / "cache") == outcomes.count(Outcome.STORED) * CHUNK_BYTES
    stored = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.STORED]
    assert all(get(tier, make_ref(number)) is Outcome.HIT for number in stored)
    tier.close()
    with pytest.raises(ConfigError, match="GiB"):
        DiskTier(small_disk / "cache", MINE, EVEN, 8 * CHUNK_BYTES)
    ballast.unlink()
    tier = DiskTier(small_disk / "cache", MINE, EVEN, 8 * CHUNK_BYTES)
    assert len(tier.scan()) == len(stored)
    tier.close()


def test_tmpfs() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = DiskTier(Path(folder), MINE, ODD, 1 << 20)
        assert put(tier, make_ref(1, 3), layout=ODD) == [Outcome.STORED]
        assert get(tier, make_ref(1, 3), ODD) is Outcome.HIT
        tier.close()


def test_filesystem_without_direct_io(open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    tier = open_tier()
    assert put(tier, make_ref(1)) == [Outcome.STORED]
    assert get(tier, make_ref(1)) is Outcome.HIT
    tier.close()
    with pytest.raises(ConfigError, match="direct I/O"):
        DiskTier(folder, MINE, EVEN, CAPACITY_BYTES, direct=True)
    DiskTier(folder, MINE, EVEN, CAPACITY_BYTES, direct=False).close()  # the lock was given back


# Any order of calls

REFS = st.builds(make_ref, st.integers(0, 5), st.sampled_from([1, 3, 8]))
CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "remove", "clear", "restart", "damage", "lose"]), REFS), max_size=40
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=CALLS)
def test_behaves_like_a_dictionary_and_counts_exactly(calls: list[tuple[str, ChunkRef]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tier = DiskTier(folder, MINE, EVEN, 4 * CHUNK_BYTES)
        held: set[ChunkRef] = set()
        for call, ref in calls:
            if call == "put":
                (outcome,) = put(tier, ref)
                others = sum(tier.stored_bytes(other.num_blocks) for other in held - {ref})
                fits = others + tier.stored_bytes(ref.num_blocks) <= tier.capacity_bytes
                assert outcome is (Outcome.STORED if fits else Outcome.FULL)
                held = held | {ref} if fits else held - {ref}
            elif call == "get":
                assert get(tier, ref) is (Outcome.HIT if ref in held else Outcome.MISS)
            elif call == "remove":
                tier.remove([ref])
                held.discard(ref)
            elif call == "clear":
                tier.clear()
                held.clear()
            elif call == "restart":
                tier.close()
                tier = DiskTier(folder, MINE, EVEN, 4 * CHUNK_BYTES)
                assert {listed for listed, _ in tier.scan()} == held
            elif call == "damage" and ref in held:
                flip_payload(path_of(folder, ref)) if ref.num_blocks > 1 else flip_header(path_of(folder, ref))
                assert get(tier, ref) is Outcome.CORRUPT
                held.discard(ref)
            elif call == "lose" and ref in held:
                path_of(folder, ref).unlink()
                assert get(tier, ref) is Outcome.MISS
                held.discard(ref)
            assert tier.used_bytes == bytes_on_disk(folder) <= tier.capacity_bytes
            assert {listed for listed, _ in tier.scan()} == held
        tier.close()


def test_many_threads(open_tier: Open, folder: Path) -> None:
    tier = open_tier(capacity_bytes=6 * CHUNK_BYTES)
    wrong: list[Outcome] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(150):
            ref = make_ref(dice.randrange(8), dice.choice([1, 8]))
            action = dice.randrange(10)
            if action < 4:
                outcome = put(tier, ref)[0]
                wrong.extend([outcome] if outcome not in {Outcome.STORED, Outcome.FULL, Outcome.FAILED} else [])
            elif action < 8:
                outcome = get(tier, ref)
                wrong.extend([outcome] if outcome not in {Outcome.HIT, Outcome.MISS} else [])
            elif action == 8:
                tier.remove([ref])
            elif dice.randrange(10) == 0:
                tier.clear()
            if tier.used_bytes > tier.capacity_bytes:
                wrong.append(Outcome.FULL)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.used_bytes == bytes_on_disk(folder)
    assert all(get(tier, ref) is Outcome.HIT for ref, _ in tier.scan())


# clear


def test_clear_gives_everything_back(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2))
    tier.clear()
    assert tier.used_bytes == bytes_on_disk(folder) == 0
    assert get(tier, make_ref(1)) is Outcome.MISS
    assert put(tier, make_ref(1)) == [Outcome.STORED]
    assert get(tier, make_ref(1)) is Outcome.HIT
    assert [ref for ref, _ in open_tier().scan()] == [make_ref(1)]


def test_clear_leaves_other_namespaces(open_tier: Open) -> None:
    put(open_tier(OTHER), make_ref(1))
    open_tier().clear()
    assert get(open_tier(OTHER), make_ref(1)) is Outcome.HIT


def test_put_under_way_does_not_survive_clear(open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    put(tier, make_ref(3))
    real_write = os.pwritev

    def write_then_clear(fd: int, views: Sequence[memoryview], at: int) -> int:
        monkeypatch.setattr(os, "pwritev", real_write)
        written = real_write(fd, views, at)
        tier.clear()
        return written

    monkeypatch.setattr(os, "pwritev", write_then_clear)
    assert put(tier, make_ref(1), make_ref(2)) == [Outcome.FAILED, Outcome.FAILED]
    assert tier.contains([make_ref(1), make_ref(2), make_ref(3)]) == [False] * 3
    assert tier.used_bytes == bytes_on_disk(folder) == 0
    assert open_tier().scan() == []


# The folder


def test_folder_deleted_while_running(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2), make_ref(3))
    tier.remove([make_ref(3)])
    shutil.rmtree(folder)
    assert get(tier, make_ref(1)) is Outcome.MISS
    assert put(tier, make_ref(4)) == [Outcome.STORED]
    assert get(tier, make_ref(4)) is Outcome.HIT
    assert get(tier, make_ref(2)) is Outcome.MISS
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    with pytest.raises(FolderOwnedError):  # the lock came back with the folder
        DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)
    shutil.rmtree(folder)
    tier.remove([make_ref(4)])
    tier.clear()
    assert tier.used_bytes == 0


@pytest.mark.parametrize("part", [".free", MINE.id.hex()])
def test_part_of_the_folder_deleted_while_running(open_tier: Open, folder: Path, part: str) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2))
    tier.remove([make_ref(2)])
    shutil.rmtree(folder / part)
    assert put(tier, make_ref(3)) == [Outcome.STORED]
    assert get(tier, make_ref(3)) is Outcome.HIT
    get(tier, make_ref(1))
    assert tier.used_bytes == bytes_on_disk(folder)


def test_folder_that_cannot_come_back(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1))
    shutil.rmtree(folder)
    folder.write_text("a file now")
    assert get(tier, make_ref(1)) is Outcome.MISS
    assert put(tier, make_ref(2)) == [Outcome.FAILED]
    folder.unlink()
    assert put(tier, make_ref(2)) == [Outcome.STORED]


def test_folder_taken_over_while_it_was_gone(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1))
    shutil.rmtree(folder)
    thief = DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)
    put(thief, make_ref(1))
    shutil.rmtree(folder / ".free")
    with pytest.raises(TierError):
        put(tier, make_ref(2))
    assert get(tier, make_ref(1)) is Outcome.MISS
    assert get(thief, make_ref(1)) is Outcome.HIT
    thief.close()


def test_unusable_folders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for folder in (file, file / "below", Path("/proc/kvstore-cannot-be-here")):
        with pytest.raises(ConfigError, match=str(folder)):
            DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)
    (tmp_path / MINE.id.hex()).write_text("x")
    with pytest.raises(ConfigError, match="File exists"):
        DiskTier(tmp_path, MINE, EVEN, CAPACITY_BYTES)


def test_unusable_capacities(folder: Path) -> None:
    for capacity_bytes in (-1, 0, CHUNK_BYTES - 1):
        with pytest.raises(ConfigError, match="single chunk"):
            DiskTier(folder, MINE, EVEN, capacity_bytes)
    assert not folder.exists()
    with pytest.raises(ConfigError, match=r"1048576\.000 GiB .* GiB"):
        DiskTier(folder, MINE, EVEN, 1 << 50)
    DiskTier(folder, MINE, EVEN, CHUNK_BYTES).close()


def test_filesystem_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="No locks available"):
        DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)


HOLD = """
import sys
from pathlib import Path
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.tiers.disk import DiskTier
layout = KVLayout(page_bytes=(4096,) * 4, planes=1, block_tokens=32, chunk_tokens=256)
tier = DiskTier(Path(sys.argv[1]), Namespace({"model": "mine"}), layout, 1 << 22)
print("ready", flush=True)
sys.stdin.read()
"""


def test_one_owner(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        with pytest.raises(FolderOwnedError, match=f"{folder} .* {owner.pid}: name another folder, or stop"):
            DiskTier(folder, OTHER, EVEN, CAPACITY_BYTES)
        owner.kill()
    DiskTier(folder, OTHER, EVEN, CAPACITY_BYTES).close()


def test_children_do_not_keep_the_folder(folder: Path) -> None:
    tier = DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as executed:
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        tier.close()
        try:
            deadline_s = time.monotonic() + 30
            while True:  # the forked child needs a moment to run its handler
                try:
                    DiskTier(folder, MINE, EVEN, CAPACITY_BYTES).close()
                    break
                except FolderOwnedError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.01)
        finally:
            os.kill(forked, signal.SIGKILL)
            os.waitpid(forked, 0)
            executed.kill()


# Killed while storing

STORE = """
import mmap, random, sys
from pathlib import Path
import numpy as np
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.tiers.base import ChunkRef, Transfer
from kvstore.tiers.disk import DiskTier
layout = KVLayout(page_bytes=(4096,) * 4, planes=1, block_tokens=32, chunk_tokens=256)
tier = DiskTier(Path(sys.argv[1]), Namespace({"model": "mine"}), layout, int(sys.argv[2]))
tier.scan()
slot = np.frombuffer(mmap.mmap(-1, layout.slot_bytes), np.uint8)
dice = random.Random(int(sys.argv[3]))
print("ready", flush=True)
while True:
    ref = ChunkRef(dice.randrange(40).to_bytes(2, "little") * 8, dice.choice([3, 8, 8]))
    size = layout.payload_bytes(ref.num_blocks)
    seed = int.from_bytes(ref.prefix_key, "little") + ref.num_blocks
    slot[:size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    tier.put([Transfer(ref, slot)])
    if dice.randrange(2):
        tier.remove([ChunkRef(dice.randrange(40).to_bytes(2, "little") * 8, dice.choice([3, 8]))])
    if dice.randrange(200) == 0:
        tier.clear()
"""


def test_killed_while_storing(folder: Path) -> None:
    dice = random.Random(0)
    found = 0
    for round_ in range(6):
        arguments = [sys.executable, "-c", STORE, str(folder), str(CAPACITY_BYTES), str(round_)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
            time.sleep(dice.uniform(0.01, 0.3))
            engine.kill()
        tier = DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)
        listed = tier.scan()
        found += len(listed)
        assert tier.used_bytes == bytes_on_disk(folder) == sum(size for _, size in listed)
        assert all(get(tier, ref) is Outcome.HIT for ref, _ in listed)
        tier.close()
    assert found


# close


def test_close(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2))
    tier.remove([make_ref(2)])
    tier.close()
    tier.close()
    calls: list[Callable[[], object]] = [
        tier.scan,
        tier.clear,
        lambda: tier.contains([]),
        lambda: tier.remove([]),
        lambda: tier.get([]),
        lambda: tier.put([]),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert bytes_on_disk(folder) == CHUNK_BYTES  # no spare files stay behind
    assert get(open_tier(), make_ref(1)) is Outcome.HIT


def test_close_waits_for_calls_under_way(open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier()
    real_write = os.pwritev
    writing, closing = threading.Event(), threading.Event()

    def write_slowly(fd: int, views: Sequence[memoryview], at: int) -> int:
        writing.set()
        assert closing.wait(30)
        with pytest.raises(FolderOwnedError):
            _folder.FolderLock(folder)
        return real_write(fd, views, at)

    monkeypatch.setattr(os, "pwritev", write_slowly)
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(put(tier, make_ref(1))))
    writer.start()
    assert writing.wait(30)
    closer = threading.Thread(target=tier.close)
    closer.start()
    while True:
        try:
            tier.contains([])
        except ClosedError:
            break
    closing.set()
    writer.join()
    closer.join()
    assert outcomes == [Outcome.STORED]
    assert get(open_tier(), make_ref(1)) is Outcome.HIT
