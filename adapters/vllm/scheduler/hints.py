"""Hints of clients about their prompts: keep, retain on disk, expect back, demote, drop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple

from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.config import StoreConfig
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Match, chunk_refs
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher
from kvstore.model.lifetime import Lifetime, clock_ahead_s
from kvstore.model.retention import Retention

PIN: Final = "pin"
RETAIN: Final = "retain"
PREFETCH: Final = "prefetch"
DEMOTE: Final = "demote"
DROP: Final = "drop"


class _Coming(NamedTuple):
    """Hint that is carried out once a step has ended.

    Attributes:
        hint: its name.
        hasher: of the prompt.
        last_step: the step to wait for.
        hold: holds the chunks of a match, and returns how many of them, from the checkpoint and the front.
        shrinks: if there is no room for all, those up to an earlier checkpoint are held.
    """

    hint: str
    hasher: PrefixHasher
    last_step: int
    hold: Callable[[Match], int]
    shrinks: bool = True


class PromptHints:
    """Hints about the prompts of one engine. For the scheduler's thread.

    Each is carried out when the steps that store its chunks have ended, of its request and of others with the same
    prompt.

    Args:
        index: of all chunks.
        steps: tells which steps have ended.
        config: the duration of a pin, and the longest retention.
        count: counts a hint and its result.
    """

    def __init__(
        self, index: ChunkIndex, steps: StepTracker, config: StoreConfig, count: Callable[[str, str], None]
    ) -> None:
        self._index = index
        self._steps = steps
        self._config = config
        self._count = count
        self._coming: dict[str, _Coming] = {}  # by the name of the pin, or the request

    def add(self, name: str, hasher: PrefixHasher, last_step: int) -> None:
        """Pin the chunks of a request that has just ended, once ``last_step`` is over."""
        hold = partial(self._lease, name=name)
        self._coming[name] = _Coming(PIN, hasher, last_step, hold)
        self.hold()

    def retain(self, request_id: str, hasher: PrefixHasher, last_step: int, ttl_s: float) -> None:
        """Retain the chunks of a request that has just ended: what is known now, and the rest after ``last_step``.

        The next plan tells the workers; after that vLLM may be idle for long. 0 seconds end what was asked before.
        """
        until_s = time.monotonic() + min(ttl_s, self._config.retain_max_secs)
        hold = partial(self._retain, until_s=until_s, tenant=hasher.tenant)
        if not ttl_s:
            hold = partial(self._end_retention, hasher=hasher)
        elif self._index.checkpoints is None:
            known = takewhile(lambda ref: ref.prefix_key in self._index, chunk_refs(hasher, with_tail=True))
            hold(Match(tuple(known), 0))
        self._coming[f"{RETAIN} {request_id}"] = _Coming(RETAIN, hasher, last_step, hold, shrinks=ttl_s > 0)
        self.hold()

    def expect(self, request_id: str, hasher: PrefixHasher, last_step: int, hold: Callable[[Match], int]) -> None:
        """Call ``hold`` with what is stored of a request that has just ended, once ``last_step`` is over."""
        self._coming[f"{PREFETCH} {request_id}"] = _Coming(PREFETCH, hasher, last_step, hold)
        self.hold()

    def give_up(self, request_id: str, hasher: PrefixHasher, last_step: int, hint: str) -> None:
        """Let the chunks of a request that has just ended go first, once ``last_step`` is over."""
        give_up = partial(self._give_up, hasher=hasher, hint=hint)
        self._coming[f"{hint} {request_id}"] = _Coming(hint, hasher, last_step, give_up, shrinks=False)
        self.hold()

    def _give_up(self, match: Match, hasher: PrefixHasher, hint: str) -> int:
        return self._index.give_up(_own_refs(match, hasher), demotes=hint == DEMOTE)

    def _end_retention(self, match: Match, hasher: PrefixHasher) -> int:
        return self._index.end_retention(_own_refs(match, hasher))

    def _lease(self, match: Match, name: str) -> int:
        return self._index.lease(name, _refs_of(match), self._config.pin_max_secs)

    def _retain(self, match: Match, until_s: float, tenant: bytes) -> int:
        """Retain chunks, and return how many; where there is a checkpoint, all or none, as a part is of no use."""
        refs = _refs_of(match)
        count = self._index.retainable(refs, tenant)
        if self._index.checkpoints is None or count == len(refs):
            self._index.retain(refs, until_s, tenant)
        return count

    def restore(self, retained: Iterable[Retention], limited: Iterable[Lifetime]) -> None:
        """Limit and retain chunks as before a restart, and end those whose time to live is over.

        If ranks tell different ends of a chunk, the earliest counts. The longest retention comes first.
        """
        ahead_s, now_s = clock_ahead_s(), time.time()
        self._index.limit(one.later(-ahead_s) for one in limited)
        self._index.advance(time.monotonic())
        for one in sorted(retained, key=lambda one: -one.until_s):
            if one.until_s > now_s:  # a clock that was set back does not make it longer than what is allowed
                ttl_s = min(one.until_s - now_s, self._config.retain_max_secs)
                self._index.retain([one.ref], time.monotonic() + ttl_s, one.tenant)
        self._index.take_retentions()  # the disk knows them

    def take_retained(self) -> list[Retention]:
        """Return the retention begun since the last call, for the workers to note."""
        ahead_s = clock_ahead_s()
        return [one.later(ahead_s) for one in self._index.take_retentions()]

    def take_limited(self) -> list[Lifetime]:
        """Return the times to live that became longer since the last call, for the workers to note."""
        ahead_s = clock_ahead_s()
        return [one.later(ahead_s) for one in self._index.take_lifetimes()]

    def hold(self) -> None:
        """Begin what waited for steps that have ended."""
        for name, coming in list(self._coming.items()):
            if self._steps.is_over(coming.last_step):
                del self._coming[name]
                self._count(coming.hint, self._hold(coming))

    def _hold(self, coming: _Coming) -> str:
        """Hold the known chunks of a prompt with the checkpoint behind them, without which they may be of no use.

        If there is no room for all, hold those up to an earlier checkpoint for which there is. Returns the result.
        """
        match = self._index.lookup(coming.hasher)
        wanted = len(_refs_of(match))
        while True:
            num_held = coming.hold(match)
            if num_held == len(_refs_of(match)) or not match.checkpoint or not coming.shrinks:
                return _result(num_held, wanted)
            num_chunks = max(0, num_held - len(match.checkpoint))
            limit_tokens = min(match.num_tokens - 1, num_chunks * coming.hasher.chunk_tokens)
            match = self._index.lookup(coming.hasher, limit_tokens=limit_tokens)

    def end(self, name: str) -> None:
        """End a pin, also one that has yet to begin."""
        self._coming.pop(name, None)
        self._index.release(name)

    def end_all(self) -> int:
        """End all pins, and return how many there were."""
        coming = (name for name, other in self._coming.items() if other.hint == PIN)
        names = {*coming, *(view.name for view in self._index.lease_views())}
        for name in names:
            self.end(name)
        return len(names)

    def cancel_coming(self) -> None:
        """Forget what has yet to begin."""
        self._coming.clear()


def _refs_of(match: Match) -> Sequence[ChunkRef]:
    return (*match.checkpoint, *match.refs)


def _own_refs(match: Match, hasher: PrefixHasher) -> Sequence[ChunkRef]:
    """Return a prompt's own chunks, head first, without a longer one of another sequence with the same first blocks."""
    is_longer = match.front_blocks(hasher.block_tokens, hasher.blocks_per_chunk) > 0
    return (*(match.refs[:-1] if is_longer else match.refs), *match.checkpoint)


def _result(num_held: int, wanted: int) -> str:
    if not num_held:
        return "refused"
    return "done" if num_held >= wanted else "partly"
