"""The disk tier: one file per chunk in a folder that one engine owns. ``docs/FORMAT.md`` describes the folder.

What keeps it right:

- The dictionary of chunks and the names in the folder change together, under one lock. Inside it are only renames and
  the making of folders; opening, reading, writing and unlinking happen outside.
- A file is written under a number in ``.free`` and renamed to its chunk's name when it is whole. A chunk that goes is
  renamed to a number again, and overwritten later: direct I/O over an existing file is the fastest way to write.
- Bytes are claimed before they are written and given back after they are gone, so the folder never holds more than
  ``used_bytes``. Spare files and chunks of other namespaces give way to new chunks before anything is called full.
- A file may be recycled while it is read. Then the checksums do not match, and the reader sees in the dictionary that
  the chunk it meant is gone: a miss, not damage.
- A chunk counts as used when its call began: those of a prompt are asked for from its head to its tail, several at
  once, and may be answered in another order.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError, TierError
from kvstore.format.codecs import open_codec
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.throttle import Throttle
from kvstore.tiers.base import Tier, TierCounters, TierSetup, Transfer, check_layers
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.chunkio import Body, ChunkIO, Writable
from kvstore.tiers.disk.codedio import CodedIO
from kvstore.tiers.disk.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.format.chunkfile import Damage

logger = logging.getLogger(__name__)

_Read = Callable[[Path, Body, int], "Damage | None"]

_CLOSE_WAIT_S = 30.0
_GIB = 1 << 30


class _Held(NamedTuple):
    """A chunk in the folder: the serial number of the put that made it, when it was used last, the size of its file."""

    serial: int
    used_ns: int
    size_bytes: int


class DiskTier(Tier):
    """Chunks as files in a folder, for one namespace and one owner at a time.

    A file's mtime tells when its chunk was used last, so a restart finds them in order of use. The lock file, the
    notes beside the chunks and the folders themselves are not counted in ``used_bytes``.

    Args:
        folder: created if missing. Other engines are kept out of it until ``close``.
        namespace: whose chunks these are. Chunks of other namespaces are kept while there is room for them.
        layout: the geometry of the chunks.
        capacity_bytes: never exceeded.
        direct: whether to go round the page cache; None finds out whether the folder can, True insists.
        codec: what chunks are encoded with, see ``kvstore.format.codecs``. Chunks in the folder that another codec
            encoded are no chunks to this tier; those without any are read whatever the codec.
        checks_room: whether the filesystem must have room for the capacity. Not where several tiers share one bound.

    Raises:
        ConfigError: the folder or the capacity cannot be used, or the codec not on this layout.
        FolderOwnedError: another engine uses the folder.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        namespace: Namespace,
        layout: KVLayout,
        capacity_bytes: int,
        *,
        direct: bool | None = None,
        codec: str = "none",
        checks_room: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = TierCounters()
        self._folder = folder.absolute()
        self._layout = layout
        self._io = ChunkIO(layout) if codec == "none" else CodedIO(layout, open_codec(codec, layout))
        self._enter(namespace)
        self._max_sizes = self._io.file_bytes
        self._changed = threading.Condition()
        self._space = Space(capacity_bytes, self._folder / _folder.FREE_NAME, self._changed)
        self._chunks: dict[ChunkRef, _Held] = {}
        self._serials = itertools.count()
        self._generation = 0  # counts clears and resets
        self._condemned: dict[Path, int] = {}  # homes of before a reset, with their bytes, that must go
        self._running = 0
        self._scanned = False
        self._closed = False
        self._finished = threading.Event()
        self._throttle = Throttle(logger)
        self._open(direct, checks_room=checks_room)

    @classmethod
    def open(cls, setup: TierSetup) -> DiskTier:
        """Open the folder that the option ``folder`` names; the registry's factory. Also: ``direct`` and ``codec``.

        Raises:
            ConfigError: see the class; or ``folder`` is missing, or there are other options.
            FolderOwnedError: another engine uses the folder.
        """
        setup.require_known_options("folder", "direct", "codec")
        folder, direct = setup.options.get("folder"), setup.options.get("direct")
        codec = setup.options.get("codec", "none")
        if not isinstance(folder, str | Path) or not isinstance(direct, bool | None) or not isinstance(codec, str):
            raise ConfigError(
                "the disk tier needs the option 'folder', a path; its option 'direct' is a bool, 'codec' a name"
            )
        return cls(Path(folder), setup.namespace, setup.layout, setup.capacity_bytes, direct=direct, codec=codec)

    def _open(self, direct: bool | None, *, checks_room: bool) -> None:
        if self.capacity_bytes < self._max_sizes[-1]:
            raise ConfigError(
                f"max_local_disk_size of {self.capacity_bytes / _GIB:.4f} GiB does not hold a single chunk, "
                f"which takes {self._max_sizes[-1] / _GIB:.4f} GiB: raise it"
            )
        _folder.make_folder(self._folder)
        self._lock = _folder.FolderLock(self._folder)
        try:
            if checks_room:
                survey.check_room([self._folder], self.capacity_bytes)
            self._io.direct_flag = self._choose_io(direct)
            self._make_home()
        except OSError as error:
            self._lock.release()
            raise _folder.unusable(self._folder, error) from error
        except ConfigError:
            self._lock.release()
            raise

    def _choose_io(self, direct: bool | None) -> int:
        if direct is False:
            return 0
        if _folder.probe_direct(self._folder):
            return os.O_DIRECT
        if direct:
            raise ConfigError(
                f"direct I/O does not work in the disk folder {self._folder}: leave the choice to the probe"
            )
        return 0

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, those of the oldest session first, as ``_survey.in_order_of_use`` says.

        The first call looks at the folder and sweeps it; later ones answer from memory, as a restart would.

        Raises:
            TierError: the folder could not be read or swept.
        """
        return [(use.ref, use.size_bytes) for use in survey.in_order_of_use(self.uses())]

    def uses(self) -> list[survey.Use]:
        """Every chunk held and when it was used last, in no order: for merging several folders.

        Raises:
            TierError: the folder could not be read or swept.
        """
        with self._operation(), self._changed:
            return [survey.Use(held.used_ns, ref, held.size_bytes) for ref, held in self._chunks.items()]

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether it is held. Answers from memory."""
        with self._operation():
            return [ref in self._chunks for ref in refs]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; call from several threads to overlap them."""
        bodies = [self._io.check(transfer) for transfer in transfers]
        with self._operation():
            return [self._count(*self._get(body, self._io.read)) for body in bodies]

    @property
    def reads_layers(self) -> bool:
        """A file is read in any parts, unless a codec is at work."""
        return not isinstance(self._io, CodedIO)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Read some layers of chunks, one chunk after the other; call from several threads to overlap them."""
        check_layers(self._layout, layers)
        if not self.reads_layers:
            return self.get(transfers)
        bodies = [self._io.check(transfer) for transfer in transfers]

        def read(path: Path, body: Body, used_ns: int) -> Damage | None:
            return self._io.read_layers(path, body, layers, used_ns)

        with self._operation():
            return [self._count_layers(body, layers, self._get(body, read)[0]) for body in bodies]

    def layer_bytes(self, num_blocks: int, layers: range) -> int:
        """The length of these layers."""
        if not self.reads_layers:
            return self.stored_bytes(num_blocks)
        begin, end = self._io.layer_range(num_blocks, layers)
        return end - begin

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, one after the other; call from several threads to overlap them.

        Raises:
            TierError: the folder was deleted, and it could not be made again or belongs to another engine now; or it
                still holds chunks of before a ``reset``.
        """
        bodies = [self._io.check(transfer) for transfer in transfers]
        with self._operation():
            self._bury_condemned()
            self._space.move_stuck()
            with self._changed:  # both of one moment: a reset later makes another generation
                generation, namespace_id = self._generation, self._io.namespace_id
            return [
                self._count(
                    *(self._put(body, generation) if transfer.belongs_to(namespace_id) else (Outcome.FAILED, 0))
                )
                for transfer, body in zip(transfers, bodies, strict=True)
            ]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks: one rename each. Their files wait for reuse, or for a ``put`` that deletes some of them."""
        with self._operation():
            for ref in refs:
                with self._changed:
                    self._recycle(ref)

    def clear(self) -> None:
        """Forget every chunk of the namespace; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the folder refused, and nothing was forgotten.
        """
        with self._operation():
            with self._changed:
                dead = self._rename_away(self._home)
                dead_bytes = self._forget_all()
                self._space.leave(dead_bytes)
            self._delete_dead(dead, dead_bytes)

    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk, and enter another namespace; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the folder would not let go of the old chunks. Every ``put`` tries that again before it stores.
        """
        with self._operation():
            with self._changed:
                home = self._home
                self._enter(namespace)
                self._condemned[home] = self._forget_all()
            self._bury_condemned()

    def stored_bytes(self, num_blocks: int) -> int:
        """The size of the file of a chunk of ``num_blocks`` blocks; with a codec, the most that it can be."""
        return self._max_sizes[num_blocks]

    def size_of(self, ref: ChunkRef) -> int:
        """The size of the chunk's file. Readable after ``close``."""
        held = self._chunks.get(ref)
        return held.size_bytes if held else self._max_sizes[ref.num_blocks]

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of chunks: held, spare, foreign, being written or deleted. Readable after ``close``."""
        return self._space.used_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of files that are kept to be written over. Readable after ``close``."""
        return self._space.spare_bytes

    def drop_spares(self, wanted_bytes: int) -> None:
        """Delete spare files: somebody else, who shares the disk, has better use for their bytes."""
        with self._operation():
            self._space.give_up_spares(wanted_bytes)

    def close(self) -> None:
        """Let calls under way finish, then free the folder for other engines.

        Waits 30 seconds at most. The folder stays locked until the last call has ended, as that one may still write.
        """
        with self._changed:
            if not self._closed and not self._running:
                self._closed = True
                self._finish()
            self._closed = True
        if not self._finished.wait(_CLOSE_WAIT_S):
            logger.warning(
                "a call to the disk tier in %s does not end; the folder stays locked until it does", self._folder
            )

    def _enter(self, namespace: Namespace) -> None:
        """Keep chunks under a namespace from now on. Needs the lock, once there are threads."""
        self._namespace = namespace
        self._home = self._folder / namespace.id.hex()
        self._io.namespace_id = namespace.id

    def _forget_all(self) -> int:
        """Forget every chunk, and make the home of those to come; the bytes that the old ones take. Needs the lock."""
        self._generation += 1
        forgotten_bytes = self._forget_home()
        with suppress(OSError):  # the next put makes it
            self._make_home()
        return forgotten_bytes

    def _forget_home(self) -> int:
        """Forget all files in the home; the bytes that they take. Needs the lock."""
        forgotten_bytes = self._held_bytes() + self._space.forget_stuck()
        self._chunks.clear()
        return forgotten_bytes

    def _held_bytes(self) -> int:
        """Bytes of the files of all chunks held. Needs the lock."""
        return sum(held.size_bytes for held in self._chunks.values())

    def _rename_away(self, home: Path) -> Path:
        """Make a namespace's folder unreachable in one step, also for the next start. Needs the lock."""
        # Not named by the time: a clock that jumps repeats itself.
        dead = self._folder / f"{_folder.DEAD_PREFIX}{next(self._serials)}"
        try:
            home.rename(dead)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TierError(f"cannot clear {self._folder}: {_folder.reason(error)}") from error
        return dead

    def _delete_dead(self, dead: Path, dead_bytes: int) -> None:
        """Delete a folder that was renamed away, and whose bytes were announced by ``leave``."""
        shutil.rmtree(dead, ignore_errors=True)
        self._space.left(dead_bytes, dead_bytes - survey.tree_bytes(dead))

    def _bury_condemned(self) -> None:
        """Do away with what was stored before a reset.

        Raises:
            TierError: the folder refused.
        """
        for home in list(self._condemned):
            with self._changed:
                dead = self._rename_away(home)
                dead_bytes = self._condemned.pop(home, 0)
                self._space.leave(dead_bytes)
            self._delete_dead(dead, dead_bytes)

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Keeps the folder locked while a public call runs, and makes sure that the first one scans."""
        with self._changed:
            if self._closed:
                raise ClosedError("the disk tier was closed")
            if not self._scanned:
                self._scan()
            self._running += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            if self._closed and not self._running:
                self._finish()

    def _finish(self) -> None:
        """The last act of a closed tier."""
        with suppress(OSError):
            for spare in os.scandir(self._folder / _folder.FREE_NAME):
                _folder.delete(Path(spare.path))
        self._lock.release()
        self._io.close()
        self._finished.set()

    def _scan(self) -> None:
        """Take stock of the folder. Holds the lock, as nothing can be answered before."""
        try:
            found = survey.survey(self._folder, self._home.name, self._io.may_be)
        except OSError as error:
            raise TierError(f"cannot read the disk folder {self._folder}: {_folder.reason(error)}") from error
        self.counters.swept += found.swept
        by_use = survey.in_order_of_use(found.own)
        self._chunks = {use.ref: _Held(next(self._serials), use.used_ns, use.size_bytes) for use in by_use}
        self._space.used_bytes = self._held_bytes()
        self._space.add_foreign((Path(path), size) for _, path, size in sorted(found.foreign, reverse=True))
        self._space.shrink()
        for ref in list(self._chunks):
            if self._space.used_bytes <= self.capacity_bytes:
                break
            self._recycle(ref)
            self._space.shrink()
        self._scanned = True

    def _count(self, outcome: Outcome, moved_bytes: int) -> Outcome:
        with self._changed:
            self.counters.count(outcome, moved_bytes)
        return outcome

    def _count_layers(self, body: Body, layers: range, outcome: Outcome) -> Outcome:
        with self._changed:
            if outcome is Outcome.HIT and layers.stop < self._layout.num_layers:
                self.counters.bytes_read += self.layer_bytes(body.ref.num_blocks, layers)
            else:
                self.counters.count(outcome, self.layer_bytes(body.ref.num_blocks, layers))
        return outcome

    def _get(self, body: Body, read: _Read) -> tuple[Outcome, int]:
        """Read a chunk; what came of it, and the size of its file."""
        held = self._chunks.get(body.ref)
        return (Outcome.MISS, 0) if held is None else (self._load(body, held, read), held.size_bytes)

    def _load(self, body: Body, held: _Held, read: _Read) -> Outcome:
        used_ns = time.time_ns()
        try:
            damage = read(self._path(body.ref), body, used_ns)
        except (FileNotFoundError, NotADirectoryError):
            return self._discard(body.ref, held.serial, None)
        except OSError as error:
            self._complain("read", f"cannot read a chunk: {_folder.reason(error)}")
            return Outcome.FAILED
        if damage is not None:
            return self._discard(body.ref, held.serial, damage)
        with self._changed:
            if (now := self._chunks.get(body.ref)) is not None and now.serial == held.serial:
                self._chunks[body.ref] = now._replace(used_ns=used_ns)
        return Outcome.HIT

    def _discard(self, ref: ChunkRef, serial: int, damage: Damage | None) -> Outcome:
        """Remove a chunk whose file is damaged, or gone (None), unless it was removed or replaced meanwhile."""
        with self._changed:
            held = self._chunks.get(ref)
            if held is None or held.serial != serial:
                return Outcome.MISS
            path = self._retire(ref)
            if path is not None:
                self._space.leave(held.size_bytes)
        if path is not None:  # deleted, not recycled: the fault may be in the disk
            self._space.delete(path, held.size_bytes)
        if damage is None:
            return Outcome.MISS
        self._complain(damage.name, f"removed a damaged chunk: {damage.value}")
        return Outcome.CORRUPT

    def _put(self, body: Body, generation: int) -> tuple[Outcome, int]:
        """Store a chunk; what came of it, and the size of its file."""
        with self._io.prepared(body) as chunk:
            try:
                try:
                    outcome = self._store(chunk, generation)
                except FileNotFoundError:
                    self._revive()
                    outcome = self._store(chunk, generation)
            except OSError as error:
                is_full = error.errno in _folder.NO_ROOM
                self._complain("full" if is_full else "write", f"cannot write a chunk: {_folder.reason(error)}")
                outcome = Outcome.FULL if is_full else Outcome.FAILED
            return outcome, chunk.size_bytes

    def _store(self, chunk: Writable, generation: int) -> Outcome:
        """Write a chunk under a number and give it its name.

        Raises:
            OSError: the system refused; the file is deleted, and its bytes are given back.
        """
        used_ns = time.time_ns()
        size_bytes = chunk.size_bytes
        path = self._space.claim(size_bytes)
        if path is None:
            with self._changed:
                self._recycle(chunk.body.ref)  # without room for two of them, the new one takes the place of the old
            path = self._space.claim(size_bytes)
        if path is None:
            return Outcome.FULL
        is_named = False
        try:
            self._io.write(path, chunk, used_ns)
            is_named = self._publish(path, chunk.body.ref, _Held(next(self._serials), used_ns, size_bytes), generation)
        finally:
            if not is_named:
                with self._changed:
                    self._space.leave(size_bytes)
                self._space.delete(path, size_bytes)
        self._space.trim()
        return Outcome.STORED if is_named else Outcome.FAILED

    def _publish(self, path: Path, ref: ChunkRef, held: _Held, generation: int) -> bool:
        """Make a whole file visible as ``ref``, unless the tier was cleared since ``generation``."""
        final = self._path(ref)
        with self._changed:
            if self._generation != generation:
                return False
            self._recycle(ref)
            try:
                path.rename(final)
            except FileNotFoundError:
                self._make_home()
                final.parent.mkdir(mode=_folder.FOLDER_MODE, exist_ok=True)
                path.rename(final)
            self._space.overwritten(final)
            self._chunks[ref] = held
            return True

    def _recycle(self, ref: ChunkRef) -> None:
        """Turn the file of a chunk, if it is here, into a spare one. Needs the lock; ``trim`` comes after it."""
        held = self._chunks.get(ref)
        if held is not None:
            path = self._retire(ref)
            if path is not None:
                self._space.add_spare(path, held.size_bytes)

    def _retire(self, ref: ChunkRef) -> Path | None:
        """Forget a chunk and give its file a number; None if the file is gone or will not move. Needs the lock."""
        held = self._chunks.pop(ref)
        path = self._space.new_path()
        try:
            try:
                return self._path(ref).rename(path)
            except FileNotFoundError:
                path.parent.mkdir(mode=_folder.FOLDER_MODE, exist_ok=True)
                return self._path(ref).rename(path)
        except (FileNotFoundError, NotADirectoryError):
            self._space.used_bytes -= held.size_bytes
        except OSError as error:  # still there, so still counted: until it moves, or the next start finds it
            self._space.add_stuck(self._path(ref), held.size_bytes)
            self._complain("rename", f"cannot remove a chunk: {_folder.reason(error)}")
        return None

    def _revive(self) -> None:
        """Make the folder again after somebody deleted it.

        Raises:
            TierError: it cannot be made, or another engine has it now.
        """
        with self._changed:
            if not self._lock.is_held():  # all that was known is gone with the lock file
                self._space.used_bytes -= self._forget_home()
                self._space.forget()
            try:
                _folder.make_folder(self._folder)
                if not self._lock.is_held():
                    self._lock.acquire()
            except ConfigError as error:
                raise TierError(str(error)) from error

    def _make_home(self) -> None:
        """Create the folder of the namespace, with notes on what its id stands for and what its chunks look like."""
        self._home.mkdir(mode=_folder.FOLDER_MODE, exist_ok=True)
        notes = {_folder.NAMESPACE_FILE: self._namespace.to_json(), _folder.LAYOUT_FILE: self._layout.to_json()}
        try:
            for name, text in notes.items():
                note = self._home / name
                if not note.exists() or note.read_text() != text + "\n":
                    note.write_text(text + "\n")
        except OSError as error:
            if error.errno not in _folder.NO_ROOM:
                raise

    def _path(self, ref: ChunkRef) -> Path:
        return self._home / _folder.chunk_name(ref)

    def _complain(self, cause: str, what: str) -> None:
        self._throttle.log(cause, "the disk tier in %s %s", self._folder, what)
