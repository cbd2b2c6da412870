"""Lookups at a remote tier: asynchronous, many at a time, and within a deadline, as vLLM's scheduler must not wait."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from kvstore.adapters.vllm.scheduler.choice import slowest
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, chunk_refs, ends, tail_refs
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers, RemoteView
from kvstore.index.trails import RemoteTrails
from kvstore.model.checkpoints import Checkpoints, End
from kvstore.model.chunks import Answer, Asked, ChunkRef, in_any
from kvstore.model.keys import Namespace, PrefixHasher
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.questions import Question

PASS_BUDGET_S: Final = 0.004
"""Time that one pass of the scheduler may wait for answers, for all its requests together: an answer within this time
is sooner than the next step."""


@dataclass
class _Asking:
    """A request that asks, or that has asked and waits to be scheduled."""

    told: RemoteAnswers
    questions: list[Question] = field(default_factory=list)  # without an answer so far
    asked: Sequence[Asked] = ()  # with them
    deadline_s: float | None = None  # from the first of them on


class RemoteLookup:
    """Questions to the remote tier by requests that wait to be scheduled. For one thread.

    A chunk is not asked about twice while a question is in flight: requests with a common prefix wait for the same
    answer. Every answer is kept, even if the request that asked no longer waits.

    Args:
        directory: asks; ``close`` closes it.
        view: takes the answers.
        timeout_s: the longest time for the lookup of one request. What is not answered by then counts as missing, for
            this request.
        sources: the engines that requests may name.
        namespaces: those of the chunks, one for each shard; none without a remote tier.
    """

    def __init__(
        self,
        directory: RemoteDirectory,
        view: RemoteView,
        timeout_s: float,
        sources: Collection[str] = (),
        namespaces: Sequence[Namespace] = (),
    ) -> None:
        self.view = view
        self.timeouts = 0  # lookups that ended without an answer
        self._directory = directory
        self._timeout_s = timeout_s
        self._sources = frozenset(sources)
        self._namespaces = tuple(namespaces)
        self._requests: dict[str, _Asking] = {}
        self._open: dict[Asked, Question] = {}  # by chunk or trail, without questions to a source
        self._answered: deque[Question] = deque()  # handed over by the threads that ask
        self._left_s = PASS_BUDGET_S  # of this pass
        self._took_s = 0.0  # the last answer
        self._slow_sources: set[str] = set()  # that made a pass wait in vain, and have not answered since

    @property
    def is_open(self) -> bool:
        """True if there is a remote tier."""
        return bool(self._namespaces)

    def names_peer(self, host: str, port: int | None) -> bool:
        """Tell if a peer that was found has a host and port; see ``PeersTier.names``."""
        return self._directory.names_peer(host, port)

    def begin(self, request_id: str, source: str) -> None:
        """Also ask the engine that a request names, if that is allowed."""
        if source in self._sources:
            self._requests[request_id] = _Asking(RemoteAnswers(source))

    def told(self, request_id: str) -> RemoteAnswers:
        """Return the answers that a request has received."""
        asking = self._requests.get(request_id)
        return asking.told if asking is not None else NO_ANSWERS

    def answered(self, request_id: str, asked: Sequence[Asked], *, may_wait: bool = True) -> bool:
        """Ask about chunks and trails for a request. Return False until all is answered or its deadline has passed.

        A pass of the scheduler waits briefly at most, and not at all while the tier is slow or without ``may_wait``.
        After a request's deadline, open questions count as "no" for this request only.
        """
        now_s = time.monotonic()
        asking = self._requests.setdefault(request_id, _Asking(RemoteAnswers()))
        self._take_in()
        if asking.deadline_s is None:
            asking.deadline_s = now_s + self._timeout_s
        if not asking.questions:
            self._ask(asking, asked, now_s)
        if may_wait:
            self._wait(asking)
        if all(question.is_done for question in asking.questions):
            self._tell(asking)
            return True
        if time.monotonic() < asking.deadline_s:
            return False
        self.timeouts += 1
        asking.told.give_up()
        asking.questions = []
        return True

    def waits(self, request_id: str) -> bool:
        """Tell if a request has asked, and has neither all its answers nor reached its deadline.

        Like ``answered``, but without the chunks: to ask this again costs no lookup.
        """
        asking = self._requests.get(request_id)
        if asking is None or not asking.questions or asking.deadline_s is None:
            return False
        self._take_in()
        self._wait(asking)
        return not all(question.is_done for question in asking.questions) and time.monotonic() < asking.deadline_s

    def settled(self, request_id: str) -> None:
        """End the lookup of a request with nothing left to ask. A later question starts one with a new deadline."""
        asking = self._requests.get(request_id)
        if asking is not None:
            asking.questions, asking.deadline_s = [], None

    def end(self, request_id: str) -> None:
        """Forget a request that has used its answers or has ended."""
        self._requests.pop(request_id, None)

    def end_pass(self) -> None:
        """End a pass once the scheduler has planned a step, so that the next pass may wait again."""
        self._take_in()
        self._left_s = PASS_BUDGET_S

    def ask(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Ask about chunks, and wait for the answer within the deadline. From any thread."""
        question = self._directory.ask(refs)
        if not self._directory.wait([question], self._timeout_s):
            return [False] * len(refs)
        return [bool(answer) for answer in question.answers]

    def longest(self, trail: bytes) -> tuple[ChunkRef, int] | None:
        """Return the remote chunk with most blocks of a trail, and how many. Waits, as ``ask``. From any thread."""
        question = self._directory.ask([trail])
        heard = RemoteTrails()
        if self._directory.wait([question], self._timeout_s) and isinstance(named := question.answers[0], tuple):
            heard.add(trail, named)
        near = list(heard.nearest(trail))
        there = self.ask([ref for ref, _ in near]) if near else []
        return next((found for found, is_there in zip(near, there, strict=True) if is_there), None)

    def reset(self, epoch: str) -> None:
        """Ask about the namespaces at another epoch from now on. Questions in flight are about the old ones."""
        self._requests = {name: _Asking(RemoteAnswers(asking.told.source)) for name, asking in self._requests.items()}
        self._open.clear()
        self._answered = deque()
        if self.is_open:
            self._directory.reset([namespace.at_epoch(epoch) for namespace in self._namespaces])

    def close(self) -> None:
        """End the questions."""
        self._directory.close()

    def _ask(self, asking: _Asking, asked: Sequence[Asked], now_s: float) -> None:
        """Ask about chunks and trails, except those with a question in flight."""
        source, tell = asking.told.source, self._answered.append
        asking.asked = asked
        wanted = self.view.unknown(asked, now_s) if source else asked
        since, under_way = self.view.serial, [self._under_way(item) for item in wanted]
        asking.questions = [question for question in dict.fromkeys(under_way) if question is not None]
        fresh = [item for item, question in zip(wanted, under_way, strict=True) if question is None]
        if fresh:
            question = self._directory.ask(fresh, tell=tell, since=since)
            self._open.update(dict.fromkeys(fresh, question))
            asking.questions.append(question)
        if source:
            asking.questions.append(self._directory.ask(asked, source, since=since))

    def _under_way(self, item: Asked) -> Question | None:
        """Return a question in flight about an item, if it will count; one from before a chunk's removal does not."""
        question = self._open.get(item)
        return question if question is not None and not self.view.is_void(item, question.since) else None

    def _wait(self, asking: _Asking) -> None:
        """Wait for answers as long as this pass may.

        A source that hangs costs one such wait, and affects only the requests that name it.
        """
        questions, source = asking.questions, asking.told.source
        if source in self._slow_sources:
            return
        if self._left_s <= 0 or self._took_s > PASS_BUDGET_S or all(question.is_done for question in questions):
            return
        begin_s = time.monotonic()
        if not self._directory.wait(questions, self._left_s):
            if source:
                self._slow_sources.add(source)
            else:
                self._took_s = self._timeout_s  # until an answer says otherwise
        self._left_s -= time.monotonic() - begin_s
        self._take_in()

    def _take_in(self) -> None:
        """Pass the answers since the last call to the view."""
        while self._answered:
            question = self._answered.popleft()
            self._took_s = question.answered_s - question.asked_s
            self.view.note(question.asked, question.answers, question.answered_s, question.since)
            for item in question.asked:
                if self._open.get(item) is question:
                    del self._open[item]

    def _tell(self, asking: _Asking) -> None:
        """Give a request the answers to its questions."""
        now_s, questions = time.monotonic(), asking.questions
        asking.questions = []
        if not asking.told.source:
            for question in questions:
                self.view.tell(asking.told, question.told, now_s, question.since)
            return
        self._slow_sources.discard(asking.told.source)
        answers = {item: _together([question.told.get(item) for question in questions]) for item in asking.asked}
        self.view.tell(asking.told, answers, now_s, min(question.since for question in questions))


def _together(answers: Sequence[Answer]) -> Answer:
    """Merge the answers of two engines: a chunk is there if one of them has it."""
    named = [answer for answer in answers if isinstance(answer, tuple)]
    if named:
        return tuple(dict.fromkeys(chain(*named)))
    return in_any(answer or False for answer in answers if not isinstance(answer, tuple))


def find_tokens(hasher: PrefixHasher, index: ChunkIndex, remote: RemoteLookup) -> Counter[Place]:
    """Count the leading tokens of a sequence that are known, by the fastest tier; for operators and routers.

    With a model that needs checkpoints, tokens count up to the last one. May be called from any thread, because it
    looks chunks up one by one and asks the remote tier itself.
    """
    chunks, checkpoints = chunk_refs(hasher, with_tail=False), index.checkpoints
    if checkpoints is not None and not checkpoints.groups.full:
        last = len(chunks)
        possible = ends(hasher, 0, hasher.num_tokens, {last: tail_refs(hasher, last)})
        num_tokens, slowest = _last_checkpoint(checkpoints, possible, index, remote)
        return Counter({slowest: num_tokens} if num_tokens else {})
    places = _places(chunks, index, remote)
    whole = next((number for number, place in enumerate(places) if place is None), len(chunks))
    tails = tail_refs(hasher, whole)
    by_tail = {ref: place for ref, place in zip(tails, _places(tails, index, remote), strict=True) if place is not None}
    keys = hasher.block_keys(whole)
    if checkpoints is None and keys:
        trail = b"".join(keys)
        if (longest := index.longest(trail)) is not None:
            by_tail.setdefault(ChunkRef(keys[longest[1] - 1], longest[1]), longest[0])
        if remote.is_open and (named := remote.longest(trail)) is not None:
            by_tail.setdefault(ChunkRef(keys[named[1] - 1], named[1]), Place.REMOTE)
    whole_tokens = whole * hasher.chunk_tokens
    end_tokens = whole_tokens + max((ref.num_blocks for ref in by_tail), default=0) * hasher.block_tokens
    if checkpoints is not None:
        possible = ends(hasher, 0, end_tokens, {whole: list(by_tail)})
        end_tokens, _ = _last_checkpoint(checkpoints, possible, index, remote)
    found: Counter[Place] = Counter()
    for place in places[: end_tokens // hasher.chunk_tokens]:
        if place is not None:
            found[place] += hasher.chunk_tokens
    for ref, place in by_tail.items():
        if whole_tokens + ref.num_blocks * hasher.block_tokens == end_tokens:
            found[place] += ref.num_blocks * hasher.block_tokens
    return found


def _last_checkpoint(
    checkpoints: Checkpoints, possible: Sequence[End], index: ChunkIndex, remote: RemoteLookup
) -> tuple[int, Place]:
    """Return the tokens before the last checkpoint known whole, 0 without one, and the slowest place of its parts."""
    firsts = list(checkpoints.first_refs(possible))
    asked = [ref for ref in firsts if ref is not None]
    known = dict(zip(asked, _places(asked, index, remote), strict=True))
    begun = [end for end, first in zip(possible, firsts, strict=True) if first is None or known[first] is not None]
    parts = {end: list(checkpoints.refs(end[1], end[0])) for end in begun}
    asked = [ref for refs in parts.values() for ref in refs]
    known = dict(zip(asked, _places(asked, index, remote), strict=True))
    for (num_tokens, _), refs in parts.items():
        places = [place for ref in refs if (place := known[ref]) is not None]
        if len(places) == len(refs):
            return num_tokens, slowest(places)
    return 0, Place.MEMORY


def _places(refs: Sequence[ChunkRef], index: ChunkIndex, remote: RemoteLookup) -> list[Place | None]:
    """Return the fastest place of each chunk; None where it is not known."""
    local = (Place.MEMORY, Place.DISK)
    places = [next((place for place in local if index.holds(ref.prefix_key, place)), None) for ref in refs]
    missing = [ref for ref, place in zip(refs, places, strict=True) if place is None]
    if not (remote.is_open and missing):
        return places
    elsewhere = {ref for ref, is_there in zip(missing, remote.ask(missing), strict=True) if is_there}
    return [place or (Place.REMOTE if ref in elsewhere else None) for ref, place in zip(refs, places, strict=True)]
