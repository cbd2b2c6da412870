"""Catalog: the chunks that the manifests name, in 22 bytes each, for lookups that send no request.

A sorted array holds most of them. Changes go to a dictionary before it, which is merged when it has grown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvstore.index.trails import RemoteTrails
from kvstore.model.chunks import ChunkRef
from kvstore.tiers.base import MAX_NEAREST
from kvstore.tiers.object.manifest import NAME_TYPE, NO_NAMES, NO_TIMES, Manifest, Names, Times, name_of, ref_of

MAX_TRAILS: Final = 1 << 16  # of the chunks stored last; about 40 MB with 16 blocks a chunk
_MAX_CHANGES: Final = 1 << 16
_GONE: Final = -1


class Catalog:
    """Known chunks of one home, when each was used last, and the trails of some. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for memory only; a merge of a million names takes 0.3 s
        self._names, self._used_s = NO_NAMES, NO_TIMES
        self._changes: dict[bytes, int] = {}  # by name: when it was used last, or _GONE
        self._trails = RemoteTrails(MAX_TRAILS)

    def apply(self, manifest: Manifest) -> None:
        """Take up what a manifest says."""
        with self._lock:
            if len(manifest.stored) > _MAX_CHANGES:
                self._merge(NO_NAMES, NO_TIMES)  # first, or earlier changes would count as later ones
                self._merge(manifest.stored, manifest.used_s)
            else:
                self._changes.update(zip(manifest.stored.tolist(), manifest.used_s.tolist(), strict=True))
            for trail in manifest.trails:
                self._trails.add(trail, [trail])
            for name in manifest.removed.tolist():
                self._discard(name)
            if len(self._changes) > _MAX_CHANGES:
                self._merge(NO_NAMES, NO_TIMES)

    def touch(self, names: Iterable[bytes], used_s: int) -> None:
        """Note that known chunks were used."""
        names = list(names)
        with self._lock:
            for name, is_there in zip(names, self._hold(names), strict=True):
                if is_there:
                    self._changes[name] = max(used_s, self._changes.get(name, 0))

    def add(self, ref: ChunkRef, used_s: int, trail: bytes) -> None:
        """Note a chunk that was stored."""
        with self._lock:
            self._changes[_key(ref)] = used_s
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

    def used_s(self, ref: ChunkRef) -> int | None:
        """Return when a chunk was used last, in seconds since 1970; None if it is not there."""
        name = _key(ref)
        with self._lock:
            changed = self._changes.get(name)
            if changed is not None:
                return None if changed == _GONE else changed
            at = int(np.searchsorted(self._names, np.array(name, NAME_TYPE)))
            is_there = at < len(self._names) and self._names[at] == name
            return int(self._used_s[at]) if is_there else None

    def nearest(self, trail: bytes) -> tuple[bytes, ...]:
        """Return the trails of known chunks that share most blocks with one."""
        with self._lock:
            return self._trails.closest(trail, MAX_NEAREST)

    def snapshot(self) -> tuple[Names, Times]:
        """Return all names in order, and when each was used last."""
        with self._lock:
            self._merge(NO_NAMES, NO_TIMES)
            return self._names, self._used_s

    def trails(self) -> tuple[bytes, ...]:
        """Return the known trails, those of the chunks stored last at the end."""
        with self._lock:
            return tuple(self._trails)

    def _hold(self, names: Sequence[bytes]) -> list[bool]:
        changes = self._changes
        answers = [changes.get(name) for name in names]
        unknown = [name for name, answer in zip(names, answers, strict=True) if answer is None]
        found = iter(self._in_base(unknown))
        return [next(found) if answer is None else answer != _GONE for answer in answers]

    def _in_base(self, names: Sequence[bytes]) -> list[bool]:
        if not len(self._names):
            return [False] * len(names)
        wanted = np.array(names, NAME_TYPE)
        at = np.minimum(np.searchsorted(self._names, wanted), len(self._names) - 1)
        there: list[bool] = (self._names[at] == wanted).tolist()
        return there

    def _discard(self, name: bytes) -> None:
        self._changes[name] = _GONE
        self._trails.forget(ref_of(name))

    def _merge(self, names: Names, used_s: Times) -> None:
        """Bring all changes, and the names given, into the sorted array. The latest word on a name counts."""
        changed = np.array(list(self._changes), NAME_TYPE)
        times = np.array(list(self._changes.values()), np.int64)
        if len(changed) or len(names):
            every = np.concatenate((self._names, names, changed))
            used = np.concatenate((self._used_s.astype(np.int64), used_s.astype(np.int64), times))
            order = np.argsort(every, kind="stable")
            every, used = every[order], used[order]
            is_last = np.append(every[1:] != every[:-1], [True])  # of equal names, the one that came last
            keeps = is_last & (used != _GONE)
            self._names, self._used_s = every[keeps], used[keeps].astype(np.uint32)
            self._changes = {}


def _key(ref: ChunkRef) -> bytes:
    """Return a name as numpy returns it, which lacks the zeros at its end."""
    return name_of(ref).rstrip(b"\0")
