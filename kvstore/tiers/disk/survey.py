"""Scan of a tier's folder at start, for its chunks, their last uses, and leftovers of a crash."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from kvstore.format.chunkfile import ChunkName, chunk_name, parse_chunk_name
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.model.keys import EPOCH_FIELD, Namespace
from kvstore.tiers.disk.folder import (
    DEAD_PREFIX,
    FREE_NAME,
    NAMESPACE_FILE,
    NAMESPACE_NAME,
    NOTES,
    SHARD_NAME,
    delete,
    prune,
)

_GIB = 1 << 30
_NS_PER_S = 1_000_000_000
SESSION_NS = 10 * _NS_PER_S
PAUSE_NS = _NS_PER_S
_MAX_DESCRIBED = 64


class Use(NamedTuple):
    """Chunk, its last use in ns since 1970, the size of its file, and the end of its time to live, if it has one."""

    used_ns: int
    ref: ChunkRef
    size_bytes: int
    until_s: int | None = None


class Survey(NamedTuple):
    """Content of a folder: our chunks, foreign ones as (mtime in ns, path, size), and the number of swept leftovers."""

    own: list[Use]
    foreign: list[tuple[int, str, int]]
    swept: int


def survey(folder: Path, namespace_name: str, may_be: Callable[[int, int], bool]) -> Survey:
    """List the chunks in ``folder`` and delete the leftovers of a crash.

    Only names of this library are touched; other files in the folder stay, uncounted.

    Args:
        folder: of the tier.
        namespace_name: the folder of our namespace in it, whose unusable files are also leftovers.
        may_be: called with a number of blocks and a file size; tells if the file of such a chunk can have it.

    Raises:
        OSError: a file or folder could not be read or deleted.
    """
    own: dict[ChunkRef, Use] = {}
    foreign: list[tuple[int, str, int]] = []
    leftovers: list[str] = []
    over: list[str] = []  # others' chunks whose time to live has ended
    for entry in list(os.scandir(folder)):
        if entry.name == FREE_NAME:
            leftovers += (spare.path for spare in os.scandir(entry.path))
        elif entry.name.startswith(DEAD_PREFIX):
            leftovers.append(entry.path)
        elif entry.name == namespace_name:
            for name, chunk in names(entry.path):
                status = name.stat(follow_symlinks=False)
                if not chunk or not stat.S_ISREG(status.st_mode) or not may_be(chunk.ref.num_blocks, status.st_size):
                    leftovers.append(name.path)
                    continue
                use = Use(status.st_mtime_ns, chunk.ref, status.st_size, chunk.until_s)
                if (other := own.get(use.ref)) is not None:  # its file could not be renamed when this one was stored
                    other, use = sorted((use, other), key=attrgetter("used_ns"))
                    leftovers.append(f"{entry.path}/{chunk_name(other.ref, other.until_s)}")
                own[use.ref] = use
        elif NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            if _is_past_epoch(Path(entry.path)):
                leftovers.append(entry.path)
                continue
            chunks, ended = _foreign_in(entry.path)
            foreign += chunks
            over += ended
    for path in leftovers:
        delete(Path(path))
    for path in over:
        delete(Path(path))
        prune(Path(path).parent)
    return Survey([*own.values()], foreign, len(leftovers) + len(over))


def _foreign_in(home: str) -> tuple[list[tuple[int, str, int]], list[str]]:
    """Return the chunks of another namespace as in ``Survey``, and the files of those whose time is over."""
    chunks: list[tuple[int, str, int]] = []
    ended: list[str] = []
    for name, chunk in names(home):
        if chunk and stat.S_ISREG((status := name.stat(follow_symlinks=False)).st_mode):
            if chunk.until_s is not None and chunk.until_s <= time.time():
                ended.append(name.path)
            else:
                chunks.append((status.st_mtime_ns, name.path, status.st_size))
    return chunks, ended


def names(home: str | Path) -> Iterator[tuple[os.DirEntry[str], ChunkName | None]]:
    """Yield every name in a namespace's folder except notes, with its meaning; None if it is not a chunk's name.

    Raises:
        OSError: the folder could not be read.
    """
    for shard in os.scandir(home):
        if shard.name in NOTES:
            continue
        if not SHARD_NAME.fullmatch(shard.name) or not shard.is_dir(follow_symlinks=False):
            yield shard, None
            continue
        with suppress(FileNotFoundError):  # an engine has deleted it meanwhile
            for entry in os.scandir(shard.path):
                yield entry, parse_chunk_name(shard.name, entry.name)


def in_order_of_use(found: Iterable[Use]) -> list[Use]:
    """Sort chunks in the order in which they should be evicted.

    A prompt's chunks are written and read from head to tail, so the head has the oldest mtime; but a tail is useless
    without its head. So chunks are grouped into sessions, each of which ends with a pause, or after 10 seconds. Older
    sessions are first, and in a session the chunk used last. A use in the future, because a clock was set back, counts
    as a use now.
    """
    now_ns = time.time_ns()
    ordered: list[Use] = []
    session: list[Use] = []
    begin_ns = last_ns = 0
    for used_ns, use in sorted((min(use.used_ns, now_ns), use) for use in found):
        if used_ns - last_ns > PAUSE_NS or used_ns - begin_ns > SESSION_NS:
            ordered += reversed(session)
            session, begin_ns = [], used_ns
        session.append(use)
        last_ns = used_ns
    return ordered + session[::-1]


def check_room(folders: Sequence[Path], capacity_bytes: int) -> None:
    """Refuse a capacity that the filesystem of all ``folders`` cannot hold; chunks already stored count as room.

    Raises:
        ConfigError: it does not fit.
        OSError: a folder could not be read.
    """
    status = os.statvfs(folders[0])
    free_bytes = status.f_bavail * status.f_frsize
    if capacity_bytes <= free_bytes:
        return
    room_bytes = free_bytes + sum(held_bytes(folder) for folder in folders)
    if capacity_bytes > room_bytes:
        raise ConfigError(
            f"max_local_disk_size of {capacity_bytes / _GIB:.3f} GiB does not fit: the filesystem of "
            f"{' and '.join(map(str, folders))} has {room_bytes / _GIB:.3f} GiB for it; lower it, or name another "
            "local_disk"
        )


def _is_past_epoch(home: Path) -> bool:
    """Tell if a foreign namespace is of an epoch, which is never entered again."""
    namespace = read_namespace(home)
    return namespace is not None and EPOCH_FIELD in namespace.fields


def read_namespace(home: Path) -> Namespace | None:
    """Read the namespace from the note in its folder; None if there is no note."""
    try:
        fields = json.loads((home / NAMESPACE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return Namespace(fields) if isinstance(fields, dict) else None


def describe_foreign(folder: Path, ours: Namespace) -> list[str]:
    """Return, for each foreign namespace in a folder, the names of the fields in which it differs from ours.

    Raises:
        OSError: the folder could not be read.
    """
    homes = (Path(entry.path) for entry in os.scandir(folder) if NAMESPACE_NAME.fullmatch(entry.name))
    found = (read_namespace(home) for home in islice(homes, _MAX_DESCRIBED))
    others = [namespace for namespace in found if namespace is not None and namespace.id != ours.id]
    return sorted({", ".join(ours.differing_fields(other)) for other in others})


def held_bytes(folder: Path) -> int:
    """Return the bytes in ``folder`` that belong to the tier.

    Raises:
        OSError: the folder could not be read.
    """
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    ours = (n for n in names if n == FREE_NAME or n.startswith(DEAD_PREFIX) or NAMESPACE_NAME.fullmatch(n))
    return sum(tree_bytes(folder / name) for name in ours)


def tree_bytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``; 0 if it does not exist."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total
