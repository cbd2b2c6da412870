"""Writes to the disk and to the remote tier after a store, and the accounting of the disk's space."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final

from kvstore.catalog.entries import (
    LOADING,
    NO_FILE,
    NO_SLOT,
    READY,
    SENDING,
    SENT,
    STORED,
    THERE,
    UNSENT,
    WRITING,
    Entries,
    Entry,
)
from kvstore.catalog.remote_view import RemoteView
from kvstore.chunks import ChunkRef, chunk_of
from kvstore.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.policies import Policy

_MAX_SENT_TAILS: Final = 1 << 14  # about 4 MB; older ones stay until the tier evicts them
_MAX_HOLDERS: Final = 8  # candidates examined for one tail


@dataclass(eq=False)
class DiskWrites:
    """The chunks on disk, those being written included, and the writes in flight.

    Attributes:
        chunks: all entries of the index.
        order: the policy for the disk; it also counts the bytes.
        stored_bytes: maps a chunk's number of blocks to its bytes on disk; None without a disk tier.
        max_writes: maximum of concurrent writes.
        num_writes: writes in flight.
        answers: True if the disk can be read now.
        removals: chunks dropped from the disk and not announced yet.
    """

    chunks: Entries
    order: Policy
    stored_bytes: Callable[[int], int] | None
    max_writes: int
    num_writes: int = 0
    answers: bool = True
    removals: list[ChunkRef] = field(default_factory=list)

    def adopt(self, survivors: Iterable[tuple[ChunkRef, int]], trails: Mapping[PrefixKey, bytes]) -> None:
        """Register the chunks that the tier held at start, with their trails where the tier knows them."""
        for ref, stored_bytes in survivors if self.stored_bytes is not None else ():
            self.chunks[ref.prefix_key] = Entry(ref, disk=STORED)
            self.order.add(ref.prefix_key, stored_bytes)
        self.chunks.learn_all(trails)

    def reserve(self, chunk: Entry) -> bool:
        """Make room for a chunk about to be stored; False if it will not be written."""
        if self.stored_bytes is None or chunk.disk is not NO_FILE or chunk.expires_s is not None:
            return False
        need_bytes = self.stored_bytes(chunk.ref.num_blocks)
        if self.num_writes >= self.max_writes or not self._make_room(chunk, need_bytes):
            self.chunks.counters.writes_dropped += 1
            return False
        chunk.disk = WRITING
        self.order.add(chunk.ref.prefix_key, need_bytes)
        self.num_writes += 1
        return True

    def complete(self, chunk: Entry, *, stored: bool, size_bytes: int | None) -> None:
        """Take the result of a write, and its size if that differs from the bytes reserved."""
        self.num_writes -= 1
        if not stored:
            self.chunks.counters.writes_failed += 1
            self.drop(chunk, announce=False)
            return
        self.chunks.counters.writes_done += 1
        chunk.disk = STORED
        self.chunks.note_change(chunk)
        if size_bytes is not None:
            self.order.resize(chunk.ref.prefix_key, size_bytes)
        if chunk.forgotten:  # its removal may have been carried out before the write began
            self.removals.append(chunk.ref)

    def drop(self, chunk: Entry, *, announce: bool) -> None:
        """Remove a chunk from the disk."""
        self.chunks.note_change(chunk)
        self.order.evict(chunk.ref.prefix_key)
        if announce:
            self.removals.append(chunk.ref)
        chunk.disk = NO_FILE
        if chunk.memory is NO_SLOT:
            self.chunks.vanish(chunk)

    def _make_room(self, newcomer: Entry, need_bytes: int) -> bool:
        """Evict until the bytes fit, if the newcomer is worth more than the victims. Evicts enough or nothing."""
        missing_bytes = self.order.used_bytes + need_bytes - self.order.capacity_bytes
        victims = self.order.make_room(missing_bytes, self.chunks.is_unused, newcomer.ref.prefix_key)
        for key in victims or ():
            self.chunks.counters.evicted_disk += 1
            self.drop(victim := self.chunks[key], announce=True)
            self.chunks.note_evicted(victim)
        return victims is not None


@dataclass(eq=False)
class RemoteSends:
    """Knowledge of the remote tier, and the writes to it in flight.

    A tail is not sent if a longer chunk that every engine finds in its place is there or on its way. It is recalled
    once such a chunk has arrived. Only tails of engines that search by block ends are recalled, because an older engine
    would miss its own.

    Attributes:
        chunks: all entries of the index.
        view: the known contents of the tier; None without one.
        max_sends: maximum of concurrent writes; 0 for a tier that is only read.
        num_sends: writes in flight.
        answers: True if the tier can be asked and read now.
        keeps_trails: True if the tier is known to keep the trails of chunks sent to it.
        recalls: chunks that must leave the tier and have not been announced.
    """

    chunks: Entries
    view: RemoteView | None
    max_sends: int
    num_sends: int = 0
    answers: bool = True
    keeps_trails: bool = False
    recalls: list[ChunkRef] = field(default_factory=list)
    _sent_tails: OrderedDict[ChunkRef, None] = field(default_factory=OrderedDict)

    @property
    def is_sent_to(self) -> bool:
        """True if chunks are written to the tier, False if it is only read."""
        return self.view is not None and self.max_sends > 0

    def reserve(self, chunk: Entry, trail: bytes, now_s: float) -> bool:
        """Reserve a place in the queue; False if the chunk, whose entry may still lack ``trail``, will not be sent."""
        if self.view is None or not self.is_sent_to or chunk.expires_s is not None:
            return False
        if chunk.remote is not UNSENT:
            return False
        if self.view.holds(chunk.ref, now_s):  # another engine's
            chunk.remote = THERE
            return False
        if self._is_held(self.view, chunk.ref.num_blocks, trail, now_s):
            return False
        if self.num_sends >= self.max_sends:
            self.chunks.counters.sends_dropped += 1
            return False
        chunk.remote = SENDING
        self.num_sends += 1
        return True

    def complete(self, chunk: Entry, now_s: float, *, stored: bool) -> None:
        """Take the result of a write."""
        self.chunks.counters.sends_done += stored
        self.chunks.counters.sends_failed += not stored
        chunk.remote = UNSENT
        self.num_sends -= 1
        if not stored or self.view is None:
            return
        is_led_to = self.keeps_trails and bool(chunk.trail)
        chunk.remote = SENT if is_led_to else THERE
        if not chunk.forgotten:
            self.view.note([chunk.ref], [True], now_s)
        if is_led_to:
            self._recall(self.view, self._superseded_by(self.view, chunk, now_s), now_s)

    def clear(self) -> None:
        """Forget the sent tails, because the tier has been cleared."""
        self._sent_tails.clear()

    def leads_to(self, chunk: Entry, now_s: float) -> bool:
        """Tell if every search for a part of a chunk finds the chunk, once pending sends have arrived.

        A chunk in memory that has not been sent counts, since it is sent in a tail's place.
        """
        if self.view is None or not self.keeps_trails:
            return False
        is_there = self.view.holds(chunk.ref, now_s)
        if chunk.remote is SENDING:
            return True
        if chunk.remote is UNSENT and not is_there:
            return chunk.memory is READY
        is_told = chunk.remote is SENT or bool(self.view.heard.trail_of(chunk.ref))
        return is_told and is_there is not False

    def _is_held(self, view: RemoteView, num_blocks: int, trail: bytes, now_s: float) -> bool:
        """Tell if the tier has a longer chunk with all blocks of a tail, which would then be recalled at once."""
        if not self.keeps_trails or not trail or num_blocks >= self.chunks.whole_blocks:
            return False
        if any(self._is_sent(view, longer, now_s) for longer in self._longer(trail)):
            return True
        named = takewhile(lambda found: found[1] == num_blocks, view.heard.nearest(trail))
        longer = (ref for ref, _ in named if ref.num_blocks > num_blocks)
        return any(view.holds(ref, now_s) for ref in islice(longer, _MAX_HOLDERS))

    def _superseded_by(self, view: RemoteView, chunk: Entry, now_s: float) -> list[ChunkRef]:
        """Return the tails to recall for a chunk that has arrived, itself included if a longer one arrived first."""
        going = [] if chunk.forgotten else [tail for tail in _tails_in(chunk) if self._may_go(view, tail)]
        if chunk.ref.num_blocks < self.chunks.whole_blocks:
            self._sent_tails[chunk.ref] = None
            if len(self._sent_tails) > _MAX_SENT_TAILS:
                self._sent_tails.popitem(last=False)
            if any(self._is_sent(view, longer, now_s) for longer in self._longer(chunk.trail)):
                going.append(chunk.ref)
        return going

    def _longer(self, trail: bytes) -> Iterator[Entry]:
        known = (self.chunks.near, self.chunks.far)
        keys = (key for trails in known for key in islice(trails.within(trail), _MAX_HOLDERS))
        return (chunk for key in keys if (chunk := self.chunks.get(key)) is not None)

    @staticmethod
    def _is_sent(view: RemoteView, chunk: Entry, now_s: float) -> bool:
        return chunk.remote is SENT and not chunk.forgotten and view.holds(chunk.ref, now_s) is not False

    def _may_go(self, view: RemoteView, tail: ChunkRef) -> bool:
        """Tell if a tail may be recalled: its sender searches by block ends, and it is not being read or sent here."""
        if tail not in self._sent_tails and not view.heard.trail_of(tail):
            return False
        chunk = self.chunks.get(tail.prefix_key)
        return chunk is None or (chunk.memory is not LOADING and chunk.remote is not SENDING)

    def _recall(self, view: RemoteView, tails: Sequence[ChunkRef], now_s: float) -> None:
        for tail in tails:
            self._sent_tails.pop(tail, None)
            view.heard.forget(tail)
            chunk = self.chunks.get(tail.prefix_key)
            if chunk is not None:
                chunk.remote = UNSENT
        if tails:
            view.deny(tails, now_s)
            self.recalls += tails


def _tails_in(chunk: Entry) -> Iterator[ChunkRef]:
    """Yield the tails that hold the first blocks of a chunk."""
    return (chunk_of(chunk.trail[:end]) for end in range(PREFIX_KEY_BYTES, len(chunk.trail), PREFIX_KEY_BYTES))
