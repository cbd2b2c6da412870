"""Chunks held in a tier's folder, and the names of their files.

The dictionary and the names change together, under the tier's lock. Only renames and the creation of folders happen
under it; files are opened, read, written and unlinked without it.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.format.chunkfile import chunk_name
from kvstore.model.chunks import ChunkRef, Presence
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import LAST_END_S, Lifetime
from kvstore.tiers.disk import survey
from kvstore.tiers.disk.folder import (
    DEAD_PREFIX,
    FOLDER_MODE,
    LAYOUT_FILE,
    NAMESPACE_FILE,
    NO_ROOM,
    reason,
)
from kvstore.tiers.disk.space import Space

_NS_PER_S: Final = 1_000_000_000


class Held(NamedTuple):
    """Chunk in the folder.

    Attributes:
        serial: number of its put.
        used_ns: its last use, in ns since 1970.
        size_bytes: the size of its file.
        until_s: the end of its time to live, in seconds since 1970; None for no end.
    """

    serial: int
    used_ns: int
    size_bytes: int
    until_s: int | None = None


class Chunks:
    """Chunks of one namespace. Thread-safe; every method may be called under the lock, which those that change it take.

    Args:
        folder: of the tier.
        namespace: of the chunks.
        layout: of the chunks.
        space: counts the bytes of their files; its lock is the tier's.
        warn: logs a cause and a message.

    Attributes:
        namespace: of the chunks, until ``enter``.
        home: the folder of the namespace.
        generation: counts clears and resets.
    """

    def __init__(
        self,
        folder: Path,
        namespace: Namespace,
        layout: KVLayout,
        space: Space,
        warn: Callable[[str, str], None],
    ) -> None:
        self.namespace = namespace
        self.home = folder / namespace.id.hex()
        self.generation = 0
        self._folder = folder
        self._layout = layout
        self._space = space
        self._changed = space.changed
        self._warn = warn
        self._held: dict[ChunkRef, Held] = {}
        self._serials = itertools.count()
        self._former_homes: dict[Path, int] = {}  # homes from before a reset that must be deleted, and their bytes

    def get(self, ref: ChunkRef) -> Held | None:
        """Return the record of a chunk; None if it is not held."""
        return self._held.get(ref)

    def presence(self, ref: ChunkRef) -> Presence:
        """Tell if a chunk is held, and until when if it has a time to live."""
        held = self._held.get(ref)
        return held is not None and (held.until_s is None or float(held.until_s))

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> set[PrefixKey]:
        """Return the keys of all chunks held."""
        with self._changed:
            return {ref.prefix_key for ref in self._held}

    def path(self, ref: ChunkRef, held: Held) -> Path:
        """Return the path of a chunk's file, which exists as long as this is the chunk's record."""
        return self.home / chunk_name(ref, held.until_s)

    def uses(self) -> list[survey.Use]:
        """Return every chunk held, in no order."""
        with self._changed:
            return [survey.Use(held.used_ns, ref, held.size_bytes, held.until_s) for ref, held in self._held.items()]

    def lifetimes(self) -> list[Lifetime]:
        """Return the times to live of the chunks held that have one."""
        with self._changed:
            return [Lifetime(ref, held.until_s) for ref, held in self._held.items() if held.until_s is not None]

    def is_renamed(self, ref: ChunkRef, held: Held) -> bool:
        """Tell if a chunk's file was renamed since this record."""
        with self._changed:  # or it may have its new name, and not yet its new record
            now = self.get(ref)
        return now is not None and now.serial == held.serial and now.until_s != held.until_s

    def limit(self, lifetimes: Iterable[Lifetime]) -> None:
        """Change the times to live of the chunks held now, by one rename each. One that fails keeps its time."""
        asked = [(one, held) for one in lifetimes if (held := self.get(one.ref)) is not None]
        for (ref, until_s), found in asked:
            with self._changed:
                held = self.get(ref)
                # A late call must not let a chunk stay that was stored again meanwhile.
                if held is None or held.serial != found.serial:
                    continue
                self._rename(ref, held, held._replace(until_s=_whole(until_s)))

    def _rename(self, ref: ChunkRef, held: Held, limited: Held) -> None:
        """Give a chunk's file the name of another end. Needs the lock."""
        if limited.until_s == held.until_s:
            return
        final = self.path(ref, limited)
        try:
            self.path(ref, held).rename(final)
        except OSError as error:
            self._warn("rename", f"cannot change a chunk's time to live: {reason(error)}")
            return
        if self._space.stuck_files:
            self._space.overwritten(final)
        self._held[ref] = limited

    def take_stock(self, found: survey.Survey) -> None:
        """Hold the chunks that a survey found, and delete those over the capacity, other namespaces' chunks first."""
        with self._changed:
            by_use = survey.in_order_of_use(found.own)
            self._held = {
                use.ref: Held(next(self._serials), use.used_ns, use.size_bytes, use.until_s) for use in by_use
            }
            self._notice_clock()
            self._space.used_bytes = sum(use.size_bytes for use in by_use)
            self._space.add_foreign((Path(path), size) for _, path, size in sorted(found.foreign, reverse=True))
            self._space.shrink()
            for use in by_use:
                if self._space.used_bytes <= self._space.capacity_bytes:
                    break
                self.recycle(use.ref)
                self._space.shrink()

    def _notice_clock(self) -> None:
        """Move ends earlier by as much as a clock was set back since the last use of their chunks. Needs the lock."""
        now_ns = time.time_ns()
        ahead = [(ref, held, held.until_s) for ref, held in self._held.items() if held.used_ns > now_ns]
        for ref, held, until_s in ahead:
            if until_s is not None:
                limited = held._replace(used_ns=now_ns, until_s=_whole(until_s - (held.used_ns - now_ns) / _NS_PER_S))
                self._rename(ref, held, limited)
                with suppress(OSError):  # the next start does it again
                    os.utime(self.path(ref, limited), ns=(now_ns, now_ns))

    def publish(
        self, path: Path, ref: ChunkRef, used_ns: int, size_bytes: int, *, generation: int, until_s: float | None = None
    ) -> bool:
        """Make a complete file visible as ``ref``; False after a clear or reset since ``generation``.

        Raises:
            OSError: the file could not be renamed.
        """
        with self._changed:
            if self.generation != generation:
                return False
            self.recycle(ref)
            held = Held(next(self._serials), used_ns, size_bytes, _whole(until_s))
            final = self.path(ref, held)
            try:
                path.rename(final)
            except FileNotFoundError:
                self.make_home()
                final.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
                path.rename(final)
            if self._space.stuck_files:
                self._space.overwritten(final)
            self._held[ref] = held
            return True

    def used(self, ref: ChunkRef, serial: int, used_ns: int) -> None:
        """Note a use, unless the chunk was removed or replaced meanwhile."""
        with self._changed:
            held = self._held.get(ref)
            if held is not None and held.serial == serial:
                self._held[ref] = held._replace(used_ns=used_ns)

    def recycle(self, ref: ChunkRef) -> None:
        """Turn a chunk's file into a spare one, if the chunk is held. ``Space.trim`` must follow later."""
        with self._changed:
            if (held := self._held.get(ref)) is not None and (path := self._retire(ref, held)) is not None:
                self._space.add_spare(path, held.size_bytes)

    def discard(self, ref: ChunkRef, serial: int) -> bool:
        """Delete a chunk whose file is damaged or missing; False if it was removed or replaced meanwhile."""
        with self._changed:
            held = self._held.get(ref)
            if held is None or held.serial != serial:
                return False
            path = self._retire(ref, held)
            if path is not None:
                self._space.leave(held.size_bytes)
        if path is not None:  # not recycled, because the fault may be in the disk
            self._space.delete(path, held.size_bytes)
        return True

    def clear(self, former_home: Path | None = None) -> None:
        """Remove every chunk and delete the files, or delete a home from before a reset.

        The folder is renamed first, so that it is unreachable in one step, also for the next start.

        Raises:
            TierError: the folder refused, and no chunk was removed.
        """
        with self._changed:
            # Not named by the time, because a clock that jumps can repeat a name.
            dead = self._folder / f"{DEAD_PREFIX}{next(self._serials)}"
            try:
                (former_home or self.home).rename(dead)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise TierError(f"cannot clear {self._folder}: {reason(error)}") from error
            dead_bytes = self._former_homes.pop(former_home, 0) if former_home else self._forget_all()
            self._space.leave(dead_bytes)
        shutil.rmtree(dead, ignore_errors=True)
        self._space.left(dead_bytes, dead_bytes - survey.tree_bytes(dead))

    def enter(self, namespace: Namespace) -> None:
        """Drop every chunk and enter another namespace. ``delete_former_homes`` deletes the old files."""
        with self._changed:
            old = self.home
            self.namespace = namespace
            self.home = self._folder / namespace.id.hex()
            self._former_homes[old] = self._forget_all()

    def retry_failed(self) -> None:
        """Try again what failed before: to delete the files from before a reset, and to rename those of dropped chunks.

        Raises:
            TierError: the folder still holds files from before a reset.
        """
        self.delete_former_homes()
        if self._space.stuck_files:
            self._space.move_stuck()

    def delete_former_homes(self) -> None:
        """Delete the files from before a reset.

        Raises:
            TierError: the folder refused.
        """
        for home in list(self._former_homes):
            self.clear(home)

    def forget(self) -> int:
        """Drop every chunk from the dictionary; returns the bytes of their files, which stay counted."""
        with self._changed:
            forgotten_bytes = sum(held.size_bytes for held in self._held.values()) + self._space.forget_stuck()
            self._held.clear()
            return forgotten_bytes

    def make_home(self) -> None:
        """Create the folder of the namespace, with notes of the namespace's fields and of the chunks' layout.

        Raises:
            OSError: the folder cannot be created, or a note cannot be written for another reason than lack of room.
        """
        self.home.mkdir(mode=FOLDER_MODE, exist_ok=True)
        notes = {NAMESPACE_FILE: self.namespace.to_json(), LAYOUT_FILE: self._layout.to_json()}
        try:
            for name, text in notes.items():
                note = self.home / name
                if not note.exists() or note.read_text() != text + "\n":
                    note.write_text(text + "\n")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def _forget_all(self) -> int:
        """Drop every chunk and create the home of later ones; returns the bytes of the old files."""
        self.generation += 1
        forgotten_bytes = self.forget()
        with suppress(OSError):  # the next put creates it
            self.make_home()
        return forgotten_bytes

    def _retire(self, ref: ChunkRef, held: Held) -> Path | None:
        """Drop a chunk and rename its file to a number; None if the file is missing or cannot be renamed."""
        del self._held[ref]
        path, named = self._space.new_path(), self.path(ref, held)
        try:
            try:
                return named.rename(path)
            except FileNotFoundError:
                path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
                return named.rename(path)
        except (FileNotFoundError, NotADirectoryError):
            self._space.used_bytes -= held.size_bytes
        except OSError as error:  # still there, so still counted until it is renamed, or the next start finds it
            self._space.add_stuck(named, held.size_bytes)
            self._warn("rename", f"cannot remove a chunk: {reason(error)}")
        return None


def _whole(until_s: float | None) -> int | None:
    """Return an end in the whole seconds of a name."""
    return None if until_s is None else max(1, math.ceil(min(until_s, LAST_END_S)))
