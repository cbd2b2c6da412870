"""The disk tier's folder: the names in it, its lock, and a probe of direct I/O.

Names inside the folder::

    .lock                                             locked by the owner, holds its process id
    .free/<n>                                         spare files, and files being written: never chunks
    .dead-<n>/                                        a cleared namespace being deleted
    <namespace id>/namespace.json                     the fields of the namespace
    <namespace id>/layout.json                        the layout of its chunks, for tools
    <namespace id>/trails                             the keys at the ends of the chunks' blocks
    <namespace id>/<first 2 of key>/<key>-<blocks>.safetensors
    <namespace id>/<first 2 of key>/<key>-<blocks>-<end>.safetensors    of a chunk with a time to live

A cache server's folder also has a ``.lock``, and one such folder per namespace, with ``geometry.json`` in it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from kvstore.format.ownerrecords import OWNERS_FILE
from kvstore.format.retentions import RETAINED_FILE
from kvstore.format.trailrecords import TRAILS_FILE
from kvstore.format.wholeio import FILE_MODE
from kvstore.model.errors import ConfigError, FolderOwnedError
from kvstore.model.keys import NAMESPACE_ID_BYTES
from kvstore.model.layout import ALIGNMENT_BYTES

FREE_NAME = ".free"
DEAD_PREFIX = ".dead-"
NAMESPACE_FILE = "namespace.json"
LAYOUT_FILE = "layout.json"
GEOMETRY_FILE = "geometry.json"  # only in the folders of a cache server's namespaces
LOCK_FILE = ".lock"
NOTES = frozenset({NAMESPACE_FILE, LAYOUT_FILE, OWNERS_FILE, TRAILS_FILE, RETAINED_FILE})
FOLDER_MODE = 0o700  # KV reveals the prompts
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NAMESPACE_NAME = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}")
SHARD_NAME = re.compile("[0-9a-f]{2}")


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
    """Return the error for a folder in which the tier cannot work at all."""
    return ConfigError(f"the disk folder {folder} cannot be used: {reason(error)}; name a folder that can be written")


def reason(error: OSError) -> str:
    """Return the system's message without the path, because paths inside the folder contain users' keys."""
    return os.strerror(error.errno) if error.errno else type(error).__name__


def delete(path: Path) -> None:
    """Delete a file, or a folder in its place, if it exists.

    Raises:
        OSError: it could not be deleted.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def prune(shard: Path) -> None:
    """Delete the folder of a shard if it is empty, and then its namespace's folder if only notes are left."""
    with suppress(OSError):  # not empty
        shard.rmdir()
        left = list(shard.parent.iterdir())
        if all(path.name in NOTES for path in left):
            for path in left:
                path.unlink()
            shard.parent.rmdir()


class FolderLock:
    """Exclusive right to use a folder, held until ``release`` or the end of the process.

    The kernel drops the lock however the process ends. Children do not inherit it, because exec closes the file, and so
    does the child after a fork. Otherwise a lingering helper process would keep the folder of a killed engine.
    """

    def __init__(self, folder: Path, fd: int = -1) -> None:
        self._folder = folder
        self._path = folder / LOCK_FILE
        self._fd = fd
        if fd < 0:
            self.acquire()
        else:
            _held_locks.add(self)
            self._check_same()

    @property
    def fd(self) -> int:
        """Descriptor that holds the lock; a duplicate of it in another process holds it, too."""
        return self._fd

    def acquire(self) -> None:
        """Take the lock, or take it again after the folder was deleted and created again.

        Raises:
            FolderOwnedError: another engine holds it.
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
        with suppress(OSError):  # the process id is only information, and a full disk is no reason to refuse
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def is_held(self) -> bool:
        """Tell if this process holds the lock and its file still exists in the folder."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._path.stat())
        except OSError:
            return False

    def _check_same(self) -> None:
        """Check that a lock from another process is one of this folder.

        Raises:
            FolderOwnedError: it is of another folder, which has this path there.
        """
        if not self.is_held():
            self.release()
            raise FolderOwnedError(f"{self._folder} is another folder for the process that had it: name the same one")

    def release(self) -> None:
        """Release the folder. Idempotent."""
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


def direct_flag(folder: Path, *, wanted: bool | None) -> int:
    """Return the flag to open files with: that of direct I/O if it is ``wanted``, or for None if it works there.

    Raises:
        ConfigError: it is wanted and does not work, or no file can be written at all.
    """
    if wanted is not False and probe_direct(folder):
        return os.O_DIRECT
    if wanted:
        raise ConfigError(f"direct I/O does not work in the disk folder {folder}: leave the choice to the probe")
    return 0


def probe_direct(folder: Path) -> bool:
    """Tell if direct I/O works in ``folder``, by writing one page and reading it back.

    Raises:
        ConfigError: no file can be written at all.
    """
    probe = folder / FREE_NAME / "probe"
    page = mmap.mmap(-1, ALIGNMENT_BYTES)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # from filesystems without O_DIRECT
            return False
        raise unusable(folder, error) from error
    try:
        return os.pwrite(fd, page, 0) == os.preadv(fd, [page], 0) == ALIGNMENT_BYTES
    except OSError as error:
        return error.errno in NO_ROOM  # no room to try, but the file could be opened for direct I/O
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
