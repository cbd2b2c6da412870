"""Record of one worker's hand-overs under way, and of the outcomes of their chunks."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.handover.transport import Receiver
from kvstore.model.chunks import ChunkRef
from kvstore.paged.base import BlockIds
from kvstore.protocol.messages import MAX_OPEN
from kvstore.protocol.progress import ALL_TOKENS, Progress

_MAX_LOST: Final = 256  # incomplete hand-overs that are still reported to receivers after their end


class PushJob(NamedTuple):
    """A chunk to hand over, whose blocks are complete after the step.

    Attributes:
        ref: its key and length.
        block_ids: its blocks in the paged cache.
        handover: the number of the hand-over that it belongs to.
        begin_tokens: its first token in the prompt.
        is_needed: later chunks are of no use without it.
        trail: the keys at the ends of its blocks; empty if they are not needed.
        until_s: the end of its time to live, in seconds since 1970; None for no end.
    """

    ref: ChunkRef
    block_ids: BlockIds
    handover: int = 0
    begin_tokens: int = 0
    is_needed: bool = True
    trail: bytes = b""
    until_s: float | None = None


@dataclass
class Settled:
    """Outcomes of chunks that were to be handed over.

    Attributes:
        arrived: number of chunks that arrived, by the number of the hand-over and their first token.
        lost: first token of the first chunk that never arrives, by the number of the hand-over.
    """

    arrived: Counter[tuple[int, int]] = field(default_factory=Counter)
    lost: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True if there is any outcome to report."""
        return bool(self.arrived or self.lost)

    def lose(self, handover: int, begin_tokens: int) -> None:
        """Note a chunk that never arrives."""
        self.lost[handover] = min(begin_tokens, self.lost.get(handover, ALL_TOKENS))

    def merge(self, other: Settled) -> None:
        """Add another rank's part."""
        self.arrived += other.arrived
        for handover, begin_tokens in other.lost.items():
            self.lose(handover, begin_tokens)


@dataclass
class _Entry:
    receiver: Receiver
    num_left: int = 0  # chunks with unknown outcome
    end_tokens: int = ALL_TOKENS
    is_complete: bool = False  # no more chunks follow

    @property
    def has_lost(self) -> bool:
        return self.end_tokens < ALL_TOKENS

    @property
    def is_over(self) -> bool:
        return self.is_complete and not self.num_left


class HandoverTracker:
    """Record of the hand-overs of one worker. Thread-safe.

    Attributes:
        sender: name of this engine for receivers; empty while no progress is reported to them.
    """

    def __init__(self) -> None:
        self.sender = ""
        self._lock = threading.Lock()
        self._next = 0
        self._entries: dict[int, _Entry] = {}
        self._lost: OrderedDict[int, _Entry] = OrderedDict()  # ended, the oldest first
        self._settled = Settled()

    def begin(self, receiver: Receiver, jobs: Iterable[PushJob]) -> None:
        """Note chunks to be sent, each of which must be settled."""
        with self._lock:
            for job in jobs:
                self._next = max(self._next, job.handover + 1)
                self._entries.setdefault(job.handover, _Entry(receiver)).num_left += 1

    def settle(self, job: PushJob, *, has_arrived: bool) -> None:
        """Note that a chunk has arrived, or never will."""
        with self._lock:
            entry = self._entries[job.handover]
            entry.num_left -= 1
            if has_arrived:
                self._settled.arrived[job.handover, job.begin_tokens] += 1
            elif job.is_needed:
                entry.end_tokens = min(entry.end_tokens, job.begin_tokens)
                self._settled.lose(job.handover, job.begin_tokens)
            self._end_if_over(job.handover, entry)

    def wants(self, job: PushJob) -> bool:
        """Tell if a chunk is of use, which it is if no chunk before it is lost."""
        with self._lock:
            return job.begin_tokens < self._entries[job.handover].end_tokens

    def complete(self, handover: int) -> Receiver | None:
        """Note that a hand-over gets no more chunks; returns its receiver if the hand-over was still open."""
        with self._lock:
            self._next = max(self._next, handover + 1)
            entry = self._entries.get(handover)
            if entry is None:
                return None
            entry.is_complete = True
            self._end_if_over(handover, entry)
            return entry.receiver

    def progress(self, receiver: Receiver) -> Progress:
        """Return the current progress to report to a receiver."""
        with self._lock:
            numbers = sorted(number for number, entry in self._entries.items() if entry.receiver == receiver)
            following = numbers[MAX_OPEN] if len(numbers) > MAX_OPEN else self._next
            open_ = {number: self._entries[number].end_tokens for number in numbers[:MAX_OPEN]}
            lost = {number: entry.end_tokens for number, entry in self._lost.items() if entry.receiver == receiver}
            return Progress(self.sender, following, open_, lost)

    def take_settled(self) -> Settled:
        """Return the outcomes since the last call."""
        with self._lock:
            settled, self._settled = self._settled, Settled()
            return settled

    def _end_if_over(self, handover: int, entry: _Entry) -> None:
        if not entry.is_over:
            return
        del self._entries[handover]
        if entry.has_lost:  # a receiver of several ranks must not wait for the others' parts
            self._lost[handover] = entry
            if len(self._lost) > _MAX_LOST:
                self._lost.popitem(last=False)
