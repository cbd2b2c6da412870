"""The server's disk: one folder, and in it one disk tier for each namespace, which share the bound.

Beside the chunks of a namespace stands ``geometry.json``, from which a server started anew knows what it has, before
the first client comes. The stock decides what goes; here are only the moves, on threads of their own. Of one chunk's
file, what was begun first ends first: an older version would otherwise come to stand in the place of a newer one.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore import chunkfile
from kvstore.errors import ConfigError, LayoutError, TierError, TierTimeoutError
from kvstore.keys import EPOCH_FIELD, Namespace
from kvstore.layout import KVLayout
from kvstore.server.spaces import Chunk, Space
from kvstore.throttle import Throttle
from kvstore.tiers import _folder, _survey
from kvstore.tiers.base import ByteArray, ChunkRef, Outcome, Tier, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.wrappers import GuardOptions, guarded

logger = logging.getLogger(__name__)

WRITE_THREADS = 4
_SHELF_NAME = re.compile("[0-9a-f]{16}")
_SLOW_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ShelfOptions:
    """The disk.

    Attributes:
        folder: of the server alone.
        capacity_bytes: of all namespaces together.
        codec: what chunks are encoded with.
        direct: whether to go round the page cache; None finds out.
        read_threads: reads at once.
        timeout_s: deadline of each call.
    """

    folder: Path
    capacity_bytes: int
    codec: str = "none"
    direct: bool | None = None
    read_threads: int = 4
    timeout_s: float = 10.0


class Found(NamedTuple):
    """A namespace on disk, and its chunks with their sizes, the longest untouched first."""

    namespace: Namespace
    layout: KVLayout
    chunks: list[tuple[ChunkRef, int]]


_Work = Callable[[Callable[[], None]], None]
"""Something to do, which is given what to call when it has ended."""


class _Shelf(NamedTuple):
    raw: DiskTier
    tier: Tier  # guarded


@dataclass
class _Traffic:
    """What is done to the files of one namespace.

    Attributes:
        active: works under way, or waiting for their file.
        held: what came after a clear that has not ended; None without one.
        clear: begins that, once nothing is active.
    """

    active: int = 0
    held: deque[Callable[[], None]] | None = None
    clear: Callable[[], None] = lambda: None


class Shelves:
    """The folder, owned by this process. Thread-safe.

    Args:
        options: the disk.
        report: takes what is to be done by the thread that decides.

    Raises:
        ConfigError: the folder cannot be used, is an engine's, or is smaller than the bound.
        FolderOwnedError: another process uses it.
    """

    def __init__(self, options: ShelfOptions, report: Callable[[Callable[[], None]], None]) -> None:
        self.capacity_bytes = options.capacity_bytes
        self._options = options
        self._report = report
        self._shelves: dict[bytes, _Shelf] = {}
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # held while the folder of a namespace is made
        self._claimed_bytes = 0
        self._throttle = Throttle()
        _folder.make_folder(options.folder)
        self._owner = _folder.FolderLock(options.folder)
        try:
            _refuse_engines(options.folder)
            _survey.check_room([options.folder], options.capacity_bytes)
        except (OSError, ConfigError):
            self._owner.release()
            raise
        self._readers = ThreadPoolExecutor(options.read_threads, "kvstore-read-disk")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "kvstore-write-disk")
        self._staging = threading.local()
        self._turns: dict[bytes, deque[_Work]] = {}  # what waits for the file of a chunk, while something is done to it
        self._traffic: dict[bytes, _Traffic] = {}  # by namespace
        self._turns_lock = threading.Lock()
        self._is_closing = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of chunks."""
        return sum(shelf.raw.used_bytes for shelf in list(self._shelves.values()))

    @property
    def is_busy(self) -> bool:
        """Whether files are being written or deleted."""
        return any(traffic.active or traffic.held is not None for traffic in list(self._traffic.values()))

    def open_all(self) -> list[Found]:
        """What an earlier server has left. Namespaces of past epochs, and what cannot be read, are deleted.

        Raises:
            TierError: a folder cannot be read.
        """
        found = []
        for home in sorted(self._options.folder.iterdir()):
            if not _SHELF_NAME.fullmatch(home.name):
                continue
            space = _read_geometry(home)
            if space is None or EPOCH_FIELD in space.namespace.fields or space.id.hex() != home.name:
                shutil.rmtree(home, ignore_errors=True)
                continue
            shelf = self._open(space)
            found.append(Found(space.namespace, space.layout, shelf.tier.scan()))
        return found

    def size_of(self, space: Space, ref: ChunkRef) -> int:
        """What a chunk takes on disk at most."""
        shelf = self._shelves.get(space.id)
        return shelf.raw.stored_bytes(ref.num_blocks) if shelf else _file_bytes(space, ref, self._options.codec)

    def write(self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[int | None], None]) -> None:
        """Start to write a chunk; ``done`` is called with the size of its file, or None, by the thread that decides."""
        self._in_turn(chunk.space, chunk.key, partial(self._write, chunk, parts, done))

    def read(
        self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[Outcome], None], freed: Callable[[], None]
    ) -> None:
        """Start to read a chunk.

        Args:
            chunk: which.
            parts: where to.
            done: called with what came of it.
            freed: called after that, once nothing can write to ``parts`` any more.
        """
        self._readers.submit(self._read, chunk, parts, done, freed)

    def remove(self, removals: Sequence[tuple[Space, ChunkRef]]) -> None:
        """Start to delete the files of chunks."""
        for space, ref in removals:
            self._in_turn(space, space.key_of(ref), partial(self._remove, space, ref))

    def clear(self, space: Space, refs: Sequence[ChunkRef], done: Callable[[bool], None]) -> None:
        """Start to forget all files of a namespace, of which ``refs`` are known.

        What was begun before ends first, and what comes later waits. ``done`` is called by the thread that decides:
        with True if no file can be found any more, not even after a crash; otherwise they are deleted one by one.
        """

        def begin() -> None:
            with suppress(RuntimeError):  # it is closing now
                self._writers.submit(self._clear, space, refs, done)

        with self._turns_lock:
            traffic = self._traffic.setdefault(space.id, _Traffic())
            if traffic.held is not None:
                traffic.held.append(lambda: self.clear(space, refs, done))
                return
            traffic.held, traffic.clear = deque(), begin
            is_quiet = not traffic.active
        if is_quiet:
            begin()

    def close(self, timeout_s: float) -> None:
        """End the threads, and close all tiers; what hangs is left behind."""
        self._is_closing = True
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        closing = threading.Thread(target=self._close, daemon=True, name="kvstore-close")
        closing.start()
        closing.join(timeout_s)

    def _close(self) -> None:
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True)
        for shelf in self._shelves.values():
            shelf.tier.close()
        self._owner.release()

    def _in_turn(self, space: Space, key: bytes, work: _Work) -> None:
        """Start to do something to the file of a chunk once nothing else is done to it, and no clear is under way."""
        with self._turns_lock:
            traffic = self._traffic.setdefault(space.id, _Traffic())
            if traffic.held is not None:
                traffic.held.append(lambda: self._in_turn(space, key, work))
                return
            traffic.active += 1
            waiting = self._turns.get(key)
            if waiting is None:
                self._turns[key] = deque()
            else:
                waiting.append(work)
        if waiting is None:
            self._start(space, key, work)

    def _start(self, space: Space, key: bytes, work: _Work) -> None:
        if not self._is_closing:
            with suppress(RuntimeError):  # it is closing now
                self._writers.submit(work, lambda: self._end_turn(space, key))

    def _end_turn(self, space: Space, key: bytes) -> None:
        with self._turns_lock:
            waiting = self._turns[key]
            work = waiting.popleft() if waiting else None
            if work is None:
                del self._turns[key]
            traffic = self._traffic[space.id]
            traffic.active -= 1
            may_clear = traffic.held is not None and not traffic.active
        if work is not None:
            self._start(space, key, work)
        if may_clear:
            traffic.clear()

    def _end_clear(self, space: Space) -> None:
        with self._turns_lock:
            traffic = self._traffic[space.id]
            held, traffic.held = traffic.held, None
        for resume in held or ():
            resume()

    # -- on the threads ----------------------------------------------------------------------------------------------

    def _write(
        self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[int | None], None], end: Callable[[], None]
    ) -> None:
        def report(size_bytes: int | None) -> None:
            self._report(lambda: done(size_bytes))
            end()

        if chunk.is_gone:  # while it waited: a clear need not wait for it
            report(None)
            return
        try:
            shelf = self._open(chunk.space)
            buffer = self._gathered(chunk, parts)
            most_bytes = shelf.raw.stored_bytes(chunk.ref.num_blocks)
            if not self._claim(shelf, most_bytes):
                report(None)
                return
            try:
                (outcome,) = shelf.tier.put([Transfer(chunk.ref, buffer)])
            finally:
                self._unclaim(most_bytes)
            report(shelf.raw.size_of(chunk.ref) if outcome is Outcome.STORED else None)
        except TierTimeoutError as error:
            self._complain(error)
            self._staging.buffer = None  # the call that hangs still reads from it
            error.pending.add_done_callback(lambda _: report(None))
        except (TierError, ConfigError) as error:
            self._complain(error)
            report(None)

    def _read(
        self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[Outcome], None], freed: Callable[[], None]
    ) -> None:
        pending = None
        outcome = Outcome.FAILED
        try:
            shelf = self._open(chunk.space)
            buffer = parts[0] if len(parts) == 1 else self._room(chunk)
            (outcome,) = shelf.tier.get([Transfer(chunk.ref, buffer)])
            if outcome is Outcome.HIT and len(parts) > 1:
                begin = 0
                for part in parts:
                    part[:] = buffer[begin : begin + len(part)]
                    begin += len(part)
        except TierTimeoutError as error:
            self._complain(error)
            self._staging.buffer = None
            pending = error.pending
        except (TierError, ConfigError) as error:
            self._complain(error)
        self._report(lambda: done(outcome))
        if pending is None:
            self._report(freed)
        else:
            pending.add_done_callback(lambda _: self._report(freed))

    def _remove(self, space: Space, ref: ChunkRef, end: Callable[[], None]) -> None:
        shelf = self._shelves.get(space.id)
        try:
            if shelf is not None:
                shelf.tier.remove([ref])
        except TierTimeoutError as error:
            self._complain(error)
            error.pending.add_done_callback(lambda _: end())
            return
        except TierError as error:  # the breaker remembers it
            self._complain(error)
        end()

    def _clear(self, space: Space, refs: Sequence[ChunkRef], done: Callable[[bool], None]) -> None:
        def end(*, is_clear: bool) -> None:
            self._report(lambda: done(is_clear))
            self._end_clear(space)
            if not is_clear:
                self.remove([(space, ref) for ref in refs])

        shelf = self._shelves.get(space.id)
        try:
            if shelf is not None:
                shelf.tier.clear()
            end(is_clear=True)
        except TierTimeoutError as error:
            self._complain(error)
            error.pending.add_done_callback(lambda _: end(is_clear=False))
        except TierError as error:
            self._complain(error)
            end(is_clear=False)

    def _open(self, space: Space) -> _Shelf:
        shelf = self._shelves.get(space.id)
        if shelf is not None:  # who is known does not wait for another's folder to be made
            return shelf
        with self._opening:
            shelf = self._shelves.get(space.id)
            if shelf is None:
                shelf = self._shelves[space.id] = self._make(space)
            return shelf

    def _make(self, space: Space) -> _Shelf:
        options = self._options
        home = options.folder / space.id.hex()
        try:
            home.mkdir(mode=_folder.FOLDER_MODE, exist_ok=True)
            text = json.dumps({"namespace": dict(space.namespace.fields), "geometry": _geometry(space.layout)})
            (home / _folder.GEOMETRY_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise _folder.unusable(home, error) from error
        raw = DiskTier(
            home,
            space.namespace,
            space.layout,
            options.capacity_bytes,
            direct=options.direct,
            codec=options.codec,
            checks_room=False,
        )
        guard = GuardOptions(
            options.timeout_s, max(options.timeout_s, _SLOW_TIMEOUT_S), options.read_threads + WRITE_THREADS + 2
        )
        return _Shelf(raw, guarded(raw, guard))

    def _claim(self, shelf: _Shelf, num_bytes: int) -> bool:
        """Whether there are so many bytes for one more file, after the spare files of others have gone if need be.

        They are deleted through what guards their tier and outside the lock: a disk that hangs must not hold up those
        who want to read.
        """
        if self._try_claim(num_bytes):
            return True
        for other in [*(s for s in list(self._shelves.values()) if s is not shelf), shelf]:
            if not other.raw.spare_bytes:
                continue
            try:
                other.tier.drop_spares(self._missing_bytes(num_bytes))
            except TierError as error:
                self._complain(error)
            if self._try_claim(num_bytes):
                return True
        return False

    def _try_claim(self, num_bytes: int) -> bool:
        with self._lock:
            if self._missing_bytes(num_bytes) > 0:
                return False
            self._claimed_bytes += num_bytes
            return True

    def _missing_bytes(self, num_bytes: int) -> int:
        return self.used_bytes + self._claimed_bytes + num_bytes - self._options.capacity_bytes

    def _unclaim(self, num_bytes: int) -> None:
        with self._lock:
            self._claimed_bytes -= num_bytes

    def _gathered(self, chunk: Chunk, parts: Sequence[ByteArray]) -> ByteArray:
        """The bytes of a chunk in one row."""
        if len(parts) == 1:
            return parts[0]
        room = self._room(chunk)
        begin = 0
        for part in parts:
            room[begin : begin + len(part)] = part
            begin += len(part)
        return room

    def _room(self, chunk: Chunk) -> ByteArray:
        """A buffer of this thread's, for chunks that lie in several runs."""
        room: ByteArray | None = getattr(self._staging, "buffer", None)
        if room is None or len(room) < chunk.size_bytes:
            room = np.frombuffer(mmap.mmap(-1, chunk.size_bytes), np.uint8)
            self._staging.buffer = room
        return room[: chunk.size_bytes]

    def _complain(self, error: Exception) -> None:
        if self._throttle.is_due("disk"):
            logger.warning("the disk of the cache server: %s; more of this kind stays unsaid for a minute", error)


def _refuse_engines(folder: Path) -> None:
    """Refuse a folder with chunks that an engine stored: their namespaces would be swept as what nobody can read.

    Raises:
        ConfigError: it is such a folder.
        OSError: it cannot be read.
    """
    for home in folder.iterdir():
        if _SHELF_NAME.fullmatch(home.name) and (home / _folder.NAMESPACE_FILE).is_file():
            raise ConfigError(f"the folder {folder} holds chunks of an engine, not of a server: name another folder")


def _geometry(layout: KVLayout) -> dict[str, Any]:
    return {
        "page_bytes": list(layout.page_bytes),
        "planes": layout.planes,
        "block_tokens": layout.block_tokens,
        "chunk_tokens": layout.chunk_tokens,
        "physical": layout.physical,
        "element": layout.element,
        "page_axes": list(layout.page_axes) if layout.page_axes else None,
    }


def _read_geometry(home: Path) -> Space | None:
    """The namespace whose folder this is; None if it does not say."""
    try:
        found = json.loads((home / _folder.GEOMETRY_FILE).read_bytes())
        geometry = dict(found["geometry"])
        geometry["page_bytes"] = tuple(geometry["page_bytes"])
        geometry["page_axes"] = tuple(geometry["page_axes"]) if geometry["page_axes"] else None
        return Space(Namespace(found["namespace"]), KVLayout(**geometry))
    except (OSError, ValueError, TypeError, KeyError, LayoutError):
        return None


def _file_bytes(space: Space, ref: ChunkRef, codec: str) -> int:
    return chunkfile.file_bytes(space.layout, ref.num_blocks, codec)
