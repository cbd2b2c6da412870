"""The disk tier keeps within its bound, and files that it no longer needs make room."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.diskwork import (
    CHUNK_BYTES,
    EVEN,
    MINE,
    OTHER,
    Open,
    bytes_on_disk,
    cut,
    extend,
    get,
    make_ref,
    path_of,
    put,
)

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError
from kvstore.tiers.disk import space
from kvstore.tiers.disk.tier import DiskTier


def test_spare_files_can_be_given_up(open_tier: Open, folder: Path) -> None:
    """They make room for others that share the disk; the chunks stay."""
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
    """It is refused, unless another component checks it."""
    with pytest.raises(ConfigError, match="does not fit"):
        DiskTier(folder, MINE, EVEN, 1 << 60)
    DiskTier(folder, MINE, EVEN, 1 << 60, checks_room=False).close()


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


@pytest.mark.slow
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
