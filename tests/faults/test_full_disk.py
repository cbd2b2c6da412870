"""Tests of a filesystem smaller than the tier's bound: puts are answered with FULL, and work again with new space."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.diskwork import CHUNK_BYTES, EVEN, MINE, bytes_on_disk, get, make_ref, put

from kvstore.model.chunks import Outcome
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.tier import DiskTier

DISK_BYTES = 24 << 20
CAPACITY_BYTES = 4 * DISK_BYTES  # too much, as when others fill the filesystem after the start

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a filesystem")


def run(*command: str | Path) -> None:
    """Run a command as root; skip the test if it is missing or not allowed, such as in a container."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"there is no {command[0]} here")
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"{command[0]} is not allowed here: {result.stderr.strip()}")


@contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """Yield a small real filesystem of the kind "ext4" or "tmpfs"."""
    point = folder / "mounted"
    point.mkdir()
    if kind == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "kvstore-test", point)
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-F", image)
        run("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as point:
        yield point


@pytest.fixture
def tier(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    monkeypatch.setattr(survey, "check_room", lambda *_: None)  # the disk had the room when the engine started
    tier = DiskTier(disk / "cache", MINE, EVEN, CAPACITY_BYTES)
    tier.scan()
    yield tier
    tier.close()


def fill(tier: DiskTier) -> list[int]:
    """Store until the disk is full; return the numbers of the chunks stored."""
    for number in range(CAPACITY_BYTES // CHUNK_BYTES):
        if put(tier, make_ref(number)) != [Outcome.STORED]:
            return list(range(number))
    raise AssertionError("the disk never became full")


def test_recovers_when_space_returns(tier: DiskTier, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = fill(tier)
    assert len(stored) > 50
    last = make_ref(len(stored) + 1)
    for _ in range(5):
        assert put(tier, last) == [Outcome.FULL]
        assert tier.used_bytes == bytes_on_disk(disk / "cache") == len(stored) * CHUNK_BYTES
    assert len([record for record in caplog.records if "No space" in record.message]) == 1
    assert all(get(tier, make_ref(number)) is Outcome.HIT for number in stored)
    tier.remove([make_ref(0), make_ref(1)])
    assert put(tier, last) == [Outcome.STORED]
    assert get(tier, last) is Outcome.HIT
    assert tier.used_bytes == bytes_on_disk(disk / "cache")


def test_others_fill_the_disk(tier: DiskTier, disk: Path) -> None:
    put(tier, make_ref(1))
    hog = disk / "hog"
    with hog.open("wb", buffering=0) as file, suppress(OSError):  # until there is no space left
        while True:
            file.write(b"x" * 4096)
    assert put(tier, make_ref(2)) == [Outcome.FULL]
    assert put(tier, make_ref(1)) == [Outcome.FULL]
    assert get(tier, make_ref(1)) is Outcome.HIT
    hog.unlink()
    assert put(tier, make_ref(2)) == [Outcome.STORED]
    assert get(tier, make_ref(2)) is Outcome.HIT
    assert tier.used_bytes == bytes_on_disk(disk / "cache") == 2 * CHUNK_BYTES


def test_restart_on_a_full_disk(tier: DiskTier, disk: Path) -> None:
    stored = fill(tier)
    tier.close()
    again = DiskTier(disk / "cache", MINE, EVEN, CAPACITY_BYTES)
    try:
        assert len(again.scan()) == len(stored)
        assert all(get(again, make_ref(number)) is Outcome.HIT for number in stored)
        again.clear()
        assert again.used_bytes == bytes_on_disk(disk / "cache") == 0
        assert put(again, make_ref(1)) == [Outcome.STORED]
    finally:
        again.close()
