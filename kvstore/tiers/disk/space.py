"""Accounting of the bytes in a tier's folder, and choice of the files to delete when more are needed."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from kvstore.tiers.disk.folder import delete, prune, reason

logger = logging.getLogger(__name__)

SPARE_FILES = 64
TRIM_FILES = 8  # the maximum of superfluous files that one call deletes


class _Spares:
    """Spare files by age and by size. The cost of a call is independent of their number. Not thread-safe."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._by_age: OrderedDict[Path, int] = OrderedDict()  # a dict would search past all deleted entries
        self._by_size: dict[int, OrderedDict[Path, None]] = {}
        self._sizes: list[int] = []  # sorted; few, because chunks have few lengths

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, path: Path, size_bytes: int) -> None:
        """Add a spare file."""
        same = self._by_size.get(size_bytes)
        if same is None:
            same = self._by_size[size_bytes] = OrderedDict()
            insort(self._sizes, size_bytes)
        same[path] = None
        self._by_age[path] = size_bytes
        self.total_bytes += size_bytes

    def take_oldest(self) -> tuple[Path, int] | None:
        """Take the file that was added first; None if there is none."""
        return self._take(next(iter(self._by_age))) if self._by_age else None

    def take_near(self, size_bytes: int, extra_bytes: int) -> tuple[Path, int] | None:
        """Take the file nearest to a size, within a sixteenth of it, and at most ``extra_bytes`` shorter."""
        at = bisect_left(self._sizes, size_bytes)
        near = [
            size
            for size in self._sizes[max(at - 1, 0) : at + 1]
            if 16 * abs(size - size_bytes) <= size_bytes and size_bytes - size <= extra_bytes
        ]
        if not near:
            return None
        return self._take(next(iter(self._by_size[min(near, key=lambda size: abs(size - size_bytes))])))

    def _take(self, path: Path) -> tuple[Path, int]:
        size_bytes = self._by_age.pop(path)
        same = self._by_size[size_bytes]
        del same[path]
        if not same:
            del self._by_size[size_bytes]
            del self._sizes[bisect_left(self._sizes, size_bytes)]
        self.total_bytes -= size_bytes
        return path, size_bytes


class Space:
    """Counter of the folder's bytes, which makes room when more are needed.

    ``used_bytes`` counts chunks, spare files, chunks of other namespaces, and files being written or deleted. The state
    changes only under ``changed``, the tier's lock. Methods that touch the disk must be called without it.

    Attributes:
        stuck_files: those of dropped chunks that could not be renamed, with their bytes.
    """

    def __init__(self, capacity_bytes: int, free_folder: Path, changed: threading.Condition) -> None:
        self.used_bytes = 0
        self.capacity_bytes = capacity_bytes
        self.changed = changed
        self._free_folder = free_folder
        self._numbers = itertools.count()
        self._leaving_bytes = 0
        self._spares = _Spares()
        self._foreign: list[tuple[Path, int]] = []  # newest first
        self.stuck_files: dict[Path, int] = {}

    def new_path(self) -> Path:
        """Return a name in ``.free`` that this tier has never used."""
        return self._free_folder / str(next(self._numbers))

    def claim(self, size_bytes: int) -> Path | None:
        """Claim ``size_bytes``, and return the file to write them to: a spare one of about that size, or a new name.

        None if there is no room. A longer spare file is cut first, so that the released bytes are really free.

        Raises:
            OSError: a longer file can be neither cut nor deleted.
        """
        refused = 0
        while refused < TRIM_FILES:
            victim = None
            with self.changed:
                spare = self._take_spare(size_bytes)
                if spare is None:
                    if self.used_bytes + size_bytes <= self.capacity_bytes:
                        self.used_bytes += size_bytes
                        return self.new_path()
                    victim = self._take_victim()
                    if victim is None:
                        if not self._leaving_bytes:
                            return None
                        self.changed.wait()  # for another thread's deletion, which may free enough
            if spare is not None and (spare[1] <= size_bytes or self._cut(*spare, size_bytes)):
                return spare[0]
            if victim is not None:
                refused += not self.delete(*victim)
        return None

    def delete(self, path: Path, size_bytes: int) -> bool:
        """Delete a counted file whose bytes ``leave`` announced; False if it cannot be deleted.

        In that case it stays counted and is kept for another attempt, or its bytes would be lost until the next start.
        """
        freed_bytes = 0
        try:
            delete(path)
            freed_bytes = size_bytes
            if path.parent != self._free_folder:
                prune(path.parent)
        except OSError as error:
            logger.debug("could not delete a file of the disk tier: %s", reason(error))
            with self.changed:
                if path.parent == self._free_folder:
                    self.add_spare(path, size_bytes)
                else:
                    self._foreign.insert(0, (path, size_bytes))
        self.left(size_bytes, freed_bytes)
        return freed_bytes > 0

    def leave(self, size_bytes: int) -> None:
        """Announce that counted bytes will be deleted. Takes the lock."""
        with self.changed:
            self._leaving_bytes += size_bytes

    def left(self, size_bytes: int, freed_bytes: int) -> None:
        """End an announcement by ``leave``, of whose bytes ``freed_bytes`` were freed."""
        with self.changed:
            self._leaving_bytes -= size_bytes
            self.used_bytes -= freed_bytes
            self.changed.notify_all()

    def add_spare(self, path: Path, size_bytes: int) -> None:
        """Keep a counted file for reuse. Needs the lock; ``trim`` bounds the number of spare files."""
        self._spares.add(path, size_bytes)

    def add_stuck(self, path: Path, size_bytes: int) -> None:
        """Keep the counted file of a dropped chunk that could not be renamed. Needs the lock."""
        self.stuck_files[path] = size_bytes

    def overwritten(self, path: Path) -> None:
        """Note that another file has taken this name, which replaces a stuck file there. Needs the lock."""
        self.used_bytes -= self.stuck_files.pop(path, 0)

    def forget_stuck(self) -> int:
        """Drop stuck files, whose whole folder is deleted; returns their bytes. Needs the lock."""
        forgotten_bytes = sum(self.stuck_files.values())
        self.stuck_files.clear()
        return forgotten_bytes

    def move_stuck(self) -> None:
        """Try again to turn some stuck files into spare ones, as their bytes would be lost until the next start."""
        with self.changed:
            for path, size_bytes in list(islice(self.stuck_files.items(), TRIM_FILES)):
                spare = self.new_path()
                try:
                    path.rename(spare)
                except (FileNotFoundError, NotADirectoryError):
                    self.overwritten(path)
                except OSError:
                    return
                else:
                    del self.stuck_files[path]
                    self.add_spare(spare, size_bytes)

    def add_foreign(self, chunks: Iterable[tuple[Path, int]]) -> None:
        """Count chunks of other namespaces, the newest first. Needs the lock."""
        self._foreign.extend(chunks)
        self.used_bytes += sum(size for _, size in self._foreign)

    def trim(self) -> None:
        """Delete some spare files above the bound, the oldest first; call it where a wait is harmless."""
        if len(self._spares) > SPARE_FILES:  # mostly not, and writers wait for the lock
            self._delete_victims(TRIM_FILES, lambda: len(self._spares) > SPARE_FILES)

    def shrink(self) -> None:
        """Delete spare files and foreign chunks until the capacity is kept, or all of them were tried."""
        most = len(self._spares) + len(self._foreign)
        self._delete_victims(most, lambda: self.used_bytes > self.capacity_bytes)

    def _delete_victims(self, most: int, is_needed: Callable[[], bool]) -> None:
        for _ in range(most):
            with self.changed:
                victim = self._take_victim() if is_needed() else None
            if victim is None:
                return
            self.delete(*victim)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the spare files."""
        return self._spares.total_bytes

    def give_up_spares(self, wanted_bytes: int) -> None:
        """Delete spare files, the oldest first, until so many bytes are free, or all of them were tried."""
        for _ in range(len(self._spares)):
            with self.changed:
                victim = self._spares.take_oldest() if wanted_bytes > 0 else None
                if victim is None:
                    return
                self.leave(victim[1])
            wanted_bytes -= victim[1] if self.delete(*victim) else 0

    def forget(self) -> None:
        """Uncount spare files and foreign chunks, which were deleted with the folder. Needs the lock."""
        self.used_bytes -= self._spares.total_bytes + sum(size for _, size in self._foreign)
        self._spares = _Spares()
        self._foreign.clear()

    def _take_spare(self, size_bytes: int) -> tuple[Path, int] | None:
        """Take the spare file nearest to a size, and return it with its size. Needs the lock.

        The bytes that a shorter one lacks are counted, and those of a longer one are announced as leaving. A file that
        differs by more than a sixteenth is not taken, because overwriting is faster only if few bytes are new.
        """
        extra_bytes = self.capacity_bytes - self.used_bytes
        found = self._spares.take_near(size_bytes, extra_bytes) if extra_bytes >= 0 else None
        if found is None:
            return None
        path, has_bytes = found
        self.used_bytes += max(size_bytes - has_bytes, 0)
        if has_bytes > size_bytes:
            self.leave(has_bytes)
        return path, has_bytes

    def _cut(self, path: Path, has_bytes: int, size_bytes: int) -> bool:
        """Shorten a spare file that was announced as leaving; if that fails, delete it and return False.

        Raises:
            OSError: the file cannot be deleted either.
        """
        try:
            os.truncate(path, size_bytes)
        except OSError:
            if not self.delete(path, has_bytes):
                raise
            return False
        self.left(has_bytes, has_bytes - size_bytes)
        return True

    def _take_victim(self) -> tuple[Path, int] | None:
        """Take the file to delete first, and announce it as leaving. Needs the lock."""
        victim = self._spares.take_oldest() or (self._foreign.pop() if self._foreign else None)
        if victim is None:
            return None
        self.leave(victim[1])
        return victim
