"""The disk tier: one file per chunk in a folder that one engine owns. ``docs/FORMAT.md`` describes the folder.

- The dictionary of chunks and the names in the folder change together, under one lock, which is never held during I/O
  (``chunks.py``).
- A file is written under a number in ``.free`` and renamed to its chunk's name when it is complete. The file of a
  removed chunk is renamed to a number again and overwritten later, because direct I/O over an existing file is the
  fastest write.
- Bytes are claimed before they are written and released after they are deleted, so the folder never holds more than
  ``used_bytes``. Spare files and chunks of other namespaces are deleted for new chunks before the tier is full.
- A file may be recycled while it is read. Then the checksums do not match, and the dictionary shows that the chunk was
  removed, so the result is a miss, not damage.
- A chunk counts as used when its call began: a prompt's chunks are requested head first, and may complete otherwise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.format.chunkfile import Damage
from kvstore.format.coding import open_coder
from kvstore.format.sealing import open_ring
from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import ClosedError, ConfigError, TierError
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.model.throttle import Throttle
from kvstore.tiers.base import BoundedTier, TierCounters, TierSetup, Transfer, check_layers
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.chunkio import Body, ChunkIO, Writable
from kvstore.tiers.disk.chunks import Chunks
from kvstore.tiers.disk.codedio import CodedIO
from kvstore.tiers.disk.notes import ChunkNotes
from kvstore.tiers.disk.space import Space

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing

logger = logging.getLogger(__name__)

_CLOSE_WAIT_S = 30.0
_GIB = 1 << 30


class DiskTier(BoundedTier):
    """Tier of chunks as files in a folder, for one namespace and one owner at a time.

    A file's mtime is its chunk's last use, so a restart finds the order of use. The lock file, the notes next to the
    chunks and the folders themselves are not counted in ``used_bytes``.

    Args:
        folder: created if missing. Other engines are locked out until ``close``.
        namespace: of the chunks. Chunks of other namespaces are kept while there is room for them.
        layout: of the chunks.
        capacity_bytes: never exceeded.
        direct: True requires that the page cache is bypassed, False forbids it, None probes the folder.
        codec: encodes the chunks, see ``kvstore.format.codecs``. Files encoded by another codec are no chunks to this
            tier; files without a codec are read by any.
        keys: encrypt the chunks, and then only encrypted ones are read; None for no encryption.
        checks_room: require that the filesystem has room for the capacity; False if several tiers share one bound.

    Raises:
        ConfigError: the folder, the capacity, or the codec on this layout cannot be used.
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
        keys: KeyRing | None = None,
        checks_room: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = TierCounters()
        self._folder = folder.absolute()
        self._layout = layout
        coder = open_coder(layout, codec, keys)
        self._io = CodedIO(layout, coder) if coder else ChunkIO(layout)
        self._io.namespace_id = namespace.id
        self._max_sizes = self._io.file_bytes
        self._changed = threading.Condition()
        self._warn = _log_of(self._folder)
        self._space = Space(capacity_bytes, self._folder / _folder.FREE_NAME, self._changed)
        self._chunks = Chunks(self._folder, namespace, layout, self._space, self._warn)
        self._notes = ChunkNotes(self._chunks, layout, self._warn)
        self._running = 0
        self._scanned = False
        self._closed = False
        self._finished = threading.Event()
        self._open(direct, checks_room=checks_room)

    @classmethod
    def open(cls, setup: TierSetup) -> DiskTier:
        """Open the folder that the option ``folder`` names; the registry's factory.

        Also: ``direct``, ``codec``, and ``encryption_keys``, the path of a key file.

        Raises:
            ConfigError: see the class; or ``folder`` is missing, or there are other options.
            FolderOwnedError: another engine uses the folder.
        """
        setup.require_known_options("folder", "direct", "codec", "encryption_keys")
        folder, direct = setup.options.get("folder"), setup.options.get("direct")
        codec = setup.options.get("codec", "none")
        if not isinstance(folder, str | Path) or not isinstance(direct, bool | None) or not isinstance(codec, str):
            raise ConfigError(
                "the disk tier needs the option 'folder' (a path), and may have 'direct' (a bool) and 'codec' (a name)"
            )
        keys = open_ring(setup.options.get("encryption_keys"))
        what = setup.namespace, setup.layout, setup.capacity_bytes
        return cls(Path(folder), *what, direct=direct, codec=codec, keys=keys)

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
            self._io.direct_flag = _folder.direct_flag(self._folder, wanted=direct)
            self._chunks.make_home()
        except OSError as error:
            self._lock.release()
            raise _folder.unusable(self._folder, error) from error
        except ConfigError:
            self._lock.release()
            raise

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Return every chunk held, those of the oldest session first, see ``survey.in_order_of_use``.

        The first call reads the folder and sweeps it; later calls answer from memory, as a restart would.

        Raises:
            TierError: the folder could not be read or swept.
        """
        return [(use.ref, use.size_bytes) for use in survey.in_order_of_use(self.uses())]

    def uses(self) -> list[survey.Use]:
        """Return every chunk held and its last use, in no order, to merge several folders.

        Raises:
            TierError: the folder could not be read or swept.
        """
        with self._operation():
            return self._chunks.uses()

    def trails(self) -> dict[PrefixKey, bytes]:
        """Return the trails of the chunks held that were stored with one; none if the note cannot be read."""
        with self._operation():
            return self._notes.trails()

    def owners(self) -> dict[PrefixKey, bytes]:
        """Return the owners of the chunks held that were stored with one; none if the note cannot be read."""
        with self._operation():
            return self._notes.owners()

    def retain(self, retentions: Sequence[Retention]) -> None:
        """Note which chunks stay until when. A failure is logged, and they stay only until a restart."""
        with self._operation():
            self._notes.retain(retentions)

    def retained(self) -> list[Retention]:
        """Return the retention of the chunks held; none if the note cannot be read."""
        with self._operation():
            return self._notes.retained()

    @property
    def keeps_lifetimes(self) -> bool:
        """True: a file's name has the end of its time to live."""
        return True

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Change the times to live of chunks held, by one rename each. A failure is logged."""
        with self._operation():
            self._chunks.limit(lifetimes)

    def lifetimes(self) -> list[Lifetime]:
        """Return the times to live of the chunks held that have one. Answers from memory."""
        with self._operation():
            return self._chunks.lifetimes()

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if it is held. Answers from memory."""
        with self._operation():
            return [self._chunks.presence(ref) for ref in refs]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; callers on several threads overlap."""
        return self._read(transfers)

    @property
    def reads_layers(self) -> bool:
        """True if layers can be read one by one, which they cannot if a codec encodes the chunks."""
        return not isinstance(self._io, CodedIO)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Read some layers of chunks, one chunk after the other; callers on several threads overlap."""
        check_layers(self._layout, layers)
        return self._read(transfers, layers if self.reads_layers else None)

    def _read(self, transfers: Sequence[Transfer], layers: range | None = None) -> list[Outcome]:
        bodies = [self._io.check(transfer) for transfer in transfers]
        is_last = layers is None or layers.stop == self._layout.num_layers
        with self._operation():
            return [self.counters.count(*self._get(body, layers), is_last=is_last) for body in bodies]

    def layer_bytes(self, num_blocks: int, layers: range) -> int:
        """Return the bytes of these layers; with a codec, those of the largest possible file."""
        if not self.reads_layers:
            return self.stored_bytes(num_blocks)
        begin, end = self._io.layer_range(num_blocks, layers)
        return end - begin

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, one after the other; callers on several threads overlap.

        Raises:
            TierError: the folder was deleted, and cannot be created again or belongs to another engine now; or it
                still holds chunks from before a ``reset``.
        """
        bodies = [self._io.check(transfer) for transfer in transfers]
        with self._operation():
            self._chunks.retry_failed()
            with self._changed:  # both at one moment, as a later reset makes another generation
                generation, namespace_id = self._chunks.generation, self._io.namespace_id
            outcomes = []
            for transfer, body in zip(transfers, bodies, strict=True):
                is_ours = transfer.belongs_to(namespace_id)
                put = self._put(body, generation, transfer) if is_ours else (Outcome.FAILED, 0)
                outcomes.append(self.counters.count(*put))
            return outcomes

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks, by one rename each. A later ``put`` overwrites or deletes their files."""
        with self._operation():
            for ref in refs:
                self._chunks.recycle(ref)

    def clear(self) -> None:
        """Remove every chunk of the namespace; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the folder refused, and no chunk was removed.
        """
        with self._operation():
            self._chunks.clear()

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk and enter another namespace; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the folder did not delete the old chunks. Every ``put`` tries again before it stores.
        """
        with self._operation():
            with self._changed:
                self._io.namespace_id = namespace.id
                self._chunks.enter(namespace)
            self._chunks.delete_former_homes()

    def stored_bytes(self, num_blocks: int) -> int:
        """Return the file size of a chunk of ``num_blocks`` blocks; with a codec, the largest possible one."""
        return self._max_sizes[num_blocks]

    def size_of(self, ref: ChunkRef) -> int:
        """Return the size of the chunk's file. Readable after ``close``."""
        held = self._chunks.get(ref)
        return held.size_bytes if held else self._max_sizes[ref.num_blocks]

    @property
    def used_bytes(self) -> int:
        """Bytes of all chunk files: held, spare, foreign, being written or deleted. Readable after ``close``."""
        return self._space.used_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of files that are kept to be overwritten. Readable after ``close``."""
        return self._space.spare_bytes

    def drop_spares(self, wanted_bytes: int) -> None:
        """Delete spare files, for other users of the disk."""
        with self._operation():
            self._space.give_up_spares(wanted_bytes)

    def close(self) -> None:
        """Wait for calls under way, then release the folder for other engines.

        Waits 30 seconds at most. The folder stays locked until the last call has ended, as that call may still write.
        """
        with self._changed:
            if not self._closed and not self._running:
                self._finish()
            self._closed = True
        if not self._finished.wait(_CLOSE_WAIT_S):
            logger.warning(
                "the disk tier in %s did not close within %.0f s: a call has not ended, and the folder stays locked "
                "until it does",
                self._folder,
                _CLOSE_WAIT_S,
            )

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Keep the folder locked during a public call, and scan it before the first one."""
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
        """Delete the spare files and release the folder, once no call can follow."""
        with suppress(OSError):
            for spare in os.scandir(self._folder / _folder.FREE_NAME):
                _folder.delete(Path(spare.path))
        self._lock.release()
        self._io.close()
        self._finished.set()

    def _scan(self) -> None:
        """Read and sweep the folder. Holds the lock, as no call can be answered before."""
        try:
            found = survey.survey(self._folder, self._chunks.home.name, self._io.may_be)
        except OSError as error:
            raise TierError(f"cannot read the disk folder {self._folder}: {_folder.reason(error)}") from error
        self.counters.swept += found.swept
        self._chunks.take_stock(found)
        self._scanned = True

    def _get(self, body: Body, layers: range | None) -> tuple[Outcome, int]:
        """Read a chunk, or some layers of it; returns the outcome, and the size of its file or of these layers."""
        ref = body.ref
        held = self._chunks.get(ref)
        if held is None:
            return Outcome.MISS, 0
        # A clock that was set back is noticed at the next start, which moves ends earlier.
        used_ns = max(time.time_ns(), held.used_ns if held.until_s is not None else 0)
        damage = None
        try:
            damage = self._io.read(self._chunks.path(ref, held), body, used_ns, layers)
            if damage is None:
                self._chunks.used(ref, held.serial, used_ns)
                return Outcome.HIT, self.layer_bytes(ref.num_blocks, layers) if layers else held.size_bytes
        except (FileNotFoundError, NotADirectoryError):
            if self._chunks.is_renamed(ref, held):
                return self._get(body, layers)
        except OSError as error:
            self._warn("read", f"cannot read a chunk: {_folder.reason(error)}")
            return Outcome.FAILED, 0
        if not self._chunks.discard(ref, held.serial) or damage is None:
            return Outcome.MISS, 0
        self._warn(damage.name, f"removed a chunk that cannot be read: {damage.value}")
        return (Outcome.MISS if damage is Damage.SEAL else Outcome.CORRUPT), 0

    def _put(self, body: Body, generation: int, transfer: Transfer) -> tuple[Outcome, int]:
        """Store a chunk; returns the outcome, and the size of its file."""
        with self._io.prepared(body) as chunk:
            try:
                try:
                    outcome = self._store(chunk, generation, transfer.until_s)
                except FileNotFoundError:
                    self._revive()
                    outcome = self._store(chunk, generation, transfer.until_s)
                if outcome is Outcome.STORED:
                    self._notes.add(transfer)
            except OSError as error:
                is_full = error.errno in _folder.NO_ROOM
                self._warn("full" if is_full else "write", f"cannot write a chunk: {_folder.reason(error)}")
                outcome = Outcome.FULL if is_full else Outcome.FAILED
            return outcome, chunk.size_bytes

    def _store(self, chunk: Writable, generation: int, until_s: float | None) -> Outcome:
        """Write a chunk under a number, then give the file its name.

        Raises:
            OSError: the system refused; the file is deleted, and its bytes are released.
        """
        used_ns = time.time_ns()
        ref, size_bytes = chunk.body.ref, chunk.size_bytes
        path = self._space.claim(size_bytes)
        if path is None:
            self._chunks.recycle(ref)  # without room for both, the new one replaces the old
            path = self._space.claim(size_bytes)
        if path is None:
            return Outcome.FULL
        is_named = False
        try:
            self._io.write(path, chunk, used_ns)
            is_named = self._chunks.publish(path, ref, used_ns, size_bytes, generation=generation, until_s=until_s)
        finally:
            if not is_named:
                self._space.leave(size_bytes)
                self._space.delete(path, size_bytes)
        self._space.trim()
        return Outcome.STORED if is_named else Outcome.FAILED

    def _revive(self) -> None:
        """Create the folder again after it was deleted.

        Raises:
            TierError: it cannot be created, or another engine has it now.
        """
        with self._changed:
            if not self._lock.is_held():  # the chunks were deleted with the lock file
                self._space.used_bytes -= self._chunks.forget()
                self._space.forget()
            try:
                _folder.make_folder(self._folder)
                if not self._lock.is_held():
                    self._lock.acquire()
            except ConfigError as error:
                raise TierError(str(error)) from error


def _log_of(folder: Path) -> Callable[[str, str], None]:
    """Return a function that logs a cause and a message. It refers to no tier: in a cycle, a closed one would stay."""
    throttle = Throttle(logger)
    return lambda cause, what: throttle.log(cause, "the disk tier in %s %s", folder, what)
