"""Prompts that are brought back to memory before their conversations go on, as clients have announced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kvstore.adapters.vllm.scheduler.loads import LoadPlanner
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup
from kvstore.index.deadlines import Deadlines
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Match, Place
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixKey

SPAN_S: Final = 60.0
"""A prompt keeps its room for this time after it is due. An engine that falls idle plans no steps, so it brings at once
what is due within this time."""

_MOST_CHUNKS: Final = 1 << 18  # of all announced prompts; about 50 MB
_AT_ONCE: Final = 16  # chunks of a load, so that a request waits briefly for it
_LOOKS: Final = 4  # at announced prompts, in a step
_ASKER: Final = "prefetch"  # at the remote tier; a request's id is longer


@dataclass
class _Coming:
    """A prompt that is expected back.

    Attributes:
        due_s: the time until which it should be in memory.
        refs: its chunks, in order, behind the parts of its checkpoint.
        checkpoint: these parts.
        num_missing: number of its chunks that were not in memory at the last look; None before the first.
    """

    due_s: float
    refs: Sequence[ChunkRef]
    checkpoint: Sequence[ChunkRef]
    num_missing: int | None = None


class Prefetches:
    """Prompts of one engine that clients expect back. For the scheduler's thread.

    One load is under way at a time, of few chunks. It takes slots as a request's load does, so nothing in use leaves
    memory, and one of the threads for such loads. Prompts that were brought and have yet to go on have at most half as
    many chunks as there are slots.

    Args:
        index: of all chunks.
        loads: plans the loads.
        remote: lookups at the remote tier.
        keeps: chunks stay in memory; False refuses all prompts.

    Attributes:
        is_busy: there is more to do, so the engine should plan another step even without requests.
        num_chunks: chunks brought to memory so far.
    """

    def __init__(self, index: ChunkIndex, loads: LoadPlanner, remote: RemoteLookup, *, keeps: bool) -> None:
        self.is_busy = False
        self.num_chunks = 0
        self._index = index
        self._loads = loads
        self._remote = remote
        self._most_chunks = index.num_slots // 2 if keeps else 0
        self._coming: dict[PrefixKey, _Coming] = {}  # by a chunk that shows that the conversation goes on
        self._num_coming = 0  # chunks of all of them
        self._due, self._over = Deadlines[PrefixKey](), Deadlines[PrefixKey]()
        self._brought: dict[PrefixKey, int] = {}  # with the numbers of their chunks
        self._early: list[PrefixKey] = []  # looked at before they were due, in this time of idleness
        self._current: PrefixKey | None = None
        self._fetch: int | None = None  # the number of the last load

    def expect(self, name: PrefixKey, due_s: float, match: Match) -> int:
        """Bring a prompt to memory by a time, and return how many of its chunks; 0 if there is no room for them.

        With a checkpoint it is brought as a whole or not at all. ``name`` is the key of the last chunk that is surely
        part of the next prompt.
        """
        self._forget(name)
        wanted = (*match.checkpoint, *match.refs)
        count = min(len(wanted), self._most_chunks, _MOST_CHUNKS - self._num_coming)
        if count and (count == len(wanted) or not match.checkpoint):
            self._coming[name] = _Coming(due_s, wanted[:count], match.checkpoint)
            self._num_coming += count
            self._due.set(name, due_s)
        return count

    def note_prompt(self, keys: Iterable[PrefixKey]) -> None:
        """End the wait for conversations that go on with a prompt, given by the keys of its chunks."""
        if self._coming:
            for key in keys:
                self._forget(key)

    def cancel(self) -> None:
        """Forget all prompts, because their chunks are out of date."""
        for name in list(self._coming):
            self._forget(name)

    def plan(self, now_s: float, *, is_idle: bool) -> None:
        """Add a load to the next plan if a prompt is due and no load is under way."""
        self.is_busy = self._fetch is not None and self._loads.is_under_way(self._fetch)
        if self.is_busy or not self._coming:
            return
        for name in self._over.take_due(now_s):
            self._forget(name)
        for _ in range(_LOOKS):
            self._current = self._current or self._next(now_s, is_idle=is_idle)
            self.is_busy = self._current is not None
            if self._current is None:
                return
            if self._bring(self._coming[self._current], now_s):
                return
            self._end(self._current, now_s)

    def _next(self, now_s: float, *, is_idle: bool) -> PrefixKey | None:
        """Return a prompt to bring; None if none is due, or if those brought have their share of the slots."""
        for name in self._due.take_due(now_s + SPAN_S if is_idle else now_s, 1):
            coming = self._coming[name]
            self._brought.pop(name, None)  # it was early
            if sum(self._brought.values()) + len(coming.refs) <= self._most_chunks:
                return name
            if coming.due_s > now_s:
                self._early.append(name)
            else:
                self._forget(name)
        for name in self._early:
            if name in self._coming:
                self._due.set(name, self._coming[name].due_s)
        self._early.clear()
        return None

    def _bring(self, coming: _Coming, now_s: float) -> bool:
        """Plan to load the next chunks of a prompt, or ask the remote tier for them; False at its end."""
        told = self._told(coming.refs, now_s)
        if told is None:
            return True
        sources = [*takewhile(lambda place: place is not None, (self._index.source(ref, told) for ref in coming.refs))]
        missing = [number for number, place in enumerate(sources, 1) if place is not Place.MEMORY]
        before, coming.num_missing = coming.num_missing, len(missing)
        if before is not None:
            self.num_chunks += max(0, before - len(missing))
        if not missing or (before is not None and len(missing) >= before):
            return False
        self._fetch = self._loads.bring(coming.refs[: missing[:_AT_ONCE][-1]], told, coming.checkpoint)
        return self._fetch is not None

    def _told(self, refs: Sequence[ChunkRef], now_s: float) -> RemoteAnswers | None:
        """Return the remote tier's answers about chunks that are not here; None while they are awaited."""
        if not self._remote.is_open:
            return NO_ANSWERS
        told = self._remote.told(_ASKER)
        away = [ref for ref in refs if self._index.source(ref, told) is None]
        asked = self._remote.view.unknown(away, now_s, told)
        if asked and not self._remote.answered(_ASKER, asked, may_wait=False):
            return None
        return self._remote.told(_ASKER)

    def _end(self, name: PrefixKey, now_s: float) -> None:
        """End the work on the current prompt. If it was early, it may leave memory again before its time."""
        coming, self._current = self._coming[name], None
        self._remote.end(_ASKER)
        self._brought[name], coming.num_missing = len(coming.refs), None
        if coming.due_s > now_s:
            self._early.append(name)
        else:
            self._over.set(name, now_s + SPAN_S)

    def _forget(self, name: PrefixKey) -> None:
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
