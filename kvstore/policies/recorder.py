"""Recorder of traces: a file that a thread of its own writes, so that nobody who records waits for a disk."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from kvstore.model.errors import ConfigError
from kvstore.model.history import ChunkEvent
from kvstore.model.keys import PrefixKey
from kvstore.policies.traces import (
    FORMAT_NAME,
    FORMAT_VERSION,
    KEY_BYTES,
    LookedUp,
    Tiers,
    fields_of,
    fields_of_events,
)

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 1 << 16  # records; a disk that stands still for so many ends the trace
_MAX_ID: Final = 512  # characters of a request's id, which its client may choose
_GATHER_S: Final = 0.1  # records that come within this time are written together
_END_WAIT_S: Final = 5.0
_BATCH: Final = 1024
_AT_ONCE: Final = 64  # keys hashed before other threads may run, or a scheduler would wait for milliseconds


class _Ended(NamedTuple):
    """Request that has ended."""

    keys: Sequence[PrefixKey]
    num_tokens: int
    answer_tokens: int
    request_id: str


_T = TypeVar("_T")
_Item = tuple[float, _Ended | LookedUp | ChunkEvent | Tiers]


class TraceRecorder:
    """Recorder of a trace in our own format. Thread-safe; a record costs its caller microseconds.

    Keys are hashed once more, with a secret made for this file and never written, so that knowing a prompt does not
    reveal if it is in the trace.

    Attributes:
        recorded: requests written.
        dropped: requests left out, because the file had reached its bound or could not be written.
    """

    def __init__(self, path: Path, chunk_tokens: int, *, max_bytes: int = 1 << 30) -> None:
        """Begin a new file, readable by its owner only.

        Raises:
            ConfigError: it exists already, or cannot be created.
        """
        self.recorded = 0
        self.dropped = 0
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._left_bytes = max_bytes
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ended = False  # nothing more is written: a trace with a gap would be misleading
        self._is_overrun = False  # nothing more is queued, likewise
        self._is_closing = threading.Event()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot record a trace in {path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "w", encoding="ascii", buffering=1 << 16)
        header = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "chunk_tokens": chunk_tokens}
        self._write([_line({**header, "start_s": round(time.time(), 3)})])

    @classmethod
    def open_next(cls, path: Path, chunk_tokens: int) -> TraceRecorder:
        """Begin a new file for each start, under the first free name of ``path``, ``path.1``, ``path.2``, ...

        Raises:
            ConfigError: the file cannot be created.
        """
        return cls(next(name for name in names_of(path) if not name.exists()), chunk_tokens)

    def record(self, keys: Sequence[PrefixKey], num_tokens: int, answer_tokens: int, request_id: str = "") -> None:
        """Record a request: the keys of all its chunks, head first, the number of their tokens, and of its answer's.

        Call it once for each request. After ``close`` requests count as dropped.
        """
        self._put(_Ended(tuple(keys), num_tokens, answer_tokens, request_id[:_MAX_ID]))

    def note(self, what: LookedUp | ChunkEvent | Tiers) -> None:
        """Record a lookup, an event or the sizes of the tiers."""
        if isinstance(what, LookedUp):
            what = what._replace(request_id=what.request_id[:_MAX_ID])
        self._put(what)

    def close(self) -> None:
        """Write what is left and close the file, within seconds even if the disk hangs. Idempotent."""
        with self._lock:
            if not self._is_closing.is_set():
                self._is_closing.set()
                self._queue.put(None)
                if self._thread is None:
                    self._thread = self._start()
        if self._thread is not None:
            self._thread.join(_END_WAIT_S)

    def _put(self, what: _Ended | LookedUp | ChunkEvent | Tiers) -> None:
        with self._lock:
            if not self._is_overrun and self._queue.qsize() >= MAX_QUEUED:
                self._is_overrun = True
                logger.warning("the trace %s ends early: %s records wait for its disk", self._path, MAX_QUEUED)
            if self._is_overrun or self._is_ended or self._is_closing.is_set():
                self.dropped += isinstance(what, _Ended)
                return
            self._queue.put((time.monotonic() - self._start_s, what))
            if self._thread is None:
                self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._write_all, name="kvstore-trace", daemon=True)  # a disk may hang
        thread.start()
        return thread

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Write records until ``close``."""
        is_open = True
        while is_open:
            batch = [self._queue.get()]
            if self._queue.qsize() < _BATCH:
                self._is_closing.wait(_GATHER_S)
            while batch[-1] is not None and len(batch) < _BATCH:
                try:
                    batch.append(self._queue.get_nowait())
                except Empty:
                    break
            is_open = batch[-1] is not None
            self._write_batch([item for item in batch if item is not None])
        try:
            self._file.close()
        except OSError as error:  # a full disk: the trace ends early
            self._end(f"it cannot be closed: {error.strerror}")

    def _write_batch(self, batch: Sequence[_Item]) -> None:
        num_requests = sum(isinstance(what, _Ended) for _, what in batch)
        recorded = 0 if self._is_ended else self._write([*self._lines(batch)])
        with self._lock:
            self.recorded += recorded
            self.dropped += num_requests - recorded

    def _write(self, lines: Sequence[tuple[str, int]]) -> int:
        """Write lines, each given with its number of requests, as far as they fit. Returns how many requests."""
        fitting, count = [], 0
        for line, num_requests in lines:
            if len(line) > self._left_bytes:
                self._end("it has reached its bound")
                break
            self._left_bytes -= len(line)
            count += num_requests
            fitting.append(line)
        try:
            self._file.writelines(fitting)
            self._file.flush()
        except OSError as error:
            self._end(f"it cannot be written: {error.strerror}")
            return 0
        return count

    def _end(self, reason: str) -> None:
        """Let the trace end here, and log why, once."""
        if not self._is_ended:
            self._is_ended = True
            logger.warning("the trace %s ends early: %s", self._path, reason)

    def _lines(self, batch: Sequence[_Item]) -> Iterator[tuple[str, int]]:
        """Yield the lines of records; one for neighbours that are the same event of several chunks."""
        for kind, group in itertools.groupby(batch, _kind_of):
            items = list(group)
            if kind is None:
                yield from (self._line_of(time_s, what) for time_s, what in items)
                continue
            for some in self._split(items):
                events = [what for _, what in some if isinstance(what, ChunkEvent)]
                chunks = [self._names(event.key, event.first_key, event.newcomer) for event in events]
                yield _line(fields_of_events(round(some[0][0], 3), events[0], chunks))

    def _line_of(self, time_s: float, what: _Ended | LookedUp | ChunkEvent | Tiers) -> tuple[str, int]:
        time_s = round(time_s, 3)
        if isinstance(what, _Ended):
            keys, num_tokens, answer_tokens, request_id = what
            fields: dict[str, Any] = {"time_s": time_s, "num_tokens": num_tokens, "answer_tokens": answer_tokens}
            named = {"id": request_id} if request_id else {}
            names = [name for some in self._split(keys) for name in self._names(*some)]
            return _line({**fields, **named, "keys": names})[0], 1
        assert not isinstance(what, ChunkEvent), "events are written together"
        missing = {"missing": self._names(*what.missing)} if isinstance(what, LookedUp) and what.missing else {}
        return _line({**fields_of(time_s, what), **missing})

    def _split(self, things: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Yield things in parts, and let other threads run after each."""
        for begin in range(0, len(things), _AT_ONCE):
            yield things[begin : begin + _AT_ONCE]
            if not self._is_closing.is_set():
                time.sleep(0)

    def _names(self, *keys: PrefixKey) -> list[str]:
        """Return the names of keys in the file, without empty ones at the end."""
        named = [blake2b(key, digest_size=KEY_BYTES, key=self._secret).hexdigest() if key else "" for key in keys]
        while named and not named[-1]:
            named.pop()
        return named


def names_of(path: Path) -> Iterator[Path]:
    """Yield the names of a trace's files, one for each start, in order and without end."""
    yield path
    yield from (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))


def _kind_of(item: _Item) -> tuple[object, ...] | None:
    """Return what events have in common that share a line; None for other records."""
    time_s, what = item
    return (int(time_s * 100), what.fate, what.place, what.cause) if isinstance(what, ChunkEvent) else None


def _line(fields: dict[str, Any]) -> tuple[str, int]:
    """Return a line, and its number of requests, 0."""
    return json.dumps(fields, separators=(",", ":")) + "\n", 0
