"""The folder of the disk tier: its owner, its loss, and its release."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.diskwork import CAPACITY_BYTES, CHUNK_BYTES, EVEN, MINE, OTHER, Open, bytes_on_disk, get, make_ref, put

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError, ConfigError, FolderOwnedError, TierError
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.tier import DiskTier

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
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.tier import DiskTier
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


def test_the_folder_is_not_free_before_the_last_call_has_ended(
    open_tier: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    real_write, gates, writing = os.pwritev, [threading.Event(), threading.Event()], threading.Semaphore(0)
    waiting = list(gates)

    def write_slowly(fd: int, views: Sequence[memoryview], at: int) -> int:
        gate = waiting.pop()
        writing.release()
        assert gate.wait(30)
        return real_write(fd, views, at)

    monkeypatch.setattr(os, "pwritev", write_slowly)
    writers = [threading.Thread(target=put, args=(tier, make_ref(number))) for number in range(2)]
    for writer in writers:
        writer.start()
        assert writing.acquire(timeout=30)
    closer = threading.Thread(target=tier.close)
    closer.start()
    while True:
        try:
            tier.contains([])
        except ClosedError:
            break
    gates[1].set()
    writers[0].join(30)
    assert not writers[0].is_alive()
    with pytest.raises(FolderOwnedError):
        _folder.FolderLock(folder)
    gates[0].set()
    closer.join(30)
    assert not closer.is_alive()
    writers[1].join(30)
    assert len(open_tier().scan()) == 2
