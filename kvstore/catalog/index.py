"""Where every chunk is: pure state that answers questions and returns plans.

No I/O, no threads, no clock. Invariants:

1. A chunk can be found only after ``complete_store`` or ``complete_load`` said that its bytes are there.
2. A slot belongs to at most one chunk, and is given away only while nothing is *using* it: a plan being carried out, or
   a write to disk in flight, counts as a use.
3. The chunks on disk, those being written included, never exceed the disk's capacity.
4. What leaves the disk is announced by ``take_removals`` before anything that needs its room.
5. What a remote tier holds is hearsay: a chunk that is only there has no entry here until a load of it is planned.

The caller serialises all calls. Under vLLM this object lives in the scheduler and its plans travel to the workers; in
``CacheEngine`` both ends are in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

from kvstore.catalog.deadlines import Deadlines
from kvstore.catalog.departed import Departed
from kvstore.catalog.leases import Leases, LeaseView
from kvstore.catalog.plans import NO_MATCH, IndexCounters, LoadStep, Match, MissReason, Place, StoreStep
from kvstore.catalog.remote_view import NOTHING_TOLD, RemoteView, Told
from kvstore.chunks import ChunkRef
from kvstore.keys import PrefixHasher, PrefixKey
from kvstore.policies import Adaptive, Policy, open_policy

QUESTION_ROUNDS = 2  # after which ``questions`` has been answered


@dataclass
class _Chunk:
    ref: ChunkRef
    slot: int | None = None
    filling: bool = False  # the slot's bytes are not there yet
    loading: bool = False  # they are on their way from elsewhere: a load planned now is carried out after that
    disk_bytes: int = 0  # on disk, or being written there
    unread: bool = False  # the last read from disk failed
    writing: bool = False
    sent: bool = False  # at the remote tier, or on its way there
    sending: bool = False
    uses: int = 0  # plans and writes in flight
    forgotten: bool = False  # dropped while in use: goes when the last use ends
    expires_s: float | None = None  # has a time to live, so it stays in memory
    tails: tuple[PrefixKey, ...] = ()  # superseded once this chunk has been written

    @property
    def in_memory(self) -> bool:
        return self.slot is not None and not self.filling

    @property
    def on_disk(self) -> bool:
        return self.disk_bytes > 0 and not self.writing


@dataclass
class _Disk:
    """The index's account of the disk tier."""

    capacity_bytes: int
    stored_bytes: Callable[[int], int]
    order: Policy
    used_bytes: int = 0


class ChunkIndex:
    """The catalog of one namespace over a pool of slots and, if there is one, a disk tier."""

    def __init__(
        self,
        num_slots: int,
        *,
        keep_in_memory: bool = True,
        disk_capacity_bytes: int = 0,
        stored_bytes: Callable[[int], int] | None = None,
        max_writes: int | None = None,
        remote: RemoteView | None = None,
        max_sends: int | None = None,
        cache_policy: str = Adaptive.name,
        disk_policy: str | None = None,
        tracks_changes: bool = False,
    ) -> None:
        """Start empty.

        Args:
            num_slots: slots of the pool, numbered from 0.
            keep_in_memory: False makes the pool a mere passage to the disk.
            disk_capacity_bytes: bound of the disk tier; 0 without one.
            stored_bytes: bytes that a chunk of so many blocks occupies on disk.
            max_writes: writes to disk that may be in flight at once; further chunks are not written.
            remote: what a remote tier is known to hold; None without one.
            max_sends: writes to the remote tier that may be in flight at once; 0 for a tier that is only read.
            cache_policy: a name in ``POLICIES``, for memory.
            disk_policy: the same for the disk; None for the same as memory's.
            tracks_changes: remember what changed for ``take_changes``.

        Raises:
            ConfigError: no policy has this name.
        """
        self.counters = IndexCounters()
        self._keep_in_memory = keep_in_memory
        self._chunks: dict[PrefixKey, _Chunk] = {}
        self._memory = open_policy(cache_policy, num_slots)  # chunks with a slot; each is of size 1
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._idle_slots = 0  # readable and unused: can be given away
        self._disk: _Disk | None = None
        if stored_bytes and disk_capacity_bytes:
            self._disk = _Disk(
                disk_capacity_bytes, stored_bytes, open_policy(disk_policy or cache_policy, disk_capacity_bytes)
            )
        self._orders = [self._memory, *([self._disk.order] if self._disk else [])]
        self._last_used: Sequence[PrefixKey] = ()  # the chain
        self._writes = 0
        self._max_writes = max(1, num_slots // 2) if max_writes is None else max_writes
        self._remote = remote
        self._remote_answers = True
        self._sends = 0
        self._max_sends = max(1, num_slots // 4) if max_sends is None else max_sends
        self._removals: list[ChunkRef] = []
        self._disk_answers = True
        self._now_s = 0.0
        self._expiries = Deadlines[PrefixKey]()  # of the chunks that have a time to live
        self._leases = Leases(num_slots)
        self._departed = Departed()
        self._changes: dict[PrefixKey, None] | None = {} if tracks_changes else None  # in order

    def __contains__(self, key: PrefixKey) -> bool:
        chunk = self._chunks.get(key)
        return chunk is not None and not chunk.forgotten

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._num_slots

    @property
    def slots_in_use(self) -> int:
        """Slots that hold a chunk or are being filled."""
        return self._num_slots - len(self._free_slots)

    @property
    def uses(self) -> int:
        """Plans and writes in flight, counted per chunk; 0 when idle."""
        return sum(chunk.uses for chunk in self._chunks.values())

    @property
    def leases(self) -> int:
        """Leases and pins held."""
        return len(self._leases)

    @property
    def disk_used_bytes(self) -> int:
        """Bytes accounted to the disk tier, writes in flight included."""
        return self._disk.used_bytes if self._disk else 0

    def queued_writes(self, target: Place) -> int:
        """Chunks waiting to be written to a slower tier, or being written."""
        return self._sends if target is Place.REMOTE else self._writes

    def in_memory(self, key: PrefixKey) -> bool:
        """Whether a load would find the chunk in a slot."""
        return self.holds(key, Place.MEMORY)

    def holds(self, key: PrefixKey, place: Place) -> bool:
        """Whether the bytes of a chunk are in a slot, or on disk."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.forgotten:
            return False
        return chunk.in_memory if place is Place.MEMORY else place is Place.DISK and chunk.on_disk

    def take_changes(self) -> list[PrefixKey]:
        """The chunks that came to a place, or left one, since the last call; not those adopted."""
        changes = list(self._changes or ())
        if self._changes:
            self._changes.clear()
        return changes

    def is_loading(self, key: PrefixKey) -> bool:
        """Whether a load that has not been completed is bringing the chunk to a slot."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.loading

    def adopt(self, survivors: Iterable[tuple[ChunkRef, int]]) -> None:
        """Take in what a disk tier held at start, with its bytes, the longest untouched first."""
        if self._disk is None:
            return
        for ref, stored_bytes in survivors:
            self._chunks[ref.prefix_key] = _Chunk(ref, disk_bytes=stored_bytes)
            self._disk.used_bytes += stored_bytes
            self._disk.order.add(ref.prefix_key, stored_bytes)

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lookup(self, hasher: PrefixHasher, skip_tokens: int = 0, told: Told = NOTHING_TOLD) -> Match:
        """The longest prefix of the hasher's tokens that could be loaded now, by one who has its ``skip_tokens``.

        Walks whole chunks, from the one in which the caller's tokens end, then probes the block ends inside the first
        missing one, longest first. A chunk on disk needs a slot on its way, so the answer ends where slots would. Of a
        remote tier counts what the view knows, and what the caller was ``told``.
        """
        first_chunk = skip_tokens // hasher.chunk_tokens
        blocks_per_chunk = hasher.chunk_tokens // hasher.block_tokens
        found: list[ChunkRef] = []
        room = _StagingRoom(len(self._free_slots) + self._idle_slots)
        for key in hasher.chunk_keys()[first_chunk:]:
            ref = self._find(key, blocks_per_chunk, room, told)
            if ref is None:
                break
            found.append(ref)
        num_tokens = (first_chunk + len(found)) * hasher.chunk_tokens
        block_keys = hasher.block_keys(first_chunk + len(found))
        for num_blocks in range(len(block_keys), 0, -1):
            tail = self._find(block_keys[num_blocks - 1], num_blocks, room, told)
            if tail is not None:
                found.append(tail)
                num_tokens += num_blocks * hasher.block_tokens
                break
        return Match(tuple(found), num_tokens, first_chunk) if num_tokens > skip_tokens else NO_MATCH

    def why_missing(self, hasher: PrefixHasher, known_tokens: int, end_tokens: int) -> MissReason | None:
        """Why a match ended at ``known_tokens``, and not at ``end_tokens``; None if no whole block lies between.

        Looks at the first chunk behind the match, and at the tails that it may have been stored as.
        """
        first_chunk, inside_tokens = divmod(known_tokens, hasher.chunk_tokens)
        end_block = (end_tokens - first_chunk * hasher.chunk_tokens) // hasher.block_tokens
        keys = hasher.block_keys(first_chunk)[inside_tokens // hasher.block_tokens : max(0, end_block)]
        if not keys:
            return None
        here = [chunk for key in reversed(keys) if (chunk := self._chunks.get(key)) is not None and not chunk.forgotten]
        if here:
            return self._why_unreadable(here[0])
        gone = (self._departed.reason(key) for key in reversed(keys))
        reason = next((reason for reason in gone if reason is not None), MissReason.NEVER_STORED)
        return MissReason.TIER_DOWN if self._remote is not None and not self._remote_answers else reason

    def _why_unreadable(self, chunk: _Chunk) -> MissReason:
        if self._is_readable(chunk):
            return MissReason.NO_ROOM
        return MissReason.TIER_DOWN if chunk.on_disk and not chunk.filling else MissReason.NOT_YET

    def questions(
        self, hasher: PrefixHasher, match: Match, skip_tokens: int = 0, told: Told = NOTHING_TOLD
    ) -> list[ChunkRef]:
        """What must be asked of the remote tier before a match is known to be the longest; none when it is.

        First the whole chunks behind the match, with the tails inside the first of them and those at the end of the
        sequence; in a second round, should it be needed, the tails inside the first one that is missing. The answers
        go to the ``RemoteView``, or to what the caller was ``told``.
        """
        if self._remote is None or not self._remote_answers:
            return []
        blocks_per_chunk = hasher.chunk_tokens // hasher.block_tokens
        known_tokens = max(match.num_tokens, skip_tokens)
        first_chunk = known_tokens // hasher.chunk_tokens
        keys = hasher.chunk_keys()
        asked = [ChunkRef(key, blocks_per_chunk) for key in keys[first_chunk:]]
        for chunk in dict.fromkeys((first_chunk, len(keys))):
            begin = max(0, known_tokens - chunk * hasher.chunk_tokens) // hasher.block_tokens
            tails = hasher.block_keys(chunk)[: blocks_per_chunk - 1]
            asked += [ChunkRef(key, number) for number, key in enumerate(tails, 1) if number > begin]
        unknown = [ref for ref in asked if not self._is_here(ref)]
        return self._remote.unknown(unknown, self._now_s, told)

    def _find(self, key: PrefixKey, num_blocks: int, room: _StagingRoom, told: Told) -> ChunkRef | None:
        """A chunk that could be loaded, counted into ``room``."""
        chunk = self._chunks.get(key)
        if chunk is not None and self._is_readable(chunk):
            return chunk.ref if room.takes(chunk) else None
        ref = ChunkRef(key, num_blocks)
        return ref if self._is_remote(ref, told) and room.takes_new() else None

    # -- load --------------------------------------------------------------------------------------------------------

    def prepare_load(self, refs: Sequence[ChunkRef], told: Told = NOTHING_TOLD) -> list[LoadStep]:
        """Plan to load a prefix's chunks, in order; ends before the first one that is no longer possible.

        What the caller was ``told`` of a remote tier counts. Every step holds its chunk until ``complete_load``.
        """
        planned: list[tuple[_Chunk, Place]] = []
        for ref in refs:
            source = self.source(ref, told)
            if source is None:
                break
            chunk = self._chunks.setdefault(ref.prefix_key, _Chunk(ref))
            self._begin_use(chunk)  # before slots are taken for others: this one must not be given away
            planned.append((chunk, source))
        steps: list[LoadStep] = []
        for position, (chunk, source) in enumerate(planned):
            if chunk.slot is None:
                slot = self._take_slot()
                if slot is None:
                    for unreachable, _ in planned[position:]:
                        self._end_use(unreachable)
                    break
                chunk.slot, chunk.filling, chunk.loading = slot, True, True
                self._memory.add(chunk.ref.prefix_key)
            steps.append(LoadStep(chunk.ref, chunk.slot, source))
        self._touch([step.ref.prefix_key for step in steps])
        return steps

    def source(self, ref: ChunkRef, told: Told = NOTHING_TOLD) -> Place | None:
        """Where a chunk would be loaded from now; None if nowhere."""
        chunk = self._chunks.get(ref.prefix_key)
        if chunk is not None and self._is_readable(chunk):
            if chunk.ref != ref:
                return None
            return Place.DISK if chunk.slot is None else Place.MEMORY
        return Place.REMOTE if self._is_remote(ref, told) else None

    def complete_load(
        self, steps: Iterable[LoadStep], failed: AbstractSet[PrefixKey], lost: AbstractSet[PrefixKey]
    ) -> None:
        """Take the results of loads.

        Chunks in ``failed`` did not arrive. Those also in ``lost`` were missing or damaged and are forgotten, as is one
        that was to come from its slot and is not there; the others may still be on a disk that does not answer.
        """
        for step in steps:
            chunk = self._chunks[step.ref.prefix_key]
            if step.ref.prefix_key in failed:
                self._fail_load(chunk, step, is_lost=step.ref.prefix_key in lost)
            elif step.source is not Place.MEMORY and not chunk.forgotten:
                chunk.filling = chunk.loading = chunk.unread = False
                chunk.sent |= step.source is Place.REMOTE
                self._note_change(chunk)
            self._end_use(chunk)

    def _fail_load(self, chunk: _Chunk, step: LoadStep, *, is_lost: bool) -> None:
        self.counters.failed_loads += 1
        if step.source is Place.REMOTE:
            self._fail_remote_load(chunk)
            return
        # A slot without its chunk's bytes. One that has changed since only waited for a read that failed.
        is_mislabelled = step.source is Place.MEMORY and chunk.in_memory and chunk.slot == step.slot
        if is_lost or is_mislabelled:
            self.counters.lost_chunks += not chunk.forgotten
            self._departed.note(step.ref.prefix_key, MissReason.LOST)
            self._forget(chunk)
        elif step.source is Place.DISK:
            chunk.unread = True
            self._drop_from_memory(chunk)

    def _fail_remote_load(self, chunk: _Chunk) -> None:
        """Missing there, or not to be asked for again so soon. What a disk out of reach holds is still there."""
        if self._remote is not None:
            self._remote.deny([chunk.ref], self._now_s)
        if chunk.forgotten:
            return
        if chunk.disk_bytes:
            self._drop_from_memory(chunk)
        else:
            self._forget(chunk)

    # -- store -------------------------------------------------------------------------------------------------------

    def prepare_store(
        self,
        refs: Sequence[ChunkRef],
        prefix: Sequence[PrefixKey] = (),
        *,
        ttl_s: float | None = None,
        noted: AbstractSet[PrefixKey] | None = None,
    ) -> list[StoreStep]:
        """Plan to store chunks that continue ``prefix``; known ones and those without room are left out.

        A known chunk that was not written to disk, because the queue or the disk was full, gets another chance. One
        that is only on a disk that could not read it was computed again, and is stored again. With ``ttl_s`` new
        chunks are kept in memory only, and go when that time is over; one that is offered again stays for longer if it
        is to, and if that is for good, is written then.

        This is a use of all these chunks but those ``noted`` for the request already, by a load or an earlier store. A
        caller who does not know, None, takes these to be the prefix and the chain that was used last.

        A chunk never displaces one of its own prefix, so a pool smaller than a request keeps the request's front. Every
        step holds its slot until ``complete_store``, and until ``complete_write`` for each of its targets.
        """
        for ref in refs:
            chunk = self._chunks.get(ref.prefix_key)
            if chunk is not None and self._is_out_of_reach(chunk):
                self._discard(chunk)
        chain = [*prefix, *(ref.prefix_key for ref in refs)]
        own = [chunk for key in chain if (chunk := self._chunks.get(key)) is not None]
        for chunk in own:
            self._begin_use(chunk)
        self._touch(chain, {*prefix, *self._last_used} if noted is None else noted)
        steps = self._plan_store(refs, ttl_s)
        for chunk in own:
            self._end_use(chunk)
        for order in self._orders:
            order.refresh_chain(chain)  # with the new ones, or they would outlive their prefix
        return steps

    def _plan_store(self, refs: Sequence[ChunkRef], ttl_s: float | None) -> list[StoreStep]:
        steps: list[StoreStep] = []
        for ref in refs:
            chunk = self._chunks.get(ref.prefix_key)
            if chunk is None:
                step = self._plan_new(ref, ttl_s)
                self.counters.refused += step is None
            elif chunk.forgotten:  # an older self is still on its way out
                step = None
                self.counters.refused += 1
            else:
                self._extend(chunk, ttl_s)
                step = self._plan_known(chunk)
                self.counters.known += 1
            if step is not None:
                steps.append(step)
        return steps

    def _plan_new(self, ref: ChunkRef, ttl_s: float | None) -> StoreStep | None:
        chunk = _Chunk(ref, filling=True, uses=1, expires_s=None if ttl_s is None else self._now_s + ttl_s)
        slot = self._take_slot(ref.prefix_key)
        targets = self._reserve_targets(chunk) if slot is not None or self._idle_slots else ()
        if slot is None and targets:  # worth its room in a slower tier only, and a slot is the way there
            slot = self._take_slot()
        if slot is None:
            return None
        chunk.slot = slot
        if not targets and not self._keep_in_memory:  # it would be gone as soon as it is here
            self._free_slots.append(slot)
            return None
        self._chunks[ref.prefix_key] = chunk
        self._memory.add(ref.prefix_key)
        chunk.uses += len(targets)
        if chunk.expires_s is not None:
            self._expiries.set(ref.prefix_key, chunk.expires_s)
        return StoreStep(ref, slot, targets)

    def _extend(self, chunk: _Chunk, ttl_s: float | None) -> None:
        """A chunk stored by several stays for as long as any of them wants."""
        if chunk.expires_s is None:
            return
        if ttl_s is None:
            chunk.expires_s = None
            self._expiries.withdraw(chunk.ref.prefix_key)
        elif self._now_s + ttl_s > chunk.expires_s:
            chunk.expires_s = self._now_s + ttl_s
            self._expiries.set(chunk.ref.prefix_key, chunk.expires_s)

    def _plan_known(self, chunk: _Chunk) -> StoreStep | None:
        """Write a chunk from memory to where it is missing, if there is room for it now."""
        if not chunk.in_memory or not (targets := self._reserve_targets(chunk)):
            return None
        assert chunk.slot is not None
        self.counters.writes_retried += 1
        for _ in range(1 + len(targets)):  # until complete_store, and until complete_write for each target
            self._begin_use(chunk)
        return StoreStep(chunk.ref, chunk.slot, targets, gather=False)

    def _reserve_targets(self, chunk: _Chunk) -> tuple[Place, ...]:
        """Where a chunk is to be written, with the room for it taken."""
        disk = (Place.DISK,) if self._reserve_disk(chunk) else ()
        return (*disk, Place.REMOTE) if self._reserve_send(chunk) else disk

    def complete_store(self, steps: Iterable[StoreStep], failed: AbstractSet[PrefixKey]) -> None:
        """Take the results of stores; a failed one leaves nothing behind.

        The writes of a failed store are completed like any other, as not stored.
        """
        for step in steps:
            chunk = self._chunks[step.ref.prefix_key]
            if not step.gather:
                pass  # nothing was copied: the chunk is what it was
            elif step.ref.prefix_key in failed:
                self.counters.failed_stores += 1
                self._forget(chunk)
            elif not chunk.forgotten:
                chunk.filling = False
                self.counters.stored += 1
                self._note_change(chunk)
            self._end_use(chunk)

    def complete_write(self, key: PrefixKey, target: Place, *, stored: bool, size_bytes: int | None = None) -> None:
        """Take the result of a write behind, and the bytes it took, if these are not those reserved for it."""
        chunk = self._chunks[key]
        if target is Place.REMOTE:
            self._complete_send(chunk, stored=stored)
        else:
            if stored and size_bytes is not None:
                self._resize_on_disk(chunk, size_bytes)
            self._complete_disk_write(chunk, stored=stored)
        self._end_use(chunk)

    def _complete_send(self, chunk: _Chunk, *, stored: bool) -> None:
        self.counters.sends_done += stored
        self.counters.sends_failed += not stored
        chunk.sending, chunk.sent = False, stored
        self._sends -= 1
        if stored and not chunk.forgotten and self._remote is not None:
            self._remote.note([chunk.ref], [True], self._now_s)

    def _complete_disk_write(self, chunk: _Chunk, *, stored: bool) -> None:
        if stored:
            self.counters.writes_done += 1
            if chunk.forgotten:  # its removal may have been carried out before the write began
                self._removals.append(chunk.ref)
        else:
            self.counters.writes_failed += 1
            self._drop_from_disk(chunk, announce=False)
        chunk.writing = False
        self._note_change(chunk)
        self._writes -= 1
        tails, chunk.tails = chunk.tails, ()
        if stored and not chunk.forgotten:
            self._drop_tails(chunk, tails)

    def supersede(self, key: PrefixKey, tails: Sequence[PrefixKey]) -> None:
        """Forget the tails of a full chunk that has just been stored; unknown ones are ignored.

        A tail on disk stays until its full chunk is there too, or a crash in between would lose both. One that is
        leased stays: it goes in its turn, like any other chunk.
        """
        chunk = self._chunks.get(key)
        if chunk is None or chunk.forgotten:
            return
        if chunk.writing:
            chunk.tails = tuple(tail for tail in tails if tail in self._chunks)
        else:
            self._drop_tails(chunk, tails)

    def _drop_tails(self, chunk: _Chunk, tails: Iterable[PrefixKey]) -> None:
        for key in tails:
            tail = self._chunks.get(key)
            if tail is None or tail.forgotten or key in self._leases:
                continue
            if chunk.expires_s is not None and tail.expires_s is None:
                continue  # the tail is there for longer
            if chunk.on_disk or not tail.disk_bytes:
                self.counters.superseded_tails += 1
                self._remove(tail)

    # -- leases and time ---------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Tell the index the time, on any clock that only goes forward: ends what has run out."""
        self._now_s = max(self._now_s, now_s)
        for key in self._expiries.take_due(self._now_s):
            self.counters.expired += 1
            self._remove(self._chunks[key])
        for lease_id in self._leases.take_expired(self._now_s):
            self.release(lease_id)

    def lease(self, lease_id: str, refs: Sequence[ChunkRef], ttl_s: float) -> int:
        """Keep chunks from eviction until ``release``, or for ``ttl_s``; a lease of the same name is replaced.

        Returns how many of them, from the front, are held: all leases together hold at most half of the slots' number,
        and of chunks that many leases share a multiple of it.
        """
        former = self._leases.withdraw(lease_id)
        held = [ref.prefix_key for ref in takewhile(self._is_here, refs)]
        del held[self._leases.admitted(held) :]
        for key in held:
            self._begin_use(self._chunks[key])
        if held:
            self._leases.add(lease_id, held, self._now_s + ttl_s)
        for key in former:  # only now: a renewed lease must not lose its chunks in between
            self._end_use(self._chunks[key])
        return len(held)

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and ended ones are ignored."""
        for key in self._leases.withdraw(lease_id):
            self._end_use(self._chunks[key])

    def lease_views(self) -> list[LeaseView]:
        """All leases, on the index's clock. May be called by any thread."""
        return self._leases.views()

    def _unlease(self, chunk: _Chunk) -> None:
        """Take a chunk that is to go out of all leases, or it could not come back before they end."""
        holders = self._leases.drop_chunk(chunk.ref.prefix_key)
        chunk.uses -= holders
        if holders and not chunk.uses and chunk.in_memory:
            self._idle_slots += 1

    def set_disk_answers(self, *, answers: bool) -> None:
        """While the disk does not answer, what is only there cannot be read.

        Writes go on: they fail at once, and one of them will be the first to succeed again.
        """
        self._disk_answers = answers

    def set_remote_answers(self, *, answers: bool) -> None:
        """While the remote tier does not answer, it is not asked, and nothing is loaded from it; writes go on."""
        self._remote_answers = answers

    # -- removal -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[PrefixKey]) -> int:
        """Forget chunks by key and return how many were known."""
        chunks = [chunk for key in keys if (chunk := self._chunks.get(key)) is not None and not chunk.forgotten]
        for chunk in chunks:
            self._remove(chunk)
        return len(chunks)

    def condemn(self, refs: Sequence[ChunkRef]) -> None:
        """Forget chunks whose bytes are wrong, wherever they are; the caller takes them off the remote tier."""
        self.remove(ref.prefix_key for ref in refs)
        if self._remote is not None:
            self._remote.deny(refs, self._now_s)

    def remove_all(self) -> int:
        """Forget every chunk here and return how many there were; what is on disk is announced for removal."""
        return self.remove(list(self._chunks))

    def clear(self) -> int:
        """Forget every chunk and return how many there were; what is in flight goes when it ends.

        The caller clears the disk tier as a whole, so nothing is announced for removal.
        """
        count = self.remove_all()
        self._removals.clear()
        if self._remote is not None:
            self._remote.clear()
        return count

    def take_removals(self) -> list[ChunkRef]:
        """Chunks that must leave the disk before any plan made so far is carried out.

        One that is forgotten while it is being written is announced again when the write ends.
        """
        removals, self._removals = self._removals, []
        return removals

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_readable(self, chunk: _Chunk) -> bool:
        if chunk.forgotten:
            return False
        return chunk.in_memory or chunk.loading or (chunk.on_disk and not chunk.filling and self._disk_answers)

    def _is_here(self, ref: ChunkRef) -> bool:
        chunk = self._chunks.get(ref.prefix_key)
        return chunk is not None and self._is_readable(chunk)

    def _is_remote(self, ref: ChunkRef, told: Told) -> bool:
        """Whether a chunk that is not here could be loaded from the remote tier."""
        if self._remote is None or not self._remote_answers or not self._remote.holds(ref, self._now_s, told):
            return False
        chunk = self._chunks.get(ref.prefix_key)
        return chunk is None or (chunk.ref == ref and not chunk.forgotten and chunk.slot is None)

    def _touch(self, chain: Sequence[PrefixKey], noted: AbstractSet[PrefixKey] = frozenset()) -> None:
        self._last_used = chain
        for order in self._orders:
            order.touch_chain(chain, noted)

    def _is_out_of_reach(self, chunk: _Chunk) -> bool:
        """Whether a chunk nobody holds is only on a disk that cannot give it."""
        return chunk.uses == 0 and chunk.slot is None and (chunk.unread or not self._disk_answers)

    def _begin_use(self, chunk: _Chunk) -> None:
        if chunk.uses == 0 and chunk.in_memory:
            self._idle_slots -= 1
        chunk.uses += 1

    def _end_use(self, chunk: _Chunk) -> None:
        chunk.uses -= 1
        if chunk.uses:
            return
        if chunk.in_memory:
            self._idle_slots += 1
        if chunk.forgotten:
            self._discard(chunk)
        elif chunk.in_memory and not self._keep_in_memory:
            self._drop_from_memory(chunk)
        elif chunk.slot is None and not chunk.disk_bytes:  # a load from the remote tier for which there was no slot
            self._vanish(chunk)

    def _may_go(self, key: PrefixKey) -> bool:
        return self._chunks[key].uses == 0

    def _take_slot(self, newcomer: PrefixKey | None = None) -> int | None:
        """A slot to fill: a free one, or of the least valuable chunk nobody uses, if the newcomer is worth more."""
        if not self._free_slots:
            victims = self._memory.make_room(1, self._may_go, newcomer)
            if victims is None:
                return None
            for key in victims:
                self.counters.evicted_memory += 1
                self._drop_from_memory(self._chunks[key])
                self._note_evicted(key)
        return self._free_slots.pop()

    def _reserve_disk(self, chunk: _Chunk) -> bool:
        """Make room on disk for a chunk about to be stored; False if it will not be written."""
        disk = self._disk
        if disk is None or chunk.disk_bytes or chunk.expires_s is not None:
            return False
        need_bytes = disk.stored_bytes(chunk.ref.num_blocks)
        if self._writes >= self._max_writes or not self._make_disk_room(disk, chunk, need_bytes):
            self.counters.writes_dropped += 1
            return False
        chunk.disk_bytes, chunk.writing = need_bytes, True
        disk.used_bytes += need_bytes
        disk.order.add(chunk.ref.prefix_key, need_bytes)
        self._writes += 1
        return True

    def _reserve_send(self, chunk: _Chunk) -> bool:
        """Take a place in the queue to the remote tier; False if a chunk will not be sent."""
        if self._remote is None or not self._max_sends or chunk.sent or chunk.expires_s is not None:
            return False
        if self._remote.holds(chunk.ref, self._now_s):  # somebody else's
            chunk.sent = True
            return False
        if self._sends >= self._max_sends:
            self.counters.sends_dropped += 1
            return False
        chunk.sent = chunk.sending = True
        self._sends += 1
        return True

    def _make_disk_room(self, disk: _Disk, newcomer: _Chunk, need_bytes: int) -> bool:
        """Evict until the bytes fit, if the newcomer is worth more: all that is needed, or nothing."""
        missing_bytes = disk.used_bytes + need_bytes - disk.capacity_bytes
        victims = disk.order.make_room(missing_bytes, self._may_go, newcomer.ref.prefix_key)
        if victims is None:
            return False
        for key in victims:
            self.counters.evicted_disk += 1
            self._drop_from_disk(self._chunks[key], announce=True)
            self._note_evicted(key)
        return True

    def _resize_on_disk(self, chunk: _Chunk, size_bytes: int) -> None:
        """A codec needed fewer bytes than were reserved."""
        assert self._disk is not None
        self._disk.used_bytes += size_bytes - chunk.disk_bytes
        chunk.disk_bytes = size_bytes
        self._disk.order.resize(chunk.ref.prefix_key, size_bytes)

    def _note_change(self, chunk: _Chunk) -> None:
        if self._changes is not None:
            self._changes[chunk.ref.prefix_key] = None

    def _note_evicted(self, key: PrefixKey) -> None:
        if key not in self._chunks:  # gone from everywhere
            self._departed.note(key, MissReason.EVICTED)

    def _remove(self, chunk: _Chunk) -> None:
        """Let a chunk go that nobody is to find again."""
        self._departed.note(chunk.ref.prefix_key, MissReason.REMOVED)
        self._discard(chunk)

    def _forget(self, chunk: _Chunk) -> None:
        """Make a chunk in use unreachable at once, and its file go."""
        if chunk.forgotten:
            return
        chunk.forgotten = True
        self._expiries.withdraw(chunk.ref.prefix_key)
        self._note_change(chunk)
        self._unlease(chunk)
        if self._disk and chunk.disk_bytes:
            self._removals.append(chunk.ref)

    def _discard(self, chunk: _Chunk) -> None:
        """Let a chunk go from everywhere, now or when its last use ends; leases do not keep it."""
        self._unlease(chunk)
        if chunk.uses:
            self._forget(chunk)
            return
        if chunk.slot is not None:
            self._drop_from_memory(chunk)
        if chunk.disk_bytes:
            self._drop_from_disk(chunk, announce=not chunk.forgotten)
        self._vanish(chunk)
        self._memory.remove(chunk.ref.prefix_key)
        if self._disk:
            self._disk.order.remove(chunk.ref.prefix_key)

    def _vanish(self, chunk: _Chunk) -> None:
        self._chunks.pop(chunk.ref.prefix_key, None)
        self._expiries.withdraw(chunk.ref.prefix_key)

    def _drop_from_memory(self, chunk: _Chunk) -> None:
        assert chunk.slot is not None
        self._note_change(chunk)
        if chunk.in_memory:
            self._idle_slots -= 1
        self._memory.evict(chunk.ref.prefix_key)
        if chunk.loading:  # a read that hangs may still write to it: let others be used first
            self._free_slots.insert(0, chunk.slot)
        else:
            self._free_slots.append(chunk.slot)
        chunk.slot, chunk.filling, chunk.loading = None, False, False
        if not chunk.disk_bytes:
            self._vanish(chunk)

    def _drop_from_disk(self, chunk: _Chunk, *, announce: bool) -> None:
        assert self._disk is not None
        self._note_change(chunk)
        self._disk.used_bytes -= chunk.disk_bytes
        self._disk.order.evict(chunk.ref.prefix_key)
        if announce:
            self._removals.append(chunk.ref)
        chunk.disk_bytes = 0
        if chunk.slot is None:
            self._vanish(chunk)


@dataclass
class _StagingRoom:
    """Slots that a load could take, less those that hold the load's own chunks."""

    slots: int
    staged: int = 0

    def takes(self, chunk: _Chunk) -> bool:
        """Count a chunk in, unless the load would then run out of slots."""
        if chunk.slot is not None:
            slots, staged = self.slots - (chunk.uses == 0), self.staged
        else:
            slots, staged = self.slots, self.staged + 1
        if staged > slots:
            return False
        self.slots, self.staged = slots, staged
        return True

    def takes_new(self) -> bool:
        """Count in a chunk that no slot has."""
        if self.staged >= self.slots:
            return False
        self.staged += 1
        return True
