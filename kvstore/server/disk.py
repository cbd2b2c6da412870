"""The server's disk: one folder with a disk tier for each namespace, which share one bound.

Next to the chunks of a namespace lies ``geometry.json``, from which a restarted server learns what it holds before the
first client connects. The stock decides what is written and deleted; this module does it, on separate threads, in the
order that ``file_order.py`` keeps.
"""

from __future__ import annotations

import logging
import mmap
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from kvstore.format import chunkfile
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError, TierTimeoutError
from kvstore.model.keys import EPOCH_FIELD, PrefixKey
from kvstore.model.lifetime import Lifetime, clock_ahead_s
from kvstore.model.threads import carry_out, open_pool
from kvstore.model.throttle import Throttle
from kvstore.protocol.payload import scatter
from kvstore.server.disk_tiers import WRITE_THREADS, DiskOptions, DiskTiers, read_home
from kvstore.server.file_order import FileOrder, Work
from kvstore.server.spaces import Chunk, Space
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.notes import owners_in, trails_in

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Found(NamedTuple):
    """Remains of a namespace of an earlier server.

    Attributes:
        space: the namespace, without chunks.
        chunks: its chunks and their sizes in bytes, the least recently used first.
        trails: their trails, as far as they were kept.
        ends: ends of the times to live of those that have one, on the monotonic clock.
        owners: ids of their owners, as far as they were kept.
    """

    space: Space
    chunks: list[tuple[ChunkRef, int]]
    trails: dict[PrefixKey, bytes]
    ends: dict[ChunkRef, float]
    owners: dict[PrefixKey, bytes]


class Disk:
    """The folder, owned by this process. Thread-safe.

    Args:
        options: the disk.
        report: queues a call for the thread that decides.
        lock_fd: a lock of the folder from another process, which this object then owns.

    Raises:
        ConfigError: the folder cannot be used, is an engine's, or is smaller than the bound.
        FolderOwnedError: another process uses it.
    """

    def __init__(self, options: DiskOptions, report: Callable[[Callable[[], None]], None], lock_fd: int = -1) -> None:
        self.capacity_bytes = options.capacity_bytes
        self._options = options
        self._report = report
        self._throttle = Throttle(logger)
        _folder.make_folder(options.folder)
        self._owner = _folder.FolderLock(options.folder, lock_fd)
        try:
            _refuse_engines(options.folder)
            survey.check_room([options.folder], options.capacity_bytes)
        except (OSError, ConfigError):
            self._owner.release()
            raise
        self._tiers = DiskTiers(options)
        self._readers = open_pool(options.read_threads, "kvstore-read-disk")
        self._writers = open_pool(WRITE_THREADS, "kvstore-write-disk")
        self._order = FileOrder()
        self._staging = threading.local()
        self._is_closing = False
        self._counting = threading.Lock()
        self.num_errors = 0  # calls that failed, and damaged chunks

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of chunks."""
        return self._tiers.used_bytes

    @property
    def is_busy(self) -> bool:
        """True while files are being written or deleted."""
        return self._order.is_busy

    def open_all(self) -> list[Found]:
        """Return what an earlier server kept. Namespaces of past epochs and unreadable folders are deleted.

        Raises:
            TierError: a folder cannot be read.
        """
        found = []
        for home in sorted(self._options.folder.iterdir()):
            if not _folder.NAMESPACE_NAME.fullmatch(home.name):
                continue
            space = read_home(home)
            if space is None or EPOCH_FIELD in space.namespace.fields or space.id.hex() != home.name:
                shutil.rmtree(home, ignore_errors=True)
                continue
            with self._tiers.use(space) as opened:
                assert opened is not None
                chunks, trails, ahead_s = opened.tier.scan(), trails_in(opened.tier), clock_ahead_s()
                ends = {ref: until_s - ahead_s for ref, until_s in opened.tier.lifetimes() if until_s is not None}
                found.append(Found(space, chunks, trails, ends, owners_in(opened.tier)))
        return found

    @property
    def lock_fd(self) -> int:
        """Descriptor that locks the folder."""
        return self._owner.fd

    def bytes_of(self, space: Space) -> int:
        """Return the bytes of all files of a namespace."""
        return self._tiers.bytes_of(space)

    def expect(self, space: Space, num_bytes: int) -> None:
        """Note the bytes of a namespace whose tier was not opened here."""
        self._tiers.expect(space, num_bytes)

    @property
    def can_rest(self) -> bool:
        """True if no call hangs, and no removal is pending."""
        return self._tiers.can_rest

    def rest(self) -> bool:
        """Close all files, which the next call opens again; return False if some must stay open."""
        return self._tiers.rest()

    def size_of(self, space: Space, ref: ChunkRef) -> int:
        """Return the most bytes that a chunk can take on disk."""
        return chunkfile.file_bytes(space.layout, ref.num_blocks, self._options.stored_codec)

    def write(self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[int | None], None]) -> None:
        """Start to write a chunk; ``done`` is called with the size of its file, or None, by the thread that decides."""
        work = self._work(partial(self._put, chunk, parts), None, lambda size: self._report(partial(done, size)))
        self._order.queue(chunk.space.id, chunk.key, work)

    def read(
        self, chunk: Chunk, parts: Sequence[ByteArray], done: Callable[[Outcome], None], freed: Callable[[], None]
    ) -> None:
        """Start to read a chunk.

        Args:
            chunk: the chunk.
            parts: its pages, in order.
            done: called with the outcome, at the latest when the deadline of the disk is over.
            freed: called after ``done``, once nothing can write to ``parts`` any more.
        """

        def report(outcome: Outcome) -> None:
            self._report(partial(done, outcome))

        get, free = partial(self._get, chunk, parts), partial(self._report, freed)
        self._start(self._readers, get, Outcome.FAILED, report, free, reports_hang=True)

    def remove(self, removals: Sequence[tuple[Space, ChunkRef]]) -> None:
        """Start to delete the files of chunks."""
        for space, ref in removals:
            self._order.queue(space.id, space.key_of(ref), self._work(partial(self._remove, space, ref), None))

    def limit(self, chunk: Chunk, until_s: float | None, done: Callable[[], None]) -> None:
        """Start to change the end of a chunk's time to live, after its write; ``done`` is called as by ``write``."""
        work = self._work(partial(self._limit, chunk, until_s), None, lambda _: self._report(done))
        self._order.queue(chunk.space.id, chunk.key, work)

    def clear(self, space: Space, done: Callable[[bool], None]) -> None:
        """Start to delete all files of a namespace.

        Work begun before ends first, and later work waits. The thread that decides calls ``done``, with True if no
        file can be found any more, not even after a crash; otherwise the files are deleted one by one.
        """

        def cleared(is_clear: bool) -> None:
            if not is_clear:  # delete the present files, but none that is written from now on
                self._order.queue_next(space.id, self._work(partial(self._remove_all, space), None))
            self._report(partial(done, is_clear))

        self._order.queue_alone(space.id, self._work(partial(self._clear, space), False, cleared))

    def forget(self, space: Space) -> None:
        """Start to delete the folder of a namespace that has neither chunks nor clients."""
        self._order.queue_alone(space.id, self._work(partial(self._tiers.forget, space), None))

    def close(self, timeout_s: float) -> None:
        """End the threads, and close all tiers; calls that hang longer than the timeout are abandoned."""
        self._is_closing = True
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        closing = threading.Thread(target=self._close, daemon=True, name="kvstore-close")
        closing.start()
        closing.join(timeout_s)

    def _close(self) -> None:
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True)
        self._tiers.close()
        self._owner.release()

    def _work(
        self, call: Callable[[], Result], failed: Result, report: Callable[[Result], None] = lambda _: None
    ) -> Work:
        """Return work that changes files; see ``_start``."""
        return partial(self._start, self._writers, call, failed, report)

    def _start(
        self,
        pool: ThreadPoolExecutor,
        call: Callable[[], Result],
        failed: Result,
        report: Callable[[Result], None],
        ended: Callable[[], None],
        *,
        reports_hang: bool = False,
    ) -> None:
        """Call the disk on a thread, unless it is closing.

        Args:
            pool: the threads.
            call: raises ``TierError`` or ``ConfigError`` if the disk is broken.
            failed: the result that is reported if it raised anything.
            report: called once with the result.
            ended: called once, after ``report`` and when no call of the disk hangs any more.
            reports_hang: True to report a hanging call at its deadline, and not only when it ends.
        """

        def look(future: Future[Result]) -> None:
            error = future.exception()
            if error is not None:
                self._count_error()
            if isinstance(error, TierTimeoutError):
                self._complain(error)
                if reports_hang:
                    report(failed)
                error.pending.add_done_callback(lambda _: finish(failed, is_reported=reports_hang))
                return
            if isinstance(error, TierError | ConfigError):
                self._complain(error)
            elif error is not None:
                said = "unexpected error on a disk thread of the cache server"
                self._throttle.log(type(error).__name__, said, level=logging.ERROR, exc_info=error)
            finish(failed if error is not None else future.result())

        def finish(result: Result, *, is_reported: bool = False) -> None:
            if not is_reported:
                report(result)
            ended()

        if not self._is_closing:
            asked: Future[Result] = Future()
            asked.add_done_callback(look)
            with suppress(RuntimeError):  # as it is closing now, or starts no further thread
                pool.submit(carry_out, (asked, partial(self._call, call)))

    # -- on the threads ----------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except TierTimeoutError:
            self._staging.buffer = None  # the call that hangs still uses it
            raise

    def _put(self, chunk: Chunk, parts: Sequence[ByteArray]) -> int | None:
        """Write a chunk; return the size of its file, or None if it was not stored."""
        if chunk.is_gone:  # while it waited: a clear need not wait for it
            return None
        most_bytes = self.size_of(chunk.space, chunk.ref)
        with self._tiers.use(chunk.space) as opened:
            assert opened is not None
            buffer = parts[0] if len(parts) == 1 else np.concatenate(parts, out=self._room(chunk))
            if not self._tiers.claim(chunk.space, most_bytes):
                return None
            try:
                until_s = _on_disk(chunk.until_s)
                stored = Transfer(chunk.ref, buffer, trail=chunk.trail, until_s=until_s, owner=chunk.owner)
                (outcome,) = opened.tier.put([stored])
            finally:
                self._tiers.unclaim(most_bytes)
            if outcome is Outcome.FAILED:
                self._count_error()
            return opened.raw.size_of(chunk.ref) if outcome is Outcome.STORED else None

    def _get(self, chunk: Chunk, parts: Sequence[ByteArray]) -> Outcome:
        """Read a chunk into its pages."""
        if chunk.is_gone:  # perhaps with its namespace
            return Outcome.MISS
        with self._tiers.use(chunk.space, makes=False) as opened:
            if opened is None:
                return Outcome.MISS
            buffer = parts[0] if len(parts) == 1 else self._room(chunk)
            (outcome,) = opened.tier.get([Transfer(chunk.ref, buffer)])
        if outcome in {Outcome.FAILED, Outcome.CORRUPT}:
            self._count_error()
        if outcome is Outcome.HIT and len(parts) > 1:
            scatter(buffer, parts)
        return outcome

    def _remove(self, space: Space, ref: ChunkRef) -> None:
        with self._tiers.use(space, makes=False) as opened:
            if opened is not None:  # if this fails, the tier's breaker tries again later
                opened.tier.remove([ref])

    def _limit(self, chunk: Chunk, until_s: float | None) -> None:
        with self._tiers.use(chunk.space, makes=False) as opened:
            if opened is not None and not chunk.is_gone:  # another of this name may be there
                opened.tier.limit([Lifetime(chunk.ref, _on_disk(until_s))])

    def _remove_all(self, space: Space) -> None:
        with self._tiers.use(space, makes=False) as opened:
            if opened is not None:
                opened.tier.remove([ref for ref, _ in opened.raw.scan()])

    def _clear(self, space: Space) -> bool:
        with self._tiers.use(space, makes=False) as opened:
            if opened is not None:
                opened.tier.clear()
        return True

    def _room(self, chunk: Chunk) -> ByteArray:
        """Return this thread's buffer for chunks that lie in several runs of pages."""
        room: ByteArray | None = getattr(self._staging, "buffer", None)
        if room is None or len(room) < chunk.size_bytes:
            room = np.frombuffer(mmap.mmap(-1, chunk.size_bytes), np.uint8)
            self._staging.buffer = room
        return room[: chunk.size_bytes]

    def _count_error(self) -> None:
        with self._counting:
            self.num_errors += 1

    def _complain(self, error: Exception) -> None:
        self._throttle.log("disk", "disk error of the cache server: %s", error)


def _on_disk(until_s: float | None) -> float | None:
    return None if until_s is None else until_s + clock_ahead_s()


def _refuse_engines(folder: Path) -> None:
    """Refuse a folder with chunks that an engine stored, because they would be deleted as unreadable.

    Raises:
        ConfigError: it is such a folder.
        OSError: it cannot be read.
    """
    for home in folder.iterdir():
        if _folder.NAMESPACE_NAME.fullmatch(home.name) and (home / _folder.NAMESPACE_FILE).is_file():
            raise ConfigError(f"the folder {folder} holds chunks of an engine, not of a server: use another folder")
