"""The disk tier stores, reads, and removes chunks."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.diskwork import (
    CAPACITY_BYTES,
    CHUNK_BYTES,
    EVEN,
    MINE,
    OTHER,
    Open,
    bytes_on_disk,
    get,
    make_ref,
    make_slot,
    make_transfer,
    path_of,
    put,
)

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError, InvalidCallError, TierError
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.tier import DiskTier

ODD = KVLayout(page_bytes=(1000, 36, 1000), planes=2, block_tokens=16, chunk_tokens=64)


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
    """Chunks stored before are out of reach at once, and nothing is stored until they are gone."""
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
    """An old epoch is never entered again, unlike other namespaces."""
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
    """Makes the files of chunks refuse renames until told otherwise."""

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


def test_a_closed_tier_goes_without_a_garbage_collector(folder: Path) -> None:
    """A cache server opens and closes thousands, and does without full collections."""
    gc.disable()
    try:
        tier = DiskTier(folder, MINE, EVEN, CAPACITY_BYTES)
        put(tier, make_ref(1, 8))
        tier.close()
        gone = weakref.ref(tier)
        del tier
        assert gone() is None
    finally:
        gc.enable()
