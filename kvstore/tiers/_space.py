"""The bytes of a tier's folder: who holds them, and who gives way when more are needed."""

from __future__ import annotations

import itertools
import logging
import os
from typing import TYPE_CHECKING

from kvstore.tiers._folder import delete, prune, reason

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable
    from pathlib import Path

logger = logging.getLogger(__name__)

SPARE_FILES = 64
TRIM_FILES = 8  # a call deletes no more than that of what is merely superfluous


class Space:
    """Who holds the bytes of the folder, and who gives way when more are needed.

    ``used_bytes`` counts chunks, spare files, chunks of other namespaces, and files being written or deleted. The state
    changes only under ``changed``, which is the tier's lock; methods that touch the disk must be called without it.
    """

    def __init__(self, capacity_bytes: int, free_folder: Path, changed: threading.Condition) -> None:
        self.used_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._free_folder = free_folder
        self._changed = changed
        self._numbers = itertools.count()
        self._leaving_bytes = 0
        self._spares: dict[Path, int] = {}  # oldest first
        self._foreign: list[tuple[Path, int]] = []  # newest first

    def new_path(self) -> Path:
        """A name in ``.free`` that was never used by this tier."""
        return self._free_folder / str(next(self._numbers))

    def claim(self, size_bytes: int) -> Path | None:
        """A file to write ``size_bytes`` into, paid for: a spare one of about that size, or a new name. None: no room.

        A spare file that is longer is cut first, so that what is given back is really free.
        """
        while True:
            victim = None
            with self._changed:
                spare = self._take_spare(size_bytes)
                if spare is None:
                    if self.used_bytes + size_bytes <= self._capacity_bytes:
                        self.used_bytes += size_bytes
                        return self.new_path()
                    victim = self._take_victim()
                    if victim is None:
                        if not self._leaving_bytes:
                            return None
                        self._changed.wait()  # another thread is deleting: what it frees may be enough
            if spare is not None and (spare[1] <= size_bytes or self._cut(*spare, size_bytes)):
                return spare[0]
            if victim is not None:
                self.delete(*victim)

    def delete(self, path: Path, size_bytes: int) -> None:
        """Delete a file whose bytes were announced by ``leave``; bytes that cannot be deleted stay counted."""
        freed_bytes = 0
        try:
            delete(path)
            freed_bytes = size_bytes
            if path.parent != self._free_folder:
                prune(path.parent)
        except OSError as error:
            logger.debug("could not delete a file of the disk tier: %s", reason(error))
        self.left(size_bytes, freed_bytes)

    def leave(self, size_bytes: int) -> None:
        """Announce that counted bytes are about to be deleted. Needs the lock."""
        self._leaving_bytes += size_bytes

    def left(self, size_bytes: int, freed_bytes: int) -> None:
        """End what ``leave`` announced: ``freed_bytes`` of them are gone."""
        with self._changed:
            self._leaving_bytes -= size_bytes
            self.used_bytes -= freed_bytes
            self._changed.notify_all()

    def add_spare(self, path: Path, size_bytes: int) -> None:
        """Keep a counted file for later use. Needs the lock; ``trim`` bounds their number."""
        self._spares[path] = size_bytes

    def add_foreign(self, chunks: Iterable[tuple[Path, int]]) -> None:
        """Count chunks of other namespaces, the newest first. Needs the lock."""
        self._foreign.extend(chunks)
        self.used_bytes += sum(size for _, size in self._foreign)

    def trim(self) -> None:
        """Delete some of the spare files that are too many, the oldest first; call it where waiting does no harm."""
        for _ in range(TRIM_FILES):
            with self._changed:
                victim = self._take_victim() if len(self._spares) > SPARE_FILES else None
            if victim is None:
                return
            self.delete(*victim)

    def shrink(self) -> None:
        """Delete spare files and foreign chunks until the capacity holds, or until there are none."""
        while True:
            with self._changed:
                victim = self._take_victim() if self.used_bytes > self._capacity_bytes else None
            if victim is None:
                return
            self.delete(*victim)

    def empty(self) -> None:
        """Delete all spare files and foreign chunks."""
        while True:
            with self._changed:
                victim = self._take_victim()
            if victim is None:
                return
            self.delete(*victim)

    def forget(self) -> None:
        """Uncount spare files and foreign chunks: the folder was deleted with them. Needs the lock."""
        self.used_bytes -= sum(self._spares.values()) + sum(size for _, size in self._foreign)
        self._spares.clear()
        self._foreign.clear()

    def _take_spare(self, size_bytes: int) -> tuple[Path, int] | None:
        """The spare file nearest to a size, and the bytes it has. Needs the lock.

        What a shorter one lacks is paid for, and the bytes of a longer one are announced as leaving. One that differs
        by more than a sixteenth is passed over: overwriting is faster than writing anew, but not if much is new.
        """
        near = [
            (abs(size - size_bytes), path)
            for path, size in self._spares.items()
            if 16 * abs(size - size_bytes) <= size_bytes
            and self.used_bytes + max(size_bytes - size, 0) <= self._capacity_bytes
        ]
        if not near:
            return None
        path = min(near, key=lambda found: found[0])[1]
        has_bytes = self._spares.pop(path)
        self.used_bytes += max(size_bytes - has_bytes, 0)
        if has_bytes > size_bytes:
            self.leave(has_bytes)
        return path, has_bytes

    def _cut(self, path: Path, has_bytes: int, size_bytes: int) -> bool:
        """Shorten a spare file that was announced as leaving; one that resists is deleted instead, and False."""
        try:
            os.truncate(path, size_bytes)
        except OSError:
            self.delete(path, has_bytes)
            return False
        self.left(has_bytes, has_bytes - size_bytes)
        return True

    def _take_victim(self) -> tuple[Path, int] | None:
        """The file that gives way first, announced as leaving. Needs the lock."""
        if self._spares:
            path = next(iter(self._spares))
            victim = path, self._spares.pop(path)
        elif self._foreign:
            victim = self._foreign.pop()
        else:
            return None
        self.leave(victim[1])
        return victim
