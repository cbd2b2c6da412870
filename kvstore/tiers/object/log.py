"""The log: the manifests of all engines, read by each of them every few seconds, so that no lookup sends a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.throttle import Throttle
from kvstore.tiers.object.catalog import Catalog
from kvstore.tiers.object.journal import Journal
from kvstore.tiers.object.manifest import Ends
from kvstore.tiers.object.names import EPOCH_CHARS, Home, Stamps, epoch_name, new_epoch, parse_epoch
from kvstore.tiers.object.reader import LogReader
from kvstore.tiers.object.store import Store

logger = logging.getLogger(__name__)

EVERY_S: Final = 2.0  # between two looks at the log
TOUCH_EVERY_S: Final = 600  # a use within so many seconds of the last one is not noted
_LOOKS: Final = 4

_open: Final[set[Log]] = set()  # of this process
_opening: Final = threading.Lock()


@dataclass(eq=False)
class View:
    """All that is known of one home.

    Attributes:
        home: the namespace and the epoch.
        journal: notes for other engines.
        reader: of their manifests.
    """

    home: Home
    journal: Journal
    reader: LogReader

    @property
    def catalog(self) -> Catalog:
        """The known chunks."""
        return self.reader.catalog

    def store(self, ref: ChunkRef, trail: bytes, end_s: int) -> None:
        """Note a chunk that was stored now, with the end of its time to live in its header; 0 for none."""
        self._tell(ref, int(time.time()), trail, Ends(end_s, end_s))

    def limit(self, ref: ChunkRef, end_s: int) -> None:
        """Note that a chunk's time to live ends later, or never (0)."""
        used_s, ends = self.catalog.used_s(ref), self.catalog.ends(ref)
        if used_s is not None and ends.end_s and not 0 < end_s <= ends.end_s:
            self._tell(ref, used_s, b"", ends._replace(end_s=end_s))

    def _tell(self, ref: ChunkRef, used_s: int, trail: bytes, ends: Ends) -> None:
        self.catalog.add(ref, used_s, trail, ends)
        self.journal.store(ref, used_s, trail, ends)

    def touch(self, ref: ChunkRef) -> None:
        """Note that a chunk was used now."""
        now_s, used_s = int(time.time()), self.catalog.used_s(ref)
        if used_s is not None and now_s - used_s > TOUCH_EVERY_S:
            self.catalog.touch([ref], now_s)
            self.journal.touch(ref)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Note that chunks are gone, those that were known."""
        refs = list(refs)
        known = [ref for ref, is_there in zip(refs, self.catalog.holds(refs), strict=True) if is_there]
        for ref in known:
            self.catalog.discard(ref)
        self.journal.remove(known)


class Log:
    """Reader and writer of the log of one namespace, on a thread of its own. Thread-safe.

    Args:
        store: of the objects.
        namespace_id: that of the chunks.
        timeout_s: longest wait for the first look at the log, or the next one after a failure.
    """

    def __init__(self, store: Store, namespace_id: bytes, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._stamps = Stamps()
        self._throttle = Throttle(logger)
        self._changed = threading.Condition()
        self._namespace_id = namespace_id
        self._view: View | None = None
        self._entered = 0  # counts resets and clears, which void a view that is being read
        self._looks = 0
        self._error: TierError | None = None
        self._is_looking = False
        self._is_wanted = False
        self._is_closed = False
        with _opening:
            _open.add(self)
        self._thread = threading.Thread(target=self._run, name="kvstore-object-log", daemon=True)
        self._thread.start()

    def view(self) -> View:
        """Return the view of the current home, after a look at the log if there is none, or if the last one failed.

        Raises:
            TierError: the log could not be read.
            ClosedError: after ``close``.
        """
        with self._changed:
            view = self._view
            if view is not None and self._error is None:
                return view
            looks = self._looks + self._is_looking
            self._is_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or self._has_looked(looks), self._timeout_s)
            if self._is_closed:
                raise ClosedError("the object tier was closed")
            if self._error is not None:
                raise type(self._error)(str(self._error)) from self._error
            if self._view is None:
                raise TierError(f"the log of {self._store.place} was not read within {self._timeout_s:g} s")
            return self._view

    def _has_looked(self, looks: int) -> bool:
        """Tell if a look that began after ``looks`` others has ended in a view, or in an error."""
        return self._looks > looks and (self._view is not None or self._error is not None)

    def is_current(self, view: View) -> bool:
        """Tell if neither a clear nor a reset has ended a view."""
        return self._view is view

    def remove(self, view: View, refs: Sequence[ChunkRef]) -> None:
        """Note that chunks of a view are gone, in all logs of this process.

        A tier for lookups would otherwise go on naming chunks that the engine has just removed.
        """
        view.remove(refs)
        for other in self._others():
            known = other._view  # noqa: SLF001 - of the same class
            if known is not None and known.home == view.home:
                for ref in refs:
                    known.catalog.discard(ref)

    def _others(self) -> list[Log]:
        with _opening:
            return [log for log in _open if log is not self]

    def _leave(self, home: Home) -> None:
        """Forget a home whose epoch has ended; its successor is read at once."""
        with self._changed:
            if self._view is not None and self._view.home == home:
                self._view = None
                self._entered += 1
                self._is_wanted = True
                self._changed.notify_all()

    def renew(self, view: View) -> None:
        """Begin a new epoch of a view's namespace; its chunks are unreachable for this engine at once.

        Raises:
            TierError: the storage failed; the chunks are still there.
        """
        home = Home(view.home.namespace_id, new_epoch())
        self._store.write(epoch_name(home.namespace_id), home.epoch.encode())
        with self._changed:
            self._entered += 1
            if self._namespace_id == home.namespace_id:
                self._view = self._empty(home)
        for other in self._others():
            other._leave(view.home)  # noqa: SLF001 - of the same class

    def enter(self, namespace_id: bytes) -> View | None:
        """Move to a namespace, whose log is read then. Returns the view that was left."""
        with self._changed:
            left, self._view = self._view, None
            self._namespace_id = namespace_id
            self._entered += 1
            self._is_wanted = True
            self._changed.notify_all()
        return left

    def close(self) -> None:
        """Write what waits, and end the thread, within two time-outs of the storage."""
        with _opening:
            _open.discard(self)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(2 * self._timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_wanted, self._is_looking = False, True
                is_last = self._is_closed
            error: TierError | None = None
            try:
                self._look(writes_only=is_last)
            except TierError as failure:
                error = failure
                self._throttle.log("look", "cannot read the log of %s: %s", self._store.place, failure)
            except ClosedError:
                return
            except Exception as defect:
                logger.exception("defect while the log of %s was read: it is tried again", self._store.place)
                error = TierError(f"a defect prevents reading the log of {self._store.place}: {defect!r}")
            with self._changed:
                self._error, self._is_looking = error, False
                self._looks += 1
                self._changed.notify_all()
                if is_last:
                    return
                self._changed.wait_for(lambda: self._is_closed or self._is_wanted, EVERY_S)

    def _look(self, *, writes_only: bool) -> None:
        """Write what waits, and read what is new.

        Raises:
            TierError: the storage failed.
        """
        with self._changed:
            view, namespace_id, entered = self._view, self._namespace_id, self._entered
        if writes_only:
            if view is not None:
                self._write(view)
            return
        home = Home(namespace_id, current_epoch(self._store, namespace_id))
        if view is None or view.home != home:
            view = self._empty(home)
            view.reader.read_all()
        else:
            self._write(view)
            view.reader.read_new()
        with self._changed:
            if entered == self._entered:
                self._view = view

    def _write(self, view: View) -> None:
        """Write what waits; a full storage, or one that may only be read, can still be read."""
        try:
            view.journal.write()
        except TierError as error:
            self._throttle.log("write", "cannot write a manifest in %s: %s", self._store.place, error)

    def _empty(self, home: Home) -> View:
        journal = Journal(self._store, home, self._stamps)
        return View(home, journal, LogReader(self._store, home, journal))


def current_epoch(store: Store, namespace_id: bytes) -> str:
    """Return the epoch of a namespace, which begins one if it has none.

    Raises:
        TierError: the storage failed.
    """
    name = epoch_name(namespace_id)
    for _ in range(_LOOKS):
        found = store.read(name, EPOCH_CHARS + 1)
        epoch = parse_epoch(found)
        if epoch is not None:
            return epoch
        fresh = new_epoch()
        if found is not None:
            store.write(name, fresh.encode())  # something else is in its place
        elif store.create(name, fresh.encode()):
            return fresh
    raise TierError(f"{store.place} holds no epoch at {name}, though it was written {_LOOKS} times")
