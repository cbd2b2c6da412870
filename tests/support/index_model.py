"""Simulated surroundings of an index, and its invariants, checked by looking at everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvstore.index.entries import LOADING, NO_FILE, NO_SLOT, SENDING, STORED, UNSENT
from kvstore.index.owners import Owners
from kvstore.index.plans import LoadStep, Match, Place, StoreStep, chunk_refs
from kvstore.index.trails import keys_of
from kvstore.model.keys import NO_EXTRAS, KeyExtras, PrefixHasher
from kvstore.model.lifetime import Lifetime
from kvstore.model.quotas import ANY_NAME, QuotaRules
from kvstore.tiers.base import MAX_NEAREST
from support.index import shared_blocks, trails_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index.entries import Entry
    from kvstore.index.index import ChunkIndex
    from kvstore.index.plans import TierState
    from kvstore.index.remote_view import RemoteView
    from kvstore.model.checkpoints import Checkpoints
    from kvstore.model.chunks import Answer, Asked, ChunkRef
    from kvstore.model.keys import PrefixHasher, PrefixKey

BLOCK, CHUNK = 2, 6
COMMON = list(range(100, 118))
FAMILIES = [  # they part at the end of a chunk, inside one, at the end of a block and inside one
    COMMON + list(range(10, 30)),
    COMMON[:6] + list(range(30, 60)),
    list(range(60, 90)),
    COMMON[:10] + list(range(120, 146)),
    COMMON[:15] + list(range(150, 171)),
]

TAGGED = 2  # the family with an owner of its own; it shares no chunk with others


def stored_bytes(num_blocks: int) -> int:
    return 10 + 30 * num_blocks


def owners_of(in_memory: tuple[int, int], on_disk: tuple[int, int]) -> Owners:
    """Return owners with quotas for so many chunks of the tagged family, and of the others; 0 for none."""
    names = ("a", ANY_NAME)
    memory = {name: count for name, count in zip(names, in_memory, strict=True) if count}
    chunk_bytes = stored_bytes(CHUNK // BLOCK)
    disk = {name: count * chunk_bytes for name, count in zip(names, on_disk, strict=True) if count}
    return Owners(QuotaRules("team", memory, disk), slot_bytes=1, chunk_bytes=chunk_bytes)


@cache  # every schedule asks for the same few again
def hasher_of(family: int, length: int) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK, KeyExtras(tags=(("team", "a"),)) if family == TAGGED else NO_EXTRAS)
    hasher.update(FAMILIES[family][:length])
    return hasher


@cache
def all_trails() -> dict[ChunkRef, bytes]:
    """Return the trails of every chunk of any sequence."""
    found: dict[ChunkRef, bytes] = {}
    for family, tokens in enumerate(FAMILIES):
        for length in range(BLOCK, len(tokens) + 1, BLOCK):
            hasher = hasher_of(family, length)
            refs = chunk_refs(hasher, with_tail=True)
            made = trails_of(hasher, refs)
            found.update((ref, made[ref.prefix_key]) for ref in refs)
    return found


@dataclass
class World:
    """Contents of a mover and its tiers."""

    slots: dict[int, ChunkRef] = field(default_factory=dict)
    disk: set[ChunkRef] = field(default_factory=set)
    sizes: dict[ChunkRef, int] = field(default_factory=dict)  # on disk, of those that a codec made smaller
    ends: dict[ChunkRef, float | None] = field(default_factory=dict)  # times to live on disk, in the last write's name
    remote: set[ChunkRef] = field(default_factory=set)  # other engines store there too, and it evicts
    told: set[ChunkRef] = field(default_factory=set)  # those whose trails the remote tier has, or had
    stores: list[list[StoreStep]] = field(default_factory=list)
    loads: list[list[LoadStep]] = field(default_factory=list)
    writes: dict[tuple[Place, ChunkRef], int] = field(default_factory=dict)  # started, from which slot
    doomed: set[tuple[Place, ChunkRef]] = field(default_factory=set)
    stale: set[LoadStep] = field(default_factory=set)  # planned behind a read that failed: find nothing in their slot

    def say(self, item: Asked) -> Answer:
        """Return the answer of the remote tier."""
        if not isinstance(item, bytes):
            return item in self.remote
        shared = {ref: shared_blocks(item, all_trails()[ref]) for ref in sorted(self.remote & self.told)}
        nearest = sorted(filter(shared.__getitem__, shared), key=lambda ref: -shared[ref])
        return tuple(all_trails()[ref] for ref in nearest[:MAX_NEAREST])

    def written_to_disk(self) -> set[ChunkRef]:
        return {ref for place, ref in self.writes if place is Place.DISK}

    def busy_slots(self) -> set[int]:
        steps = [step for store in self.stores for step in store]
        reads = [step for load in self.loads for step in load if step not in self.stale]
        return {step.slot for step in steps} | {step.slot for step in reads} | set(self.writes.values())


FAMILY, LENGTH = st.integers(0, len(FAMILIES) - 1), st.integers(0, 36)
Quotas = tuple[tuple[int, int], tuple[int, int]]
QUOTAS = st.tuples(*[st.tuples(st.integers(0, 6), st.integers(0, 6))] * 2) | st.just(((0, 0), (0, 0)))


class IndexModel(RuleBasedStateMachine):
    checkpoints: Checkpoints | None = None
    index: ChunkIndex
    view: RemoteView | None
    world: World
    stored: set[PrefixKey]
    keeps: bool
    tiers: TierState
    now_s: float
    expiries: dict[PrefixKey, float]

    def hasher(self, family: int, length: int) -> PrefixHasher:
        return hasher_of(family, length)

    def carry_out_removals(self) -> None:
        for ref in self.index.take_removals():
            if (Place.DISK, ref) in self.world.writes:
                self.world.doomed.add((Place.DISK, ref))
            else:
                self.world.disk.discard(ref)
        for ref, until_s in self.index.take_lifetimes():
            if ref in self.world.disk or (Place.DISK, ref) in self.world.writes:  # or its write has not begun
                self.world.ends[ref] = until_s
        for chunk in self.index._chunks.values():
            if chunk.on_disk and not chunk.forgotten:
                assert chunk.expires_s == self.world.ends.get(chunk.ref), "it would end at another time after a restart"

    def note_ends(self, steps: Iterable[StoreStep]) -> None:
        """Note until when the chunks last that a plan writes to disk."""
        self.world.ends |= {step.ref: step.until_s for step in steps if Place.DISK in step.targets}

    def adopt(self, hasher: PrefixHasher, *, knows_trails: bool) -> None:
        """Begin with chunks on disk, every other one of which has a time to live if the disk keeps those."""
        refs = chunk_refs(hasher, with_tail=True)
        owners = {ref.prefix_key: self.index.owners.id_of(hasher) for ref in refs * knows_trails}
        survivors = ((ref, stored_bytes(ref.num_blocks)) for ref in refs)
        self.index.adopt(survivors, trails_of(hasher, refs * knows_trails), owners)
        self.world.disk.update(refs)
        self.stored.update(ref.prefix_key for ref in refs)
        limited = refs[::2] if self.index._disk.keeps_lifetimes else []
        self.index.limit(Lifetime(ref, until_s) for until_s in (4.0, 3.0, 5.0) for ref in limited)  # of three ranks
        self.world.ends = dict.fromkeys(refs) | dict.fromkeys(limited, 3.0)
        self.expiries = {ref.prefix_key: 3.0 for ref in limited}
        self.index.settle()
        self.carry_out_removals()

    @rule(family=FAMILY, length=LENGTH, ttl_s=st.integers(1, 9), tenant=st.sampled_from([b"", b"a"]))
    def retain(self, family: int, length: int, ttl_s: int, tenant: bytes) -> None:
        refs = self.index.lookup(self.hasher(family, length)).refs
        count = self.index.retain(refs, self.now_s + ttl_s, tenant)
        kept = self.index._disk.retained
        assert [ref.prefix_key in kept for ref in refs[:count]] == [True] * count

    @rule(family=FAMILY, length=LENGTH, demotes=st.booleans())
    def give_up(self, family: int, length: int, *, demotes: bool) -> None:
        refs = self.index.lookup(self.hasher(family, length)).refs
        assert self.index.give_up(refs, demotes=demotes) <= len(refs)

    def mark_stale(self, failed: LoadStep) -> None:
        """Mark the loads planned behind a failed read as stale, as they find nothing in its slot."""
        behind = (other for load in self.world.loads for other in load if other.ref == failed.ref)
        self.world.stale.update(other for other in behind if other.slot == failed.slot)

    @rule(family=FAMILY, chunk=st.integers(0, 5))
    def remove(self, family: int, chunk: int) -> None:
        keys = self.hasher(family, 36).block_keys(chunk)
        assume(keys)
        assert self.index.remove(keys) <= len(keys)
        if self.view is not None:
            self.view.forget([ref for ref in self.view._answers if ref.prefix_key in keys])
        self.forget(keys)

    @precondition(lambda self: self.stored)
    @rule(chance=st.integers(0, 3))
    def clear(self, chance: int) -> None:
        assume(chance == 0)
        self.index.clear()
        self.index.take_removals()
        self.world.disk.clear()
        self.world.remote.clear()
        self.world.told.clear()
        self.index.take_recalls()
        self.world.doomed.update(self.world.writes)
        self.stored.clear()

    def retained(self) -> list[ChunkRef]:
        """Return the chunks that stay on disk whatever is stored."""
        chunks = [self.index._chunks[key] for key in self.index._disk.retained._stays]
        stay = [chunk.ref for chunk in chunks if chunk.disk is STORED and not chunk.forgotten]
        return stay if self.tiers.disk_answers else []  # else a chunk that was computed again is stored again

    def check_retained(self, before: Iterable[ChunkRef]) -> None:
        """Check that chunks have stayed on disk, unless a longer one there holds them now."""
        on_disk = {chunk.ref for chunk in self.index._chunks.values() if chunk.on_disk}
        for ref in before:
            assert ref in on_disk or on_disk.intersection(self.longer(ref)), "a retained chunk was evicted"

    def carry_out_recalls(self) -> None:
        for ref in self.index.take_recalls():
            assert ref in self.world.told, "a tail was recalled that an older engine may have sent"
            holders = [longer for longer in self.longer(ref) if longer in self.world.told]
            assert holders, "a tail was recalled, and nothing leads to its blocks"
            self.world.remote.discard(ref)

    def longer(self, tail: ChunkRef) -> Iterable[ChunkRef]:
        """Return all chunks that hold the blocks of a tail, and more."""
        trail = all_trails()[tail]
        return (ref for ref, other in all_trails().items() if ref != tail and other.startswith(trail))

    def check_sent_longer(self, held: Iterable[ChunkRef]) -> None:
        """Check of tails not to be stored that a longer chunk is or was at a remote tier, or may be sent there."""
        for tail in held if self.view is not None else ():
            chunks = (self.index._chunks.get(ref.prefix_key) for ref in self.longer(tail))
            coming = any(c is not None and c.in_memory and c.remote in {UNSENT, SENDING} for c in chunks)
            sending = any(target is Place.REMOTE and ref in set(self.longer(tail)) for target, ref in self.world.writes)
            planned = {step.ref for store in self.world.stores for step in store if Place.REMOTE in step.targets}
            longer = set(self.longer(tail))
            assert coming or sending or longer & (planned | self.world.told), "a tail is lost to a chunk not there"

    def forget(self, keys: list[PrefixKey]) -> None:
        self.stored.difference_update(keys)
        self.carry_out_removals()

    def held(self) -> set[PrefixKey]:
        return set(self.index._leases._holders)

    def check_held(self, held: set[PrefixKey]) -> None:
        chunks = self.index._chunks
        assert all(key in chunks and not chunks[key].forgotten for key in held), "a leased chunk was evicted"

    def leased(self) -> dict[str, set[PrefixKey]]:
        return {name: set(lease.keys) for name, lease in self.index._leases._leases.items()}

    def check_leases(self, before: dict[str, set[PrefixKey]]) -> None:
        """Check that every lease has the chunks it had, or chunks that hold them now."""
        for name, keys in before.items():
            now = self.index._leases._leases[name].keys
            assert all(any(key in self.keys_in(chunk) for chunk in now) for key in keys), "a lease lost its chunk"

    def keys_in(self, key: PrefixKey) -> list[PrefixKey]:
        """Return the block ends that a chunk leads to."""
        chunk = self.index._chunks[key]
        return list(keys_of(chunk.trail)) or [key]

    def holders_of(self, key: PrefixKey) -> Iterable[Entry]:
        """Return the longer chunks that hold a tail, by looking at all."""
        chunks = self.index._chunks.values()
        return (chunk for chunk in chunks if not chunk.forgotten and key in list(keys_of(chunk.trail))[:-1])

    def is_held(self, ref: ChunkRef, until_s: float | None) -> bool:
        """Tell if a longer chunk holds a tail, which then needs no bytes and keeps none."""
        if ref.num_blocks * BLOCK == CHUNK:
            return False
        tail = self.index._chunks.get(ref.prefix_key)
        tail = None if tail is not None and tail.forgotten else tail
        fit = [c for c in self.holders_of(ref.prefix_key) if c.lasts_until(until_s) and self.is_sure(c)]
        if self.view is not None and until_s is None:
            fit = [c for c in fit if self.index._remote.leads_to(c)]
        fit.sort(key=lambda chunk: chunk.memory is NO_SLOT)
        if not fit or (self.keeps and fit[0].memory is NO_SLOT):  # it is kept in memory if its holder is only on disk
            return False
        return tail is None or self.takes_in(fit[0], tail)

    def longest_there(self, hasher: PrefixHasher) -> tuple[int, int]:
        """Count a sequence's whole chunks in the remote tier, and the blocks behind them that can be found there."""
        remote = {ref.prefix_key for ref in self.world.remote}
        whole = sum(1 for _ in takewhile(remote.__contains__, hasher.chunk_keys()))
        trail = b"".join(hasher.block_keys(whole))
        shared = {ref: shared_blocks(trail, all_trails()[ref]) for ref in self.world.remote}
        found = (blocks for ref, blocks in shared.items() if blocks == ref.num_blocks or ref in self.world.told)
        return whole, max(found, default=0)

    def is_sure(self, chunk: Entry) -> bool:
        return (chunk.in_memory and self.keeps) or (chunk.disk is STORED and self.tiers.disk_answers)

    def takes_in(self, chunk: Entry, tail: Entry) -> bool:
        """Tell if a chunk is in every tier that holds a tail, and stays at least as long."""
        has_slot = chunk.in_memory or tail.memory is NO_SLOT or not self.keeps
        has_file = chunk.disk is STORED or tail.disk is NO_FILE
        is_ours = tail.owner is chunk.owner
        return is_ours and has_slot and has_file and tail.memory is not LOADING and chunk.lasts_until(tail.expires_s)

    def check_superseded(self, keys: Iterable[PrefixKey]) -> None:
        """Check that no tail is kept that these whole chunks, which have just arrived in a place, hold."""
        chunks = self.index._chunks
        for chunk in (chunks[key] for key in keys if chunks.is_known(key)):
            for key in self.keys_in(chunk.ref.prefix_key)[:-1] if chunk.ref.num_blocks * BLOCK == CHUNK else ():
                tail = chunks.get(key)
                assert tail is None or tail.forgotten or not self.takes_in(chunk, tail), "a tail is stored twice"

    def check_longest(self, family: int, length: int, match: Match) -> None:
        """Check that a match ends with the longest common prefix, in blocks, of the sequence and all readable ones."""
        room = self.index._lookup._room(self.hasher(family, length))
        chunks = self.index._chunks.values()
        is_mixed = any(chunk.owner is not room.owner for chunk in chunks if chunk.ref in match.refs)
        if (
            is_mixed
            or self.view is not None
            or self.checkpoints is not None
            or not match.refs
            or room.slots <= len(match.refs)
        ):
            return
        hasher, begin = self.hasher(family, length), match.num_tokens // CHUNK
        if match.num_tokens % CHUNK == 0 and match.refs[-1].prefix_key != hasher.chunk_keys()[begin - 1]:
            begin -= 1  # all blocks of a chunk that holds more than these
        keys = hasher.block_keys(begin)
        shared = [0]
        for chunk in self.index._chunks.values():
            if self.index._chunks.is_readable(chunk):
                is_coming = chunk.memory is LOADING  # as a whole: no request waits for a part of it
                trail = [] if is_coming else list(keys_of(chunk.trail))
                trail = trail or [chunk.ref.prefix_key]
                shared += [number for number, key in enumerate(keys, 1) if key in trail]
        assert match.num_tokens == begin * CHUNK + max(shared) * BLOCK, "a longer prefix is there"
