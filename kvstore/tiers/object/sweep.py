"""Sweep: keeps a storage that nobody owns within a size and an age, and turns its manifests into one.

It runs beside engines. What it removes it first says in a manifest, which they read within seconds; an engine that asks
for such a chunk all the same has a miss. Two sweeps at once would do no harm, but a lock keeps the second one from
doing the work again.
"""

from __future__ import annotations

import json
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.format.chunkfile import END_BYTES, end_of
from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.model.errors import ConfigError, TierError
from kvstore.tiers.object.catalog import MAX_TRAILS, Catalog
from kvstore.tiers.object.folder import is_part
from kvstore.tiers.object.log import EVERY_S
from kvstore.tiers.object.manifest import ENDLESS, NAME_TYPE, Manifest, Names, Times, name_of, ref_of
from kvstore.tiers.object.names import (
    LOCK_NAME,
    Home,
    Place,
    Stamps,
    is_probe,
    parse_home,
    parse_place,
    parse_stamp,
    stamp_at,
)
from kvstore.tiers.object.reader import OVERLAP_S, RELOAD_AFTER_S, LogReader
from kvstore.tiers.object.store import MAX_DELETED, FullError, Store, is_current

LOCKED_S: Final = 120.0  # without a sign of life, after which another sweep takes over
GRACE_S: Final = 2 * EVERY_S + 1  # between the manifest of removals and the removals
MANIFESTS_STAY_S: Final = RELOAD_AFTER_S + OVERLAP_S  # after which every engine has read them, or reads all again
_LATE_S: Final = 60.0  # by which a listing may be older than what the manifests say
_PART_STAYS_S: Final = 3600.0
_SESSION_S: Final = 600  # chunks used within so many seconds of each other belong together: the last ones go first
_READERS: Final = 8
_GONE_BATCH: Final = 1 << 15  # names in a manifest of removals

Tick = Callable[[int, int], None]
Bytes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Limits:
    """Bounds of a storage; None for none.

    Attributes:
        max_bytes: of all chunks together.
        max_age_s: since a chunk was used last.
    """

    max_bytes: int | None = None
    max_age_s: float | None = None


@dataclass(frozen=True)
class SweepReport:
    """Result of a sweep, or of a dry run what it would do.

    Attributes:
        chunks: that were there.
        size_bytes: of them.
        removed_chunks: because of a limit, or because their time to live is over.
        removed_bytes: of them.
        found_chunks: that no manifest named, such as those of an engine that was killed; they are found from now on.
        lost_chunks: that a manifest named and that are gone.
        garbage_objects: of cleared namespaces, and of writers that were killed.
        garbage_bytes: of them.
        manifests: that became one.
        is_dry: nothing was changed.
    """

    chunks: int = 0
    size_bytes: int = 0
    removed_chunks: int = 0
    removed_bytes: int = 0
    found_chunks: int = 0
    lost_chunks: int = 0
    garbage_objects: int = 0
    garbage_bytes: int = 0
    manifests: int = 0
    is_dry: bool = False


@dataclass
class _Stock:
    """Objects of one home in the storage; a chunk takes 30 bytes."""

    names: bytearray = field(default_factory=bytearray)
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    written: array[int] = field(default_factory=lambda: array("I"))
    others: list[tuple[str, int]] = field(default_factory=list)  # manifests, with their bytes

    def add(self, ref: ChunkRef, size_bytes: int, written_s: float) -> None:
        """Add a chunk."""
        self.names += name_of(ref)
        self.sizes.append(size_bytes)
        self.written.append(int(written_s))

    def arrays(self) -> tuple[Names, Bytes, Times]:
        """Return names in order, sizes, and when each was written."""
        names = np.frombuffer(bytes(self.names), NAME_TYPE)
        order = np.argsort(names)
        sizes, written = np.array(self.sizes, np.uint64), np.array(self.written, np.uint32)
        return names[order], sizes[order], written[order]


@dataclass(frozen=True)
class _Part:
    """Home in a sweep: its chunks in order of their names, and what the log says of them.

    Attributes:
        home: of the chunks.
        reader: of its log.
        bases: names of all bases, older ones included.
        names: of the chunks in the storage.
        sizes: of each in bytes.
        used_s: when each was used last.
        found: tells for each of them if no manifest named it.
        lost: names of chunks that are gone.
        ends: ``Ends`` of each.
    """

    home: Home
    reader: LogReader
    bases: list[str]
    names: Names
    sizes: Bytes
    used_s: Times
    found: npt.NDArray[np.bool_]
    lost: Names
    ends: Times

    def manifests(self, chosen: npt.NDArray[np.bool_]) -> tuple[Manifest, Manifest | None]:
        """Return a manifest of some chunks without ends, and one of those with ends, if there are any."""
        has_ends = chosen & self.ends.any(axis=1)
        endless = chosen & ~has_ends
        ending = Manifest(self.names[has_ends], self.used_s[has_ends], ends=self.ends[has_ends])
        return Manifest(self.names[endless], self.used_s[endless]), ending if has_ends.any() else None


def sweep(
    store: Store, limits: Limits, *, dry_run: bool = False, tick: Tick = lambda _total, _size: None
) -> SweepReport:
    """Remove garbage, keep to the limits, and compact the log of every namespace.

    Args:
        store: of the objects.
        limits: to keep to.
        dry_run: only report.
        tick: called for each object that is removed, with their number and its bytes.

    Raises:
        ConfigError: another sweep is under way.
        TierError: the storage failed; what was done stays done.
    """
    if dry_run:
        return _Sweep(store, limits, tick, lambda: None).run(dry_run=True)
    with _locked(store) as renew:
        return _Sweep(store, limits, tick, renew).run(dry_run=False)


class _Sweep:
    """One run."""

    def __init__(self, store: Store, limits: Limits, tick: Tick, renew: Callable[[], None]) -> None:
        self._store = store
        self._limits = limits
        self._tick = tick
        self._renew = renew
        self._stamps = Stamps()
        self._begin_s = time.time()
        self._garbage: list[tuple[str, int]] = []
        self._announced: set[str] = set()  # names of this sweep's manifests

    def run(self, *, dry_run: bool) -> SweepReport:
        """Sweep. Returns what was done, or would be."""
        stocks = self._list()
        parts = [self._examine(home, stock) for home, stock in stocks.items()]
        leaving = self._choose(parts)
        report = self._report(parts, leaving, is_dry=dry_run)
        if not dry_run:
            self._carry_out(parts, leaving, report.removed_chunks + report.garbage_objects)
        return report

    def _list(self) -> dict[Home, _Stock]:
        """List all objects. Returns the chunks of the current epochs; the rest of other epochs is garbage."""
        stocks: dict[Home, _Stock] = {}
        for number, (name, size_bytes, written_s) in enumerate(self._store.list("")):
            home, place = parse_home(name), parse_place(name)
            if home is None:
                if (is_part(name) or is_probe(name)) and written_s < self._begin_s - _PART_STAYS_S:
                    self._garbage.append((name, size_bytes))
                continue
            stock = stocks.setdefault(home, _Stock())
            if place is not None:
                stock.add(place.ref, size_bytes, written_s)
            else:
                stock.others.append((name, size_bytes))
            if not number % MAX_DELETED:
                self._renew()
        current = {home for home in stocks if is_current(self._store, home)}
        for home in stocks.keys() - current:
            self._garbage += stocks[home].others
            names, sizes, _ = stocks[home].arrays()
            chunks = (Place(home, ref_of(name)).name for name in names.tolist())
            self._garbage += zip(chunks, sizes.tolist(), strict=True)
        return {home: stocks[home] for home in current}

    def _examine(self, home: Home, stock: _Stock) -> _Part:
        """Compare the chunks in the storage with what the log says."""
        reader = LogReader(self._store, home)
        reader.read_all()
        names, sizes, written_s = stock.arrays()
        logged, logged_s, known_ends = reader.catalog.snapshot()
        used_s = written_s.copy()
        _, mine, theirs = np.intersect1d(names, logged, assume_unique=True, return_indices=True)
        used_s[mine] = np.maximum(written_s[mine], logged_s[theirs])
        is_lost = ~np.isin(logged, names) & (logged_s < self._begin_s - _LATE_S)
        bases = [name for name, _ in stock.others if name.startswith(home.base)]
        found = np.ones(len(names), np.bool_)
        found[mine] = False
        ends = np.zeros((len(names), 2), np.uint32)
        if known_ends and len(mine):
            ends[mine] = [known_ends.get(name, ENDLESS) for name in names[mine].tolist()]
        stays = np.ones(len(names), np.bool_)
        unknown = np.flatnonzero(found).tolist()  # no manifest tells their ends
        for at, end_s in zip(unknown, self._ends(home, names[found].tolist()), strict=True):
            stays[at], ends[at] = end_s is not None, end_s or 0
        lost = logged[is_lost]
        return _Part(home, reader, bases, names[stays], sizes[stays], used_s[stays], found[stays], lost, ends[stays])

    def _ends(self, home: Home, names: Sequence[bytes]) -> Iterator[int | None]:
        """Yield the ends in the headers of chunks, 0 for no end; None if there is no such chunk any more."""

        def end_s(name: bytes) -> int | None:
            place = Place(home, ref_of(name))
            header = self._store.read(place.name, END_BYTES)
            return None if header is None else end_of(header, place.key) or 0

        with ThreadPoolExecutor(_READERS, "kvstore-sweep") as readers:
            for begin in range(0, len(names), MAX_DELETED):
                self._renew()
                yield from readers.map(end_s, names[begin : begin + MAX_DELETED])

    def _choose(self, parts: list[_Part]) -> list[npt.NDArray[np.bool_]]:
        """Return for each home which of its chunks leave: those that are over, by age, then those used longest ago.

        Of the chunks used within some minutes the last ones go first, because a prompt is used from its head to its
        tail, and a tail without its head is of no use.
        """
        if not parts:
            return []
        used_s = np.concatenate([part.used_s for part in parts]).astype(np.int64)
        sizes = np.concatenate([part.sizes for part in parts])
        end_s = np.concatenate([part.ends[:, 0] for part in parts])
        leaves = (end_s > 0) & (end_s <= self._begin_s)
        if self._limits.max_age_s is not None:
            leaves |= used_s < self._begin_s - self._limits.max_age_s
        if self._limits.max_bytes is not None:
            stays = np.flatnonzero(~leaves)
            order = stays[np.lexsort((-used_s[stays], used_s[stays] // _SESSION_S))]
            left = int(sizes[order].sum()) - np.cumsum(sizes[order]).astype(np.int64) + sizes[order].astype(np.int64)
            leaves[order[left > self._limits.max_bytes]] = True
        return np.split(leaves, np.cumsum([len(part.names) for part in parts])[:-1])

    def _report(self, parts: list[_Part], leaving: list[npt.NDArray[np.bool_]], *, is_dry: bool) -> SweepReport:
        return SweepReport(
            chunks=sum(len(part.names) for part in parts),
            size_bytes=sum(int(part.sizes.sum()) for part in parts),
            removed_chunks=sum(int(leaves.sum()) for leaves in leaving),
            removed_bytes=sum(int(part.sizes[leaves].sum()) for part, leaves in zip(parts, leaving, strict=True)),
            found_chunks=sum(int(part.found.sum()) for part in parts),
            lost_chunks=sum(len(part.lost) for part in parts),
            garbage_objects=len(self._garbage),
            garbage_bytes=sum(size_bytes for _, size_bytes in self._garbage),
            manifests=sum(len(part.reader.names) for part in parts),
            is_dry=is_dry,
        )

    def _carry_out(self, parts: list[_Part], leaving: list[npt.NDArray[np.bool_]], total: int) -> None:
        for part, leaves in zip(parts, leaving, strict=True):
            with suppress(FullError):  # engines that ask for such a chunk have a miss
                self._announce(part, leaves)
        if total:
            time.sleep(GRACE_S)
        self._delete(iter(self._garbage), total)
        for part, leaves in zip(parts, leaving, strict=True):
            names = (Place(part.home, ref_of(name)).name for name in part.names[leaves].tolist())
            self._delete(zip(names, part.sizes[leaves].tolist(), strict=True), total)
            with suppress(FullError):  # nothing is lost: the manifests stay
                self._compact(part, leaves)

    def _announce(self, part: _Part, leaves: npt.NDArray[np.bool_]) -> None:
        """Tell the engines which chunks leave, and which were found."""
        gone, found = np.concatenate((part.names[leaves], part.lost)), part.found & ~leaves
        endless, ending = part.manifests(found)
        news = [endless] if len(endless.stored) else []
        news += [ending] if ending is not None else []
        news += [Manifest(removed=gone[begin : begin + _GONE_BATCH]) for begin in range(0, len(gone), _GONE_BATCH)]
        for manifest in news:
            name = part.home.log + self._stamps.next()
            self._store.write(name, manifest.encode())
            self._announced.add(name)

    def _delete(self, objects: Iterator[tuple[str, int]], total: int) -> None:
        while batch := list(islice(objects, MAX_DELETED)):
            self._store.delete(name for name, _ in batch)
            for _, size_bytes in batch:
                self._tick(total, size_bytes)
            self._renew()

    def _compact(self, part: _Part, leaves: npt.NDArray[np.bool_]) -> None:
        """Write a base of what stays, then delete the manifests that all engines have read."""
        stays = ~leaves
        gone = {ref_of(name) for name in part.names[leaves].tolist()}
        trails = [trail for trail in part.reader.catalog.trails() if chunk_of(trail) not in gone][-MAX_TRAILS:]
        read = {name for name in part.reader.names if name.startswith(part.home.log)}
        merged = frozenset(map(_stamp, read | self._announced))
        endless, ending = part.manifests(stays)
        if ending is not None:  # in the log, as older versions skip it; before the base, as that ends older manifests
            refs = {ref_of(name) for name in ending.stored.tolist()}
            own = tuple(trail for trail in trails if chunk_of(trail) in refs)
            trails = [trail for trail in trails if chunk_of(trail) not in refs]
            part.reader.read_new()  # engines take it for news, so it must not undo theirs
            latest = replace(_up_to_date(ending, part.reader.catalog), trails=own)
            self._store.write(part.home.log + self._stamps.next(), latest.encode())
        base = replace(endless, merged=merged, trails=tuple(trails))
        self._store.write(part.home.base + self._stamps.next(), base.encode())
        oldest = stamp_at(self._begin_s - MANIFESTS_STAY_S)
        self._store.delete([*part.bases, *sorted(name for name in read if _stamp(name) < oldest)])


def _up_to_date(ending: Manifest, catalog: Catalog) -> Manifest:
    """Return a manifest of chunks with ends without those that have been removed meanwhile, or have other ends."""
    refs = [ref_of(name) for name in ending.stored.tolist()]
    ends = np.array([catalog.ends(ref) for ref in refs], np.uint32)
    same = np.array(catalog.holds(refs), np.bool_) & (ends == ending.ends).all(axis=1)
    return Manifest(ending.stored[same], ending.used_s[same], ends=ending.ends[same])


def _stamp(name: str) -> str:
    return name.rpartition("/")[2] if parse_stamp(name) else ""


@dataclass(frozen=True)
class _Lock:
    """Content of the lock: who holds it, and until when, in seconds since 1970."""

    holder: str
    until_s: float

    def encode(self) -> bytes:
        """Return the bytes of the object."""
        return json.dumps({"holder": self.holder, "until_s": self.until_s}).encode()


@contextmanager
def _locked(store: Store) -> Iterator[Callable[[], None]]:
    """Hold the lock of the sweep; yields a function that shows that it is alive.

    Raises:
        ConfigError: another sweep holds it.
    """
    lock = _Lock(secrets.token_hex(8), time.time() + LOCKED_S)
    try:
        is_first = store.create(LOCK_NAME, lock.encode())
    except FullError:  # then a sweep is needed most, and two do no harm
        yield lambda: None
        return
    if not is_first:
        found = store.read(LOCK_NAME, 1024) or b""
        left_s = _until_s(found) - time.time()
        if left_s > 0:
            raise ConfigError(
                f"another sweep of {store.place} is under way: wait for it; if it was killed, for {left_s:.0f} seconds"
            )
        if not store.replace(LOCK_NAME, found, lock.encode()):
            raise ConfigError(f"another sweep of {store.place} has just begun: wait for it")

    def renew() -> None:
        nonlocal lock
        now_s = time.time()
        if lock.until_s - now_s < LOCKED_S / 2:
            longer = replace(lock, until_s=now_s + LOCKED_S)
            if not store.replace(LOCK_NAME, lock.encode(), longer.encode()):
                raise TierError(f"another sweep of {store.place} has taken over: this one hung for too long")
            lock = longer

    try:
        yield renew
    finally:
        with suppress(TierError):  # it ends by itself
            if store.read(LOCK_NAME, 1024) == lock.encode():
                store.delete([LOCK_NAME])


def _until_s(content: bytes) -> float:
    """Return when a lock ends; 0 if it says nothing that can be read."""
    try:
        return float(json.loads(content)["until_s"])
    except (ValueError, TypeError, KeyError):
        return 0.0
