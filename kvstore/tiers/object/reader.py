"""Reader of the manifests of one home, in the order of their names, into a catalog.

It begins with the newest base and all manifests; after that it lists what is new. A listing starts a while before the
newest known name, because clocks differ, and from the beginning now and then.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from kvstore.model.throttle import Throttle
from kvstore.tiers.abandonable_threads import AbandonableThreads
from kvstore.tiers.object.catalog import Catalog
from kvstore.tiers.object.journal import Journal
from kvstore.tiers.object.manifest import MAX_MANIFEST_BYTES, decode, ref_of
from kvstore.tiers.object.names import Home, parse_stamp, stamp_at
from kvstore.tiers.object.store import Store

logger = logging.getLogger(__name__)

OVERLAP_S: Final = 120.0  # by which clocks of engines may differ before their chunks are found late
WHOLE_EVERY_S: Final = 600.0  # between two listings of all manifests
RELOAD_AFTER_S: Final = 300.0  # without a look, as a sweep may have deleted manifests that were not read
_THREADS: Final = 8
_LOOKS: Final = 4
_throttle: Final = Throttle(logger)


class LogReader:
    """Reader of one home's log. For one thread; the catalog is for all.

    Args:
        store: of the objects.
        home: whose log it is.
        journal: of this engine, whose manifests need not be read; None to read all.

    Attributes:
        catalog: the chunks that the manifests name.
        names: of all manifests that were read, the base included.
    """

    def __init__(self, store: Store, home: Home, journal: Journal | None = None) -> None:
        self.catalog = Catalog()
        self.names: set[str] = set()
        self._store = store
        self._home = home
        self._journal = journal
        self._merged: set[str] = set()  # manifests that the base contains
        self._newest_s = 0.0
        self._listed_s = self._looked_s = time.monotonic()

    def read_all(self) -> None:
        """Read the newest base and all manifests; again if a sweep deleted some of them meanwhile.

        Raises:
            TierError: the storage failed.
        """
        for _ in range(_LOOKS):
            base = max((listed.name for listed in self._store.list(self._home.base)), default=None)
            names = {listed.name for listed in self._store.list(self._home.log) if parse_stamp(listed.name)}
            is_whole = self._take([base] if base else []) and self._take(sorted(names - self._merged))
            self.names |= names & self._merged
            if is_whole:
                break
        self._listed_s = self._looked_s = time.monotonic()

    def read_new(self) -> None:
        """Read the manifests that were not read yet.

        Raises:
            TierError: the storage failed.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > RELOAD_AFTER_S:
            self.read_all()
        is_whole = now_s - self._listed_s > WHOLE_EVERY_S
        start_after = "" if is_whole else self._home.log + stamp_at(self._newest_s - OVERLAP_S)
        names = {listed.name for listed in self._store.list(self._home.log, start_after) if parse_stamp(listed.name)}
        self._take(sorted(names - self.names - self._merged))
        self.catalog.shrink()  # an engine without others applies nothing, and its own chunks are changes, too
        self._looked_s = now_s
        if is_whole:
            self.names, self._listed_s = names, now_s

    def _take(self, names: Sequence[str]) -> bool:
        """Read manifests into the catalog, in order. Returns True if all of them were still there."""
        is_whole = True
        for name, data in self._contents([name for name in names if not self._is_own(name)]):
            if data is None:
                is_whole = False
            else:
                self._apply(name, data)
        for name in names:
            self.names.add(name)
            if (stamp := parse_stamp(name)) is not None:
                self._newest_s = max(self._newest_s, min(stamp[0], time.time()))
        return is_whole

    def _apply(self, name: str, data: bytes) -> None:
        manifest, stamp = decode(data), parse_stamp(name)
        if manifest is None:
            _throttle.log("damage", "a manifest at %s is damaged: a sweep finds its chunks", self._store.place)
            return
        self._merged |= {self._home.log + stamp for stamp in manifest.merged}
        self.catalog.apply(manifest)
        self.catalog.touch(map(ref_of, manifest.touched.tolist()), int(stamp[0]) if stamp else 0)
        if self._journal is not None:
            self._journal.forget(manifest.removed.tolist())

    def _contents(self, names: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield the objects with these names, in order, several requests at a time."""
        if len(names) < 2:
            yield from ((name, self._store.read(name, MAX_MANIFEST_BYTES)) for name in names)
            return
        threads = AbandonableThreads("object-read", min(_THREADS, len(names)), len(names))  # a folder may hang
        try:
            reads = deque(
                (name, threads.submit("read", partial(self._store.read, name, MAX_MANIFEST_BYTES))) for name in names
            )
            while reads:
                name, read = reads.popleft()
                yield name, read.result()
        finally:
            threads.close()

    def _is_own(self, name: str) -> bool:
        stamp = parse_stamp(name)
        return self._journal is not None and stamp is not None and stamp[1] == self._journal.writer
