"""Catalog: the chunks that the manifests name, in 22 bytes each without an end, for lookups that send no request.

A sorted array holds most of them. Changes go to a dictionary before it, which is merged when it has grown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

import numpy as np

from kvstore.index.trails import RemoteTrails
from kvstore.model.chunks import ChunkRef, Presence, chunk_of
from kvstore.tiers.base import MAX_NEAREST
from kvstore.tiers.object.manifest import (
    ENDLESS,
    NAME_TYPE,
    NO_NAMES,
    NO_TIMES,
    Ends,
    Manifest,
    Names,
    Times,
    name_of,
    ref_of,
)

MAX_TRAILS: Final = 1 << 16  # of the chunks stored last; about 40 MB with 16 blocks a chunk
_MAX_CHANGES: Final = 1 << 16
_BATCH: Final = 1 << 11  # names with ends that are taken up at once, in a few milliseconds
_GONE: Final = -1


class Catalog:
    """Known chunks of one home, when each was used last, and the trails of some. Thread-safe; one thread applies.

    No lookup waits for a merge, which takes a third of a second for a million names.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for memory only
        self._names, self._used_s = NO_NAMES, NO_TIMES
        self._merging: dict[bytes, int] = {}  # changes on their way into the arrays
        self._changes: dict[bytes, int] = {}  # by name: when it was used last, or _GONE
        self._trails = RemoteTrails(MAX_TRAILS)
        self._ends: dict[bytes, Ends] = {}  # of the chunks that have any

    def apply(self, manifest: Manifest) -> None:
        """Take up what a manifest says."""
        is_large = len(manifest.stored) > _MAX_CHANGES
        if is_large:
            self._merge()  # first, or earlier changes would count as later ones
        step = _BATCH if self._ends or len(manifest.ends) else max(1, len(manifest.stored))
        for begin in range(0, len(manifest.stored), step):
            part = slice(begin, begin + step)
            names = manifest.stored[part].tolist()
            with self._lock:
                self._take_ends(names, manifest.ends[part])  # first, so that no chunk is there without its end
                if not is_large:
                    self._changes.update(zip(names, manifest.used_s[part].tolist(), strict=True))
        if is_large:
            self._merge(manifest.stored, manifest.used_s)
        with self._lock:
            for trail in manifest.trails:
                self._trails.add(trail, [trail])
            for name in manifest.removed.tolist():
                self._discard(name)
        self.shrink()

    def shrink(self) -> None:
        """Merge the changes if there are many. Call it now and then, on the thread that applies."""
        if len(self._changes) > _MAX_CHANGES:
            self._merge()

    def touch(self, refs: Iterable[ChunkRef], used_s: int) -> None:
        """Note that chunks were used, those that are known."""
        names = [_key(ref) for ref in refs]
        with self._lock:
            for name, is_there in zip(names, self._hold(names), strict=True):
                if is_there:
                    self._changes[name] = max(used_s, self._changes.get(name, 0))

    def _take_ends(self, names: Sequence[bytes], ends: Times) -> None:
        if self._ends or len(ends):
            each = map(Ends._make, ends.tolist()) if len(ends) else repeat(ENDLESS)
            for name, told in zip(names, each, strict=False):
                self._set_ends(name, self._ends.get(name, ENDLESS).joined(told))

    def _set_ends(self, name: bytes, ends: Ends) -> None:
        if ends == ENDLESS:
            self._ends.pop(name, None)
        else:
            self._ends[name] = ends

    def add(self, ref: ChunkRef, used_s: int, trail: bytes, ends: Ends = ENDLESS) -> None:
        """Note a chunk that was stored, or the ends of one that is there."""
        with self._lock:
            self._changes[_key(ref)] = used_s
            self._set_ends(_key(ref), ends)
            if trail:
                self._trails.add(trail, [trail])

    def discard(self, ref: ChunkRef) -> None:
        """Note that a chunk is gone."""
        with self._lock:
            self._discard(_key(ref))

    def holds(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Tell for each chunk if it is there."""
        names = [_key(ref) for ref in refs]
        with self._lock:
            return self._hold(names)

    def presence(self, refs: Sequence[ChunkRef], now_s: float) -> list[Presence]:
        """Tell for each chunk if it is there; the end of its time to live if it has one that is not over."""
        names = [_key(ref) for ref in refs]
        with self._lock:
            there = self._hold(names)
            if not self._ends:
                return [*there]
            ends = [self._ends.get(name, ENDLESS).end_s for name in names]
        return [
            is_there and (not end_s or (end_s > now_s and float(end_s)))
            for is_there, end_s in zip(there, ends, strict=True)
        ]

    def ends(self, ref: ChunkRef) -> Ends:
        """Return the ends of a chunk."""
        with self._lock:
            return self._ends.get(_key(ref), ENDLESS)

    def used_s(self, ref: ChunkRef) -> int | None:
        """Return when a chunk was used last, in seconds since 1970; None if it is not there."""
        name = _key(ref)
        with self._lock:
            changed = self._changed(name)
            if changed is not None:
                return None if changed == _GONE else changed
            at = int(np.searchsorted(self._names, np.array(name, NAME_TYPE)))
            is_there = at < len(self._names) and self._names[at] == name
            return int(self._used_s[at]) if is_there else None

    def nearest(self, trail: bytes, now_s: float) -> tuple[bytes, ...]:
        """Return the trails of known chunks that share most blocks with one; forgets those of chunks that are over."""
        with self._lock:
            while True:
                near = self._trails.closest(trail, MAX_NEAREST)
                ends = {chunk_of(found): self._ends.get(_key(chunk_of(found)), ENDLESS).end_s for found in near}
                over = [ref for ref, end_s in ends.items() if 0 < end_s <= now_s]
                if not over:
                    return near
                for ref in over:
                    self._trails.forget(ref)

    def snapshot(self) -> tuple[Names, Times, dict[bytes, Ends]]:
        """Return all names in order, when each was used last, and the ends of those that have any, by name.

        Call it on the thread that applies.
        """
        self._merge()
        with self._lock:
            return self._names, self._used_s, dict(self._ends)

    def trails(self) -> tuple[bytes, ...]:
        """Return the known trails, those of the chunks stored last at the end."""
        with self._lock:
            return tuple(self._trails)

    def _changed(self, name: bytes) -> int | None:
        changed = self._changes.get(name)
        return self._merging.get(name) if changed is None else changed

    def _hold(self, names: Sequence[bytes]) -> list[bool]:
        answers = [self._changed(name) for name in names]
        unknown = [name for name, answer in zip(names, answers, strict=True) if answer is None]
        found = iter(self._in_arrays(unknown) if unknown else ())
        return [next(found) if answer is None else answer != _GONE for answer in answers]

    def _in_arrays(self, names: Sequence[bytes]) -> list[bool]:
        if not len(self._names):
            return [False] * len(names)
        wanted = np.array(names, NAME_TYPE)
        at = np.minimum(np.searchsorted(self._names, wanted), len(self._names) - 1)
        there: list[bool] = (self._names[at] == wanted).tolist()
        return there

    def _discard(self, name: bytes) -> None:
        self._changes[name] = _GONE
        self._ends.pop(name, None)
        self._trails.forget(ref_of(name))

    def _merge(self, names: Names = NO_NAMES, used_s: Times = NO_TIMES) -> None:
        """Bring the names given, and all changes, into the sorted arrays. The latest word on a name counts."""
        with self._lock:
            self._merging, self._changes = self._changes, {}
        merged = _merged((self._names, self._used_s), (names, used_s), self._merging)
        with self._lock:
            (self._names, self._used_s), self._merging = merged, {}


def _merged(old: tuple[Names, Times], new: tuple[Names, Times], changes: Mapping[bytes, int]) -> tuple[Names, Times]:
    """Return names in order and when each was used, of three sources of which the later ones count."""
    changed = np.array(list(changes), NAME_TYPE)
    changed_s = np.array(list(changes.values()), np.int64)
    names = np.concatenate((old[0], new[0], changed))
    used_s = np.concatenate((old[1].astype(np.int64), new[1].astype(np.int64), changed_s))
    order = np.argsort(names, kind="stable")
    names, used_s = names[order], used_s[order]
    keeps = used_s != _GONE
    keeps[:-1] &= names[1:] != names[:-1]  # of equal names the last one
    return names[keeps], used_s[keeps].astype(np.uint32)


def _key(ref: ChunkRef) -> bytes:
    """Return a name as numpy returns it, which lacks the zeros at its end."""
    return name_of(ref).rstrip(b"\0")
