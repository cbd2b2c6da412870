"""The disk of the cache server: a namespace whose files hang does not block reads of others."""

from __future__ import annotations

import errno
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from support.diskwork import CHUNK_BYTES, EVEN, make_ref, make_slot, make_transfer
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate
from support.key_files import write_keys
from support.redis_server import wait_for

from kvstore.format import chunkfile
from kvstore.format.sealing.keyring import KeyRing
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.server.disk import Disk
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.spaces import Chunk, Space
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.chunks import Chunks
from kvstore.tiers.disk.tier import DiskTier

A_WHILE_S = 0.5
FULL, READ, WRITTEN = (Space(Namespace({"model": name}), EVEN) for name in ("full", "read", "written"))


class Desk:
    """Calls of a disk, and the deciding thread, which is this one."""

    def __init__(
        self, folder: Path, capacity_bytes: int, timeout_s: float = HANG_GUARD_S, keys: KeyRing | None = None
    ) -> None:
        self._reports: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        options = DiskOptions(folder, capacity_bytes, timeout_s=timeout_s, keys=keys)
        self.disk = Disk(options, self._reports.put)
        with ExitStack() as opened:
            opened.callback(self.disk.close, HANG_GUARD_S)
            self.disk.open_all()
            opened.pop_all()

    def write(self, space: Space, number: int) -> list[int | None]:
        """Begin to write a chunk; the list has its size, or None, once ``wait`` has seen the end."""
        ended: list[int | None] = []
        chunk = Chunk(space, make_ref(number))
        self.disk.write(chunk, [payload_of(number)], ended.append)
        return ended

    def read(self, space: Space, number: int) -> list[Outcome]:
        """Begin to read a chunk; the list has its outcome once ``wait`` has seen the end."""
        ended: list[Outcome] = []
        self.disk.read(Chunk(space, make_ref(number)), [make_slot()], ended.append, lambda: None)
        return ended

    def remove(self, space: Space, *numbers: int) -> None:
        """Remove chunks, and wait until their files are spares."""
        self.disk.remove([(space, make_ref(number)) for number in numbers])
        wait_for("removals", lambda: not self.disk.is_busy)

    def wait(self, ended: list[Any]) -> Any:
        """Wait until an operation reports its result, and return it."""
        while not ended:
            self._reports.get(timeout=HANG_GUARD_S)()
        return ended[0]

    def wait_a_while(self, ended: list[Any]) -> None:
        """Give an operation time to end, if it can."""
        with suppress(queue.Empty):
            while not ended:
                self._reports.get(timeout=A_WHILE_S)()


def payload_of(number: int) -> ByteArray:
    return np.ascontiguousarray(make_transfer(make_ref(number)).buffer)


@pytest.fixture
def open_desk(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    opened: list[Desk] = []

    def open_(capacity_bytes: int, **options: Any) -> Desk:
        opened.append(Desk(tmp_path / "disk", capacity_bytes, **options))
        return opened[-1]

    yield open_
    for desk in opened:
        desk.disk.close(HANG_GUARD_S)


def test_spares_of_one_make_room_for_another(open_desk: Callable[..., Desk], tmp_path: Path) -> None:
    """Only as many are deleted as are needed."""
    desk = open_desk(4 * CHUNK_BYTES)
    for number in range(4):
        assert desk.wait(desk.write(FULL, number)) == CHUNK_BYTES
    desk.remove(FULL, 0, 1, 2)
    assert desk.wait(desk.write(WRITTEN, 9)) == CHUNK_BYTES
    assert len(list((tmp_path / "disk" / FULL.id.hex() / _folder.FREE_NAME).iterdir())) == 2
    assert desk.disk.used_bytes == 4 * CHUNK_BYTES
    assert desk.wait(desk.read(FULL, 3)) is Outcome.HIT


def test_chunks_can_be_encrypted(open_desk: Callable[..., Desk], tmp_path: Path) -> None:
    """The bound counts what they take in addition."""
    keys = KeyRing(write_keys(tmp_path / "keys", "one"))
    desk = open_desk(4 * CHUNK_BYTES, keys=keys)
    size_bytes = desk.wait(desk.write(FULL, 0))
    assert size_bytes == desk.disk.size_of(FULL, make_ref(0)) == desk.disk.used_bytes > CHUNK_BYTES
    (file,) = (tmp_path / "disk").rglob("*-*.safetensors")
    assert chunkfile.seal_of(file.read_bytes()[:4096]).startswith("one ")
    assert desk.wait(desk.read(FULL, 0)) is Outcome.HIT


def test_a_spare_that_cannot_be_deleted_holds_up_nobody_else(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a writing thread hangs. Other namespaces are read, and so is a new one."""
    desk = open_desk(4 * CHUNK_BYTES)
    for space, number in ((FULL, 0), (FULL, 1), (READ, 2), (READ, 3)):
        assert desk.wait(desk.write(space, number)) == CHUNK_BYTES
    desk.remove(FULL, 0, 1)
    gate = Gate()
    real = _folder.delete

    def hang(path: Path) -> None:
        if FULL.id.hex() in str(path):
            gate()
        real(path)

    monkeypatch.setattr("kvstore.tiers.disk.space.delete", hang)
    try:
        late = desk.write(WRITTEN, 4)
        assert gate.reached.wait(HANG_GUARD_S)
        assert desk.wait(desk.read(READ, 2)) is Outcome.HIT
        assert desk.wait(desk.read(WRITTEN, 77)) is Outcome.MISS
        assert not late
    finally:
        gate.open()
    assert desk.wait(late) == CHUNK_BYTES


def test_a_hanging_spare_ends_with_its_deadline(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write that needed its bytes is not stored, and the thread continues with the next."""
    desk = open_desk(2 * CHUNK_BYTES, timeout_s=0.2)
    for number in range(2):
        assert desk.wait(desk.write(FULL, number)) == CHUNK_BYTES
    desk.remove(FULL, 0)
    gate = Gate()
    monkeypatch.setattr("kvstore.tiers.disk.space.delete", lambda _path: gate())
    try:
        assert desk.wait(desk.write(WRITTEN, 4)) is None
        assert desk.wait(desk.read(FULL, 1)) is Outcome.HIT
    finally:
        gate.open()


@pytest.mark.parametrize("refused", ["kvstore-read-disk", "kvstore-write-disk"])
def test_where_no_further_thread_can_be_started_the_others_serve(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, gate: Gate, refused: str
) -> None:
    """Each read and write ends, or its pages would stay in use, and later work on its file would wait for ever."""
    desk = open_desk(4 * CHUNK_BYTES)
    assert desk.wait(desk.write(READ, 0)) == CHUNK_BYTES
    refuse_threads(monkeypatch, refused)
    for name in ("_get", "_put"):
        monkeypatch.setattr(desk.disk, name, gate.before(getattr(desk.disk, name)))
    reads = [desk.read(READ, 0) for _ in range(3)]
    writes = [desk.write(space, 1) for space in (FULL, WRITTEN)]
    gate.open()
    assert [desk.wait(read) for read in reads] == [Outcome.HIT] * 3
    assert [desk.wait(write) for write in writes] == [CHUNK_BYTES] * 2
    assert desk.wait(desk.write(FULL, 1)) == CHUNK_BYTES


def test_a_folder_that_cannot_be_made_holds_up_nobody_else(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk(8 * CHUNK_BYTES)
    assert desk.wait(desk.write(READ, 1)) == CHUNK_BYTES
    gate = Gate()
    real = Chunks.make_home

    def hang(chunks: Chunks) -> None:
        if chunks.namespace == WRITTEN.namespace:
            gate()
        real(chunks)

    monkeypatch.setattr(Chunks, "make_home", hang)
    try:
        new = desk.write(WRITTEN, 2)
        assert gate.reached.wait(HANG_GUARD_S)
        assert desk.wait(desk.read(READ, 1)) is Outcome.HIT
        assert desk.wait(desk.write(READ, 3)) == CHUNK_BYTES
    finally:
        gate.open()
    assert desk.wait(new) == CHUNK_BYTES


def test_a_folder_that_is_opened_again_keeps_its_name_whatever_happens(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be killed while it writes its owner's name, or be on an unreadable disk: the next start must keep it."""
    desk = open_desk(4 * CHUNK_BYTES)
    assert desk.wait(desk.write(FULL, 1)) == CHUNK_BYTES
    desk.disk.close(HANG_GUARD_S)
    note = tmp_path / "disk" / FULL.id.hex() / _folder.GEOMETRY_FILE
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: fail(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(TierError, match="Input/output error"):
            open_desk(4 * CHUNK_BYTES)
    note.write_text(note.read_text().replace("{", "{ ", 1))  # as another version would have written it
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: fail(OSError(errno.EIO, "killed here")))
        with pytest.raises(ConfigError, match="Input/output error"):
            open_desk(4 * CHUNK_BYTES)
    again = open_desk(4 * CHUNK_BYTES)
    assert again.wait(again.read(FULL, 1)) is Outcome.HIT


def test_a_folder_is_not_opened_while_it_is_deleted(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late read would lock it again, and nothing could be written there any more."""
    desk = open_desk(4 * CHUNK_BYTES)
    assert desk.wait(desk.write(FULL, 1)) == CHUNK_BYTES
    desk.remove(FULL, 1)
    gate = Gate()
    real = shutil.rmtree

    def delete(home: Path, **options: Any) -> None:
        real(home, **options)
        gate()

    monkeypatch.setattr("kvstore.server.disk_tiers.shutil.rmtree", delete)
    desk.disk.forget(FULL)
    assert gate.reached.wait(HANG_GUARD_S)
    late = desk.read(FULL, 1)
    desk.wait_a_while(late)
    gate.open()
    assert desk.wait(late) is Outcome.MISS
    wait_for("the folder is forgotten", lambda: not desk.disk.is_busy)
    assert desk.wait(desk.write(FULL, 2)) == CHUNK_BYTES
    assert desk.wait(desk.read(FULL, 2)) is Outcome.HIT


def test_a_late_read_makes_no_folder(open_desk: Callable[..., Desk], tmp_path: Path) -> None:
    desk = open_desk(4 * CHUNK_BYTES)
    assert desk.wait(desk.read(FULL, 1)) is Outcome.MISS
    assert not (tmp_path / "disk" / FULL.id.hex()).exists()


def test_a_folder_whose_deletion_hangs_takes_nothing_along_that_came_later(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    desk = open_desk(4 * CHUNK_BYTES)
    assert desk.wait(desk.write(FULL, 1)) == CHUNK_BYTES
    desk.remove(FULL, 1)
    gate = Gate()
    monkeypatch.setattr("kvstore.server.disk_tiers.shutil.rmtree", gate.before(shutil.rmtree))
    monkeypatch.setattr("kvstore.server.disk_tiers._SLOW_TIMEOUT_S", 0.01)
    desk.disk.forget(FULL)
    assert gate.reached.wait(HANG_GUARD_S)
    later = desk.write(FULL, 2)
    desk.wait_a_while(later)
    gate.open()
    assert desk.wait(later) == CHUNK_BYTES
    wait_for("the folder is forgotten", lambda: not desk.disk.is_busy)
    assert desk.wait(desk.read(FULL, 2)) is Outcome.HIT
    assert (tmp_path / "disk" / FULL.id.hex() / _folder.GEOMETRY_FILE).is_file()


def test_a_clear_that_fails_takes_nothing_along_that_is_stored_later(
    open_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks stored before are removed file by file."""
    desk = open_desk(4 * CHUNK_BYTES)
    for number in (1, 2):
        assert desk.wait(desk.write(FULL, number)) == CHUNK_BYTES
    gate = Gate()

    def refuse(_tier: DiskTier) -> NoReturn:
        gate()
        fail(TierError("the folder does not let go"))

    monkeypatch.setattr(DiskTier, "clear", refuse)
    cleared: list[bool] = []
    desk.disk.clear(FULL, cleared.append)
    assert gate.reached.wait(HANG_GUARD_S)
    later = desk.write(FULL, 1)
    gate.open()
    assert desk.wait(cleared) is False
    assert desk.wait(later) == CHUNK_BYTES
    wait_for("removals", lambda: not desk.disk.is_busy)
    assert desk.wait(desk.read(FULL, 1)) is Outcome.HIT
    assert desk.wait(desk.read(FULL, 2)) is Outcome.MISS


def fail(error: Exception) -> NoReturn:
    raise error
