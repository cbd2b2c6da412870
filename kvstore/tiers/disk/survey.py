"""The first look at a tier's folder: which chunks it holds, when they were used, and what a crash left behind."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import EPOCH_FIELD, Namespace
from kvstore.tiers.disk.folder import (
    DEAD_PREFIX,
    FREE_NAME,
    NAMESPACE_FILE,
    NAMESPACE_NAME,
    NOTES,
    SHARD_NAME,
    delete,
    parse_chunk_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.chunks import ChunkRef

_GIB = 1 << 30
_NS_PER_S = 1_000_000_000
SESSION_NS = 10 * _NS_PER_S
PAUSE_NS = _NS_PER_S
_MAX_DESCRIBED = 64


class Use(NamedTuple):
    """A chunk, when it was used last, in ns since 1970, and the bytes of its file."""

    used_ns: int
    ref: ChunkRef
    size_bytes: int


class Survey(NamedTuple):
    """What stands in a folder: our chunks, foreign ones with mtime in ns, path and bytes, and leftovers swept."""

    own: list[Use]
    foreign: list[tuple[int, str, int]]
    swept: int


def survey(folder: Path, namespace_name: str, may_be: Callable[[int, int], bool]) -> Survey:
    """List the chunks in ``folder`` and delete what a crash left behind.

    Only names of ours are touched: whatever else lies in the folder stays there, uncounted.

    Args:
        folder: the tier's folder.
        namespace_name: the folder in it that is ours; its unusable files are leftovers as well.
        may_be: whether a chunk of so many blocks can have a file of so many bytes.

    Raises:
        OSError: something could not be read or deleted.
    """
    own: list[Use] = []
    foreign: list[tuple[int, str, int]] = []
    leftovers: list[str] = []
    for entry in list(os.scandir(folder)):
        if entry.name == FREE_NAME:
            leftovers += (spare.path for spare in os.scandir(entry.path))
        elif entry.name.startswith(DEAD_PREFIX):
            leftovers.append(entry.path)
        elif entry.name == namespace_name:
            _survey_own(entry.path, may_be, own, leftovers)
        elif NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            if _is_past_epoch(Path(entry.path)):
                leftovers.append(entry.path)
                continue
            foreign += _foreign_chunks(entry.path)
    for path in leftovers:
        delete(Path(path))
    return Survey(own, foreign, len(leftovers))


def in_order_of_use(found: Iterable[Use]) -> list[Use]:
    """Chunks in the order in which they should be evicted.

    A prompt's chunks are written and read from its head to its tail, so the head has the oldest mtime; but a tail is
    worth nothing without its head. Chunks are therefore grouped into sessions: each ends with a pause, and after 10
    seconds at the latest. Older sessions come first, and in a session the chunk touched last. What lies in the future,
    because a clock was put back, counts as touched just now.
    """
    now_ns = time.time_ns()
    by_time = sorted(Use(min(used_ns, now_ns), ref, size_bytes) for used_ns, ref, size_bytes in found)
    ordered: list[Use] = []
    session: list[Use] = []
    for use in by_time:
        if session and (use.used_ns - session[-1].used_ns > PAUSE_NS or use.used_ns - session[0].used_ns > SESSION_NS):
            ordered += reversed(session)
            session = []
        session.append(use)
    return ordered + session[::-1]


def check_room(folders: Sequence[Path], capacity_bytes: int) -> None:
    """Refuse a capacity that the one filesystem of ``folders`` cannot hold; what is in them already counts as room.

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


def _survey_own(home: str, may_be: Callable[[int, int], bool], chunks: list[Use], leftovers: list[str]) -> None:
    for shard in os.scandir(home):
        if shard.name in NOTES:
            continue
        if not SHARD_NAME.fullmatch(shard.name) or not shard.is_dir(follow_symlinks=False):
            leftovers.append(shard.path)
            continue
        for entry in os.scandir(shard.path):
            ref = parse_chunk_name(shard.name, entry.name)
            status = entry.stat(follow_symlinks=False)
            if ref and stat.S_ISREG(status.st_mode) and may_be(ref.num_blocks, status.st_size):
                chunks.append(Use(status.st_mtime_ns, ref, status.st_size))
            else:
                leftovers.append(entry.path)


def _is_past_epoch(home: Path) -> bool:
    """Whether a namespace of somebody else is an epoch, which nobody enters again."""
    namespace = read_namespace(home)
    return namespace is not None and EPOCH_FIELD in namespace.fields


def read_namespace(home: Path) -> Namespace | None:
    """What the folder of a namespace says that it is; None if it says nothing."""
    try:
        fields = json.loads((home / NAMESPACE_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return Namespace(fields) if isinstance(fields, dict) else None


def describe_foreign(folder: Path, ours: Namespace) -> list[str]:
    """For each namespace of somebody else in a folder, the names of the fields in which it differs from ours.

    Raises:
        OSError: the folder could not be read.
    """
    homes = (Path(entry.path) for entry in os.scandir(folder) if NAMESPACE_NAME.fullmatch(entry.name))
    found = (read_namespace(home) for home in islice(homes, _MAX_DESCRIBED))
    others = [namespace for namespace in found if namespace is not None and namespace.id != ours.id]
    return sorted({", ".join(ours.differing_fields(other)) for other in others})


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
