"""Prompts that are brought back to memory before their conversations go on, as clients have announced."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup
from kvstore.index.deadlines import Deadlines
from kvstore.index.index import ChunkIndex
from kvstore.index.owners import Owner
from kvstore.index.plans import Match, Place
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher, PrefixKey

SPAN_S: Final = 60.0
"""A prompt keeps its room for this time after it is due. An engine that falls idle plans no steps, so it brings at once
what is due within this time."""

BURST_S: Final = 2.0
"""An idle engine plans steps for this time at most, as vLLM waits for them before it pauses, sleeps or ends."""

_LONGEST_S: Final = 86_400.0  # until a prompt is due
_MOST_CHUNKS: Final = 1 << 17  # of all announced prompts; about 70 MB
_MOST_PROMPTS: Final = 4096
_AT_ONCE: Final = 16  # chunks of a load, so that a request waits briefly for it
_WINDOW: Final = 64  # chunks looked at together
_LOOKS: Final = 4  # at windows, in a step
_TRIES: Final = 64  # prompts without room that are passed over, in a step
_ASKER: Final = "prefetch\0"  # at the remote tier; no request has this id


@dataclass
class _Coming:
    """A prompt that is expected back.

    Attributes:
        due_s: the time until which it should be in memory.
        refs: its chunks, in order, and then the parts of its checkpoint.
        num_parts: number of these.
        trails: the trails of its chunks.
        tenant: ``KeyExtras.tenant`` of the request that announced it.
        owner: of its chunks.
        place: number of the first chunk that is not known to be in memory.
        piece: the chunks of the load under way.
    """

    due_s: float
    refs: Sequence[ChunkRef]
    num_parts: int
    trails: Mapping[PrefixKey, bytes]
    tenant: bytes = b""
    owner: Owner | None = None
    place: int = 0
    piece: Sequence[ChunkRef] = ()

    @property
    def checkpoint(self) -> Sequence[ChunkRef]:
        """The parts of its checkpoint."""
        return self.refs[len(self.refs) - self.num_parts :]


class Prefetches:
    """Prompts of one engine that clients expect back. For the scheduler's thread.

    One load is under way at a time, of few chunks. It takes slots as a request's load does, so nothing in use leaves
    memory, and one of the threads for such loads. Prompts that were brought and have yet to go on have at most half as
    many chunks as there are slots; a tenant that has more of these than another makes room for it. A step costs the
    same for a long prompt as for a short one.

    Args:
        index: of all chunks.
        loads: plans the loads.
        remote: lookups at the remote tier.
        keeps: chunks stay in memory, and may be loaded; False refuses all prompts.

    Attributes:
        num_chunks: chunks brought to memory so far.
    """

    def __init__(self, index: ChunkIndex, loads: LoadPlanner, remote: RemoteLookup, *, keeps: bool) -> None:
        self.num_chunks = 0
        self._index = index
        self._loads = loads
        self._remote = remote
        self._most_chunks = index.num_slots // 2 if keeps else 0
        self._coming: dict[str, _Coming] = {}  # by the request that announced it
        self._num_coming = 0  # chunks of all of them
        self._anchors: dict[str, PrefixKey] = {}  # of these, and of those that wait for the steps that store them
        self._anchored: dict[PrefixKey, dict[str, None]] = {}  # the same by anchor
        self._due, self._over = Deadlines[str](), Deadlines[str]()
        self._brought: dict[str, int] = {}  # with the numbers of their chunks
        self._early: deque[str] = deque()  # looked at before they were due, while the engine is idle
        self._current: str | None = None
        self._fetch: int | None = None  # the number of the last load
        self._has_more = False
        self._planned_s = 0.0
        self._busy_s = 0.0  # since then the engine plans steps without requests

    def is_busy(self, now_s: float) -> bool:
        """Tell if the engine should plan another step even without requests, if it still plans any."""
        return self._has_more and now_s < self._planned_s + BURST_S

    def announce(self, request_id: str, anchor: PrefixKey, in_s: float, hasher: PrefixHasher) -> Callable[[Match], int]:
        """Note that a conversation goes on in so many seconds, and return what to call once its chunks are stored.

        ``anchor`` is the key of the last chunk that is surely part of the next prompt. The function returns how many
        chunks will be brought to memory by then; 0 if there is no room for them. With a checkpoint a prompt is brought
        as a whole or not at all. Of too many prompts, those that are due last are given up.
        """
        self._forget(request_id)  # clients may choose ids, and use one twice
        self._anchors[request_id] = anchor
        self._anchored.setdefault(anchor, {})[request_id] = None
        return partial(self._expect, request_id, time.monotonic() + min(in_s, _LONGEST_S), hasher)

    def _expect(self, request_id: str, due_s: float, hasher: PrefixHasher, match: Match) -> int:
        wanted = (*match.refs, *match.checkpoint)
        if request_id not in self._anchors:
            return len(wanted)  # it has gone on already
        owner = self._index.owners.of(hasher)
        most = self._most_chunks if owner is None else min(self._most_chunks, owner.memory.capacity_bytes // 2)
        count = min(len(wanted), most)
        if count < len(wanted) and match.checkpoint:
            return count  # the caller tries an earlier one
        if not count or not self._make_room(count, due_s):
            self._forget(request_id)
            return 0
        refs = wanted[:count]
        trails = self._index.trails(refs)
        self._coming[request_id] = _Coming(due_s, refs, len(match.checkpoint), trails, hasher.tenant, owner)
        self._num_coming += count
        self._due.set(request_id, due_s)
        return count

    def _make_room(self, count: int, due_s: float) -> bool:
        while self._num_coming + count > _MOST_CHUNKS or len(self._coming) >= _MOST_PROMPTS:
            last = max(self._coming, key=lambda name: self._coming[name].due_s)
            if self._coming[last].due_s <= due_s:
                return False
            self._forget(last)
        return True

    def note_prompt(self, keys: Iterable[PrefixKey]) -> None:
        """End the wait for the conversations that go on with a prompt, given by the keys of its chunks.

        Of several that share their last chunk the first announced one ends.
        """
        if self._anchored:
            for key in keys:
                if (name := next(iter(self._anchored.get(key, ())), None)) is not None:
                    self._forget(name)

    def cancel(self) -> None:
        """Forget all prompts, because their chunks are out of date."""
        for name in list(self._anchors):
            self._forget(name)

    # -- steps -------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float, *, is_idle: bool) -> None:
        """Add a load to the next plan if a prompt is due and no load is under way."""
        if not is_idle or now_s > self._planned_s + BURST_S:
            self._busy_s = now_s
            self._put_back()
        self._planned_s = now_s
        self._has_more = self._fetch is not None and self._loads.is_under_way(self._fetch)
        if self._has_more or not self._coming or now_s > self._busy_s + BURST_S:
            return
        self._index.advance(now_s)
        for name in self._over.take_due(now_s):
            self._forget(name)
        self._has_more = True
        for _ in range(_LOOKS):
            self._current = self._current or self._next(now_s, is_idle=is_idle)
            if self._current is None:
                self._has_more = False
                return
            coming = self._coming[self._current]
            self._count(coming)
            if (told := self._told(coming, now_s)) is None or self._bring(coming, told):
                return
            if coming.place >= len(coming.refs):
                self._end(self._current, now_s)

    def _next(self, now_s: float, *, is_idle: bool) -> str | None:
        """Return a prompt to bring; None if none is due that fits into the share of the slots."""
        room, may_ask = self._most_chunks - sum(self._brought.values()), True
        for _ in range(_TRIES):
            name = next(iter(self._due.take_due(now_s + SPAN_S if is_idle else now_s, 1)), None)
            if name is None:
                return None
            coming = self._coming[name]
            room += self._brought.pop(name, 0)  # it was early
            if may_ask and len(coming.refs) > room:  # once a step, as it looks at all that was brought
                may_ask = False
                room += self._room_of_others(coming, len(coming.refs) - room)
            if len(coming.refs) <= room:
                coming.place = 0
                return name
            if coming.due_s > now_s:
                self._early.append(name)
            else:
                self._forget(name)
        return None

    def _room_of_others(self, coming: _Coming, missing: int) -> int:
        """Return the room that the tenant with most makes, by giving up what was brought for it last.

        It keeps at least as much as the other one then has.
        """
        held = Counter[bytes]()
        for name, count in self._brought.items():
            held[self._coming[name].tenant] += count
        most = max(held, key=held.__getitem__, default=coming.tenant)
        spare = held[most] - held[coming.tenant] - len(coming.refs)
        freed, given = 0, list[str]()
        for name in reversed(self._brought):
            count = self._brought[name]
            if freed < missing and self._coming[name].tenant == most and freed + count <= spare:
                freed += count
                given.append(name)
        if freed < missing:
            return 0
        for name in given:
            self._forget(name)
        return freed

    def _window(self, coming: _Coming) -> Sequence[ChunkRef]:
        """Return the next chunks of a prompt; the parts of its checkpoint come together, and first are known whole."""
        end, chunks = coming.place + _WINDOW, len(coming.refs) - coming.num_parts
        is_first = coming.num_parts > 0 and coming.place == 0
        return coming.refs[coming.place : len(coming.refs) if end > chunks or is_first else end]

    def _told(self, coming: _Coming, now_s: float) -> RemoteAnswers | None:
        """Return the remote tier's answers about chunks that are not here; None while they are awaited."""
        if not self._remote.is_open:
            return NO_ANSWERS
        told = self._remote.told(_ASKER)
        away = [ref for ref in self._window(coming) if self._index.source(ref, told) is None]
        asked = self._remote.view.unknown(away, now_s, told)
        if asked and not self._remote.answered(_ASKER, asked, may_wait=False):
            return None
        self._remote.settled(_ASKER)
        return self._remote.told(_ASKER)

    def _bring(self, coming: _Coming, told: RemoteAnswers) -> bool:
        """Plan to load the next missing chunks; False if there are none in the window, which then moves on."""
        window = self._window(coming)
        sources = [self._index.source(ref, told) for ref in window]
        known = next((number for number, source in enumerate(sources) if source is None), len(window))
        if known < len(window) and (coming.num_parts or not known):
            coming.place = len(coming.refs)  # the rest is of no use
            return False
        missing = [number for number in range(known) if sources[number] is not Place.MEMORY]
        first_part = len(coming.refs) - coming.num_parts - coming.place
        if not missing:
            coming.place = min(coming.place + known, len(coming.refs)) if known == len(window) else len(coming.refs)
            return False
        if missing[:_AT_ONCE][-1] < first_part:
            missing = missing[:_AT_ONCE]
        end = len(window) if missing[-1] >= first_part else missing[-1] + 1
        coming.piece = [window[number] for number in missing]
        begin = max(0, coming.place + missing[0] - 1)  # the policies link the first chunk to the one before
        checkpoint = coming.checkpoint if end > first_part else ()
        self._fetch = self._loads.bring(
            coming.refs[begin : coming.place + end], told, checkpoint, coming.trails, coming.owner
        )
        coming.place += end if self._fetch is not None else len(coming.refs)
        return self._fetch is not None

    def _count(self, coming: _Coming) -> None:
        """Count what the last load has brought; if something is missing, the rest is of no use."""
        here = sum(self._index.in_memory(ref.prefix_key) for ref in coming.piece)
        if here < len(coming.piece):
            coming.place = len(coming.refs)
        self.num_chunks += here
        coming.piece = ()

    def _end(self, name: str, now_s: float) -> None:
        """End the work on the current prompt. If it was early, it may leave memory again before its time."""
        coming, self._current = self._coming[name], None
        self._remote.end(_ASKER)
        self._brought[name] = len(coming.refs)
        if coming.due_s > now_s:
            self._early.append(name)
        else:
            self._over.set(name, now_s + SPAN_S)

    def _put_back(self) -> None:
        while self._early:
            name = self._early.popleft()
            if name in self._coming:
                self._due.set(name, self._coming[name].due_s)

    def _forget(self, name: str) -> None:
        anchor = self._anchors.pop(name, None)
        if anchor is None:
            return
        del self._anchored[anchor][name]
        if not self._anchored[anchor]:
            del self._anchored[anchor]
        coming = self._coming.pop(name, None)
        if coming is None:
            return
        self._num_coming -= len(coming.refs)
        self._due.withdraw(name)
        self._over.withdraw(name)
        self._brought.pop(name, None)
        if name == self._current:
            self._current = None
            self._remote.end(_ASKER)
