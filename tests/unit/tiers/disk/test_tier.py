"""The disk tier stores, finds again after a restart, keeps within its bound, and forgets when told to."""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.diskwork import (
    CHUNK_BYTES,
    EVEN,
    MINE,
    OTHER,
    bytes_on_disk,
    cut,
    extend,
    get,
    make_ref,
    make_slot,
    make_transfer,
    path_of,
    put,
)

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ConfigError, InvalidCallError, TierError
from kvstore.format.chunkfile import Damage
from kvstore.layout import KVLayout
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk import space, survey
from kvstore.tiers.disk.chunkio import Body, ChunkIO
from kvstore.tiers.disk.tier import DiskTier

ODD = KVLayout(page_bytes=(1000, 36, 1000), planes=2, block_tokens=16, chunk_tokens=64)
CAPACITY_BYTES = 16 * CHUNK_BYTES

Open = Callable[..., DiskTier]


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


def test_spare_files_can_be_given_up(open_tier: Open, folder: Path) -> None:
    """For others that share the disk; the chunks stay."""
    tier = open_tier()
    put(tier, make_ref(1, 8), make_ref(2, 8))
    tier.remove([make_ref(1, 8)])
    assert tier.used_bytes == 2 * CHUNK_BYTES
    assert tier.spare_bytes == CHUNK_BYTES
    tier.drop_spares(1)
    assert tier.spare_bytes == 0
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    assert get(tier, make_ref(2, 8)) is Outcome.HIT


def test_a_bound_larger_than_the_filesystem(folder: Path) -> None:
    """Is refused, unless somebody else sees to it."""
    with pytest.raises(ConfigError, match="does not fit"):
        DiskTier(folder, MINE, EVEN, 1 << 60)
    DiskTier(folder, MINE, EVEN, 1 << 60, checks_room=False).close()


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


# Restart


def test_restart_finds_everything_in_order_of_use(open_tier: Open, folder: Path) -> None:
    tier = open_tier()
    refs = [make_ref(number) for number in range(4)]
    put(tier, *refs, make_ref(9, 3))
    for age, ref in enumerate(refs):
        os.utime(path_of(folder, ref), (1000 - 100 * age,) * 2)
    assert get(tier, refs[3]) is Outcome.HIT  # the oldest becomes the newest
    tier = open_tier()
    listed = tier.scan()
    assert [ref for ref, _ in listed][:3] == [refs[2], refs[1], refs[0]]
    assert {ref for ref, _ in listed} == {*refs, make_ref(9, 3)}
    assert all(size == tier.stored_bytes(ref.num_blocks) for ref, size in listed)
    assert all(get(tier, ref) is Outcome.HIT for ref, _ in listed)
    assert tier.used_bytes == bytes_on_disk(folder) == sum(size for _, size in listed)


def test_restart_evicts_the_tail_of_a_prompt_before_its_head(open_tier: Open, folder: Path) -> None:
    """Chunks of a prompt are touched from head to tail; prompts by turns, with a pause between them."""
    put(open_tier(), *(make_ref(number) for number in range(9)))
    for number in range(9):
        used_s = 1000 * (number // 3) + 0.1 * (number % 3)
        os.utime(path_of(folder, make_ref(number)), (used_s, used_s))
    assert [ref for ref, _ in open_tier().scan()] == [make_ref(number) for number in (2, 1, 0, 5, 4, 3, 8, 7, 6)]


def test_a_chunk_counts_as_used_when_its_read_began(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and tail of a prompt are read at once; the tail is there first, and still goes first."""
    tier = open_tier()
    head, tail = make_ref(1), make_ref(2)
    put(tier, tail, head)
    began, go_on = threading.Event(), threading.Event()
    original = ChunkIO.read

    def read(self: ChunkIO, path: Path, body: Body, used_ns: int) -> Damage | None:
        if body.ref == head:
            began.set()
            assert go_on.wait(30)
        return original(self, path, body, used_ns)

    monkeypatch.setattr(ChunkIO, "read", read)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(get, tier, head)
        assert began.wait(30)
        assert get(tier, tail) is Outcome.HIT
        go_on.set()
        assert reading.result() is Outcome.HIT
    assert [ref for ref, _ in tier.scan()] == [tail, head]
    assert [ref for ref, _ in open_tier().scan()] == [tail, head]


def test_order_of_use_without_pauses() -> None:
    """Under steady load a session lasts ten seconds, so that what is old still goes first."""
    second_ns = 10**9
    found = [survey.Use(number * second_ns // 2, make_ref(number), CHUNK_BYTES) for number in range(120)]
    ordered = [use.ref for use in survey.in_order_of_use(found)]
    assert ordered[0] == make_ref(20)
    assert all(abs(place - int.from_bytes(ref.prefix_key[:2], "little")) <= 20 for place, ref in enumerate(ordered))


def test_what_lies_in_the_future_was_used_just_now() -> None:
    hour_ns = 3600 * 10**9
    found = [survey.Use(time.time_ns() + hour_ns * hours, make_ref(hours), CHUNK_BYTES) for hours in (1, 2)]
    assert [use.ref for use in survey.in_order_of_use(found)] == [make_ref(2), make_ref(1)], "in one session"


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
        os.utime(path_of(folder, make_ref(number)), (100 * number,) * 2)
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
    assert len(list((folder / ".free").iterdir())) == 80  # nothing is deleted on the thread that removes
    for number in range(100, 103):
        put(tier, make_ref(number))
        tier.remove([make_ref(number)])
    put(tier, make_ref(103))
    assert len(list((folder / ".free").iterdir())) <= space.SPARE_FILES
    assert tier.used_bytes == bytes_on_disk(folder)
    tails = [make_ref(number, 1) for number in range(500)]  # of another size: no spare file fits
    assert set(put(tier, *tails)) == {Outcome.STORED}
    assert tier.used_bytes == bytes_on_disk(folder) <= tier.capacity_bytes


def test_foreign_chunks_are_counted_and_give_way_oldest_first(open_tier: Open, folder: Path) -> None:
    tier = open_tier(OTHER, capacity_bytes=3 * CHUNK_BYTES)
    put(tier, *(make_ref(number) for number in range(3)))
    for number in range(3):
        os.utime(path_of(folder, make_ref(number), OTHER), (100 * number,) * 2)
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


def test_a_reset_that_the_folder_refuses(open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before is out of reach at once, and nothing is stored before it is gone."""
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2))
    rename, refuses = Path.rename, True

    def rename_unless_home(self: Path, target: Path) -> Path:
        if refuses and self == folder / MINE.id.hex():
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_unless_home)
    with pytest.raises(TierError, match="Input/output error"):
        tier.reset(MINE.at_epoch("1"))
    assert get(tier, make_ref(1)) is Outcome.MISS
    with pytest.raises(TierError, match="Input/output error"):
        put(tier, make_ref(3))
    assert tier.used_bytes == bytes_on_disk(folder) == 2 * CHUNK_BYTES
    refuses = False
    assert put(tier, make_ref(3)) == [Outcome.STORED]
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    assert open_tier().scan() == []


def test_past_epochs_are_swept(open_tier: Open, folder: Path) -> None:
    """Nobody enters one again, unlike other namespaces."""
    put(open_tier(OTHER), make_ref(1))
    tier = open_tier()
    tier.reset(MINE.at_epoch("1"))
    put(tier, make_ref(2))
    assert tier.used_bytes == bytes_on_disk(folder) == 2 * CHUNK_BYTES
    tier = open_tier()
    assert tier.scan() == []
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
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


class Immovable:
    """Makes the files of chunks refuse to be renamed, until it is told not to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = True
        rename = Path.rename

        def refuse(path: Path, target: Path) -> Path:
            if self.refuses and path.suffix == ".safetensors" and path.exists():
                raise OSError(errno.EIO, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", refuse)


def test_a_chunk_that_would_not_move_is_replaced(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file takes the old one's place, and its bytes."""
    tier = open_tier()
    put(tier, make_ref(1))
    immovable = Immovable(monkeypatch)
    tier.remove([make_ref(1)])
    assert tier.contains([make_ref(1)]) == [False]
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    assert put(tier, make_ref(1)) == put(tier, make_ref(1)) == [Outcome.STORED]
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
    immovable.refuses = False
    assert put(tier, make_ref(2)) == [Outcome.STORED]
    assert get(tier, make_ref(1)) is Outcome.HIT, "it is no leftover of its own"


def test_chunks_that_would_not_move_give_way_when_they_do(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(capacity_bytes=3 * CHUNK_BYTES)
    put(tier, make_ref(1), make_ref(2))
    immovable = Immovable(monkeypatch)
    tier.remove([make_ref(1), make_ref(2)])
    assert put(tier, make_ref(3), make_ref(4)) == [Outcome.STORED, Outcome.FULL]
    immovable.refuses = False
    assert put(tier, make_ref(4), make_ref(5)) == [Outcome.STORED] * 2
    assert tier.used_bytes == bytes_on_disk(folder) == 3 * CHUNK_BYTES
    path_of(folder, make_ref(5)).unlink()


@pytest.mark.parametrize("by", ["clear", "reset", "a deletion by hand"])
def test_chunks_that_would_not_move_go_with_the_rest(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    tier = open_tier()
    put(tier, make_ref(1), make_ref(2))
    Immovable(monkeypatch)
    tier.remove([make_ref(1)])
    if by == "clear":
        tier.clear()
    elif by == "reset":
        tier.reset(MINE.at_epoch("1"))
    else:
        path_of(folder, make_ref(1)).unlink()
        path_of(folder, make_ref(2)).unlink()
        assert get(tier, make_ref(2)) is Outcome.MISS
    assert put(tier, make_ref(3)) == [Outcome.STORED]
    assert tier.used_bytes == bytes_on_disk(folder) == CHUNK_BYTES
