"""StorePlanner: their plans, with steps for new chunks and for known ones that some tier lacks, and their results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvstore.index.entries import GATHERING, MAX_HOLDERS, NO_SLOT, READY, STORED, UNREAD, Entries, Entry
from kvstore.index.owners import Owner, Owners
from kvstore.index.plans import Place, StoreStep
from kvstore.index.slots import Slots, Uses
from kvstore.index.writes import DiskWrites, RemoteSends
from kvstore.model.chunks import ChunkRef
from kvstore.model.history import Cause, Fate
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixHasher, PrefixKey


@dataclass(frozen=True, eq=False)
class StorePlanner:
    """Plans stores, and takes their results.

    Attributes:
        chunks, slots, disk, remote, uses, owners: the parts of the index.
        keep_in_memory: False makes the pool a staging area for the disk.
    """

    chunks: Entries
    slots: Slots
    disk: DiskWrites
    remote: RemoteSends
    uses: Uses
    owners: Owners
    keep_in_memory: bool

    def prepare(
        self,
        refs: Sequence[ChunkRef],
        prefix: Sequence[PrefixKey] = (),
        *,
        hasher: PrefixHasher | None = None,
        by_blocks: bool = True,
        ttl_s: float | None = None,
        noted: AbstractSet[PrefixKey] | None = None,
        checkpoints: Collection[Sequence[ChunkRef]] = (),
    ) -> list[StoreStep]:
        """Plan to store chunks that continue ``prefix``; known ones and those without room are left out.

        A known chunk that was not written to disk because the queue or the disk was full is tried again. A chunk that
        is only on a disk that cannot be read was computed again, and is stored again. With ``ttl_s`` new chunks are
        removed when that time is over, and go only to tiers that keep such times. A chunk offered again keeps the
        longer of its two times.

        With the ``hasher`` of the sequence, a chunk is found by its block ends, and a whole chunk supersedes the tails
        in it once it is stored itself. A tail that a longer chunk in memory holds is not stored: it counts as known,
        and that chunk is used and, if necessary, written in its place. A tail that a chunk on disk holds is kept in
        memory only. Without ``by_blocks`` the sequence only tells whose the chunks are.

        This counts as a use of all these chunks, except those already ``noted`` for the request by a load or an earlier
        store. None stands for the prefix and the chain that was used last.

        ``checkpoints`` lists those of the refs that are the parts of one, each after the chunk it belongs to. They are
        planned all or none, since a checkpoint without one of its parts is useless.

        A chunk never displaces one of its own prefix, so a pool smaller than a request keeps the request's front. Every
        step holds its slot until ``complete``, and until ``complete_write`` for each of its targets.
        """
        self._discard_out_of_reach(refs)
        owner = self.owners.of(hasher)
        made = self.chunks.new_trails(hasher, refs, prefix) if by_blocks else {}
        until_s = None if ttl_s is None else self.chunks.now_s + ttl_s
        holders: dict[PrefixKey, Entry] = {}
        if hasher is not None and by_blocks:
            self.chunks.whole_blocks = hasher.blocks_per_chunk
            holders = self._holders(refs, made, until_s)
        chain = [*prefix, *(key for ref in refs for key in self._used(ref, holders))]
        known = list(map(self.chunks.get, chain))
        chain = [key if chunk is None else chunk.prefix_key for key, chunk in zip(chain, known, strict=True)]
        own = [chunk for chunk in known if chunk is not None]
        for chunk in own:
            self.uses.begin(chunk)
        noted = {*prefix, *self.uses.last_touched} if noted is None else noted
        if holders:
            noted = {*noted, *(holder.prefix_key for tail, holder in holders.items() if tail in noted)}
        whole = {part.prefix_key: parts for parts in checkpoints for part in parts}
        leaves = whole.keys() | {holder.prefix_key for holder in holders.values()}  # nothing depends on a holder
        self.uses.touch(chain, noted, leaves)
        steps = self._plan(refs, whole, holders, made, until_s, owner=owner)
        for chunk in own:
            self.uses.end(chunk)
        self.uses.refresh(chain, leaves)  # includes new ones, or they would outlive their prefix
        for parts in checkpoints:
            self.chunks.note_checkpoint(parts)
        if hasher is None or not hasher.tenant:
            return steps
        owner_id = self.owners.id_of(hasher)
        return [step._replace(tenant=hasher.tenant, owner=owner_id) for step in steps]

    def complete(self, steps: Iterable[StoreStep], failed: AbstractSet[PrefixKey]) -> None:
        """Take the results of stores; a failed one leaves nothing behind.

        The writes of a failed store are completed like any other, as not stored.
        """
        stored: list[Entry] = []
        for step in steps:
            chunk = self.chunks[step.ref.prefix_key]
            if step.gather and step.ref.prefix_key in failed:
                self.chunks.counters.failed_stores += 1
                self.chunks.tell(Fate.FAILED, chunk, Place.MEMORY)
                self.uses.forget(chunk)
            elif step.gather and not chunk.forgotten:
                chunk.memory = READY
                self.chunks.counters.stored += 1
                self.chunks.tell(Fate.STORED, chunk, Place.MEMORY)
                if chunk.owner is not None:
                    chunk.owner.stored += 1
                self.chunks.note_change(chunk)
            stored.append(chunk)
        for chunk in stored:
            self.uses.end(chunk)
            self.uses.supersede(chunk)

    def complete_write(
        self, key: PrefixKey, target: Place, *, stored: bool, size_bytes: int | None = None, is_full: bool = False
    ) -> None:
        """Take the result of a background write, and its size if that differs from the bytes reserved.

        ``is_full`` tells that the tier had no room.
        """
        chunk = self.chunks[key]
        self._tell_written(chunk, target, stored=stored, is_full=is_full)
        self.disk.tell_again(chunk, target)
        if target is Place.REMOTE:
            self.remote.complete(chunk, stored=stored)
        else:
            self.disk.complete(chunk, stored=stored, size_bytes=size_bytes)
            if stored and chunk.memory is READY:
                self.uses.supersede(chunk)
        self.uses.end(chunk)

    def _tell_written(self, chunk: Entry, target: Place, *, stored: bool, is_full: bool) -> None:
        if chunk.forgotten:
            return  # its bytes were bad, or it was removed meanwhile
        if stored:
            self.chunks.tell(Fate.WRITTEN, chunk, target)
            return
        if is_full:
            self.chunks.tell(Fate.REFUSED, chunk, target, Cause.FULL)
            return
        answers = self.remote.answers if target is Place.REMOTE else self.chunks.disk_answers
        self.chunks.tell(Fate.FAILED, chunk, target, Cause.NONE if answers else Cause.DOWN)

    def _discard_out_of_reach(self, refs: Iterable[ChunkRef]) -> None:
        """Discard unused chunks that are only on disk and cannot be read from there."""
        for ref in refs:
            chunk = self.chunks.get(ref.prefix_key)
            if chunk is not None and self._is_out_of_reach(chunk):
                self.uses.discard(chunk)

    def _is_out_of_reach(self, chunk: Entry) -> bool:
        is_only_on_disk = chunk.uses == 0 and chunk.memory is NO_SLOT
        return is_only_on_disk and (chunk.disk is UNREAD or not self.chunks.disk_answers)

    # -- tails that a longer chunk holds -----------------------------------------------------------------------------

    def _holders(
        self, refs: Iterable[ChunkRef], made: Mapping[PrefixKey, bytes], until_s: float | None
    ) -> dict[PrefixKey, Entry]:
        """Return the longer chunks that hold tails, by the tails' keys.

        Drops a redundant tail unless something still references it. For tails that would be sent to a remote tier, the
        longer chunk must be there or on its way, and every search for the tail must lead to it.
        """
        found: dict[PrefixKey, Entry] = {}
        is_sent = self.remote.max_sends > 0 and (until_s is None or self.remote.keeps_lifetimes)
        for ref in [ref for ref in refs if ref.num_blocks < self.chunks.whole_blocks]:
            tail = self.chunks.get(ref.prefix_key)
            trail = made.get(ref.prefix_key) or (tail.trail if tail is not None else b"")
            fit = (chunk for chunk in self._fit(trail, until_s) if not is_sent or self.remote.leads_to(chunk))
            holder = next(fit, None)
            if holder is None:
                continue
            if tail is None or tail.forgotten or self.uses.take_in(holder, tail) or not self._stands_in(holder):
                found[ref.prefix_key] = holder
        return found

    def _stands_in(self, holder: Entry) -> bool:
        """Tell if a tail needs no bytes of its own, because ``holder`` holds it.

        The tail keeps its own slot while the chunk is on disk only. Reading the whole chunk for its first blocks may
        take longer than computing them, and they would then be computed at every request.
        """
        return holder.memory is not NO_SLOT or not self.keep_in_memory

    def _used(self, ref: ChunkRef, holders: Mapping[PrefixKey, Entry]) -> Iterable[PrefixKey]:
        """Return the keys that an offered chunk uses: its own, preceded or replaced by that of its holder."""
        holder = holders.get(ref.prefix_key)
        if holder is None:
            return (ref.prefix_key,)
        return (holder.prefix_key,) if self._stands_in(holder) else (holder.prefix_key, ref.prefix_key)

    def _fit(self, trail: bytes, until_s: float | None) -> Iterator[Entry]:
        """Yield chunks that hold all blocks of a tail and are kept at least as long; those in memory first.

        No chunk is kept longer for the tail's sake, because stores of its other blocks were promised their end.
        """
        for chunk in self.chunks.longer(trail, MAX_HOLDERS):
            if not chunk.forgotten and chunk.lasts_until(until_s) and self._is_sure(chunk):
                yield chunk

    def _is_sure(self, chunk: Entry) -> bool:
        """Tell if a chunk can be found and stays. A pending transfer may fail, and a tail would be lost with it."""
        return (chunk.disk is STORED and self.chunks.disk_answers) or (chunk.memory is READY and self.keep_in_memory)

    # -- plans -------------------------------------------------------------------------------------------------------

    def _plan(
        self,
        refs: Iterable[ChunkRef],
        whole: Mapping[PrefixKey, Sequence[ChunkRef]],
        holders: Mapping[PrefixKey, Entry],
        made: Mapping[PrefixKey, bytes],
        until_s: float | None,
        *,
        owner: Owner | None,
    ) -> list[StoreStep]:
        """Return the steps for the offered chunks, without the parts of checkpoints that do not fit as a whole.

        ``whole`` maps the key of each part to all parts of its checkpoint.
        """
        steps: list[StoreStep] = []
        has_slower = self._has_slower_tier()
        left_out: Sequence[ChunkRef] = ()
        for ref in refs:
            parts = whole.get(ref.prefix_key)
            if parts is not None and ref == parts[0] and not self._has_room(parts, owner):
                left_out = parts
            if ref in left_out:
                self._refuse(ref, made.get(ref.prefix_key, b""), Cause.IN_USE, owner)
                continue
            holder = holders.get(ref.prefix_key)
            if holder is not None and self._stands_in(holder):
                self.chunks.counters.known += 1
                step = self._plan_known(holder)
            else:
                trail = holder.trail[: ref.num_blocks * PREFIX_KEY_BYTES] if holder else made.get(ref.prefix_key, b"")
                step = self._plan_one(ref, until_s, trail, owner, is_written=has_slower and holder is None)
            if step is not None:
                steps.append(step)
        return steps

    def _plan_one(
        self, ref: ChunkRef, until_s: float | None, trail: bytes, owner: Owner | None, *, is_written: bool
    ) -> StoreStep | None:
        chunk = self.chunks.get(ref.prefix_key)
        if chunk is not None and not chunk.forgotten:
            self.chunks.counters.known += 1
            self.chunks.extend(chunk, until_s)
            self.chunks.learn(chunk, trail)
            return self._plan_known(chunk) if is_written else None
        if chunk is not None:  # a forgotten chunk's earlier entry is still being removed
            self._refuse(ref, trail, Cause.LEAVING, owner)
            return None
        return self._plan_new(Entry(*ref, uses=1, expires_s=until_s, owner=owner), trail, is_written=is_written)

    def _refuse(self, ref: ChunkRef, trail: bytes, cause: Cause, owner: Owner | None) -> None:
        self.chunks.counters.refused += 1
        if owner is not None:
            owner.refused += 1
        self.chunks.tell(Fate.REFUSED, Entry(*ref, trail=trail), Place.MEMORY, cause)

    def _plan_new(self, chunk: Entry, trail: bytes, *, is_written: bool) -> StoreStep | None:
        ref, owner = chunk.ref, chunk.owner
        slot = self.slots.take(ref.prefix_key, owner)
        has_way = slot is not None or (self.slots.num_idle > 0 and self.slots.has_room(1, owner=owner))
        targets = self._reserve_targets(chunk, trail) if is_written and has_way else ()
        if slot is None and targets:  # worth its room in a slower tier only, which needs a slot for staging
            slot = self.slots.take(owner=owner)
        if slot is None:
            self._refuse(ref, trail, self._cause_of(owner), owner)
            return None
        if not targets and not self.keep_in_memory:  # it would be dropped as soon as it is stored
            self.slots.free.append(slot)
            self._refuse(ref, trail, Cause.UNWRITTEN, owner)
            return None
        chunk.slot, chunk.memory = slot, GATHERING
        self.chunks.enter(chunk, trail)
        self.slots.add(chunk)
        chunk.uses += len(targets)
        return StoreStep(ref, slot, targets, trail=trail, until_s=chunk.expires_s)

    def _cause_of(self, owner: Owner | None) -> Cause:
        """Return the reason why no slot was found."""
        if owner is not None and not self.slots.has_room(1, owner=owner):
            return Cause.QUOTA
        return Cause.POLICY if self.slots.num_idle else Cause.IN_USE

    def _plan_known(self, chunk: Entry) -> StoreStep | None:
        """Write a chunk from memory to the tiers that lack it, if they have room for it now."""
        if chunk.memory is not READY or not (targets := self._reserve_targets(chunk, chunk.trail)):
            return None
        self.chunks.counters.writes_retried += 1
        self.uses.begin(chunk, 1 + len(targets))  # until complete_store, and until complete_write for each target
        return StoreStep(chunk.ref, chunk.slot, targets, gather=False, trail=chunk.trail, until_s=chunk.expires_s)

    def _reserve_targets(self, chunk: Entry, trail: bytes) -> tuple[Place, ...]:
        """Reserve room for a chunk in the slower tiers, and return those that will be written."""
        disk = (Place.DISK,) if self.disk.reserve(chunk) else ()
        return (*disk, Place.REMOTE) if self.remote.reserve(chunk, trail) else disk

    def _has_room(self, refs: Sequence[ChunkRef], owner: Owner | None) -> bool:
        """Tell if all new ones of these chunks could be stored, if only as staging for a slower tier."""
        if any((chunk := self.chunks.get(ref.prefix_key)) is not None and chunk.forgotten for ref in refs):
            return False  # its earlier entry is still being removed
        new = [ref.prefix_key for ref in refs if ref.prefix_key not in self.chunks]
        if not new or self.slots.has_room(len(new), new[0], owner):
            return True
        return self._has_slower_tier() and self.slots.has_room(len(new), owner=owner)

    def _has_slower_tier(self) -> bool:
        """Tell if chunks can be written anywhere but to memory."""
        return self.disk.stored_bytes is not None or self.remote.exists
