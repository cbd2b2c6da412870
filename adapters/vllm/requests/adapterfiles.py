"""Fingerprints of LoRA adapters' files, read in the background and again only after a change. No vLLM types."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from kvstore.adapters.vllm.identity import digest_of, fingerprint_adapter
from kvstore.model.errors import ConfigError
from kvstore.model.threads import Work
from kvstore.model.throttle import Throttle
from kvstore.tiers.abandonable_threads import serve

logger = logging.getLogger(__name__)

_THREADS: Final = 2  # one may hang in a folder
_MAX_DIGESTS: Final = 4096  # files
_SETTLED_S: Final = 2.0  # a younger file may change again without its times changing
_CLOCK_S: Final = 0.05  # a kernel's times of files lag behind its clock by a tick


class Adapter(NamedTuple):
    """An adapter as a request names it.

    Attributes:
        number: vLLM's number of it.
        name: the name that clients use.
        folder: the folder of its files.
        in_place: its files replace others under the same number.
    """

    number: int
    name: str
    folder: str
    in_place: bool


Look = Future[str | None]
"""A look at an adapter's files: their fingerprint, or None if there is none."""


class AdapterFiles:
    """Fingerprints of LoRA adapters. ``look`` and ``take`` are for one thread; the files are read on others.

    vLLM keeps an adapter in memory under its number, and may load its files again at any time. Once the files of a
    number have changed, it is unknown which of them a request will use, so the number is never trusted again. The same
    holds where they changed after vLLM loaded them and before the first look.
    """

    def __init__(self) -> None:
        self._loaded_s: dict[int, float] = {}  # the earliest time at which vLLM had a number's files
        self._known: dict[int, str] = {}
        self._distrusted: set[int] = set()
        self._digests = _Digests()
        self._lock = threading.Lock()  # guards the following
        self._looks: dict[Adapter, _Looks] = {}  # in flight
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._throttle = Throttle(logger)

    def note_load(self, number: int) -> None:
        """Note that vLLM is about to load the adapter of this number. Thread-safe."""
        self._loaded_s.setdefault(number, time.time())

    def look(self, adapter: Adapter) -> Look:
        """Start a look at an adapter's current files, or join a look that has not started."""
        self.note_load(adapter.number)  # with its first request, unless it was loaded before
        if adapter.in_place or adapter.number in self._distrusted:
            return _nothing()
        with self._lock:
            if self._is_closed:
                return _nothing()
            looks = self._looks.get(adapter)
            if looks is None:
                looks = self._looks[adapter] = _Looks(Future())
                self._start(adapter, looks.now)
                return looks.now
            if looks.next is None:
                looks.next = Future()
            return looks.next

    def take(self, adapter: Adapter, look: Look) -> str | None:
        """Return the fingerprint for the key, or None if this request must not share KV made with this adapter.

        A look that has not ended is given up for this request only.
        """
        if adapter.number in self._distrusted:
            return None
        if not look.done():
            self._throttle.log(
                "late",
                "the files of LoRA adapter %d take too long to read: its requests are served without the cache "
                "meanwhile",
                adapter.number,
            )
            return None
        found = look.result()
        if found is None or self._known.setdefault(adapter.number, found) != found:
            logger.warning("LoRA adapter %d is not cached: its files changed or cannot be identified", adapter.number)
            self._distrusted.add(adapter.number)
            return None
        return found

    def close(self, timeout_s: float = 1.0) -> None:
        """End the threads; one that hangs in a folder is left behind."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            thread.join(timeout_s)

    def _start(self, adapter: Adapter, look: Look) -> None:
        if len(self._threads) < _THREADS:  # with the first adapters: most engines have none
            thread = threading.Thread(target=serve, args=(self._work,), name="kvstore-adapters", daemon=True)
            self._threads.append(thread)
            thread.start()
        look.add_done_callback(lambda _: self._go_on(adapter))
        self._work.put((look, lambda: self._fingerprint(adapter)))

    def _go_on(self, adapter: Adapter) -> None:
        """Start the look that was requested while the last one was in flight."""
        with self._lock:
            following = self._looks.pop(adapter).next
            if following is None:
                return
            if not self._is_closed:
                self._looks[adapter] = _Looks(following)
                self._start(adapter, following)
                return
        following.set_result(None)

    def _fingerprint(self, adapter: Adapter) -> str | None:
        folder = Path(adapter.folder)
        loaded_s = self._loaded_s[adapter.number]

        def digest(path: Path) -> str:
            found = self._digests.of(path)
            if adapter.number not in self._known:  # later looks are compared with the first one
                _refuse_younger([*_links_above(folder), folder, path], loaded_s - _CLOCK_S)  # also while it was read
            return found

        try:
            return fingerprint_adapter(folder, digest)
        except ConfigError as error:
            logger.warning("LoRA adapter %d is not cached: %s", adapter.number, error)
            return None


@dataclass
class _Looks:
    """Looks at one adapter: the one in flight, and the one that starts after it."""

    now: Look
    next: Look | None = None


class _Digests:
    """Digests of files, each cached until the file's inode, size or times change. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int, int, int, int, int], str] = OrderedDict()

    def of(self, path: Path) -> str:
        """Return the digest of a file's content.

        Raises:
            OSError: it cannot be read, or changes while it is read.
        """
        before = _stamp(path)
        with self._lock:
            known = self._known.get(before)
            if known is not None:
                self._known.move_to_end(before)
                return known
        is_settled = time.time_ns() - max(before[-2:]) > _SETTLED_S * 1e9
        found = digest_of(path)
        if _stamp(path) != before:
            raise OSError(f"{path.name} has changed while it was read")
        with self._lock:
            if is_settled:
                self._known[before] = found
            while len(self._known) > _MAX_DIGESTS:
                self._known.popitem(last=False)
        return found


def _refuse_younger(paths: Iterable[Path], latest_s: float) -> None:
    """Refuse files, folders and links that may have changed since vLLM loaded the adapter.

    Raises:
        OSError: one has changed, or cannot be read.
    """
    for path in paths:
        if max(path.lstat().st_ctime, path.stat().st_ctime) > latest_s:
            raise OSError(f"{path.name} has changed since vLLM loaded it: load the adapter under another name")


def _links_above(folder: Path) -> Iterator[Path]:
    """Return the links above a folder, whose targets can be exchanged without a change to the folder."""
    return (path for path in folder.absolute().parents if path.is_symlink())


def _stamp(path: Path) -> tuple[str, int, int, int, int, int]:
    status = path.stat()
    return str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _nothing() -> Look:
    look: Look = Future()
    look.set_result(None)
    return look
