"""The server's disk: one folder, and in it one disk tier for each namespace, which share the bound.

Beside the chunks of a namespace stands ``geometry.json``, from which a server started anew knows what it has, before
the first client comes. The stock decides what goes; here are only the moves, on threads of their own, in the order that
``turns.py`` says.
"""

from __future__ import annotations

import logging
import mmap
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ConfigError, TierError, TierTimeoutError
from kvstore.format import chunkfile
from kvstore.keys import EPOCH_FIELD, Namespace
from kvstore.layout import KVLayout
from kvstore.server.rack import WRITE_THREADS, Rack, ShelfOptions, read_home
from kvstore.server.spaces import Chunk, Space
from kvstore.server.turns import Once, Turns, Work
from kvstore.throttle import Throttle
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk import survey

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_SHELF_NAME = re.compile("[0-9a-f]{16}")


class Found(NamedTuple):
    """A namespace on disk, and its chunks with their sizes, the longest untouched first."""

    namespace: Namespace
    layout: KVLayout
    chunks: list[tuple[ChunkRef, int]]


class _Report(Generic[Result]):
    """Lets the thread that decides hear of a result: of the first one that there is."""

    def __init__(self, report: Callable[[Callable[[], None]], None], done: Callable[[Result], None]) -> None:
        self._report = report
        self._done = deque([done])

    def __call__(self, result: Result) -> None:
        """Tell it, unless another was told."""
        with suppress(IndexError):
            self._report(partial(self._done.pop(), result))


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
        self._throttle = Throttle(logger)
        _folder.make_folder(options.folder)
        self._owner = _folder.FolderLock(options.folder)
        try:
            _refuse_engines(options.folder)
            survey.check_room([options.folder], options.capacity_bytes)
        except (OSError, ConfigError):
            self._owner.release()
            raise
        self._rack = Rack(options)
        self._readers = ThreadPoolExecutor(options.read_threads, "kvstore-read-disk")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "kvstore-write-disk")
        self._turns = Turns(partial(self._start, self._writers))
        self._staging = threading.local()
        self._is_closing = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of chunks."""
        return self._rack.used_bytes

    @property
    def num_open(self) -> int:
        """Namespaces whose tiers are open."""
        return self._rack.num_open

    @property
    def is_busy(self) -> bool:
        """Whether files are being written or deleted."""
        return self._turns.is_busy

    def open_all(self) -> list[Found]:
        """What an earlier server has left. Namespaces of past epochs, and what cannot be read, are deleted.

        Raises:
            TierError: a folder cannot be read.
        """
        found = []
        for home in sorted(self._options.folder.iterdir()):
            if not _SHELF_NAME.fullmatch(home.name):
                continue
            space = read_home(home)
            if space is None or EPOCH_FIELD in space.namespace.fields or space.id.hex() != home.name:
                shutil.rmtree(home, ignore_errors=True)
                continue
            with self._rack.use(space) as shelf:
                assert shelf is not None
                found.append(Found(space.namespace, space.layout, shelf.tier.scan()))
        return found

    def size_of(self, space: Space, ref: ChunkRef) -> int:
        """What a chunk takes on disk at most."""
        return chunkfile.file_bytes(space.layout, ref.num_blocks, self._options.codec)

    def write(self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[int | None], None]) -> None:
        """Start to write a chunk; ``done`` is called with the size of its file, or None, by the thread that decides."""
        report = _Report(self._report, done)
        work = Work(partial(self._write, chunk, parts, report), lambda: report(None))
        self._turns.take(chunk.space.id, chunk.key, work)

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
        report, free = _Report(self._report, done), Once(partial(self._report, freed))

        def give_up() -> None:
            report(Outcome.FAILED)
            free()

        self._start(self._readers, partial(self._read, chunk, parts, report, free), give_up)

    def remove(self, removals: Sequence[tuple[Space, ChunkRef]]) -> None:
        """Start to delete the files of chunks."""
        for space, ref in removals:
            self._turns.take(space.id, space.key_of(ref), self._removal(space, ref))

    def _removal(self, space: Space, ref: ChunkRef) -> Work:
        return Work(partial(self._remove, space, ref), lambda: None)

    def clear(self, space: Space, refs: Sequence[ChunkRef], done: Callable[[bool], None]) -> None:
        """Start to forget all files of a namespace, of which ``refs`` are known.

        What was begun before ends first, and what comes later waits. ``done`` is called by the thread that decides:
        with True if no file can be found any more, not even after a crash; otherwise they are deleted one by one.
        """
        report = _Report(self._report, done)

        def give_up() -> None:
            report(False)
            self._remove_next(space, refs)

        self._turns.take_all(space.id, Work(partial(self._clear, space, refs, report), give_up))

    def forget(self, space: Space) -> None:
        """Start to delete the folder of a namespace that has no chunks, and that nobody uses."""
        self._turns.take_all(space.id, Work(partial(self._forget, space), lambda: None))

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
        self._rack.close()
        self._owner.release()

    def _start(self, pool: ThreadPoolExecutor, action: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Let a thread do something, and give it up if that raises: whoever waits for it must not wait for ever."""

        def look(future: Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                said = "a thread of the cache server's disk failed"
                self._throttle.log(type(error).__name__, said, level=logging.ERROR, exc_info=error)
                give_up()

        if not self._is_closing:
            with suppress(RuntimeError):  # it is closing now
                pool.submit(action).add_done_callback(look)

    # -- on the threads ----------------------------------------------------------------------------------------------

    def _write(
        self, chunk: Chunk, parts: Sequence[ByteArray], report: _Report[int | None], end: Callable[[], None]
    ) -> None:
        def finish(size_bytes: int | None) -> None:
            report(size_bytes)
            end()

        if chunk.is_gone:  # while it waited: a clear need not wait for it
            finish(None)
            return
        try:
            size_bytes = self._put(chunk, parts)
        except TierTimeoutError as error:
            self._complain(error)
            self._staging.buffer = None  # the call that hangs still reads from it
            error.pending.add_done_callback(lambda _: finish(None))
        except (TierError, ConfigError) as error:
            self._complain(error)
            finish(None)
        else:
            finish(size_bytes)

    def _put(self, chunk: Chunk, parts: Sequence[ByteArray]) -> int | None:
        """Write a chunk; the size of its file, or None if it is not there.

        Raises:
            TierError, ConfigError: the disk is broken.
        """
        most_bytes = self.size_of(chunk.space, chunk.ref)
        with self._rack.use(chunk.space) as shelf:
            assert shelf is not None
            buffer = self._gathered(chunk, parts)
            if not self._rack.claim(chunk.space, most_bytes):
                return None
            try:
                (outcome,) = shelf.tier.put([Transfer(chunk.ref, buffer)])
            finally:
                self._rack.unclaim(most_bytes)
            return shelf.raw.size_of(chunk.ref) if outcome is Outcome.STORED else None

    def _read(
        self, chunk: Chunk, parts: Sequence[ByteArray], report: _Report[Outcome], free: Callable[[], None]
    ) -> None:
        pending = None
        outcome = Outcome.FAILED
        try:
            outcome = self._get(chunk, parts)
        except TierTimeoutError as error:
            self._complain(error)
            self._staging.buffer = None
            pending = error.pending
        except (TierError, ConfigError) as error:
            self._complain(error)
        report(outcome)
        if pending is None:
            free()
        else:
            pending.add_done_callback(lambda _: free())

    def _get(self, chunk: Chunk, parts: Sequence[ByteArray]) -> Outcome:
        """Read a chunk to its places.

        Raises:
            TierError, ConfigError: the disk is broken.
        """
        if chunk.is_gone:  # and its namespace perhaps with it
            return Outcome.MISS
        with self._rack.use(chunk.space, makes=False) as shelf:
            if shelf is None:
                return Outcome.MISS
            buffer = parts[0] if len(parts) == 1 else self._room(chunk)
            (outcome,) = shelf.tier.get([Transfer(chunk.ref, buffer)])
        if outcome is Outcome.HIT and len(parts) > 1:
            begin = 0
            for part in parts:
                part[:] = buffer[begin : begin + len(part)]
                begin += len(part)
        return outcome

    def _remove(self, space: Space, ref: ChunkRef, end: Callable[[], None]) -> None:
        try:
            with self._rack.use(space, makes=False) as shelf:
                if shelf is not None:
                    shelf.tier.remove([ref])
        except TierTimeoutError as error:
            self._complain(error)
            error.pending.add_done_callback(lambda _: end())
            return
        except (TierError, ConfigError) as error:  # the breaker remembers it
            self._complain(error)
        end()

    def _clear(self, space: Space, refs: Sequence[ChunkRef], report: _Report[bool], end: Callable[[], None]) -> None:
        def finish(*, is_clear: bool) -> None:
            report(is_clear)
            if not is_clear:
                self._remove_next(space, refs)
            end()

        try:
            with self._rack.use(space, makes=False) as shelf:
                if shelf is not None:
                    shelf.tier.clear()
        except TierTimeoutError as error:
            self._complain(error)
            error.pending.add_done_callback(lambda _: finish(is_clear=False))
        except (TierError, ConfigError) as error:
            self._complain(error)
            finish(is_clear=False)
        else:
            finish(is_clear=True)

    def _remove_next(self, space: Space, refs: Sequence[ChunkRef]) -> None:
        """Delete files one by one after a clear that failed, but none that is written from now on."""
        self._turns.take_next(space.id, [(space.key_of(ref), self._removal(space, ref)) for ref in refs])

    def _forget(self, space: Space, end: Callable[[], None]) -> None:
        try:
            self._rack.forget(space)
        except TierTimeoutError as error:
            self._complain(error)
            error.pending.add_done_callback(lambda _: end())  # it would take along what is written before
            return
        except TierError as error:
            self._complain(error)
        end()

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
        self._throttle.log("disk", "the disk of the cache server: %s", error)


def _refuse_engines(folder: Path) -> None:
    """Refuse a folder with chunks that an engine stored: their namespaces would be swept as what nobody can read.

    Raises:
        ConfigError: it is such a folder.
        OSError: it cannot be read.
    """
    for home in folder.iterdir():
        if _SHELF_NAME.fullmatch(home.name) and (home / _folder.NAMESPACE_FILE).is_file():
            raise ConfigError(f"the folder {folder} holds chunks of an engine, not of a server: name another folder")
