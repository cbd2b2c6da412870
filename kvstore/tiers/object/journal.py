"""Journal: what this engine has stored, used and removed, on its way into manifests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from kvstore.model.chunks import ChunkRef
from kvstore.tiers.object.manifest import ENDLESS, NAME_BYTES, NAME_TYPE, Ends, Manifest, name_of
from kvstore.tiers.object.names import Home, Stamps
from kvstore.tiers.object.store import Store

MAX_NAMES: Final = 1 << 16  # that wait; a sweep finds the chunks beyond that
MAX_AGAIN: Final = 1 << 12  # that are written, and read by all engines, again
MAX_SMALL: Final = 64  # manifests of one engine, before they become one


class _Stored(NamedTuple):
    """Chunk that was stored.

    Attributes:
        used_s: when it was used last, in seconds since 1970.
        trail: its trail; empty if it is unknown.
        ends: of its time to live.
    """

    used_s: int
    trail: bytes
    ends: Ends


class _Notes:
    """Names of chunks, each in one of three roles. Not thread-safe."""

    def __init__(self) -> None:
        self.stored: dict[bytes, _Stored] = {}
        self.touched: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self.stored) + len(self.touched) + len(self.removed)

    def store(self, name: bytes, chunk: _Stored) -> None:
        """Note a chunk that was stored, or has another end; it keeps its trail."""
        self.removed.pop(name, None)
        known = self.stored.get(name)
        self.stored[name] = chunk if chunk.trail or known is None else chunk._replace(trail=known.trail)

    def remove(self, name: bytes) -> None:
        """Note a chunk that is gone."""
        self.stored.pop(name, None)
        self.touched.pop(name, None)
        self.removed[name] = None

    def add(self, later: _Notes) -> None:
        """Take up later notes."""
        for name, chunk in later.stored.items():
            self.store(name, chunk)
        for name in later.removed:
            self.remove(name)
        self.touched.update(later.touched)

    def manifests(self) -> Iterator[Manifest]:
        """Yield the notes as manifests, one for the chunks with ends, which older versions would not understand."""
        ending = {name: chunk for name, chunk in self.stored.items() if chunk.ends != ENDLESS}
        endless = {name: chunk for name, chunk in self.stored.items() if name not in ending}
        if endless or self.touched or self.removed:
            touched, removed = (np.array(list(names), NAME_TYPE) for names in (self.touched, self.removed))
            yield replace(_manifest(endless), touched=touched, removed=removed)
        if ending:
            ends = np.array([chunk.ends for chunk in ending.values()], np.uint32)
            yield replace(_manifest(ending), ends=ends)


def _manifest(stored: Mapping[bytes, _Stored]) -> Manifest:
    return Manifest(
        np.array(list(stored), NAME_TYPE),
        np.array([chunk.used_s for chunk in stored.values()], np.uint32),
        trails=tuple(chunk.trail for chunk in stored.values() if chunk.trail),
    )


class Journal:
    """Notes of this engine about one home. Thread-safe; one thread writes.

    A writer leaves at most ``MAX_SMALL`` small manifests: then it writes one with all their notes, and deletes them.

    Args:
        store: for the manifests.
        home: of the chunks.
        stamps: for the names of manifests.
    """

    def __init__(self, store: Store, home: Home, stamps: Stamps) -> None:
        self._store = store
        self._home = home
        self._stamps = stamps
        self._lock = threading.Lock()  # of what waits
        self._waiting = _Notes()
        self._sum = _Notes()  # of the manifests in _written
        self._written: list[str] = []

    def store(self, ref: ChunkRef, used_s: int, trail: bytes, ends: Ends = ENDLESS) -> None:
        """Note a chunk that was stored, or has another end."""
        with self._lock:
            if len(self._waiting) < MAX_NAMES:
                self._waiting.store(name_of(ref), _Stored(used_s, trail, ends))

    def touch(self, ref: ChunkRef) -> None:
        """Note that a chunk was used."""
        with self._lock:
            if len(self._waiting) < MAX_NAMES:
                self._waiting.touched[name_of(ref)] = None

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Note that chunks are gone."""
        with self._lock:
            for ref in refs:
                if len(self._waiting) < MAX_NAMES:
                    self._waiting.remove(name_of(ref))

    @property
    def writer(self) -> str:
        """Digits in the names of this engine's manifests."""
        return self._stamps.writer

    def forget(self, names: Iterable[bytes]) -> None:
        """Leave removed chunks out of later manifests. Call it on the thread that writes."""
        for name in names:
            self._sum.remove(name.ljust(NAME_BYTES, b"\0"))
            del self._sum.removed[name.ljust(NAME_BYTES, b"\0")]

    def write(self) -> None:
        """Write what waits, if anything does.

        Raises:
            TierError: the storage failed; the notes wait for the next call.
        """
        with self._lock:
            notes, self._waiting = self._waiting, _Notes()
        if not len(notes):
            return
        try:
            self._written += self._write(notes)
        except BaseException:
            with self._lock:
                later, self._waiting = self._waiting, notes
                self._waiting.add(later)
            raise
        self._sum.add(notes)
        if len(self._sum) > MAX_AGAIN:
            self._written, self._sum = [], _Notes()  # they stay as they are
        elif len(self._written) >= MAX_SMALL:
            small, self._written = self._written, []
            self._written += self._write(self._sum)
            self._store.delete(small)

    def _write(self, notes: _Notes) -> list[str]:
        names = []
        for manifest in notes.manifests():
            names.append(self._home.log + self._stamps.next())
            self._store.write(names[-1], manifest.encode())
        return names
