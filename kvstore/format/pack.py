"""Packs: chunks of one model in one file, for shipping. ``docs/FORMAT.md`` describes them byte by byte.

A pack is written once, from front to back, one chunk at a time, under another name until it is complete; an interrupted
export resumes where it stopped. Every chunk in it is the content of a chunk file, with its checksums. The trails of the
chunks follow after the chunks, in a part of the file that older readers do not read.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import xxhash

from kvstore.format.images import MAX_HEADER_BYTES, check_image, read_facts
from kvstore.format.trailrecords import TrailRecords
from kvstore.format.wholeio import read_front, read_whole, write_whole
from kvstore.model.chunks import ByteArray, ChunkRef, chunk_of
from kvstore.model.errors import ConfigError, LayoutError
from kvstore.model.keys import ChunkKey, Namespace, PrefixKey
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.model.version import __version__

MAGIC = b"KVSPACK1"
END_MAGIC = b"KVSPEND1"
TRAILS_MAGIC = b"KVSPTRL1"
PARTIAL_SUFFIX = ".partial"
_FRONT = struct.Struct("<8sQ")  # magic, length of the JSON
_RECORD = struct.Struct("<II16sQQ")  # shard, blocks, prefix key, offset, bytes
_END = struct.Struct("<8sQQ16s")  # magic, offset of the index, number of records, xxh3_128 of front and index
_MAX_FRONT_BYTES = 16 << 20
_PIECE_RECORDS = 1024  # of the index or of trails, read at once
_MAX_TRAIL_BYTES = 1 << 20  # one record; of a chunk of a million tokens at least


@dataclass(frozen=True)
class Shard:
    """Chunks of one worker: their namespace and layout, and the folders below the engine's that held them."""

    namespace: Namespace
    layout: KVLayout
    folders: tuple[str, ...] = ("",)

    def to_tree(self) -> dict[str, object]:
        """Return the shard as JSON values, for the front of a pack."""
        return {
            "namespace": dict(self.namespace.fields),
            "layout": json.loads(self.layout.to_json()),
            "folders": list(self.folders),
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, object]) -> Shard:
        """Undo ``to_tree``.

        Raises:
            KeyError, TypeError, LayoutError: the tree is not that of a shard.
        """
        fields, folders = tree["namespace"], tree["folders"]
        if not isinstance(fields, dict) or not isinstance(folders, list):
            raise TypeError("a shard has a namespace and folders")
        if not all(type(value) in {str, int} for value in fields.values()):
            raise TypeError("the fields of a namespace are text or whole numbers")
        names = tuple(folders)
        if not all(isinstance(name, str) for name in names) or any(
            Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name for name in names
        ):
            raise TypeError("a shard's folders lie below the engine's")
        return cls(Namespace(fields), KVLayout.from_json(json.dumps(tree["layout"])), names)


class Extent(NamedTuple):
    """Position and size of a chunk in a pack."""

    offset: int
    size_bytes: int


class _File:
    """A file descriptor, closed by ``close`` and at the end of a ``with`` statement."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PackWriter(_File):
    """Writer of a new pack, or of an interrupted one; close it in either case. Belongs to one thread.

    Args:
        path: the pack; until ``finish`` its name is ``path`` with ``.partial`` appended.
        shards: the shards of its chunks.

    Attributes:
        held: the chunks in it, also those from before an interruption.

    Raises:
        ConfigError: the file cannot be written, another export writes it, or it holds the start of another pack.
    """

    def __init__(self, path: Path, shards: Sequence[Shard]) -> None:
        self.held: dict[tuple[int, ChunkRef], Extent] = {}
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._shards = list(shards)
        self._front = _front(self._shards)
        with _writing(path), ExitStack() as failed:
            super().__init__(os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            failed.callback(self.close)
            _lock(self._fd, self._partial)
            self._end = self._resume()
            failed.pop_all()

    def add(self, shard: int, ref: ChunkRef, image: ByteArray) -> None:
        """Append the content of a chunk file, which the caller has checked.

        Raises:
            ConfigError: there is no room, or the file cannot be written.
        """
        assert len(image) % ALIGNMENT_BYTES == 0
        with _writing(self._path):
            write_whole(self._fd, [image.data], self._end)
        self.held[shard, ref] = Extent(self._end, len(image))
        self._end += len(image)

    def finish(self, trails: Iterable[bytes] = ()) -> None:
        """Write trails and the index, sync the file, and give the pack its name.

        Args:
            trails: the known trails of its chunks; those of other chunks are left out.

        Raises:
            ConfigError: see ``add``.
        """
        noted = self._noted(trails)
        index_at = self._end + len(noted)
        index = b"".join(
            _RECORD.pack(shard, ref.num_blocks, ref.prefix_key, *extent) for (shard, ref), extent in self.held.items()
        )
        end = _END.pack(END_MAGIC, index_at, len(self.held), xxhash.xxh3_128_digest(self._front + index))
        with _writing(self._path):
            write_whole(self._fd, [memoryview(part) for part in (noted, index, end)], self._end)
            os.ftruncate(self._fd, index_at + len(index) + len(end))
            os.fsync(self._fd)
            self._partial.rename(self._path)

    def _noted(self, trails: Iterable[bytes]) -> bytes:
        """Return the part of the file that holds the trails of its chunks; empty if none is known."""
        records, held = _records(self._shards), {ref for _, ref in self.held}
        mine = dict.fromkeys(trail for trail in trails if records.takes(trail) and chunk_of(trail) in held)
        return b"".join((TRAILS_MAGIC, *map(records.record, mine))) if mine else b""

    def _resume(self) -> int:
        """Keep the sound chunks of an interrupted export; returns the offset of the next one."""
        found = read_front(self._fd, len(self._front))
        if found != self._front:
            if len(found) == len(self._front) or found[: len(MAGIC)] not in (MAGIC, b""):
                raise ConfigError(f"{self._partial} is the beginning of another pack: delete it, or name another file")
            os.ftruncate(self._fd, 0)
            write_whole(self._fd, [memoryview(self._front)], 0)
            return len(self._front)
        ids = {shard.namespace.id.hex(): number for number, shard in enumerate(self._shards)}
        end = len(self._front)
        while True:
            facts = read_facts(read_front(self._fd, MAX_HEADER_BYTES, end))
            if facts is None or facts.namespace not in ids:
                break
            shard = ids[facts.namespace]
            try:
                ref = ChunkRef(bytes.fromhex(facts.prefix_key), facts.blocks)
                image = _read_whole(self._fd, Extent(end, facts.image_bytes))
            except ValueError:
                break
            key = ChunkKey(self._shards[shard].namespace.id, ref.prefix_key)
            if image is None or check_image(self._shards[shard].layout, key, ref.num_blocks, image) is not None:
                break
            self.held[shard, ref] = Extent(end, len(image))
            end += len(image)
        os.ftruncate(self._fd, end)
        return end


class Pack(_File):
    """A pack open for reading. Thread-safe.

    Attributes:
        shards: the shards of its chunks.
        extents: for each shard, its chunks in the order in which they were written.
    """

    def __init__(
        self,
        fd: int,
        path: Path,
        shards: Sequence[Shard],
        extents: Sequence[dict[ChunkRef, Extent]],
        index_offset: int,
    ) -> None:
        self.path = path
        self.shards = shards
        self.extents = extents
        self._index_offset = index_offset
        super().__init__(fd)

    def read_trails(self) -> tuple[dict[PrefixKey, bytes], int]:
        """Return the sound trails of its chunks, and the number of records that are damaged or cannot be read."""
        held = {ref for extents in self.extents for ref in extents}
        records, offset, num_records = self._trails_at()
        trails: dict[PrefixKey, bytes] = {}
        num_sound = 0
        with suppress(OSError):
            if num_records and read_front(self._fd, len(TRAILS_MAGIC), offset - len(TRAILS_MAGIC)) != TRAILS_MAGIC:
                return {}, num_records
            for first in range(0, num_records, _PIECE_RECORDS):
                size_bytes = min(_PIECE_RECORDS, num_records - first) * records.record_bytes
                for trail in records.read(read_front(self._fd, size_bytes, offset + first * records.record_bytes)):
                    num_sound += 1
                    if (ref := chunk_of(trail)) in held:
                        trails[ref.prefix_key] = trail
        return trails, num_records - num_sound

    def _trails_at(self) -> tuple[TrailRecords, int, int]:
        """Return the kind of the trail records, the offset of the first, and their number: no more than chunks."""
        records = _records(self.shards)
        ends = [extent.offset + extent.size_bytes for extents in self.extents for extent in extents.values()]
        offset = max(ends, default=self._index_offset) + len(TRAILS_MAGIC)
        room_bytes = max(0, self._index_offset - offset) if records.record_bytes <= _MAX_TRAIL_BYTES else 0
        return records, offset, min(room_bytes // records.record_bytes, len(ends))

    def read_into(self, extent: Extent, views: Sequence[memoryview]) -> bool:
        """Fill ``views`` from the start of a chunk; False if the file ends too early.

        Raises:
            OSError: the system refused.
        """
        return read_whole(self._fd, views, extent.offset)

    def read(self, extent: Extent) -> ByteArray | None:
        """Return the content of a chunk's file; None if the pack ends too early.

        Raises:
            OSError: the system refused.
        """
        return _read_whole(self._fd, extent)

    def check(self, shard: int, ref: ChunkRef) -> str | None:
        """Describe the damage of a chunk in words; None if it is sound."""
        try:
            image = self.read(self.extents[shard][ref])
        except OSError as error:
            return f"cannot be read: {os.strerror(error.errno or 0)}"
        if image is None:
            return "wrong size"
        owner = self.shards[shard]
        damage = check_image(owner.layout, ChunkKey(owner.namespace.id, ref.prefix_key), ref.num_blocks, image)
        return None if damage is None else str(damage)

    def describe(self) -> dict[str, object]:
        """Return the contents of the pack in readable form."""
        return {
            "file_bytes": os.fstat(self._fd).st_size,
            "trails": len(self.read_trails()[0]),
            "shards": [
                {
                    "namespace": shard.namespace.id.hex(),
                    "fields": dict(shard.namespace.fields),
                    "folders": [name or "." for name in shard.folders],
                    "chunks": len(extents),
                    "tokens": sum(ref.num_blocks for ref in extents) * shard.layout.block_tokens,
                }
                for shard, extents in zip(self.shards, self.extents, strict=True)
            ],
        }


def open_pack(path: Path) -> Pack:
    """Open a pack and check its front and index. Chunks are checked when they are read.

    Raises:
        ConfigError: it is not a complete pack.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the pack {path} cannot be read: {os.strerror(error.errno or 0)}") from error
    with ExitStack() as failed:
        failed.callback(os.close, fd)
        pack = _opened(fd, path)
        failed.pop_all()
    return pack


def _opened(fd: int, path: Path) -> Pack:
    size_bytes = os.fstat(fd).st_size
    begin = read_front(fd, _FRONT.size)
    if len(begin) < _FRONT.size or not begin.startswith(MAGIC):
        raise ConfigError(f"{path} is not a pack, or one of another version of kvstore")
    front_bytes = _front_bytes(_FRONT.unpack(begin)[1])
    end = read_front(fd, _END.size, max(0, size_bytes - _END.size))
    if len(end) < _END.size or front_bytes > _MAX_FRONT_BYTES or not end.startswith(END_MAGIC):
        raise ConfigError(f"the pack {path} is incomplete: copy it again, or export it again")
    _, index_offset, count, digest = _END.unpack(end)
    front = read_front(fd, front_bytes)
    if index_offset + count * _RECORD.size + _END.size != size_bytes:
        raise ConfigError(f"the pack {path} is incomplete: copy it again, or export it again")
    found = xxhash.xxh3_128(front)
    for piece in _index_pieces(fd, index_offset, count):
        found.update(piece)
    if found.digest() != digest:
        raise ConfigError(f"the index of the pack {path} is damaged: copy it again, or export it again")
    try:
        tree = json.loads(front[_FRONT.size :])
        shards = [Shard.from_tree(shard) for shard in tree["shards"]]
    except (ValueError, KeyError, TypeError, LayoutError, RecursionError) as error:
        raise ConfigError(f"the pack {path} was made by another version of kvstore: {error}") from error
    extents: list[dict[ChunkRef, Extent]] = [{} for _ in shards]
    for piece in _index_pieces(fd, index_offset, count):
        for shard, blocks, key, offset, length in _RECORD.iter_unpack(piece):
            is_inside = shard < len(shards) and front_bytes <= offset and offset + length <= index_offset
            if not (is_inside and blocks and length) or length % ALIGNMENT_BYTES:
                raise ConfigError(f"the index of the pack {path} is inconsistent: export it again")
            extents[shard][ChunkRef(key, blocks)] = Extent(offset, length)
    return Pack(fd, path, shards, extents, index_offset)


def _index_pieces(fd: int, offset: int, num_records: int) -> Iterator[bytes]:
    """Yield the index in pieces, because a sparse file can state more records than fit into memory."""
    for first in range(0, num_records, _PIECE_RECORDS):
        size_bytes = min(_PIECE_RECORDS, num_records - first) * _RECORD.size
        yield read_front(fd, size_bytes, offset + first * _RECORD.size)


def _records(shards: Sequence[Shard]) -> TrailRecords:
    """Return the one kind of record for all shards, because a chunk has the same trail in every shard."""
    return TrailRecords(max((shard.layout.blocks_per_chunk for shard in shards), default=0))


def _front(shards: Sequence[Shard]) -> bytes:
    tree = {"format": "kvstore-pack", "version": 1, "shards": [shard.to_tree() for shard in shards]}
    text = json.dumps({**tree, "made_by": f"kvstore {__version__}"}, sort_keys=True).encode()
    return (_FRONT.pack(MAGIC, len(text)) + text).ljust(_front_bytes(len(text)))


def _front_bytes(json_bytes: int) -> int:
    return round_up(_FRONT.size + json_bytes, ALIGNMENT_BYTES)


def _read_whole(fd: int, extent: Extent) -> ByteArray | None:
    if not extent.size_bytes or extent.offset + extent.size_bytes > os.fstat(fd).st_size:
        return None
    view = memoryview(mmap.mmap(-1, extent.size_bytes))
    is_whole = all(
        read_whole(fd, [view[begin - extent.offset : end - extent.offset]], begin) for begin, end in _data(fd, extent)
    )
    return np.frombuffer(view, np.uint8) if is_whole else None


def _data(fd: int, extent: Extent) -> Iterator[tuple[int, int]]:
    """Yield begin and end of an extent's data in a sparse file: reading a hole would take memory for zeros."""
    begin, end = extent.offset, extent.offset + extent.size_bytes
    while begin < end:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole until the file's end
                return
            raise
        hole = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        if begin < hole:
            yield begin, hole
        begin = max(begin, hole)


def refuse_written(path: Path) -> None:
    """Refuse a pack that another export is writing.

    Raises:
        ConfigError: names the file.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with _writing(path):
        try:
            fd = os.open(partial, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            _lock(fd, partial)
        finally:
            os.close(fd)


def _lock(fd: int, partial: Path) -> None:
    """Lock out other exports until the file is closed; a file that was renamed by a finished export is refused.

    Raises:
        ConfigError: another export has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(fd), partial.stat())
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise ConfigError(f"{partial} is being written by another export: wait until it ends, or name another file")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of writing into ``ConfigError``."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        message = f"the pack {path} cannot be written: {reason}; make room or name another file, then export again"
        raise ConfigError(message) from error
