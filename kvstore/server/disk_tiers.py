"""The disk tiers of the server's namespaces, of which only the most recently used are open.

An open tier takes a descriptor and a dictionary of its chunks, and there may be thousands of namespaces, one for each
epoch of each model's weights. All of them are in one folder on one storage, so their calls share threads.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.format.chunkfile import sealed_name
from kvstore.model.errors import ClosedError, LayoutError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.server.spaces import Space
from kvstore.tiers.abandonable_threads import AbandonableThreads
from kvstore.tiers.base import BoundedTier
from kvstore.tiers.disk import folder as _folder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.guards import CircuitBreaker, Guard, GuardOptions, find, guarded

if TYPE_CHECKING:
    from kvstore.format.sealing.keyring import KeyRing

WRITE_THREADS: Final = 4
MAX_OPEN: Final = 64  # more if so many are in use
_SLOW_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class DiskOptions:
    """Options of the disk.

    Attributes:
        folder: its folder, used by this server alone.
        capacity_bytes: bound on the bytes of all namespaces together.
        codec: the encoding of chunks.
        keys: encrypt chunks, all with the key for requests without a salt; None for no encryption.
        direct: True to bypass the page cache; None to detect if that works.
        read_threads: number of concurrent reads.
        timeout_s: deadline of each call.
    """

    folder: Path
    capacity_bytes: int
    codec: str = "none"
    direct: bool | None = None
    read_threads: int = 4
    timeout_s: float = 10.0
    keys: KeyRing | None = None

    @property
    def stored_codec(self) -> str:
        """Name of the encoding in the headers of chunks."""
        return self.codec if self.keys is None else sealed_name(self.codec)


class OpenTier(NamedTuple):
    """Open tier of a namespace, bare and guarded."""

    raw: DiskTier
    tier: BoundedTier

    @property
    def is_dispensable(self) -> bool:
        """True if it can be closed without a loss, because no call hangs in it and no removal is pending."""
        guard, breaker = find(self.tier, Guard), find(self.tier, CircuitBreaker)
        assert guard is not None
        assert breaker is not None
        return not guard.stuck_calls and not breaker.pending_removals


@dataclass
class _Entry:
    """Tier of a namespace, open or not.

    Attributes:
        opening: held while the tier is opened or closed.
        opened: the tier, if it is open.
        users: number of threads that use it or wait for it.
        closed_bytes: bytes of its files while it is not open.
    """

    opening: threading.Lock = field(default_factory=threading.Lock)
    opened: OpenTier | None = None
    users: int = 0
    closed_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        opened = self.opened
        return self.closed_bytes if opened is None else opened.raw.used_bytes


class DiskTiers:
    """Opens and closes tiers, and keeps the bound that they share. Thread-safe.

    Args:
        options: the disk, whose folder exists and is locked.
    """

    def __init__(self, options: DiskOptions) -> None:
        self._options = options
        self._direct = options.direct
        self._threads = AbandonableThreads("disk", options.read_threads + WRITE_THREADS + 2)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self._claimed_bytes = 0
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all files of chunks."""
        return sum(entry.used_bytes for entry in list(self._entries.values()))

    @property
    def num_open(self) -> int:
        """Number of open tiers."""
        return sum(entry.opened is not None for entry in list(self._entries.values()))

    @contextmanager
    def use(self, space: Space, *, makes: bool = True) -> Iterator[OpenTier | None]:
        """Yield a namespace's tier, open for as long as the context; None if it has none and ``makes`` is false.

        Raises:
            TierError, ConfigError: it cannot be opened.
        """
        with self._lock:
            if not makes and space.id not in self._entries:
                entry = None
            else:
                entry = self._enter(space)
                self._entries.move_to_end(space.id)
        if entry is None:
            yield None
            return
        try:
            with entry.opening:
                if entry.opened is None:
                    entry.opened = self._open(space)
            yield entry.opened
        finally:
            self._leave(entry)
            self._tidy()

    def bytes_of(self, space: Space) -> int:
        """Return the bytes of all files of a namespace."""
        entry = self._entries.get(space.id)
        return entry.used_bytes if entry is not None else 0

    def expect(self, space: Space, num_bytes: int) -> None:
        """Note the bytes of a namespace whose tier is not open."""
        with self._lock:
            self._entries.setdefault(space.id, _Entry()).closed_bytes = num_bytes

    @property
    def can_rest(self) -> bool:
        """True if no call hangs in an open tier, and no removal is pending."""
        return all(tier is None or tier.is_dispensable for tier in [entry.opened for entry in self._all()])

    def rest(self) -> bool:
        """Close all tiers; return False if one has a user, a call that hangs or a removal that is pending."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.opened is not None]
            tiers = [entry.opened for entry in entries if entry.opened is not None]
            if any(entry.users for entry in entries) or not all(tier.is_dispensable for tier in tiers):
                return False
            for entry in entries:
                entry.users += 1
        for entry in entries:
            try:
                self._close_if_idle(entry)
            finally:
                self._leave(entry)
        return all(tier.is_dispensable for tier in tiers)  # still: a call may have hung since

    def _all(self) -> list[_Entry]:
        with self._lock:
            return list(self._entries.values())

    def claim(self, space: Space, num_bytes: int) -> bool:
        """Claim bytes for one more file, after a deletion of spare files if needed; return False without room."""
        with self._lock:
            others = [entry.opened for space_id, entry in self._entries.items() if space_id != space.id]
            own = self._entries[space.id].opened
        for opened in [None, *others, own]:
            if opened is not None and opened.raw.spare_bytes:
                with suppress(TierError, ClosedError):  # its breaker logs it; other tiers may have spares too
                    opened.tier.drop_spares(self._missing_bytes(num_bytes))
            if self._claim(num_bytes):
                return True
        return False

    def unclaim(self, num_bytes: int) -> None:
        """Give back claimed bytes, because the file is counted by now or was not written."""
        with self._lock:
            self._claimed_bytes -= num_bytes

    def forget(self, space: Space) -> None:
        """Delete the folder of a namespace that is not needed any more. Threads that want to use it meanwhile wait.

        Raises:
            TierTimeoutError: the disk hangs; until its ``pending`` is done the folder may yet be deleted.
            TierError: too many calls hang in it.
        """
        with self._lock:
            entry = self._enter(space)
        try:
            with entry.opening:
                if entry.opened is not None:
                    entry.opened.tier.close()
                    entry.opened = None
                entry.closed_bytes = 0
                self._delete(self._home(space))
        finally:
            with self._lock:
                entry.users -= 1
                if not entry.users and entry.opened is None:
                    del self._entries[space.id]

    def _delete(self, home: Path) -> None:
        deleting = self._threads.submit("forget", partial(shutil.rmtree, home, ignore_errors=True))
        try:
            deleting.result(_SLOW_TIMEOUT_S)
        except TimeoutError as error:
            self._threads.abandon(deleting)
            raise TierTimeoutError(f"deleting a folder took longer than {_SLOW_TIMEOUT_S} s", deleting) from error

    def close(self) -> None:
        """Close all tiers, and end the threads."""
        self._is_closed = True
        for entry in list(self._entries.values()):
            if (opened := entry.opened) is not None:
                opened.tier.close()
        self._threads.close()

    def _enter(self, space: Space) -> _Entry:
        """Return a namespace's entry, with one more user. Needs the lock."""
        entry = self._entries.setdefault(space.id, _Entry())
        entry.users += 1
        return entry

    def _leave(self, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1

    def _claim(self, num_bytes: int) -> bool:
        with self._lock:
            if self._missing_bytes(num_bytes) > 0:
                return False
            self._claimed_bytes += num_bytes
            return True

    def _missing_bytes(self, num_bytes: int) -> int:
        return self.used_bytes + self._claimed_bytes + num_bytes - self._options.capacity_bytes

    def _tidy(self) -> None:
        """Close open tiers beyond ``MAX_OPEN`` that have no user, the least recently used first."""
        while not self._is_closed and self.num_open > MAX_OPEN:
            with self._lock:
                idle = (entry for entry in self._entries.values() if not entry.users)
                entry = next((e for e in idle if e.opened is not None and e.opened.is_dispensable), None)
                if entry is None:
                    return
                entry.users += 1
            try:
                self._close_if_idle(entry)
            finally:
                self._leave(entry)

    def _close_if_idle(self, entry: _Entry) -> None:
        with entry.opening:
            with self._lock:
                opened = entry.opened if entry.users == 1 else None
            if opened is not None:  # the next user waits until it is closed, and opens it again
                with suppress(TierError):
                    opened.tier.drop_spares(opened.raw.spare_bytes)
                opened.tier.close()
                entry.closed_bytes = opened.raw.used_bytes
                entry.opened = None

    def _home(self, space: Space) -> Path:
        return self._options.folder / space.id.hex()

    def _open(self, space: Space) -> OpenTier:
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
            keys=options.keys,
            checks_room=False,
        )
        guard = GuardOptions(options.timeout_s, max(options.timeout_s, _SLOW_TIMEOUT_S))
        return OpenTier(raw, guarded(raw, guard, self._threads))


def _describe(home: Path, space: Space) -> None:
    """Write the namespace of a folder into it, unless it is there; the next start would delete the folder otherwise.

    Raises:
        OSError: the system refused.
    """
    tree: dict[str, object] = {"namespace": dict(space.namespace.fields), "geometry": asdict(space.layout)}
    text = json.dumps(tree | ({"tenant": space.tenant} if space.tenant else {})) + "\n"
    path = home / _folder.GEOMETRY_FILE
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)  # atomic: a crash here leaves the old note or the new one


def read_home(home: Path) -> Space | None:
    """Return the namespace of a folder; None if it has no note that can be understood.

    Raises:
        TierError: the disk fails to read the note.
    """
    try:
        found = json.loads((home / _folder.GEOMETRY_FILE).read_bytes())
        layout, tenant = KVLayout.from_json(json.dumps(found["geometry"])), found.get("tenant", "")
        return Space(Namespace(found["namespace"]), layout, tenant) if isinstance(tenant, str) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, LayoutError):
        return None
    except OSError as error:
        raise TierError(f"cannot read {home / _folder.GEOMETRY_FILE}: {_folder.reason(error)}") from error
