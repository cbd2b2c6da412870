"""Namespace in a folder of the disk tier, read without owning the folder and without changing it, for tools.

An engine may be using the folder meanwhile: files appear, vanish and are recycled while they are read, so a file that
looks damaged is read again before it is reported.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.format import chunkfile
from kvstore.format.chunkfile import Damage
from kvstore.format.images import MAX_HEADER_BYTES, Facts, check_image, infer_layout, read_facts
from kvstore.format.trailrecords import TrailNote
from kvstore.format.wholeio import opened, read_front, read_whole
from kvstore.model.chunks import ByteArray, ChunkRef
from kvstore.model.errors import ConfigError, LayoutError
from kvstore.model.keys import ChunkKey, Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.tiers.disk.folder import (
    FREE_NAME,
    GEOMETRY_FILE,
    LAYOUT_FILE,
    LOCK_FILE,
    NAMESPACE_NAME,
    reason,
)
from kvstore.tiers.disk.survey import names, read_namespace

_ASKED = 256  # headers that the layout is inferred from without a note
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a fifo must not block
_WORKER_NAME = re.compile(r"replica-\d+|rank-\d+-of-\d+")
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


class Place(NamedTuple):
    """Name in an inventory.

    Attributes:
        path: of the file.
        ref: the chunk; None if it is not a chunk's name.
        until_s: the end of the chunk's time to live, in seconds since 1970; None if it has none.
    """

    path: Path
    ref: ChunkRef | None
    until_s: int | None = None


class Inventory:
    """Namespace of a disk folder. Not thread-safe, because it has one buffer.

    Args:
        home: the folder of the namespace, named by its id.

    Attributes:
        namespace: as noted next to the chunks; None if there is no note.
        is_servers: True if it belongs to a cache server, which has a folder for each of its namespaces.
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
        """Return the folders whose owner may change this one: the tier's, and that of its server, if it has one."""
        folder = self.home.parent.absolute()
        return [folder.parent, folder] if self.is_servers else [folder]

    @property
    def layout(self) -> KVLayout | None:
        """Layout of the chunks, as noted, or else that of most of them; None if there are no chunks."""
        if self._layout is None:
            facts = (self.facts(place.path) for place in self.places() if place.ref is not None)
            self._layout = infer_layout(islice((found for found in facts if found), _ASKED))
        return self._layout

    def places(self) -> Iterator[Place]:
        """Yield every name among the chunk files, in order.

        Raises:
            OSError: the folder could not be read.
        """
        for entry, chunk in sorted(names(self.home), key=lambda found: found[0].path):
            yield Place(Path(entry.path), *(chunk or (None,)))

    def path(self, ref: ChunkRef, until_s: int | None = None) -> Path:
        """Return the path of a chunk's file, which exists if the chunk is in this folder with that end."""
        return self.home / chunkfile.chunk_name(ref, until_s)

    def trails(self, held: Collection[PrefixKey]) -> dict[PrefixKey, bytes]:
        """Return the noted trails of chunks; none if the note cannot be read."""
        if self._layout is None:
            return {}
        try:
            return TrailNote(self._layout).read(self.home, held)
        except OSError:
            return {}

    def facts(self, path: Path) -> Facts | None:
        """Return the header fields of a file; None if it is no chunk file, or cannot be read."""
        try:
            with opened(path, _READ_FLAGS) as fd:
                return read_facts(read_front(fd, MAX_HEADER_BYTES))
        except OSError:
            return None

    def read(self, ref: ChunkRef, until_s: int | None = None) -> ByteArray | str | None:
        """Return the checked content of a chunk's file, or its damage in words; None if there is no file.

        A chunk with a time to live is read only by its end, so no caller keeps it for longer unawares.

        The array is valid until the next call. The words are a ``Damage`` only if a file was read and is not a sound
        chunk, and not for a name that cannot be read or is no file.
        """
        for _ in range(2):
            found = self._read(ref, self.path(ref, until_s))
            if not isinstance(found, str):
                return found
        return found

    def _read(self, ref: ChunkRef, path: Path) -> ByteArray | str | None:
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{Damage.NOT_A_CHUNK}: it is {_kind(status.st_mode)}"
            with opened(path, _READ_FLAGS) as fd:
                image = self._content(fd, ref, os.fstat(fd).st_size)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # not to be read again
        except OSError as error:
            return None if error.errno in _GONE else f"cannot be read: {reason(error)}"
        if isinstance(image, str):
            return image
        assert self.layout is not None  # inferred from this chunk, at the latest
        damage = check_image(self.layout, ChunkKey(self.namespace_id, ref.prefix_key), ref.num_blocks, image)
        return image if damage is None else damage

    def _content(self, fd: int, ref: ChunkRef, size_bytes: int) -> ByteArray | str:
        """Return all bytes of a file, or only its start if it is longer than any chunk of that many blocks."""
        if size_bytes == 0:
            return Damage.SIZE
        layout = self.layout
        if layout is None:  # neither a note nor a chunk has it, so the file may be of another program
            return str(Damage.NOT_A_CHUNK)
        if self.is_layout_noted:
            size_bytes = min(
                size_bytes, chunkfile.file_bytes(layout, ref.num_blocks, chunkfile.ANY_CODEC) + mmap.PAGESIZE
            )
        else:
            facts = read_facts(read_front(fd, MAX_HEADER_BYTES))
            size_bytes = min(size_bytes, facts.image_bytes + mmap.PAGESIZE if facts else MAX_HEADER_BYTES)
        if len(self._buffer) < size_bytes:
            self._buffer = mmap.mmap(-1, size_bytes)
        view = memoryview(self._buffer)[:size_bytes]
        return np.frombuffer(view, np.uint8) if read_whole(fd, [view], 0) else Damage.SIZE


def inventories(folder: Path) -> list[Inventory]:
    """Find all namespaces in a disk tier's folder, in folders of several workers below it, or in a cache server's.

    The kind of a folder follows from its content, because a server's namespaces are named like those of an engine.

    Raises:
        ConfigError: the folder cannot be read.
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
    return [Inventory(home) for home in sorted(homes)]


def is_tier_folder(folder: Path) -> bool:
    """Tell if a folder contains namespaces and is not one itself.

    Raises:
        OSError: it could not be read.
    """
    found = {entry.name for entry in os.scandir(folder)}
    return not found.isdisjoint({GEOMETRY_FILE, LOCK_FILE, FREE_NAME}) or any(map(NAMESPACE_NAME.fullmatch, found))


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    return [Path(e.path) for e in os.scandir(parent) if name.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]


def _noted_layout(home: Path) -> KVLayout | None:
    try:
        return KVLayout.from_json((home / LAYOUT_FILE).read_bytes())
    except (OSError, LayoutError):
        return None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
