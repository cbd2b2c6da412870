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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile
from types import MappingProxyType

from kvstore.catalog import invariants
from kvstore.catalog.entries import LOADING, NO_SLOT, Entries, Entry
from kvstore.catalog.leases import Leases, LeaseView, Uses
from kvstore.catalog.loads import Loads
from kvstore.catalog.lookup import Lookup
from kvstore.catalog.plans import LoadStep, Place, StoreStep
from kvstore.catalog.remote_view import NOTHING_TOLD, RemoteView, Told
from kvstore.catalog.slots import Slots
from kvstore.catalog.stores import Stores
from kvstore.catalog.writes import DiskWrites, RemoteSends
from kvstore.checkpoints.parts import Checkpoints
from kvstore.chunks import ChunkRef, chunk_of
from kvstore.keys import PrefixHasher, PrefixKey
from kvstore.policies import Adaptive, open_policy


class ChunkIndex(Lookup):
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
        checkpoints: Checkpoints | None = None,
        slots_take_turns: bool = False,
        reads_fronts: bool = False,
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
            checkpoints: the checkpoints that the model needs with its chunks; None if it needs none.
            slots_take_turns: as ``take_turns`` of ``Slots``, for a device.
            reads_fronts: True if the remote tier can read only the leading blocks of a chunk. Not used if the pool is a
                staging area, where borrowed bytes are not copied.

        Raises:
            ConfigError: no policy has this name.
        """
        if stored_bytes is None or not disk_capacity_bytes:  # no disk
            stored_bytes, disk_capacity_bytes = None, 0
        max_writes = max(1, num_slots // 2) if max_writes is None else max_writes
        max_sends = max(1, num_slots // 4) if max_sends is None else max_sends
        memory_order = open_policy(cache_policy, num_slots)
        disk_order = open_policy(disk_policy or cache_policy, disk_capacity_bytes)
        chunks = Entries(tracks_changes=tracks_changes)
        super().__init__(
            chunks,
            Slots(chunks, num_slots, memory_order, take_turns=slots_take_turns),
            DiskWrites(chunks, disk_order, stored_bytes, max_writes),
            RemoteSends(chunks, remote, max_sends),
            checkpoints,
            reads_fronts=reads_fronts and keep_in_memory,
        )
        self._leases = Leases(num_slots)
        self._orders = [memory_order, disk_order] if disk_capacity_bytes else [memory_order]
        self._uses = Uses(chunks, self._slots, self._disk, self._leases, self._orders, keep_in_memory)
        self._loads = Loads(chunks, self._slots, self._remote, self._uses)
        self._stores = Stores(chunks, self._slots, self._disk, self._remote, self._uses, keep_in_memory)
        self._last_used: Sequence[PrefixKey] = ()  # the chain of the last call

    def adopt(
        self, survivors: Iterable[tuple[ChunkRef, int]], trails: Mapping[PrefixKey, bytes] = MappingProxyType({})
    ) -> None:
        """Register the chunks that a disk tier held at start, with bytes and trails, the longest untouched first."""
        self._disk.adopt(survivors, trails)

    def take_changes(self) -> dict[PrefixKey, bytes]:
        """Return the chunks added to a place or removed from one since the last call, except adopted ones.

        Each has its trail, as far as it was known at that time.
        """
        if not self._chunks.changes:
            return {}
        changes, self._chunks.changes = self._chunks.changes, {}
        return changes

    # -- load --------------------------------------------------------------------------------------------------------

    def prepare_load(
        self,
        refs: Sequence[ChunkRef],
        told: Told = NOTHING_TOLD,
        checkpoint: Sequence[ChunkRef] = (),
        hasher: PrefixHasher | None = None,
        front_blocks: int = 0,
    ) -> list[LoadStep]:
        """Plan to load a prefix's chunks, in order; stops before the first one that is no longer available.

        Of the last chunk only ``front_blocks`` leading blocks are wanted, or all of them for 0. If the remote tier
        reads these alone, the step is of a tail that consists of them.

        A chunk that the caller was ``told`` a remote tier holds counts. Every step holds its chunk until
        ``complete_load``. ``checkpoint`` lists those of the refs that are parts of one, which are kept or dropped
        together. With the ``hasher`` of the sequence, chunks from a remote tier can be found by their block ends
        afterwards.
        """
        made = self._new_trails(hasher, refs)
        planned: list[tuple[Entry, Place, ChunkRef | None]] = []
        for position, ref in enumerate(refs, 1):
            source = self.source(ref, told)
            if source is None:
                break
            is_cut = source is Place.REMOTE and front_blocks and position == len(refs)
            front = self.front(ref, front_blocks) if is_cut else b""
            wanted = chunk_of(front) if front else ref
            trail = front or made.get(ref.prefix_key, b"")
            chunk = self._chunks.get(wanted.prefix_key) or self._chunks.enter(
                Entry(wanted, front_of=ref if front else None)
            )
            self._chunks.learn(chunk, trail)
            self._uses.begin(chunk)  # before slots are taken for others, so that this one is not evicted
            planned.append((chunk, source, ref if front else None))
        steps: list[LoadStep] = []
        for position, (chunk, source, holder) in enumerate(planned):
            if chunk.memory is NO_SLOT:
                slot = self._slots.take()
                if slot is None:
                    for unreachable, _, _ in planned[position:]:
                        self._uses.end(unreachable)
                    break
                self._slots.fill(chunk, slot, LOADING)
            steps.append(LoadStep(chunk.ref, chunk.slot, source, holder))
        self._touch([step.ref.prefix_key for step in steps], leaves={ref.prefix_key for ref in checkpoint})
        if steps and len(steps) == len(refs):
            self._chunks.note_checkpoint(checkpoint)
        return steps

    def note_arrival(self, step: LoadStep) -> None:
        """Let other requests load a chunk from its slot, once a load that is still running has read it."""
        self._loads.note_arrival(step)

    def complete_load(
        self, steps: Iterable[LoadStep], failed: AbstractSet[PrefixKey], lost: AbstractSet[PrefixKey]
    ) -> None:
        """Take the results of loads.

        Chunks in ``failed`` did not arrive. Those also in ``lost`` were missing or damaged and are forgotten. So is a
        chunk that was to be loaded from its slot and is not there. The others may still be on a disk that is down.
        """
        self._loads.complete(steps, failed, lost, self._now_s)

    # -- store -------------------------------------------------------------------------------------------------------

    def prepare_store(
        self,
        refs: Sequence[ChunkRef],
        prefix: Sequence[PrefixKey] = (),
        *,
        hasher: PrefixHasher | None = None,
        ttl_s: float | None = None,
        noted: AbstractSet[PrefixKey] | None = None,
        checkpoints: Collection[Sequence[ChunkRef]] = (),
    ) -> list[StoreStep]:
        """Plan to store chunks that continue ``prefix``; known ones and those without room are left out.

        A known chunk that was not written to disk because the queue or the disk was full is tried again. A chunk that
        is only on a disk that cannot be read was computed again, and is stored again. With ``ttl_s`` new chunks are
        kept in memory only, and are removed when that time is over. A chunk offered again keeps the longer of its two
        times; if it is kept without end, it is written at that point.

        With the ``hasher`` of the sequence, a chunk is found by its block ends, and a whole chunk supersedes the tails
        in it once it is stored itself. A tail that a longer chunk in memory holds is not stored: it counts as known,
        and that chunk is used and, if necessary, written in its place. A tail that a chunk on disk holds is kept in
        memory only.

        This counts as a use of all these chunks, except those already ``noted`` for the request by a load or an earlier
        store. None stands for the prefix and the chain that was used last.

        ``checkpoints`` lists those of the refs that are the parts of one, each after the chunk it belongs to. They are
        planned all or none, since a checkpoint without one of its parts is useless.

        A chunk never displaces one of its own prefix, so a pool smaller than a request keeps the request's front. Every
        step holds its slot until ``complete_store``, and until ``complete_write`` for each of its targets.
        """
        self._stores.discard_out_of_reach(refs)
        whole = {part.prefix_key: parts for parts in checkpoints for part in parts}
        made = self._new_trails(hasher, refs)
        until_s = None if ttl_s is None else self._now_s + ttl_s
        holders: dict[PrefixKey, Entry] = {}
        if hasher is not None:
            self._chunks.whole_blocks = hasher.blocks_per_chunk
            holders = self._stores.holders(refs, made, until_s, self._now_s)
        chain = [*prefix, *(key for ref in refs for key in self._stores.used(ref, holders))]
        own = [chunk for key in chain if (chunk := self._chunks.get(key)) is not None]
        for chunk in own:
            self._uses.begin(chunk)
        noted = {*prefix, *self._last_used} if noted is None else noted
        if holders:
            noted = {*noted, *(holder.ref.prefix_key for tail, holder in holders.items() if tail in noted)}
        leaves = whole.keys() | {holder.ref.prefix_key for holder in holders.values()}  # nothing depends on a holder
        self._touch(chain, noted, leaves)
        steps = self._stores.plan(refs, whole=whole, holders=holders, made=made, until_s=until_s, now_s=self._now_s)
        for chunk in own:
            self._uses.end(chunk)
        for order in self._orders:
            order.refresh_chain(chain, leaves)  # includes new ones, or they would outlive their prefix
        for parts in checkpoints:
            self._chunks.note_checkpoint(parts)
        return steps

    def complete_store(self, steps: Iterable[StoreStep], failed: AbstractSet[PrefixKey]) -> None:
        """Take the results of stores; a failed one leaves nothing behind.

        The writes of a failed store are completed like any other, as not stored.
        """
        self._stores.complete(steps, failed)

    def complete_write(self, key: PrefixKey, target: Place, *, stored: bool, size_bytes: int | None = None) -> None:
        """Take the result of a background write, and its size if that differs from the bytes reserved."""
        chunk = self._chunks[key]
        if target is Place.REMOTE:
            self._remote.complete(chunk, self._now_s, stored=stored)
        else:
            self._disk.complete(chunk, stored=stored, size_bytes=size_bytes)
            if stored and chunk.in_memory:
                self._uses.supersede(chunk)
        self._uses.end(chunk)

    def check_invariants(self) -> None:
        """Assert the invariants between any two calls, for every chunk and lease. For tests, since it is slow."""
        invariants.check_expiries(self._chunks)
        invariants.check_trails(self._chunks)
        invariants.check_slots(self._chunks, self._slots)
        invariants.check_disk(self._disk)
        invariants.check_sends(self._remote)
        invariants.check_leases(self._leases)
        invariants.check_uses(self._uses)
        invariants.check_checkpoints(self._chunks)

    # -- leases and time ---------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Set the index's time, on any clock that never goes back, and end what has expired."""
        self._now_s = max(self._now_s, now_s)
        for key in self._chunks.expiries.take_due(self._now_s):
            self.counters.expired += 1
            self._uses.remove(self._chunks[key])
        for part in self._chunks.take_broken():  # includes parts of what has just expired
            self._uses.discard(part)
        for lease_id in self._leases.take_expired(self._now_s):
            self.release(lease_id)

    @property
    def leases(self) -> int:
        """Number of leases and pins held."""
        return len(self._leases)

    def lease_views(self) -> list[LeaseView]:
        """Return all leases, on the index's clock. Thread-safe."""
        return self._leases.views()

    def lease(self, lease_id: str, refs: Sequence[ChunkRef], ttl_s: float) -> int:
        """Keep chunks from eviction until ``release``, or for ``ttl_s``; replaces a lease of the same name.

        Returns how many of them, from the front, are held. All leases together hold at most half as many different
        chunks as there are slots, and a multiple of that counting shared chunks once per lease.
        """
        former = self._leases.withdraw(lease_id)
        held = [ref.prefix_key for ref in takewhile(self._is_here, refs)]
        del held[self._leases.admitted(held) :]
        for key in held:
            self._uses.begin(self._chunks[key])
        if held:
            self._leases.add(lease_id, held, self._now_s + ttl_s)
        for key in former:  # last, so that a renewed lease does not lose its chunks in between
            self._uses.end(self._chunks[key])
        return len(held)

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and ended ones are ignored."""
        for key in self._leases.withdraw(lease_id):
            self._uses.end(self._chunks[key])

    def set_disk_answers(self, *, answers: bool) -> None:
        """Set if the disk answers; while it does not, chunks that are only there cannot be read.

        Writes continue. They fail at once until one of them succeeds again.
        """
        self._disk.answers = answers

    def set_remote_answers(self, *, answers: bool, keeps_trails: bool = False) -> None:
        """Set if the remote tier answers; while it does not, it is neither asked nor read. Writes continue.

        If it ``keeps_trails``, tails that a longer chunk there holds are not sent.
        """
        self._remote.answers, self._remote.keeps_trails = answers, keeps_trails

    # -- removal -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[PrefixKey]) -> int:
        """Forget chunks by key and return how many were known."""
        chunks = [self._chunks[key] for key in keys if key in self]
        for chunk in chunks:
            self._uses.remove(chunk)
        return len(chunks)

    def condemn(self, refs: Sequence[ChunkRef]) -> None:
        """Forget chunks whose bytes are wrong in every place, and recall them from the remote tier."""
        known = [chunk for ref in refs if (chunk := self._chunks.get(ref.prefix_key)) is not None]
        refs = [*refs, *(chunk.front_of for chunk in known if chunk.front_of is not None)]  # or a load returns
        self.remove(ref.prefix_key for ref in refs)
        self._remote.recalls += refs
        if self._remote.view is not None:
            self._remote.view.deny(refs, self._now_s)

    def remove_all(self) -> int:
        """Forget every chunk here and return how many there were; those on disk are announced for removal."""
        return self.remove(list(self._chunks))

    def clear(self) -> int:
        """Forget every chunk and return how many there were; chunks in flight are removed when their transfer ends.

        The caller clears the disk tier as a whole. Its chunks are announced for removal, in case that fails.
        """
        count = self.remove_all()
        if self._remote.view is not None:
            self._remote.view.clear()
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

    # -- inside ------------------------------------------------------------------------------------------------------

    def _touch(
        self,
        chain: Sequence[PrefixKey],
        noted: AbstractSet[PrefixKey] = frozenset(),
        leaves: AbstractSet[PrefixKey] = frozenset(),
    ) -> None:
        self._last_used = chain
        for order in self._orders:
            order.touch_chain(chain, noted, leaves)
