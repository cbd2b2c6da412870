"""The disk tiers of the server's namespaces: of which few are open at a time, those that were used last.

An open one has a descriptor and a dictionary of its chunks; namespaces come and go by the thousand, one for each epoch
of each model's weights. All of them are in one folder on one storage, so their calls share threads.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.errors import ClosedError, LayoutError, TierError, TierTimeoutError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.server.spaces import Space
from kvstore.tiers.base import BoundedTier
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker, Crew, Deadline, GuardOptions, find, guarded

WRITE_THREADS: Final = 4
MAX_OPEN: Final = 64  # more, if so many are in use
_SLOW_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class ShelfOptions:
    """The disk.

    Attributes:
        folder: of the server alone.
        capacity_bytes: of all namespaces together.
        codec: what chunks are encoded with.
        direct: whether to go round the page cache; None finds out.
        read_threads: reads at once.
        timeout_s: deadline of each call.
    """

    folder: Path
    capacity_bytes: int
    codec: str = "none"
    direct: bool | None = None
    read_threads: int = 4
    timeout_s: float = 10.0


class Shelf(NamedTuple):
    """One namespace's tier, as it is and guarded."""

    raw: DiskTier
    tier: BoundedTier

    @property
    def is_dispensable(self) -> bool:
        """Whether nothing is lost if it is closed: no call hangs in it, and it owes no removal."""
        deadline, breaker = find(self.tier, Deadline), find(self.tier, CircuitBreaker)
        assert deadline is not None
        assert breaker is not None
        return not deadline.stuck_calls and not breaker.stats().owed_removals


@dataclass
class _Place:
    """Where a namespace's shelf stands, open or not.

    Attributes:
        opening: held by who opens or closes it.
        shelf: if it is open.
        users: who has it in use, or wants to.
        closed_bytes: of its files, if it is not open.
    """

    opening: threading.Lock = field(default_factory=threading.Lock)
    shelf: Shelf | None = None
    users: int = 0
    closed_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        shelf = self.shelf
        return self.closed_bytes if shelf is None else shelf.raw.used_bytes


class Rack:
    """Opens and closes shelves, and keeps their bound. Thread-safe.

    Args:
        options: the disk, whose folder is there and is ours.
    """

    def __init__(self, options: ShelfOptions) -> None:
        self._options = options
        self._direct = options.direct
        self._crew = Crew("disk", options.read_threads + WRITE_THREADS + 2)
        self._places: OrderedDict[bytes, _Place] = OrderedDict()  # the longest unused first
        self._lock = threading.Lock()
        self._claimed_bytes = 0
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of chunks."""
        return sum(place.used_bytes for place in list(self._places.values()))

    @property
    def num_open(self) -> int:
        """Shelves that are open."""
        return sum(place.shelf is not None for place in list(self._places.values()))

    @contextmanager
    def use(self, space: Space, *, makes: bool = True) -> Iterator[Shelf | None]:
        """A namespace's shelf, open for as long as the context; None if it has none and should not be made one.

        Raises:
            TierError, ConfigError: it cannot be opened.
        """
        with self._lock:
            place = self._places.get(space.id)
            if place is None and makes:
                place = self._places[space.id] = _Place()
            if place is not None:
                place.users += 1
                self._places.move_to_end(space.id)
        if place is None:
            yield None
            return
        try:
            with place.opening:
                if place.shelf is None:
                    place.shelf = self._open(space)
            yield place.shelf
        finally:
            with self._lock:
                place.users -= 1
            self._tidy()

    def claim(self, space: Space, num_bytes: int) -> bool:
        """Whether there are so many bytes for one more file, after the spare files of others have gone if need be."""
        with self._lock:
            others = [place.shelf for space_id, place in self._places.items() if space_id != space.id]
            own = self._places[space.id].shelf
        for shelf in [None, *others, own]:
            if shelf is not None and shelf.raw.spare_bytes:
                with suppress(TierError, ClosedError):  # its breaker tells; others may have spares too
                    shelf.tier.drop_spares(self._missing_bytes(num_bytes))
            if self._claim(num_bytes):
                return True
        return False

    def unclaim(self, num_bytes: int) -> None:
        """Give back what was claimed: it is counted by now, or never will be."""
        with self._lock:
            self._claimed_bytes -= num_bytes

    def forget(self, space: Space) -> None:
        """Delete a namespace's folder, of which nobody wants anything any more. Who uses it meanwhile waits.

        Raises:
            TierTimeoutError: the disk hangs; until its ``pending`` is done the folder may yet be deleted.
            TierError: too many calls hang in it.
        """
        with self._lock:
            place = self._places.setdefault(space.id, _Place())
            place.users += 1
        try:
            with place.opening:
                if place.shelf is not None:
                    place.shelf.tier.close()
                    place.shelf = None
                place.closed_bytes = 0
                self._delete(self._home(space))
        finally:
            with self._lock:
                place.users -= 1
                if not place.users and place.shelf is None:
                    del self._places[space.id]

    def _delete(self, home: Path) -> None:
        deleting = self._crew.submit("forget", partial(shutil.rmtree, home, ignore_errors=True))
        try:
            deleting.result(_SLOW_TIMEOUT_S)
        except TimeoutError as error:
            self._crew.give_up(deleting)
            message = f"a folder of the disk is not deleted within {_SLOW_TIMEOUT_S} s"
            raise TierTimeoutError(message, deleting) from error

    def close(self) -> None:
        """Close all shelves, and end the threads."""
        self._is_closed = True
        for place in list(self._places.values()):
            shelf = place.shelf
            if shelf is not None:
                shelf.tier.close()
        self._crew.close()

    def _claim(self, num_bytes: int) -> bool:
        with self._lock:
            if self._missing_bytes(num_bytes) > 0:
                return False
            self._claimed_bytes += num_bytes
            return True

    def _missing_bytes(self, num_bytes: int) -> int:
        return self.used_bytes + self._claimed_bytes + num_bytes - self._options.capacity_bytes

    def _tidy(self) -> None:
        """Close what is open beyond the bound and nobody uses, the longest unused first."""
        while not self._is_closed and self.num_open > MAX_OPEN:
            with self._lock:
                idle = (p for p in self._places.values() if not p.users and p.shelf is not None)
                place = next((p for p in idle if p.shelf is not None and p.shelf.is_dispensable), None)
                if place is None:
                    return
                place.users += 1
            try:
                self._close_if_idle(place)
            finally:
                with self._lock:
                    place.users -= 1

    def _close_if_idle(self, place: _Place) -> None:
        with place.opening:
            with self._lock:
                shelf = place.shelf if place.users == 1 else None
            if shelf is not None:  # who comes now waits for its end, and opens it again
                with suppress(TierError):
                    shelf.tier.drop_spares(shelf.raw.spare_bytes)
                shelf.tier.close()
                place.closed_bytes = shelf.raw.used_bytes
                place.shelf = None

    def _home(self, space: Space) -> Path:
        return self._options.folder / space.id.hex()

    def _open(self, space: Space) -> Shelf:
        options = self._options
        home = self._home(space)
        try:
            home.mkdir(mode=_folder.FOLDER_MODE, exist_ok=True)
            _describe(home, space)
            if self._direct is None:
                self._direct = _folder.probe_direct(options.folder)
        except OSError as error:
            raise _folder.unusable(home, error) from error
        raw = DiskTier(
            home,
            space.namespace,
            space.layout,
            options.capacity_bytes,
            direct=self._direct,
            codec=options.codec,
            checks_room=False,
        )
        guard = GuardOptions(options.timeout_s, max(options.timeout_s, _SLOW_TIMEOUT_S))
        return Shelf(raw, guarded(raw, guard, self._crew))


def _describe(home: Path, space: Space) -> None:
    """Say in a folder whose it is, unless it says so: without that the next start would delete it.

    Raises:
        OSError: the system refused.
    """
    described = {"namespace": dict(space.namespace.fields), "geometry": _geometry(space.layout)}
    text = json.dumps(described) + "\n"
    path = home / _folder.GEOMETRY_FILE
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)  # at once: whoever is killed here leaves the old one or the new one


def read_home(home: Path) -> Space | None:
    """The namespace whose folder this is; None if it does not say.

    Raises:
        TierError: the disk does not let anybody read what it says.
    """
    try:
        found = json.loads((home / _folder.GEOMETRY_FILE).read_bytes())
        geometry = dict(found["geometry"])
        geometry["page_bytes"] = tuple(geometry["page_bytes"])
        geometry["page_axes"] = tuple(geometry["page_axes"]) if geometry["page_axes"] else None
        return Space(Namespace(found["namespace"]), KVLayout(**geometry))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, LayoutError):
        return None
    except OSError as error:
        raise TierError(f"cannot read {home / _folder.GEOMETRY_FILE}: {_folder.reason(error)}") from error


def _geometry(layout: KVLayout) -> dict[str, Any]:
    return {
        "page_bytes": list(layout.page_bytes),
        "planes": layout.planes,
        "block_tokens": layout.block_tokens,
        "chunk_tokens": layout.chunk_tokens,
        "physical": layout.physical,
        "element": layout.element,
        "page_axes": list(layout.page_axes) if layout.page_axes else None,
    }
