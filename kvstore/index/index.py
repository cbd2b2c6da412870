"""Catalog of all chunks and their places: pure state that answers queries and returns plans.

No I/O, no threads, no clock. Invariants:

1. A chunk can be found only after ``complete_store`` or ``complete_load`` reported that its bytes are there.
2. A slot belongs to at most one chunk, and is reassigned only while nothing *uses* it: a plan being carried out, a
   write in flight and a lease count as uses.
3. The chunks on disk, those being written included, never exceed the disk's capacity.
4. Chunks that leave the disk are announced by ``take_removals`` before anything that needs their room.
5. The contents of a remote tier are uncertain: a chunk that is only there has no entry here until a load of it is
   planned.

The caller serialises all calls. Under vLLM this object lives in the scheduler and its plans travel to the workers; in
``CacheEngine`` both ends are in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from kvstore.index.entries import NO_FILE, Entries
from kvstore.index.leases import Leases
from kvstore.index.loads import Loads
from kvstore.index.lookup import Lookup
from kvstore.index.owners import Owners
from kvstore.index.plans import Place, TierState
from kvstore.index.remote_view import RemoteView
from kvstore.index.retained import NO_RETENTION, Limits, Retained
from kvstore.index.slots import Slots, Uses
from kvstore.index.stores import StorePlanner
from kvstore.index.writes import DiskWrites, RemoteSends
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.chunks import ChunkRef
from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.model.keys import PrefixKey
from kvstore.policies import Adaptive, open_policy


class ChunkIndex:
    """Index of one namespace over a pool of slots and, if there is one, a disk tier.

    Attributes:
        checkpoints: the checkpoints that the model needs with its chunks; None if it needs none.
        question_rounds: rounds of ``questions`` after which a match is the longest that can be known.
        counters: the decisions so far.
        owners: the owners of chunks.
    """

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
        note_event: Callable[[ChunkEvent], object] | None = None,
        checkpoints: Checkpoints | None = None,
        slots_take_turns: bool = False,
        reads_fronts: bool = False,
        retention: Limits = NO_RETENTION,
        disk_keeps_lifetimes: bool = False,
        owners: Owners | None = None,
    ) -> None:
        """Start empty.

        Args:
            num_slots: slots of the pool, numbered from 0.
            keep_in_memory: False makes the pool a staging area for the disk.
            disk_capacity_bytes: bound of the disk tier; 0 without one.
            stored_bytes: maps a chunk's number of blocks to its bytes on disk.
            max_writes: maximum of concurrent writes to disk; further chunks are not written.
            remote: the known contents of a remote tier; None without one.
            max_sends: maximum of concurrent writes to the remote tier; 0 for a tier that is only read.
            cache_policy: a name in ``POLICIES``, for memory.
            disk_policy: the same for the disk; None for the same as memory's.
            tracks_changes: True to record changes for ``take_changes``.
            note_event: takes what happens to each chunk; must not wait. None for nobody.
            checkpoints: the checkpoints that the model needs with its chunks; None if it needs none.
            slots_take_turns: as ``take_turns`` of ``Slots``, for a device.
            reads_fronts: True if the remote tier can read only the leading blocks of a chunk. Not used if the pool is a
                staging area, where borrowed bytes are not copied.
            retention: bounds of ``retain``. Beyond half of the disk it leaves no room for others.
            disk_keeps_lifetimes: False keeps chunks with a time to live off the disk.
            owners: of chunks, with their quotas; None without.

        Raises:
            ConfigError: no policy has this name.
        """
        if stored_bytes is None or not disk_capacity_bytes:  # no disk
            stored_bytes, disk_capacity_bytes = None, 0
        else:
            stored_bytes = cache(stored_bytes)  # asked for each chunk, through the guards of the tier
        if remote is None:
            max_sends = 0
        max_writes = max(1, num_slots // 2) if max_writes is None else max_writes
        max_sends = max(1, num_slots // 4) if max_sends is None else max_sends
        memory_order = open_policy(cache_policy, num_slots)
        disk_order = open_policy(disk_policy or cache_policy, disk_capacity_bytes)
        self._chunks = chunks = Entries(tracks_changes=tracks_changes, note_event=note_event)
        self.owners = owners = owners or Owners()
        self._slots = Slots(chunks, num_slots, memory_order, take_turns=slots_take_turns)
        retained = Retained(disk_order, retention, chunks.owner_of)
        self._disk = DiskWrites(chunks, disk_order, stored_bytes, max_writes, disk_keeps_lifetimes, retained, owners)
        has_remote = remote is not None
        self._remote = RemoteSends(chunks, remote or RemoteView(0.0), has_remote, max_sends, answers=has_remote)
        self._leases = Leases(num_slots, chunks.owner_of)
        self._orders = [memory_order, disk_order] if disk_capacity_bytes else [memory_order]
        self._uses = uses = Uses(chunks, self._slots, self._disk, self._leases, self._orders, keep_in_memory)
        self._lookup = lookup = Lookup(
            chunks, self._slots, self._remote, owners, checkpoints, reads_fronts=reads_fronts and keep_in_memory
        )
        self._stores = stores = StorePlanner(
            chunks, self._slots, self._disk, self._remote, uses, owners, keep_in_memory
        )
        loads = Loads(chunks, self._slots, self._remote, uses, lookup, owners)
        self.checkpoints, self.question_rounds, self.counters = checkpoints, lookup.rounds, chunks.counters
        # Calls that one part carries out alone.
        self.adopt, self.settle, self.retain = self._disk.adopt, self._disk.settle, self._disk.retain
        self.retainable, self.take_retentions = self._disk.retainable, self._disk.take_retentions
        self.end_retention = self._disk.end_retention
        self.limit, self.take_lifetimes = self._disk.limit, self._disk.take_lifetimes
        self.holds, self.is_loading = chunks.holds, chunks.is_loading
        self.lookup, self.why_missing = lookup.lookup, lookup.why_missing
        self.missing_keys = lookup.missing_keys
        self.longest, self.nearest, self.longer = lookup.longest, lookup.nearest, lookup.longer
        self.questions, self.asked_again = lookup.questions, lookup.asked_again
        self.source, self.front = lookup.source, lookup.front
        self.prepare_load, self.note_arrival, self.complete_load = loads.prepare, loads.note_arrival, loads.complete
        self.prepare_store, self.complete_store = stores.prepare, stores.complete
        self.complete_write = stores.complete_write
        self.lease, self.release, self.lease_views = uses.lease, uses.release, self._leases.views

    def __contains__(self, key: PrefixKey) -> bool:
        return self._chunks.is_known(key)

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._slots.num_slots

    @property
    def slots_in_use(self) -> int:
        """Slots that hold a chunk or are being filled."""
        return self._slots.num_slots - len(self._slots.free)

    @property
    def disk_used_bytes(self) -> int:
        """Bytes accounted to the disk tier, writes in flight included."""
        return self._disk.order.used_bytes

    @property
    def retained(self) -> int:
        """Number of chunks that stay on disk until a time."""
        return len(self._disk.retained)

    @property
    def leases(self) -> int:
        """Number of leases and pins held."""
        return len(self._leases)

    def in_memory(self, key: PrefixKey) -> bool:
        """Tell if a load would find the chunk in a slot."""
        return self.holds(key, Place.MEMORY)

    def trails(self, refs: Iterable[ChunkRef]) -> dict[PrefixKey, bytes]:
        """Return the trails of known chunks, as far as they are known."""
        chunks = self._chunks
        return {key: trail for key, _ in refs if key in chunks and (trail := chunks[key].trail)}

    def queued_writes(self, target: Place) -> int:
        """Return the number of chunks waiting to be written to a slower tier, or being written."""
        return self._remote.num_sends if target is Place.REMOTE else self._disk.num_writes

    def take_changes(self) -> dict[PrefixKey, bytes]:
        """Return the chunks added to a place or removed from one since the last call, except adopted ones.

        Each has its trail, as far as it was known at that time.
        """
        if not self._chunks.changes:
            return {}
        changes, self._chunks.changes = self._chunks.changes, {}
        return changes

    def advance(self, now_s: float, tiers: TierState | None = None) -> None:
        """Set the index's time, on any clock that never goes back, and end what has expired.

        With ``tiers``, note the state of the slower tiers as well.
        """
        if tiers is not None:
            self.set_tiers(tiers)
        self._chunks.now_s = now_s = max(self._chunks.now_s, now_s)
        for key in self._chunks.expiries.take_due(now_s):
            self.counters.expired += 1
            self._uses.remove(self._chunks[key], Fate.EXPIRED)
        for part in self._chunks.take_broken():  # includes parts of what has just expired
            self._uses.discard(part)
        for lease_id in self._leases.ends.take_due(now_s):
            self.release(lease_id)
        self._disk.retained.end_due(now_s)

    def end_request(self, keys: Iterable[PrefixKey], answer_tokens: int) -> None:
        """Note that a request that used these chunks has ended, after an answer of so many tokens."""
        for order in self._orders:
            order.end_chain(keys, answer_tokens)

    def give_up(self, refs: Sequence[ChunkRef], *, demotes: bool = False) -> int:
        """Offer the end of a prompt for eviction before all others, until it is used again.

        A stem on which other chunks depend stays. What ``demotes`` leaves memory only, and stays on disk. Returns how
        many chunks are offered.
        """
        keys = [ref.prefix_key for ref in refs]
        if demotes:
            memory, chunks = self._orders[0], self._chunks
            return memory.give_up(key for key in keys if key in chunks and chunks[key].disk is not NO_FILE)
        return max(order.give_up(keys) for order in self._orders)

    def set_tiers(self, tiers: TierState) -> None:
        """Note the state of the slower tiers."""
        self._chunks.disk_answers = tiers.disk_answers
        self._remote.answers = tiers.remote_answers and self._remote.exists
        self._remote.keeps_trails = tiers.remote_keeps_trails
        self._remote.keeps_lifetimes = tiers.remote_keeps_lifetimes

    # -- removal -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[PrefixKey], cause: Cause = Cause.NONE) -> int:
        """Forget chunks by key and return how many were known."""
        return self._remove(keys, Fate.REMOVED, cause)

    def _remove(self, keys: Iterable[PrefixKey], fate: Fate | None, cause: Cause = Cause.NONE) -> int:
        chunks = [self._chunks[key] for key in keys if key in self]
        for chunk in chunks:
            self._uses.remove(chunk, fate, cause)
        return len(chunks)

    def condemn(self, refs: Sequence[ChunkRef]) -> None:
        """Forget chunks whose bytes are wrong in every place, and recall them from the remote tier."""
        known = [chunk for ref in refs if (chunk := self._chunks.get(ref.prefix_key)) is not None]
        refs = [*refs, *(chunk.front_of for chunk in known if chunk.front_of is not None)]  # or a load returns
        self.remove((ref.prefix_key for ref in refs), Cause.WRONG)
        self._remote.recalls += refs
        self._remote.view.deny(refs, self._chunks.now_s)

    def remove_all(self) -> int:
        """Forget every chunk here and return how many there were; those on disk are announced for removal."""
        return self._remove_all(Cause.CLEARED)

    def _remove_all(self, cause: Cause) -> int:
        self._chunks.tell(Fate.REMOVED, None, None, cause)  # one event, as there may be a million chunks
        return self._remove(list(self._chunks), None)

    def clear(self) -> int:
        """Forget every chunk and return how many there were; chunks in flight are removed when their transfer ends.

        The caller clears the disk tier as a whole. Its chunks are announced for removal, in case that fails.
        """
        count = self._remove_all(Cause.RESET)
        self._remote.clear()
        return count

    def take_removals(self) -> list[ChunkRef]:
        """Return the chunks that must leave the disk before any plan made so far is carried out.

        A chunk forgotten while it is being written is announced again when the write ends.
        """
        removals, self._disk.removals = self._disk.removals, []
        return removals

    def take_recalls(self) -> list[ChunkRef]:
        """Return the chunks that must leave the remote tier."""
        recalls, self._remote.recalls = self._remote.recalls, []
        return recalls
