"""A namespace in a folder of the disk tier, looked at without owning the folder and without changing anything in it.

For tools. An engine may be using the folder meanwhile: files appear, vanish and are recycled while they are read, so
whatever looks damaged is looked at once more before it is called so.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.errors import ConfigError, LayoutError
from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.images import MAX_HEADER_BYTES, Facts, check_image, infer_layout, read_facts
from kvstore.format.wholeio import read_front, read_whole
from kvstore.keys import ChunkKey
from kvstore.layout import KVLayout
from kvstore.tiers.disk.folder import (
    FREE_NAME,
    GEOMETRY_FILE,
    LAYOUT_FILE,
    LOCK_FILE,
    NAMESPACE_NAME,
    NOTES,
    SHARD_NAME,
    chunk_name,
    parse_chunk_name,
    reason,
)
from kvstore.tiers.disk.survey import read_namespace

if TYPE_CHECKING:
    from kvstore.chunks import ByteArray, ChunkRef
    from kvstore.keys import Namespace

_ASKED = 256  # headers that are asked for their geometry where no note tells it
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a fifo would be waited for
_WORKER_NAME = re.compile(r"replica-\d+|rank-\d+-of-\d+")
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


class Place(NamedTuple):
    """A name in a shelf, and the chunk that it stands for; None if it is no chunk's name."""

    path: Path
    ref: ChunkRef | None


class Shelf:
    """One namespace of a disk folder. Not thread-safe: it has one buffer.

    Args:
        home: the folder of the namespace, named by its id.

    Attributes:
        namespace: what the note beside the chunks says; None if there is none.
        is_servers: a cache server keeps it, in a folder for each of its namespaces.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.namespace_id = bytes.fromhex(home.name)
        self.namespace: Namespace | None = read_namespace(home)
        self.is_servers = (home.parent / GEOMETRY_FILE).is_file()
        self._layout = _noted_layout(home)
        self.is_layout_noted = self._layout is not None
        self._buffer = mmap.mmap(-1, mmap.PAGESIZE)

    def owners(self) -> list[Path]:
        """The folders whose owner may change something here: the tier's, and that of the server whose tier it is."""
        folder = self.home.parent.absolute()
        return [folder.parent, folder] if self.is_servers else [folder]

    @property
    def layout(self) -> KVLayout | None:
        """The geometry of the chunks: as noted, else as most of them agree on; None if there are none."""
        if self._layout is None:
            facts = (self.facts(place.path) for place in self.places() if place.ref is not None)
            self._layout = infer_layout(islice((found for found in facts if found), _ASKED))
        return self._layout

    def places(self) -> Iterator[Place]:
        """Every name that stands where chunks stand.

        Raises:
            OSError: the folder could not be read.
        """
        for shard in sorted(os.scandir(self.home), key=lambda entry: entry.name):
            if shard.name in NOTES:
                continue
            if not SHARD_NAME.fullmatch(shard.name) or not shard.is_dir(follow_symlinks=False):
                yield Place(Path(shard.path), None)
                continue
            with suppress(FileNotFoundError):
                for entry in sorted(os.scandir(shard.path), key=lambda entry: entry.name):
                    yield Place(Path(entry.path), parse_chunk_name(shard.name, entry.name))

    def path(self, ref: ChunkRef) -> Path:
        """Where a chunk stands, if it is here."""
        return self.home / chunk_name(ref)

    def facts(self, path: Path) -> Facts | None:
        """What a file says of itself; None if it is no chunk file, or cannot be read."""
        try:
            with _opened(path) as fd:
                return read_facts(read_front(fd, MAX_HEADER_BYTES))
        except OSError:
            return None

    def read(self, ref: ChunkRef) -> ByteArray | str | None:
        """The content of a chunk's file, checked; else what is wrong with it, in words; None if it is not here.

        The array is valid until the next call. What is wrong is a ``Damage`` only where a file was read and is no sound
        chunk; what cannot be read, or is no file, may be anything.
        """
        for _ in range(2):
            found = self._read(ref)
            if not isinstance(found, str):
                return found
        return found

    def _read(self, ref: ChunkRef) -> ByteArray | str | None:
        path = self.path(ref)
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{Damage.NOT_A_CHUNK}: it is {_kind(status.st_mode)}"
            with _opened(path) as fd:
                image = self._content(fd, ref, os.fstat(fd).st_size)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # nothing here is worth a place in the page cache
        except OSError as error:
            return None if error.errno in _GONE else f"cannot be read: {reason(error)}"
        if isinstance(image, str):
            return image
        assert self.layout is not None  # inferred from this very chunk, at the latest
        damage = check_image(self.layout, ChunkKey(self.namespace_id, ref.prefix_key), ref.num_blocks, image)
        return image if damage is None else damage

    def _content(self, fd: int, ref: ChunkRef, size_bytes: int) -> ByteArray | str:
        """All bytes of a file, or only its front if it is longer than any chunk of that many blocks."""
        if size_bytes == 0:
            return Damage.SIZE
        layout = self.layout
        if layout is None:  # no note, and no chunk says anything: this may be anybody's
            return str(Damage.NOT_A_CHUNK)
        if self.is_layout_noted:
            size_bytes = min(size_bytes, chunkfile.file_bytes(layout, ref.num_blocks, "any") + mmap.PAGESIZE)
        else:
            facts = read_facts(read_front(fd, MAX_HEADER_BYTES))
            size_bytes = min(size_bytes, facts.image_bytes + mmap.PAGESIZE if facts else MAX_HEADER_BYTES)
        if len(self._buffer) < size_bytes:
            self._buffer = mmap.mmap(-1, size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        return np.frombuffer(view, np.uint8) if read_whole(fd, [view], 0) else Damage.SIZE


def shelves(folder: Path) -> list[Shelf]:
    """All namespaces in a folder of the disk tier, in the folders of several workers below it, or in a cache server's.

    What a folder is follows from what lies in it: a server's namespaces have names like those of an engine.

    Raises:
        ConfigError: it is no such folder.
    """
    homes: list[Path] = []
    try:
        parents = [folder, *_folders(folder, _WORKER_NAME)]
        parents += [below for parent in parents[1:] for below in _folders(parent, _WORKER_NAME)]
        for parent in parents:
            for found in _folders(parent, NAMESPACE_NAME):
                homes += _folders(found, NAMESPACE_NAME) if is_tier_folder(found) else [found]
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be read: {reason(error)}") from error
    return [Shelf(home) for home in sorted(homes)]


def is_tier_folder(folder: Path) -> bool:
    """Whether a folder holds namespaces and is none itself.

    Raises:
        OSError: it could not be read.
    """
    names = {entry.name for entry in os.scandir(folder)}
    return not names.isdisjoint({GEOMETRY_FILE, LOCK_FILE, FREE_NAME}) or any(map(NAMESPACE_NAME.fullmatch, names))


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    return [Path(e.path) for e in os.scandir(parent) if name.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]


def _noted_layout(home: Path) -> KVLayout | None:
    try:
        return KVLayout.from_json((home / LAYOUT_FILE).read_bytes())
    except (OSError, LayoutError):
        return None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, _READ_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
