"""What the disk tier needs of a folder: its names, its one owner, its bytes, direct and whole reads and writes.

Names inside the folder::

    .lock                                             locked by the owner, holds its process id
    .free/<n>                                         spare files, and files being written: never chunks
    .dead-<n>/                                        a cleared namespace on its way out
    <namespace id>/namespace.json                     what the id stands for, for people
    <namespace id>/<first 2 of key>/<key>-<blocks>.safetensors
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import shutil
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import ConfigError, FolderOwnedError
from kvstore.keys import NAMESPACE_ID_BYTES, PREFIX_KEY_BYTES
from kvstore.layout import ALIGNMENT_BYTES
from kvstore.tiers.base import ChunkRef

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)

FREE_NAME = ".free"
DEAD_PREFIX = ".dead-"
NAMESPACE_FILE = "namespace.json"
FOLDER_MODE = 0o700  # KV tells what was in the prompts
FILE_MODE = 0o600
SPARE_FILES = 64
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NAMESPACE_NAME = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}")
SHARD_NAME = re.compile("[0-9a-f]{2}")
_CHUNK_NAME = re.compile(rf"([0-9a-f]{{{2 * PREFIX_KEY_BYTES}}})-([1-9][0-9]{{0,8}})\.safetensors")


def chunk_name(ref: ChunkRef) -> str:
    """The path of a chunk's file inside the folder of its namespace."""
    key = ref.prefix_key.hex()
    return f"{key[:2]}/{key}-{ref.num_blocks}.safetensors"


def parse_chunk_name(shard: str, name: str) -> ChunkRef | None:
    """The chunk that a file ``name`` in the folder ``shard`` holds, or None if it is no chunk's name."""
    match = _CHUNK_NAME.fullmatch(name)
    if match is None or not name.startswith(shard):
        return None
    return ChunkRef(bytes.fromhex(match[1]), int(match[2]))


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its ``.free``.

    Raises:
        ConfigError: it is not a folder, or cannot be created or written.
    """
    try:
        (folder / FREE_NAME).mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> ConfigError:
    """The error for a folder in which the tier cannot work at all."""
    return ConfigError(f"the disk folder {folder} cannot be used: {reason(error)}; name a folder that can be written")


def reason(error: OSError) -> str:
    """What the system said, without the path: paths inside the folder hold users' keys."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


def delete(path: Path) -> None:
    """Delete a file, or whatever else stands under its name. One that is not there is fine.

    Raises:
        OSError: it could not be deleted.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def prune(shard: Path) -> None:
    """Delete the folder of a shard if it is empty, and the folder of its namespace if that held nothing else."""
    with suppress(OSError):  # not empty
        shard.rmdir()
        if [path.name for path in shard.parent.iterdir()] == [NAMESPACE_FILE]:
            (shard.parent / NAMESPACE_FILE).unlink()
            shard.parent.rmdir()


class Survey(NamedTuple):
    """What stands in a folder: our chunks with their mtime in ns, foreign ones with path and bytes, leftovers swept."""

    own: list[tuple[int, ChunkRef]]
    foreign: list[tuple[int, str, int]]
    swept: int


def survey(folder: Path, namespace_name: str, file_bytes: Sequence[int]) -> Survey:
    """List the chunks in ``folder`` and delete what a crash left behind.

    Only names of ours are touched: whatever else lies in the folder stays there, uncounted.

    Args:
        folder: the tier's folder.
        namespace_name: the folder in it that is ours; its unusable files are leftovers as well.
        file_bytes: for each number of blocks, the size that the file of such a chunk must have.

    Raises:
        OSError: something could not be read or deleted.
    """
    own: list[tuple[int, ChunkRef]] = []
    foreign: list[tuple[int, str, int]] = []
    leftovers: list[str] = []
    for entry in list(os.scandir(folder)):
        if entry.name == FREE_NAME:
            leftovers += (spare.path for spare in os.scandir(entry.path))
        elif entry.name.startswith(DEAD_PREFIX):
            leftovers.append(entry.path)
        elif entry.name == namespace_name:
            _survey_own(entry.path, file_bytes, own, leftovers)
        elif NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            foreign += _foreign_chunks(entry.path)
    for path in leftovers:
        delete(Path(path))
    return Survey(own, foreign, len(leftovers))


def _survey_own(home: str, file_bytes: Sequence[int], chunks: list[tuple[int, ChunkRef]], leftovers: list[str]) -> None:
    for shard in os.scandir(home):
        if shard.name == NAMESPACE_FILE:
            continue
        if not SHARD_NAME.fullmatch(shard.name) or not shard.is_dir(follow_symlinks=False):
            leftovers.append(shard.path)
            continue
        for entry in os.scandir(shard.path):
            ref = parse_chunk_name(shard.name, entry.name)
            status = entry.stat(follow_symlinks=False)
            if (
                ref is None
                or ref.num_blocks >= len(file_bytes)
                or status.st_size != file_bytes[ref.num_blocks]
                or not stat.S_ISREG(status.st_mode)
            ):
                leftovers.append(entry.path)
            else:
                chunks.append((status.st_mtime_ns, ref))


def _foreign_chunks(home: str) -> Iterator[tuple[int, str, int]]:
    for shard in os.scandir(home):
        if SHARD_NAME.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
            for entry in os.scandir(shard.path):
                status = entry.stat(follow_symlinks=False)
                if parse_chunk_name(shard.name, entry.name) and stat.S_ISREG(status.st_mode):
                    yield status.st_mtime_ns, entry.path, status.st_size


def held_bytes(folder: Path) -> int:
    """Bytes in ``folder`` that are the tier's to keep or to delete.

    Raises:
        OSError: the folder could not be read.
    """
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    ours = (n for n in names if n == FREE_NAME or n.startswith(DEAD_PREFIX) or NAMESPACE_NAME.fullmatch(n))
    return sum(tree_bytes(folder / name) for name in ours)


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``; 0 if it is not there."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


class FolderLock:
    """The right to be the only engine that uses a folder, held until ``release`` or the end of the process.

    The kernel drops the lock with the process, however it ends. Children do not inherit it: exec closes the file, and
    a fork closes it in the child, or a lingering helper process would keep the folder of a killed engine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        self._fd = -1
        self.acquire()

    def acquire(self) -> None:
        """Take the lock, anew if the folder was deleted and came back.

        Raises:
            FolderOwnedError: another engine has it.
            ConfigError: the lock file cannot be written, or the filesystem has no locks.
        """
        self.release()
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise unusable(self._folder, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise self._refused(error, owner) from error
        self._fd = fd
        _held_locks.add(self)
        with suppress(OSError):  # the number is for people, and a full disk is no reason to refuse
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def is_held(self) -> bool:
        """Whether the lock is ours and the folder still shows the file it is on."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Give the folder free. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _held_locks.discard(self)
            os.close(fd)

    def _refused(self, error: OSError, owner: str) -> Exception:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return FolderOwnedError(
                f"the disk folder {self._folder} is in use by the engine with process id {owner}: "
                "name another folder, or stop the other engine"
            )
        return ConfigError(
            f"the disk folder {self._folder} cannot be locked ({reason(error)}), so two engines could destroy each "
            "other's files in it: name a folder on a local disk"
        )


_held_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    for lock in list(_held_locks):
        lock.release()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def probe_direct(folder: Path) -> bool:
    """Whether direct I/O works in ``folder``: tried with one page, written and read back.

    Raises:
        ConfigError: not even an ordinary file can be written.
    """
    probe = folder / FREE_NAME / "probe"
    page = mmap.mmap(-1, ALIGNMENT_BYTES)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # what filesystems answer that do not know O_DIRECT
            return False
        raise unusable(folder, error) from error
    try:
        return os.pwrite(fd, page, 0) == os.preadv(fd, [page], 0) == ALIGNMENT_BYTES
    except OSError as error:
        return error.errno in NO_ROOM  # no room to try: that it could be opened is a good sign
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def read_whole(fd: int, views: Sequence[memoryview]) -> int:
    """Fill ``views`` from the start of a file; the number of bytes read, smaller only where the file ends.

    Raises:
        OSError: the system refused.
    """
    total = sum(view.nbytes for view in views)
    done = 0
    while done < total:
        count = os.preadv(fd, _rest(views, done), done)
        if not count:
            break
        done += count
    return done


def write_whole(fd: int, views: Sequence[memoryview]) -> None:
    """Write ``views`` at the start of a file.

    Raises:
        OSError: the system refused.
    """
    total = sum(view.nbytes for view in views)
    done = 0
    while done < total:
        count = os.pwritev(fd, _rest(views, done), done)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after ``done`` bytes; the kernel moves at most 2 GiB a call."""
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(done - view.nbytes, 0)
    return rest


class Space:
    """Who holds the bytes of the folder, and who gives way when more are needed.

    ``used_bytes`` counts chunks, spare files, chunks of other namespaces, and files being written or deleted. The state
    changes only under ``changed``, which is the tier's lock; methods that touch the disk must be called without it.
    """

    def __init__(self, capacity_bytes: int, free_folder: Path, changed: threading.Condition) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._free_folder = free_folder
        self._changed = changed
        self._numbers = itertools.count()
        self._leaving_bytes = 0
        self._spares: dict[Path, int] = {}  # oldest first
        self._foreign: list[tuple[Path, int]] = []  # newest first

    def new_path(self) -> Path:
        """A name in ``.free`` that was never used by this tier."""
        return self._free_folder / str(next(self._numbers))

    def claim(self, size_bytes: int) -> Path | None:
        """A file to write ``size_bytes`` into, paid for: a spare one of that size, or a new name. None: no room."""
        while True:
            with self._changed:
                spare = next((path for path, size in self._spares.items() if size == size_bytes), None)
                if spare is not None:
                    del self._spares[spare]
                    return spare
                if self.used_bytes + size_bytes <= self._capacity_bytes:
                    self.used_bytes += size_bytes
                    return self.new_path()
                victim = self._take_victim()
                if victim is None:
                    if not self._leaving_bytes:
                        return None
                    self._changed.wait()  # another thread is deleting: what it frees may be enough
                    continue
            self.delete(*victim)

    def delete(self, path: Path, size_bytes: int) -> None:
        """Delete a file whose bytes were announced by ``leave``; bytes that cannot be deleted stay counted."""
        freed_bytes = 0
        try:
            delete(path)
            freed_bytes = size_bytes
            if path.parent != self._free_folder:
                prune(path.parent)
        except OSError as error:
            logger.debug("could not delete a file of the disk tier: %s", reason(error))
        self.left(size_bytes, freed_bytes)

    def leave(self, size_bytes: int) -> None:
        """Announce that counted bytes are about to be deleted. Needs the lock."""
        self._leaving_bytes += size_bytes

    def left(self, size_bytes: int, freed_bytes: int) -> None:
        """End what ``leave`` announced: ``freed_bytes`` of them are gone."""
        with self._changed:
            self._leaving_bytes -= size_bytes
            self.used_bytes -= freed_bytes
            self._changed.notify_all()

    def add_spare(self, path: Path, size_bytes: int) -> None:
        """Keep a counted file for later use. Needs the lock; call ``trim`` after it."""
        self._spares[path] = size_bytes

    def add_foreign(self, chunks: Iterable[tuple[Path, int]]) -> None:
        """Count chunks of other namespaces, the newest first. Needs the lock."""
        self._foreign.extend(chunks)
        self.used_bytes += sum(size for _, size in self._foreign)

    def trim(self, keep: int = SPARE_FILES) -> None:
        """Delete the oldest spare files until ``keep`` are left, and foreign chunks until the capacity holds."""
        while True:
            with self._changed:
                if len(self._spares) <= keep and self.used_bytes <= self._capacity_bytes:
                    return
                victim = self._take_victim()
            if victim is None:
                return
            self.delete(*victim)

    def forget(self) -> None:
        """Uncount spare files and foreign chunks: the folder was deleted with them. Needs the lock."""
        self.used_bytes -= sum(self._spares.values()) + sum(size for _, size in self._foreign)
        self._spares.clear()
        self._foreign.clear()

    def _take_victim(self) -> tuple[Path, int] | None:
        """The file that gives way first, announced as leaving. Needs the lock."""
        if self._spares:
            path = next(iter(self._spares))
            victim = path, self._spares.pop(path)
        elif self._foreign:
            victim = self._foreign.pop()
        else:
            return None
        self.leave(victim[1])
        return victim


class Throttle:
    """Lets one message a cause and minute through, so that a broken disk does not flood the log."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._last_s: dict[str, float] = {}

    def is_due(self, cause: str) -> bool:
        """Whether to speak about ``cause`` now. Thread-safe; a race costs at most a line too many."""
        now_s = time.monotonic()
        last_s = self._last_s.get(cause)
        if last_s is not None and now_s - last_s < self._every_s:
            return False
        self._last_s[cause] = now_s
        return True
