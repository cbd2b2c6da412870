"""Search of a trace for a request, and for the history of the first chunk that it missed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.model.history import ChunkEvent, Fate
from kvstore.model.keys import PrefixKey
from kvstore.policies.traces import Begin, LookedUp, Record, Request, Tiers, Timed, read_records

_MAX_MATCHES: Final = 10  # requests named if several have the wanted text in their ids
_MAX_NOTED: Final = 100_000  # earlier requests of which it is remembered that they were special
_MAX_EVENTS: Final = 10_000  # of the chunks in question


class Found(NamedTuple):
    """Lookup of a request, with its time since the beginning of the trace, and that beginning."""

    time_s: float
    lookup: LookedUp
    begin: Begin


class Nearest(NamedTuple):
    """Earlier request with the longest common front.

    Attributes:
        request_id, time_s: its id, and the time when it ended.
        num_chunks: whole chunks that both have.
    """

    request_id: str
    time_s: float
    num_chunks: int


@dataclass
class Story:
    """Account of a request's first missing chunk.

    Attributes:
        found: its lookup.
        tiers: sizes of the engine's tiers; None if the trace does not say.
        events: what happened to chunks that begin like the missing one, in order.
        keys: the request's chunks; empty if it has not ended.
        nearest: the earlier request with the longest common front; None if none has a whole chunk in common.
        owner: an earlier request with the missing chunk; None if none has ended.
        notes: what was special about earlier requests, by id.
        makers: requests that brought a chunk for which another one was evicted, by that chunk.
        num_since: different chunks used since the missing one was used last.
        failed_loads: events of the request's own chunks that could not be loaded for it.
    """

    found: Found
    tiers: Tiers | None = None
    events: list[tuple[float, ChunkEvent]] = field(default_factory=list)
    keys: tuple[PrefixKey, ...] = ()
    nearest: Nearest | None = None
    owner: Nearest | None = None
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    makers: dict[PrefixKey, str] = field(default_factory=dict)
    num_since: int = 0
    failed_loads: list[ChunkEvent] = field(default_factory=list)


def latest_misses(path: Path, most: int) -> tuple[list[Found], int]:
    """Return the latest requests that missed, the last one last, and the number of all requests looked up.

    Raises:
        ConfigError: the trace cannot be read, or has no reasons.
    """
    latest: deque[Found] = deque(maxlen=most)
    count = 0
    for found in _lookups(path):
        count += 1
        if found.lookup.reason:
            latest.append(found)
    return list(latest), count


def find_request(path: Path, wanted: str) -> Found:
    """Return the last lookup of the request with an id, or with the only id of which ``wanted`` is a part.

    Raises:
        ConfigError: the trace cannot be read or has no reasons, or no request has this id, or several have.
    """
    exact: Found | None = None
    partly: dict[str, Found] = {}
    num_more = 0
    for found in _lookups(path):
        request_id = found.lookup.request_id
        if request_id == wanted:
            exact = found
        elif wanted in request_id:
            if request_id in partly or len(partly) < _MAX_MATCHES:
                partly[request_id] = found
            else:
                num_more += 1
    if exact is not None:
        return exact
    if not partly:
        raise ConfigError(
            f"no request in {path} has {wanted!r} in its id. kvstore why {path} lists those that missed. Requests that "
            "kvstore passes by, such as pooling ones, are not recorded, and each start of vLLM begins another trace"
        )
    if len(partly) > 1:
        names = ", ".join(partly) + (f", and {num_more:,} more" if num_more else "")
        raise ConfigError(f"{wanted!r} is part of several ids in {path}: {names}. Give more of the one you mean")
    return next(iter(partly.values()))


def read_story(path: Path, found: Found) -> Story:
    """Return what a trace says about the first missing chunk of a request.

    Raises:
        ConfigError: the trace cannot be read.
    """
    story = Story(found, keys=_own_keys(path, found))
    teller = _Teller(story)
    for record in read_records(path):
        teller.take(record)
    return story


def _lookups(path: Path) -> Iterator[Found]:
    """Yield the lookups of a trace, in order."""
    begin = Begin()
    for record in read_records(path, containing='"lookup":'):
        if isinstance(record, Begin):
            begin = record
            if not begin.has_reasons:
                raise ConfigError(
                    f"{path} has no reasons of misses: it is of an earlier release, or not kvstore's. Record another "
                    "trace (record_trace)"
                )
        elif isinstance(record, Timed) and isinstance(record.what, LookedUp):
            yield Found(record.time_s, record.what, begin)


def _own_keys(path: Path, found: Found) -> tuple[PrefixKey, ...]:
    """Return the chunks of a request; none if it has not ended."""
    wanted = found.lookup.request_id
    for record in read_records(path, containing=json.dumps(wanted)):
        if isinstance(record, Request) and record.request_id == wanted and record.time_s >= found.time_s:
            return record.keys
    return ()


class _Teller:
    """Collector of a story, which takes the records of a trace in order."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._until_s = story.found.time_s
        self._missing = frozenset(story.found.lookup.missing)
        self._since: set[PrefixKey] | None = None  # nothing before the first use of the missing chunk
        self._is_over = False
        self._own = frozenset(story.keys)  # until the request has ended

    def take(self, record: Record) -> None:
        """Take the next record."""
        if isinstance(record, Request):
            self._take_request(record)
        elif isinstance(record, Timed):
            self._take_timed(record.time_s, record.what)

    def _take_request(self, request: Request) -> None:
        story = self._story
        for key in story.makers.keys() & set(request.keys):
            story.makers[key] = story.makers[key] or request.request_id
        if self._is_over:
            if request.request_id == story.found.lookup.request_id:
                self._own = frozenset()
            return
        self._use(*request.keys)
        if self._missing.intersection(request.keys):
            story.owner = Nearest(request.request_id, request.time_s, 0)
        whole = len(request.keys) - (request.tail_tokens < request.chunk_tokens)
        common = 0
        for ours, theirs in zip(story.keys, request.keys[:whole], strict=False):
            if ours != theirs:
                break
            common += 1
        if common and (story.nearest is None or common >= story.nearest.num_chunks):
            story.nearest = Nearest(request.request_id, request.time_s, common)

    def _take_timed(self, time_s: float, what: LookedUp | ChunkEvent | Tiers) -> None:
        story = self._story
        if self._is_over:
            if isinstance(what, ChunkEvent) and what.fate in {Fate.LOST, Fate.UNREAD} and what.key in self._own:
                story.failed_loads.append(what)
            return
        if isinstance(what, Tiers):
            story.tiers = what
        elif isinstance(what, LookedUp):
            if time_s == self._until_s and what == story.found.lookup:
                self._is_over = True
                since = (self._since or set()).difference(self._missing)
                story.num_since = len(since.union(self._before_missing()))
            elif what.notes and len(story.notes) < _MAX_NOTED:
                story.notes[what.request_id] = tuple(what.notes)
        else:
            if what.fate in {Fate.STORED, Fate.READ}:
                self._use(what.key)
            if not what.key or what.key in self._missing or what.first_key in self._missing:
                self._take_event(time_s, what)

    def _take_event(self, time_s: float, event: ChunkEvent) -> None:
        story = self._story
        story.events.append((time_s, event))
        if len(story.events) > _MAX_EVENTS:
            del story.events[: _MAX_EVENTS // 2]
        if event.newcomer:
            story.makers.setdefault(event.newcomer, "")

    def _use(self, *keys: PrefixKey) -> None:
        """Note that chunks are used, among them perhaps the missing one."""
        if not self._missing.isdisjoint(keys):
            self._since = set()
        if self._since is not None:
            self._since.update(keys)

    def _before_missing(self) -> tuple[PrefixKey, ...]:
        """Return the request's chunks up to the missing one."""
        lookup, chunk_tokens = self._story.found.lookup, self._story.found.begin.chunk_tokens
        return self._story.keys[: lookup.found_tokens // max(1, chunk_tokens) + 1]
