"""Folder on a file system that many hosts share, such as NFS, CephFS, Lustre or an RWX volume: an object is a file.

A file is written under another name and renamed when it is whole, so no host sees a part of it. Nobody owns the folder,
and nothing is locked.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvstore.format.wholeio import FILE_MODE, opened, read_front, read_whole, write_whole
from kvstore.model.errors import ClosedError, TierError
from kvstore.tiers.disk.folder import FOLDER_MODE, NO_ROOM, reason
from kvstore.tiers.object.store import Body, Found, FullError, Listed, Reading, Store

PART_FOLDER: Final = ".part"  # files that are being written; a sweep deletes old ones
_PART_BYTES: Final = 16
_PART: Final = re.compile(rf"{re.escape(PART_FOLDER)}/[0-9a-f]{{{2 * _PART_BYTES}}}")
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class FolderStore(Store):
    """Objects as files of a folder. Thread-safe; a call that hangs is its caller's matter.

    Args:
        root: the folder, which is created if its parent exists.
    """

    def __init__(self, root: Path) -> None:
        self.place = f"file://{root}"
        self._root = root
        self._is_closed = False

    def put(self, name: str, body: Body) -> None:
        """See ``Store``."""
        with self._translated("written"), self._written(body.parts()) as part:
            self._rename(part, name)

    @contextmanager
    def open(
        self, name: str, offset: int = 0, num_bytes: int | None = None, version: str = ""
    ) -> Iterator[Reading | None]:
        """See ``Store``."""
        with self._translated("read"):
            try:
                fd = os.open(self._root / name, _READ_FLAGS | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                fd = -1
        if fd < 0:
            yield None
            return
        try:
            status = os.fstat(fd)
            found = Found(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}")
            is_right = stat.S_ISREG(status.st_mode) and version in ("", found.version)
            yield _FileReading(self, fd, found, offset, num_bytes) if is_right else None
        finally:
            os.close(fd)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """See ``Store``."""
        with self._translated("read"):
            try:
                with opened(self._root / name, _READ_FLAGS) as fd:
                    return read_front(fd, most_bytes)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, data: bytes) -> None:
        """See ``Store``."""
        self.put(name, Body.of(data))

    def create(self, name: str, data: bytes) -> bool:
        """See ``Store``."""
        with self._translated("written"), self._written([memoryview(data)]) as part:
            target = self._root / name
            target.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            try:
                target.hardlink_to(part)
            except FileExistsError:
                return False
            finally:
                part.unlink()
        return True

    def replace(self, name: str, old: bytes, data: bytes) -> bool:
        """See ``Store``. Of several callers one takes the file away, and sees if it is the one that it expects."""
        taken = self._root / PART_FOLDER / secrets.token_hex(_PART_BYTES)
        with self._translated("written"):
            try:
                (self._root / name).rename(taken)
            except FileNotFoundError:
                return False
            is_right = taken.read_bytes() == old
            if not is_right:
                with suppress(FileExistsError):
                    (self._root / name).hardlink_to(taken)
            taken.unlink()
        return is_right and self.create(name, data)

    def delete(self, names: Iterable[str]) -> None:
        """See ``Store``."""
        with self._translated("deleted"):
            for name in names:
                with suppress(FileNotFoundError, NotADirectoryError):
                    (self._root / name).unlink()

    def list(self, prefix: str, start_after: str = "") -> Iterator[Listed]:
        """See ``Store``; in no order."""
        with self._translated("listed"):
            for name, entry in self._walk(prefix):
                if name <= start_after:
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    yield Listed(name, status.st_size, status.st_mtime)

    def close(self) -> None:
        """See ``Store``."""
        self._is_closed = True

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        try:
            entries = os.scandir(self._root / prefix)
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(name + "/")
                elif entry.is_file(follow_symlinks=False):
                    yield name, entry

    @contextmanager
    def _written(self, parts: Sequence[memoryview]) -> Iterator[Path]:
        """Yield a file with a content, under a name that nobody reads; it is deleted if the block fails."""
        folder = self._root / PART_FOLDER
        part = folder / secrets.token_hex(_PART_BYTES)
        try:
            try:
                fd = os.open(part, _WRITE_FLAGS | os.O_CLOEXEC, FILE_MODE)
            except FileNotFoundError:
                self._make(folder)
                fd = os.open(part, _WRITE_FLAGS | os.O_CLOEXEC, FILE_MODE)
            try:
                write_whole(fd, parts, 0)
            finally:
                os.close(fd)  # an NFS client sends what is left here, and reports its errors
            yield part
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _rename(self, part: Path, name: str) -> None:
        target = self._root / name
        try:
            part.rename(target)
        except FileNotFoundError:
            target.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            part.rename(target)

    def _make(self, folder: Path) -> None:
        if not self._root.parent.is_dir():
            raise TierError(f"{self.place} cannot be used: {self._root.parent} is no folder; is it mounted?")
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)

    @contextmanager
    def _translated(self, done: str) -> Iterator[None]:
        """Translate the system's errors."""
        if self._is_closed:
            raise ClosedError("the object tier was closed")
        try:
            yield
        except OSError as error:
            kind = FullError if error.errno in NO_ROOM else TierError
            raise kind(f"{self.place} cannot be {done}: {reason(error)}") from error

    def failed(self, error: OSError) -> TierError:
        """Return the error for a read that failed."""
        return TierError(f"{self.place} cannot be read: {reason(error)}")


class _FileReading(Reading):
    """Open file."""

    def __init__(self, store: FolderStore, fd: int, found: Found, offset: int, num_bytes: int | None) -> None:
        self._store = store
        self._fd = fd
        self._offset = offset
        self._end = found.size_bytes if num_bytes is None else min(found.size_bytes, offset + num_bytes)
        self.found = found

    def fill(self, view: memoryview) -> bool:
        """See ``Reading``."""
        if self._offset + len(view) > self._end:
            return False
        try:
            is_whole = read_whole(self._fd, [view], self._offset)
        except OSError as error:
            raise self._store.failed(error) from error
        self._offset += len(view)
        return is_whole


def is_part(name: str) -> bool:
    """Tell if a name is that of a file that a writer has not renamed yet."""
    return _PART.fullmatch(name) is not None
