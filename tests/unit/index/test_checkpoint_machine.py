"""The index of models that need checkpoints: after any history, a lookup finds what a trial of all ends finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from support.index_machine import IndexMachine
from support.index_model import BLOCK, CHUNK, QUOTAS, Quotas, stored_bytes
from support.schedules import schedule_settings

from kvstore.index.entries import NO_SLOT
from kvstore.index.plans import Match, Place, StoreStep, chunk_refs
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.chunks import ChunkRef
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.keys import PrefixHasher, PrefixKey
from kvstore.model.layout import KVLayout

LAYOUT = KVLayout(page_bytes=(10,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
FULL = Group(GroupKind.FULL, BLOCK, 10)
WINDOW = Group(GroupKind.WINDOW, BLOCK, 15, span_tokens=5)  # three blocks: two parts
LOCAL = Group(GroupKind.LOCAL, BLOCK, 20, span_tokens=4)  # no block at every other end
STATE = Group(GroupKind.STATE, BLOCK, 30)
MODELS = [(FULL, WINDOW), (FULL, LOCAL), (WINDOW, STATE, FULL), (STATE,), (WINDOW, STATE)]

Holds = Callable[[ChunkRef], bool]


class CheckpointMachine(IndexMachine):
    checkpoints: Checkpoints

    @initialize(
        model=st.sampled_from(MODELS),
        num_slots=st.integers(2, 30),
        capacity=st.integers(0, 9),
        keep=st.booleans(),
        max_writes=st.none() | st.integers(1, 4),
        remote_hold_s=st.none() | st.integers(1, 9),
        cache_policy=st.sampled_from(["ADAPTIVE", "LRU", "S3FIFO"]),
        quotas=QUOTAS,
    )
    def start(
        self,
        model: tuple[Group, ...],
        num_slots: int,
        capacity: int,
        keep: bool,
        max_writes: int | None,
        remote_hold_s: int | None,
        cache_policy: str,
        quotas: Quotas,
    ) -> None:
        self.checkpoints = Checkpoints((Groups(model),), (LAYOUT,))
        self.parts: dict[tuple[PrefixHasher, int], tuple[ChunkRef, ...]] = {}
        self.noted: set[tuple[ChunkRef, ...]] = set()
        options = (num_slots, capacity, keep, max_writes, 0, False, remote_hold_s, cache_policy)
        super().start(*options, reads_fronts=False, quotas=quotas)

    def parts_at(self, hasher: PrefixHasher, end_tokens: int) -> tuple[ChunkRef, ...]:
        parts = self.parts.get((hasher, end_tokens))
        if parts is None:
            parts = tuple(self.checkpoints.refs(key_at(hasher, end_tokens), end_tokens))
            self.parts[hasher, end_tokens] = parts
        return parts

    # -- contents ----------------------------------------------------------------------------------------------------

    def is_here(self, ref: ChunkRef) -> bool:
        chunk = self.index._chunks.get(ref.prefix_key)
        if chunk is None or chunk.forgotten or chunk.ref != ref:
            return False
        is_on_disk = chunk.on_disk and self.tiers.disk_answers
        return is_on_disk if chunk.memory is NO_SLOT else chunk.memory.name in {"READY", "LOADING"}

    def is_known(self, ref: ChunkRef) -> bool:
        if self.is_here(ref):
            return True
        if self.view is None or not self.index._remote.answers or not self.view.holds(ref, self.now_s):
            return False
        chunk = self.index._chunks.get(ref.prefix_key)
        return chunk is None or (chunk.ref == ref and not chunk.forgotten and chunk.memory is NO_SLOT)

    def fit(self, refs: list[ChunkRef], hasher: PrefixHasher) -> bool:
        here = [self.index._chunks[ref.prefix_key] for ref in refs if self.is_here(ref)]
        in_slots = [chunk for chunk in here if chunk.memory is not NO_SLOT]
        idle = sum(not chunk.uses for chunk in in_slots)
        return len(refs) - len(in_slots) <= self.index._slots.room_of(self.index.owners.of(hasher)) - idle

    def needed(
        self, hasher: PrefixHasher, skip_tokens: int, end_tokens: int, limit_tokens: int
    ) -> dict[tuple[ChunkRef, ...], bool]:
        """Return the sets of chunks that a hit may take, each with True if it must be found while they are there.

        A tail is looked for in the first chunk that is not there whole, and in the one in which the limit is.
        """
        first, (num_chunks, tail_tokens) = skip_tokens // CHUNK, divmod(end_tokens, CHUNK)
        if not self.checkpoints.groups.full:
            return {(): not tail_tokens or num_chunks == limit_tokens // CHUNK}
        whole = [ChunkRef(key, CHUNK // BLOCK) for key in hasher.chunk_keys()[first:]]
        before = tuple(whole[: num_chunks - first])
        if not tail_tokens:
            return {before: True}
        with_tail = (*before, ChunkRef(key_at(hasher, end_tokens), tail_tokens // BLOCK))
        around = whole[num_chunks - first : num_chunks - first + 1]
        if not around:
            return {with_tail: True}
        return {(*before, *around): num_chunks == limit_tokens // CHUNK, with_tail: not self.is_known(around[0])}

    def check(self, match: Match, hasher: PrefixHasher, skip_tokens: int, limit_tokens: int) -> None:
        """Check that the match is one of the possible hits, and that none ends behind it."""
        limit_tokens = min(limit_tokens, hasher.num_tokens)
        if match.num_tokens:
            assert match.refs in self.needed(hasher, skip_tokens, match.num_tokens, limit_tokens)
            assert match.checkpoint == self.parts_at(hasher, match.num_tokens)
            assert match.first_chunk == skip_tokens // CHUNK
            assert skip_tokens < match.num_tokens <= min(limit_tokens, match.chunk_tokens)
            refs = [*match.refs, *match.checkpoint]
            assert all(map(self.is_known, refs)), "found what is not there"
            assert self.fit(refs, hasher), "no slots for it"
        for end_tokens in range(max(skip_tokens, match.num_tokens) + BLOCK, limit_tokens + 1, BLOCK):
            for chunks, is_looked_for in self.needed(hasher, skip_tokens, end_tokens, limit_tokens).items():
                refs = [*chunks, *self.parts_at(hasher, end_tokens)]
                assert not (is_looked_for and all(map(self.is_known, refs)) and self.fit(refs, hasher)), (
                    f"missed {end_tokens}"
                )

    @invariant()
    def a_lookup_finds_what_trying_all_ends_finds(self) -> None:
        for family in range(3):
            hasher = self.hasher(family, 30)
            self.check(self.index.lookup(hasher), hasher, 0, 30)

    # -- events ------------------------------------------------------------------------------------------------------

    @rule(
        family=st.integers(0, 2),
        length=st.integers(0, 36),
        first=st.integers(0, 3),
        with_tail=st.booleans(),
        ttl_s=st.none() | st.none() | st.integers(1, 9),
        marks=st.sets(st.integers(0, 5)),
    )
    def prepare_store(
        self, family: int, length: int, first: int, with_tail: bool, ttl_s: int | None, marks: set[int]
    ) -> None:
        hasher = self.hasher(family, length)
        refs: list[ChunkRef] = []
        checkpoints: list[tuple[ChunkRef, ...]] = []
        for number, ref in enumerate(chunk_refs(hasher, with_tail=with_tail)[first:], first):
            if self.checkpoints.groups.full:
                refs.append(ref)
            parts = self.parts_at(hasher, number * CHUNK + ref.num_blocks * BLOCK)
            if parts and number in marks:
                refs += parts
                checkpoints.append(parts)
        busy, held = self.world.busy_slots(), self.held()
        self.extend([ref.prefix_key for ref in refs], ttl_s)
        chunks = self.index._chunks
        before = {ref for ref in refs if chunks.is_known(ref.prefix_key)}
        prefix = hasher.chunk_keys()[:first]
        steps = self.index.prepare_store(refs, prefix, ttl_s=ttl_s, noted=set(), checkpoints=checkpoints)
        self.check_held(held - {ref.prefix_key for ref in refs})
        for step in steps:
            if step.gather:
                assert step.slot not in busy, "a slot in use was given away"
                busy.add(step.slot)
                self.expiries.pop(step.ref.prefix_key, None)
                if ttl_s is not None:
                    self.expiries[step.ref.prefix_key] = self.now_s + ttl_s
                self.world.slots.pop(step.slot, None)
        planned = {step.ref for step in steps if step.gather}
        for parts in checkpoints:
            self.noted.add(parts)
            if self.view is None and not self.has_disk:
                assert planned.isdisjoint(parts) or planned | before >= set(parts), "a part of a checkpoint"
        self.stored.difference_update(ref.prefix_key for ref in planned)
        self.note_ends(steps)
        self.carry_out_removals()
        if steps:
            self.world.stores.append(steps)

    @rule(family=st.integers(0, 2), length=st.integers(6, 30), marks=st.sets(st.integers(0, 5), min_size=1))
    def store_with_success(self, family: int, length: int, marks: set[int]) -> None:
        """Store chunk by chunk, so that a small pool lets the chunks pass to the disk."""
        for number in range((length - 1) // CHUNK + 1):
            self.store_chunk(family, min(length, (number + 1) * CHUNK), number, {*marks, (length - 1) // CHUNK})

    def store_chunk(self, family: int, length: int, first: int, marks: set[int]) -> None:
        num_stores = len(self.world.stores)
        self.prepare_store(family, length, first, with_tail=True, ttl_s=None, marks=marks)
        for steps in self.world.stores[num_stores:]:
            alive = {step.ref.prefix_key for step in steps if not self.index._chunks[step.ref.prefix_key].forgotten}
            self.world.slots.update((step.slot, step.ref) for step in steps)
            self.index.complete_store(steps, set())
            self.stored |= alive
            for step in steps:
                self.write_with_success(step)
        del self.world.stores[num_stores:]
        self.carry_out_removals()

    def write_with_success(self, step: StoreStep) -> None:
        for target in step.targets:
            (self.world.disk if target is Place.DISK else self.world.remote).add(step.ref)
            if target is Place.DISK:
                self.world.sizes[step.ref] = stored_bytes(step.ref.num_blocks)
            self.index.complete_write(step.ref.prefix_key, target, stored=True)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(0, 36),
        skip_blocks=st.integers(0, 9),
        limit_tokens=st.none() | st.integers(0, 36),
    )
    def prepare_load(self, family: int, length: int, skip_blocks: int, limit_tokens: int | None) -> None:
        hasher, skip_tokens = self.hasher(family, length), skip_blocks * BLOCK
        match = self.index.lookup(hasher, skip_tokens, limit_tokens=limit_tokens)
        self.check(match, hasher, skip_tokens, length if limit_tokens is None else limit_tokens)
        refs = [*match.refs, *match.checkpoint]
        busy, held = self.world.busy_slots(), self.held()
        steps = self.index.prepare_load(refs, checkpoint=match.checkpoint)
        self.check_held(held)
        assert [step.ref for step in steps] == refs, "lookup promised more than can be loaded"
        for step in steps:
            if step.source is not Place.MEMORY:
                assert step.slot not in busy, "a slot in use was given away"
                self.world.slots.pop(step.slot, None)
        if steps:
            self.world.loads.append(steps)

    @rule(seconds=st.integers(1, 4))
    def advance(self, seconds: int) -> None:
        super().advance(seconds)
        chunks = self.index._chunks
        for parts in self.noted if self.view is None else ():
            here = [chunks.is_known(ref.prefix_key) for ref in parts]
            assert all(here) or not any(here), "parts of a checkpoint that is not whole"

    @rule(name=st.sampled_from("ab"), family=st.integers(0, 2), length=st.integers(0, 36), ttl_s=st.integers(1, 9))
    def lease(self, name: str, family: int, length: int, ttl_s: int) -> None:
        match = self.index.lookup(self.hasher(family, length))
        refs = (*match.checkpoint, *match.refs)
        held = self.index.lease(name, refs, ttl_s)
        self.leases.pop(name, None)
        if held:
            self.leases[name] = (self.now_s + ttl_s, {ref.prefix_key for ref in refs[:held]})

    @rule(family=st.integers(0, 2), length=st.integers(0, 36), stored=st.booleans(), part=st.integers(0, 3))
    def others_use_the_remote(self, family: int, length: int, stored: bool, part: int) -> None:
        hasher = self.hasher(family, length)
        refs = chunk_refs(hasher, with_tail=True)
        ends = [sum(ref.num_blocks for ref in refs[:number]) * BLOCK for number in range(1, len(refs) + 1)]
        parts = [ref for end in ends for ref in self.parts_at(hasher, end)[: part + stored]]
        if stored:
            self.world.remote.update([*refs, *parts])
        else:
            self.world.remote.difference_update(parts if part else refs)

    @precondition(lambda self: self.view is not None)
    @rule(family=st.integers(0, 2), length=st.integers(0, 36), skip_blocks=st.integers(0, 9))
    def ask_the_remote(self, family: int, length: int, skip_blocks: int) -> None:
        super().ask_the_remote(family, length, skip_blocks)
        assert self.view is not None
        hasher, skip_tokens = self.hasher(family, length), skip_blocks * BLOCK
        match = self.index.lookup(hasher, skip_tokens)
        assert not self.index.questions(hasher, match, skip_tokens)
        # Nothing that was not asked about would have made it longer.
        behind = range(skip_tokens + BLOCK, hasher.num_tokens + 1, BLOCK)
        every = [ref for end in behind for ref in self.parts_at(hasher, end)]
        needed = [self.needed(hasher, skip_tokens, end, hasher.num_tokens) for end in behind]
        every += [ref for hits in needed for refs in hits for ref in refs]
        if self.index._remote.answers:
            unknown = self.view.unknown(every, self.now_s)
            self.view.note(unknown, [ref in self.world.remote for ref in unknown], self.now_s)
        self.check(self.index.lookup(hasher, skip_tokens), hasher, skip_tokens, length)
        assert self.index.lookup(hasher, skip_tokens).num_tokens == match.num_tokens, "it was not asked about all"

    @rule(family=st.integers(0, 2), chunk=st.integers(0, 5), part=st.integers(0, 2))
    def remove(self, family: int, chunk: int, part: int) -> None:
        hasher = self.hasher(family, 30)
        end_tokens = min(30, (chunk + 1) * CHUNK)
        refs = [*self.parts_at(hasher, end_tokens), ChunkRef(key_at(hasher, end_tokens), CHUNK // BLOCK)][
            part : part + 1
        ]
        self.index.remove(ref.prefix_key for ref in refs)
        if self.view is not None:
            self.view.forget(refs)
        self.forget([ref.prefix_key for ref in refs])


@cache
def key_at(hasher: PrefixHasher, end_tokens: int) -> PrefixKey:
    number, inside_tokens = divmod(end_tokens - BLOCK, CHUNK)
    return hasher.block_keys(number)[inside_tokens // BLOCK]


@pytest.mark.schedules
def test_a_lookup_finds_what_trying_all_ends_finds() -> None:
    run_state_machine_as_test(CheckpointMachine, settings=schedule_settings(60, stateful_step_count=30))
