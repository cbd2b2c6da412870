"""Writes to the disk and to the remote tier after a store, and the accounting of the disk's space."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Final

from kvstore.index.entries import (
    LOADING,
    MAX_HOLDERS,
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
from kvstore.index.owners import Owner, Owners
from kvstore.index.plans import Place
from kvstore.index.remote_view import RemoteView
from kvstore.index.retained import Retained
from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.model.history import Cause, Fate
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey
from kvstore.model.lifetime import Lifetime, lasts
from kvstore.model.retention import Retention
from kvstore.policies import Policy

_MAX_SENT_TAILS: Final = 1 << 14  # about 4 MB; older ones stay until the tier evicts them


@dataclass(eq=False)
class DiskWrites:
    """The chunks on disk, those being written included, and the writes in flight.

    Attributes:
        chunks: all entries of the index.
        order: the policy for the disk; it also counts the bytes.
        stored_bytes: maps a chunk's number of blocks to its bytes on disk; None without a disk tier.
        max_writes: maximum of concurrent writes.
        keeps_lifetimes: True if the tier keeps times to live; otherwise no chunk is written that has one.
        retained: chunks that stay until a time.
        owners: of chunks.
        num_writes: writes in flight.
        removals: chunks dropped from the disk and not announced yet.
        told_early: chunks whose time to live became longer while they were being written or sent.
        ended: retention of dropped chunks, not announced yet.
    """

    chunks: Entries
    order: Policy
    stored_bytes: Callable[[int], int] | None
    max_writes: int
    keeps_lifetimes: bool
    retained: Retained
    owners: Owners
    num_writes: int = 0
    removals: list[ChunkRef] = field(default_factory=list)
    told_early: dict[tuple[Place, ChunkRef], None] = field(default_factory=dict)
    ended: list[Retention] = field(default_factory=list)

    def adopt(
        self,
        survivors: Iterable[tuple[ChunkRef, int]],
        trails: Mapping[PrefixKey, bytes] = MappingProxyType({}),
        owners: Mapping[PrefixKey, bytes] = MappingProxyType({}),
    ) -> None:
        """Register the chunks that the tier held at start, with bytes and trails, the longest untouched first.

        ``owners`` has the ids of their owners, as far as the tier knows them. Quotas may be smaller than before:
        ``settle`` evicts what is beyond them.
        """
        self.order.adopt(self._adopted(survivors, owners) if self.stored_bytes is not None else ())
        self.chunks.learn_all(trails)

    def _adopted(
        self, survivors: Iterable[tuple[ChunkRef, int]], owners: Mapping[PrefixKey, bytes]
    ) -> Iterator[tuple[PrefixKey, int, Policy | None]]:
        """Enter chunks, and yield each with its bytes and its share of the disk."""
        for ref, stored_bytes in survivors:
            owner = self.owners.by_id(owners.get(ref.prefix_key, b""))
            self.chunks[ref.prefix_key] = Entry(*ref, disk=STORED, owner=owner)
            yield ref.prefix_key, stored_bytes, owner.disk if owner is not None else None

    def settle(self) -> None:
        """Evict what is beyond the quotas, the least recently used first."""
        for share in {owner.disk: None for owner in self.owners}:
            victims = share.make_room(share.used_bytes - share.capacity_bytes, self.chunks.is_unused)
            self._evict(victims or ())

    def limit(self, lifetimes: Iterable[Lifetime]) -> None:
        """Register the times to live of adopted chunks."""
        for ref, until_s in lifetimes:
            chunk = self.chunks.get(ref.prefix_key)
            if chunk is not None and until_s is not None and chunk.lasts_until(until_s):
                chunk.expires_s = until_s
                self.chunks.expiries.set(ref.prefix_key, until_s)

    def reserve(self, chunk: Entry) -> bool:
        """Make room for a chunk about to be stored; False if it will not be written."""
        if self.stored_bytes is None or chunk.disk is not NO_FILE:
            return False
        if chunk.expires_s is not None and not self.keeps_lifetimes:
            self.chunks.tell(Fate.REFUSED, chunk, Place.DISK, Cause.LIFETIME)
            return False
        need_bytes = self.stored_bytes(chunk.num_blocks)
        if (is_busy := self.num_writes >= self.max_writes) or not self._make_room(chunk, need_bytes):
            self.chunks.counters.writes_dropped += 1
            is_bound = not is_busy and self._own_victims(chunk.owner, need_bytes) is None
            cause = Cause.QUEUE if is_busy else Cause.QUOTA if is_bound else Cause.POLICY
            self.chunks.tell(Fate.REFUSED, chunk, Place.DISK, cause)
            if chunk.owner is not None and not is_busy:
                chunk.owner.refused += 1
            return False
        chunk.disk = WRITING
        self._add(chunk, need_bytes)
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
            self.order.resize(chunk.prefix_key, size_bytes)
        if chunk.forgotten:  # its removal may have been carried out before the write began
            self.removals.append(chunk.ref)

    def tell_again(self, chunk: Entry, target: Place) -> None:
        """Tell the time to live of a chunk that has arrived in a slower tier once more, if it was told before that."""
        if (target, chunk.ref) in self.told_early:
            del self.told_early[target, chunk.ref]
            self.chunks.extended[chunk.prefix_key] = None

    def retain(self, refs: Iterable[ChunkRef], until_s: float, tenant: bytes = b"") -> int:
        """Keep chunks until a time on the index's clock, or for longer if that was asked before.

        Returns how many of them, from the front, are kept: those that are here or being written, within the limits.
        """
        return self.retained.keep(self._front(refs), until_s, tenant)

    def retainable(self, refs: Iterable[ChunkRef], tenant: bytes = b"") -> int:
        """Return how many of these chunks, from the front, ``retain`` would keep."""
        return self.retained.admitted(self._front(refs), tenant)

    def end_retention(self, refs: Iterable[ChunkRef]) -> int:
        """Let the end of a prompt stay no longer, up to a chunk on which others depend. Returns how many did."""
        own = self.order.own_end(ref.prefix_key for ref in refs)
        ended = [key for key in own if self.retained.drop(key)]
        self.ended += (Retention(self.chunks[key].ref, 0.0, b"") for key in ended)
        return len(ended)

    def take_retentions(self) -> list[Retention]:
        """Return the retention begun or extended since the last call, also of chunks that are being written.

        That of removed chunks, which may be stored again, is told as over.
        """
        ended, self.ended = self.ended, []
        return [*ended, *(self.retained.of(self.chunks[key].ref) for key in self.retained.take_fresh())]

    def take_lifetimes(self) -> list[Lifetime]:
        """Return the times to live that became longer since the last call, for the slower tiers.

        Those of chunks that are being written are returned once more afterwards, as the write may not have begun.
        """
        extended, self.chunks.extended = self.chunks.extended, {}
        known = (chunk for key in extended if (chunk := self.chunks.get(key)) is not None and not chunk.forgotten)
        changed = [chunk for chunk in known if chunk.disk is not NO_FILE or chunk.remote is not UNSENT]
        self.told_early.update(((Place.DISK, chunk.ref), None) for chunk in changed if chunk.disk is WRITING)
        self.told_early.update(((Place.REMOTE, chunk.ref), None) for chunk in changed if chunk.remote is SENDING)
        return [Lifetime(chunk.ref, chunk.expires_s) for chunk in changed]

    def _front(self, refs: Iterable[ChunkRef]) -> list[PrefixKey]:
        """Return the keys of chunks that are here or being written, up to the first one that is not."""
        return [ref.prefix_key for ref in takewhile(self._has, refs)]

    def _has(self, ref: ChunkRef) -> bool:
        chunk = self.chunks.get(ref.prefix_key)
        return chunk is not None and not chunk.forgotten and chunk.disk is not NO_FILE

    def drop(self, chunk: Entry, *, announce: bool) -> None:
        """Remove a chunk from the disk."""
        self.chunks.note_change(chunk)
        if self.retained.drop(chunk.prefix_key):
            self.ended.append(Retention(chunk.ref, 0.0, b""))
        self.order.evict(chunk.prefix_key)
        if announce:
            self.removals.append(chunk.ref)
        chunk.disk = NO_FILE
        if chunk.memory is NO_SLOT:
            self.chunks.vanish(chunk)

    def _make_room(self, newcomer: Entry, need_bytes: int) -> bool:
        """Evict until the bytes fit, if the newcomer is worth more than the victims. Evicts enough or nothing.

        An owner at its quota makes room with its own chunks first.
        """
        own = self._own_victims(newcomer.owner, need_bytes)
        if own is None:
            return False
        missing_bytes = self.order.used_bytes + need_bytes - self.order.capacity_bytes
        missing_bytes -= sum(map(self.order.size_of, own)) if own else 0
        going = dict.fromkeys(own)
        others = self.order.make_room(
            missing_bytes, lambda key: key not in going and self.chunks.is_unused(key), newcomer.prefix_key
        )
        if others is None:
            return False
        self._evict((*own, *others), newcomer.prefix_key)
        return True

    def _own_victims(self, owner: Owner | None, need_bytes: int) -> Sequence[PrefixKey] | None:
        """Return the chunks that an owner must give up to store more bytes; None if they are too few."""
        if owner is None:
            return ()
        share = owner.disk
        return share.make_room(share.used_bytes + need_bytes - share.capacity_bytes, self.chunks.is_unused)

    def _evict(self, keys: Iterable[PrefixKey], newcomer: PrefixKey | None = None) -> None:
        for key in keys:
            self.drop(victim := self.chunks[key], announce=True)
            self.chunks.note_evicted(victim, Place.DISK, newcomer)

    def _add(self, chunk: Entry, size_bytes: int) -> None:
        share = chunk.owner.disk if chunk.owner is not None else None
        self.order.add(chunk.prefix_key, size_bytes, share)


@dataclass(eq=False)
class RemoteSends:
    """Knowledge of the remote tier, and the writes to it in flight.

    A tail is not sent if a longer chunk that every engine finds in its place is there or on its way. It is recalled
    once such a chunk has arrived. Chunks with a time to live replace no tails, which may be kept for longer. Only tails
    of engines that search by block ends are recalled, because an older engine would miss its own.

    Attributes:
        chunks: all entries of the index.
        view: the known contents of the tier; without one, nothing is ever known.
        exists: True if there is a tier.
        max_sends: maximum of concurrent writes; 0 for a tier that is only read, and without one.
        num_sends: writes in flight.
        answers: True if the tier can be asked and read now.
        keeps_trails: True if the tier is known to keep the trails of chunks sent to it.
        keeps_lifetimes: True if the tier keeps times to live; otherwise no chunk is sent that has one.
        recalls: chunks that must leave the tier and have not been announced.
    """

    chunks: Entries
    view: RemoteView
    exists: bool
    max_sends: int
    answers: bool
    num_sends: int = 0
    keeps_trails: bool = False
    keeps_lifetimes: bool = False
    recalls: list[ChunkRef] = field(default_factory=list)
    _sent_tails: OrderedDict[ChunkRef, None] = field(default_factory=OrderedDict)

    def reserve(self, chunk: Entry, trail: bytes) -> bool:
        """Reserve a place in the queue; False if the chunk, whose entry may still lack ``trail``, will not be sent."""
        if not self.max_sends or chunk.remote is not UNSENT:
            return False
        if chunk.expires_s is not None and not self.keeps_lifetimes:
            self.chunks.tell(Fate.REFUSED, chunk, Place.REMOTE, Cause.LIFETIME)
            return False
        if self.view.holds(chunk.ref, self.chunks.now_s):  # another engine's
            chunk.remote = THERE
            if not lasts(self.view.until_s(chunk.ref, self.chunks.now_s), chunk.expires_s):
                self.chunks.extended[chunk.prefix_key] = None
            return False
        if self._is_held(chunk.num_blocks, trail):
            return False
        if self.num_sends >= self.max_sends:
            self.chunks.counters.sends_dropped += 1
            self.chunks.tell(Fate.REFUSED, chunk, Place.REMOTE, Cause.QUEUE)
            return False
        chunk.remote = SENDING
        self.num_sends += 1
        return True

    def complete(self, chunk: Entry, *, stored: bool) -> None:
        """Take the result of a write."""
        self.chunks.counters.sends_done += stored
        self.chunks.counters.sends_failed += not stored
        chunk.remote = UNSENT
        self.num_sends -= 1
        if not stored:
            return
        is_led_to = self.keeps_trails and bool(chunk.trail)
        chunk.remote = SENT if is_led_to else THERE
        if not chunk.forgotten:
            self.view.note([chunk.ref], [chunk.expires_s or True], self.chunks.now_s)
        if is_led_to:
            self._recall(self._superseded_by(chunk))

    def clear(self) -> None:
        """Forget the answers and the sent tails, because the tier has been cleared."""
        self.view.clear()
        self._sent_tails.clear()

    def leads_to(self, chunk: Entry) -> bool:
        """Tell if every search for a part of a chunk finds the chunk, once pending sends have arrived.

        A chunk in memory that has not been sent counts, since it is sent in a tail's place.
        """
        if not self.keeps_trails:
            return False
        is_there = self.view.holds(chunk.ref, self.chunks.now_s)
        if chunk.remote is SENDING:
            return True
        if chunk.remote is UNSENT and not is_there:
            return chunk.memory is READY
        is_told = chunk.remote is SENT or bool(self.view.heard.trail_of(chunk.ref))
        return is_told and is_there is not False

    def _is_held(self, num_blocks: int, trail: bytes) -> bool:
        """Tell if the tier has a longer chunk with all blocks of a tail, which would then be recalled at once."""
        if not self.keeps_trails or not trail or num_blocks >= self.chunks.whole_blocks:
            return False
        if self._is_longer_sent(trail):
            return True
        named = takewhile(lambda found: found[1] == num_blocks, self.view.heard.nearest(trail))
        longer = (ref for ref, _ in named if ref.num_blocks > num_blocks)
        return any(self._stays(ref) for ref in islice(longer, MAX_HOLDERS))

    def _is_longer_sent(self, trail: bytes) -> bool:
        """Tell if a chunk sent from here, with all blocks of a trail and more, is still there."""
        sent = (chunk for chunk in self.chunks.longer(trail, MAX_HOLDERS) if chunk.remote is SENT)
        endless = (chunk for chunk in sent if chunk.expires_s is None and not chunk.forgotten)
        return any(self.view.holds(chunk.ref, self.chunks.now_s) is not False for chunk in endless)

    def _stays(self, ref: ChunkRef) -> bool:
        """Tell if the tier is known to have a chunk, without end."""
        now_s = self.chunks.now_s
        return self.view.holds(ref, now_s) is True and self.view.until_s(ref, now_s) is None

    def _superseded_by(self, chunk: Entry) -> list[ChunkRef]:
        """Return the tails to recall for a chunk that has arrived, itself included if a longer one arrived first."""
        is_endless = chunk.expires_s is None and not chunk.forgotten
        going = [tail for tail in _tails_in(chunk) if self._may_go(tail)] if is_endless else []
        if chunk.num_blocks < self.chunks.whole_blocks:
            self._sent_tails[chunk.ref] = None
            if len(self._sent_tails) > _MAX_SENT_TAILS:
                self._sent_tails.popitem(last=False)
            if self._is_longer_sent(chunk.trail):
                going.append(chunk.ref)
        return going

    def _may_go(self, tail: ChunkRef) -> bool:
        """Tell if a tail may be recalled: its sender searches by block ends, and it is not being read or sent here."""
        if tail not in self._sent_tails and not self.view.heard.trail_of(tail):
            return False
        chunk = self.chunks.get(tail.prefix_key)
        return chunk is None or (chunk.memory is not LOADING and chunk.remote is not SENDING)

    def _recall(self, tails: Sequence[ChunkRef]) -> None:
        for tail in tails:
            self._sent_tails.pop(tail, None)
            self.view.heard.forget(tail)
            chunk = self.chunks.get(tail.prefix_key)
            if chunk is not None:
                chunk.remote = UNSENT
        if tails:
            self.view.deny(tails, self.chunks.now_s)
            self.recalls += tails


def _tails_in(chunk: Entry) -> Iterator[ChunkRef]:
    """Yield the tails that hold the first blocks of a chunk."""
    return (chunk_of(chunk.trail[:end]) for end in range(PREFIX_KEY_BYTES, len(chunk.trail), PREFIX_KEY_BYTES))
