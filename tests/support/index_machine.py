"""The index against a model: random plans, in any order, some of them failing, with a simulated pool and disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Place, StoreStep, TierState, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.index.retained import Limits
from kvstore.model.keys import PrefixKey
from kvstore.policies import POLICIES
from support.index_model import (
    BLOCK,
    CHUNK,
    FAMILY,
    LENGTH,
    QUOTAS,
    IndexModel,
    Quotas,
    World,
    all_trails,
    owners_of,
    stored_bytes,
)
from support.invariants import check_invariants
from support.uses import uses_of

if TYPE_CHECKING:
    from kvstore.model.chunks import ChunkRef


class IndexMachine(IndexModel):
    @initialize(
        num_slots=st.integers(1, 7),
        capacity=st.integers(0, 9),
        keep=st.booleans(),
        max_writes=st.none() | st.integers(1, 4),
        survivors=st.integers(0, 4),
        knows_trails=st.booleans(),
        remote_hold_s=st.none() | st.integers(1, 9),
        cache_policy=st.sampled_from(sorted(POLICIES)),
        reads_fronts=st.booleans(),
        quotas=QUOTAS,
    )
    def start(
        self,
        num_slots: int,
        capacity: int,
        keep: bool,
        max_writes: int | None,
        survivors: int,
        knows_trails: bool,
        remote_hold_s: int | None,
        cache_policy: str,
        reads_fronts: bool,
        quotas: Quotas,
    ) -> None:
        self.capacity_bytes = capacity_bytes = capacity * stored_bytes(CHUNK // BLOCK)
        self.has_disk, self.keeps = capacity_bytes > 0, keep
        self.world = World()
        self.now_s = 0.0
        self.tiers = TierState()
        self.view = None if remote_hold_s is None else RemoteView(remote_hold_s)
        self.leases: dict[str, tuple[float, set[PrefixKey]]] = {}
        self.expiries: dict[PrefixKey, float] = {}
        self.stored: set[PrefixKey] = set()  # completed, and not removed since: all other finds are wrong
        self.index = ChunkIndex(
            num_slots,
            keep_in_memory=keep,
            disk_capacity_bytes=capacity_bytes,
            stored_bytes=stored_bytes if capacity_bytes else None,
            max_writes=max_writes,
            remote=self.view,
            max_sends=max_writes,
            cache_policy=cache_policy,
            checkpoints=self.checkpoints,
            reads_fronts=reads_fronts,
            retention=Limits(capacity // 2, of_tenant=2),
            disk_keeps_lifetimes=capacity % 2 == 1,
            owners=owners_of(*quotas),
        )
        if self.has_disk:
            self.adopt(self.hasher(2, CHUNK * min(survivors, capacity)), knows_trails=knows_trails)

    @rule(
        family=FAMILY,
        length=LENGTH,
        first=st.integers(0, 3),
        with_tail=st.booleans(),
        ttl_s=st.none() | st.integers(1, 9),
    )
    def prepare_store(self, family: int, length: int, first: int, with_tail: bool, ttl_s: int | None) -> None:
        hasher = self.hasher(family, length)
        refs = chunk_refs(hasher, with_tail=with_tail)
        busy = self.world.busy_slots()
        found = ((ref, self.index._chunks.get(ref.prefix_key)) for ref in self.index.lookup(hasher).refs)
        before = [ref for ref, chunk in found if chunk is not None and not self.index._stores._is_out_of_reach(chunk)]
        leased = self.leased()
        self.extend([ref.prefix_key for ref in refs[first:]], ttl_s)
        until_s = None if ttl_s is None else self.now_s + ttl_s
        held = {ref for ref in refs[first:] if self.is_held(ref, until_s)}
        self.check_sent_longer(held if ttl_s is None else set())
        retained = self.retained()
        steps = self.index.prepare_store(refs[first:], hasher.chunk_keys()[:first], hasher=hasher, ttl_s=ttl_s)
        self.check_leases(leased)
        self.check_retained(retained)
        kept = self.index._chunks
        assert all(ref.prefix_key in kept for ref in before if ref in refs and ref not in held), (
            "a store displaced its own prefix"
        )
        own = [step.ref for step in steps if step.ref in refs]
        assert own == [ref for ref in refs[first:] if ref in own]
        assert len(steps) - len(own) <= bool(held), "only what holds a tail is written in its stead"
        for step in steps:
            assert not (step.gather and step.ref in held), "a tail was stored that a chunk holds"
            if not step.gather:  # a missing write of a chunk in memory
                assert step.targets
                assert self.world.slots[step.slot] == step.ref
                assert Place.DISK not in step.targets or step.ref not in self.world.disk
                continue
            assert step.slot not in busy, "a slot in use was given away"
            busy.add(step.slot)
            assert Place.REMOTE not in step.targets or ttl_s is None
            assert Place.DISK not in step.targets or (
                self.has_disk and (ttl_s is None or self.index._disk.keeps_lifetimes)
            )
            assert Place.REMOTE not in step.targets or self.view is not None
            self.expiries.pop(step.ref.prefix_key, None)
            if ttl_s is not None:
                self.expiries[step.ref.prefix_key] = self.now_s + ttl_s
            assert not self.index.in_memory(step.ref.prefix_key), "readable before it was complete"
            self.world.slots.pop(step.slot, None)
        self.stored.difference_update(step.ref.prefix_key for step in steps if step.gather)
        self.note_ends(steps)
        self.carry_out_removals()
        if steps:
            self.world.stores.append(steps)

    @precondition(lambda self: self.checkpoints is None)
    @rule(
        family=FAMILY,
        length=st.integers(1, 20),
        shorter=st.integers(0, 9),
        name=st.none() | st.sampled_from("ab"),
        ttl_s=st.none() | st.integers(1, 9),
    )
    def store_both(self, family: int, length: int, shorter: int, name: str | None, ttl_s: int | None) -> None:
        """Store a prompt and one that begins like it, the longer one first or last, with success; one may be leased."""
        for number, end in enumerate(sorted({length, max(0, length - shorter)}, reverse=shorter % 2 == 0)):
            self.prepare_store(family=family, length=end, first=0, with_tail=True, ttl_s=ttl_s if number else None)
            for steps in self.world.stores:
                self.world.slots.update((step.slot, step.ref) for step in steps)
                leased = self.leased()
                self.index.complete_store(steps, set())
                self.check_leases(leased)
                self.check_superseded(step.ref.prefix_key for step in steps)
                known = self.index._chunks.is_known
                self.stored.update(step.ref.prefix_key for step in steps if known(step.ref.prefix_key))
                self.world.writes.update(((target, step.ref), step.slot) for step in steps for target in step.targets)
            self.world.stores.clear()
            self.carry_out_removals()
            for write in list(self.world.writes):
                self.finish_write(write, stored=write not in self.world.doomed)
            if name is not None:
                self.lease(name=name, family=family, length=end, ttl_s=9)

    def extend(self, keys: list[PrefixKey], ttl_s: int | None) -> None:
        """Extend the lifetime of known chunks to the longest that any store wants."""
        chunks = self.index._chunks
        for key in self.expiries.keys() & {key for key in keys if key in chunks and not chunks[key].forgotten}:
            if ttl_s is None:
                del self.expiries[key]
            else:
                self.expiries[key] = max(self.expiries[key], self.now_s + ttl_s)

    @precondition(lambda self: self.world.stores)
    @rule(data=st.data(), early=st.booleans())
    def complete_store(self, data: st.DataObject, early: bool) -> None:
        steps = self.world.stores.pop(data.draw(st.integers(0, len(self.world.stores) - 1)))
        failed = {step.ref.prefix_key for step in steps if data.draw(st.integers(0, 4)) == 0}
        for step in steps:
            if step.ref.prefix_key not in failed:
                assert step.gather or self.world.slots[step.slot] == step.ref
                self.world.slots[step.slot] = step.ref
                for target in step.targets:
                    self.world.writes[target, step.ref] = step.slot
            elif early:
                self.fail_writes(step)
        if early and self.world.writes:
            self.end_write(data)
        alive = [s.ref.prefix_key for s in steps if not self.index._chunks[s.ref.prefix_key].forgotten]
        leased = self.leased()
        self.index.complete_store(steps, failed)
        self.check_leases(leased)
        self.check_superseded(step.ref.prefix_key for step in steps if step.ref.prefix_key not in failed)
        self.stored.update(key for key in alive if key not in failed)
        for step in steps:
            if step.ref.prefix_key in failed and not early:
                self.fail_writes(step)
        self.carry_out_removals()

    @precondition(lambda self: self.world.writes)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(sorted(self.world.writes, key=lambda write: (write[0].value, write[1]))))
        stored = data.draw(st.integers(0, 3)) > 0 and write not in self.world.doomed
        size_bytes = data.draw(st.none() | st.integers(1, stored_bytes(write[1].num_blocks)))
        self.finish_write(write, stored=stored, size_bytes=size_bytes)

    def finish_write(self, write: tuple[Place, ChunkRef], *, stored: bool, size_bytes: int | None = None) -> None:
        slot, (target, ref) = self.world.writes.pop(write), write
        assert self.world.slots[slot] == ref, "the slot changed while it was being written"
        self.world.doomed.discard(write)
        if stored:
            (self.world.disk if target is Place.DISK else self.world.remote).add(ref)
            if target is Place.REMOTE and self.index._remote.keeps_trails:
                self.world.told.add(ref)
            if target is Place.DISK:
                self.world.sizes[ref] = size_bytes or stored_bytes(ref.num_blocks)
        leased = self.leased()
        self.index.complete_write(ref.prefix_key, target, stored=stored, size_bytes=size_bytes)
        self.check_leases(leased)
        self.carry_out_recalls()
        if stored and target is Place.DISK and self.index.in_memory(ref.prefix_key):
            self.check_superseded([ref.prefix_key])
        self.carry_out_removals()

    def fail_writes(self, step: StoreStep) -> None:
        for target in step.targets:
            self.index.complete_write(step.ref.prefix_key, target, stored=False)

    @rule(seconds=st.integers(1, 4))
    def advance(self, seconds: int) -> None:
        self.now_s += seconds
        self.index.advance(self.now_s)
        self.leases = {name: lease for name, lease in self.leases.items() if lease[0] > self.now_s}
        over = [key for key, end_s in self.expiries.items() if end_s <= self.now_s]
        self.expiries = {key: end_s for key, end_s in self.expiries.items() if key not in over}
        chunks = self.index._chunks
        assert all(key not in chunks or chunks[key].forgotten for key in over), "a chunk outlived its time"
        assert all(
            chunk.expires_s in (None, self.expiries.get(key)) for key, chunk in chunks.items() if not chunk.forgotten
        )
        self.forget(over)

    @rule(name=st.sampled_from("ab"), family=FAMILY, length=LENGTH, ttl_s=st.integers(1, 9))
    def lease(self, name: str, family: int, length: int, ttl_s: int) -> None:
        refs = self.index.lookup(self.hasher(family, length)).refs
        held = self.index.lease(name, refs, ttl_s)
        assert held <= len(refs)
        self.leases.pop(name, None)
        if held:
            self.leases[name] = (self.now_s + ttl_s, {ref.prefix_key for ref in refs[:held]})
        self.check_held({ref.prefix_key for ref in refs[:held]})

    @rule(name=st.sampled_from("abc"))
    def release(self, name: str) -> None:
        self.index.release(name)
        self.leases.pop(name, None)

    @rule(answers=st.booleans(), keeps_trails=st.booleans())
    def remote_goes_or_comes_back(self, answers: bool, keeps_trails: bool) -> None:
        self.tiers = self.tiers._replace(remote_answers=answers, remote_keeps_trails=keeps_trails)
        self.index.set_tiers(self.tiers)

    @rule(family=FAMILY, length=LENGTH, stored=st.booleans(), tells=st.booleans())
    def others_use_the_remote(self, family: int, length: int, stored: bool, tells: bool) -> None:
        refs = chunk_refs(self.hasher(family, length), with_tail=True)
        if stored:
            self.world.remote.update(refs)
            self.world.told.update(refs if tells else ())
        else:
            self.world.remote.difference_update(refs)

    @precondition(lambda self: self.view is not None)
    @rule(family=FAMILY, length=LENGTH, skip_blocks=st.integers(0, 9))
    def ask_the_remote(self, family: int, length: int, skip_blocks: int) -> None:
        assert self.view is not None
        hasher, skip_tokens = self.hasher(family, length), skip_blocks * BLOCK
        for _ in range(self.index.question_rounds):
            match = self.index.lookup(hasher, skip_tokens)
            questions = self.index.questions(hasher, match, skip_tokens)
            self.view.note(questions, [self.world.say(item) for item in questions], self.now_s)
        match = self.index.lookup(hasher, skip_tokens)
        assert not self.index.questions(hasher, match, skip_tokens), "asked again what was just answered"

    @precondition(lambda self: self.view is not None and self.checkpoints is None)
    @rule(family=FAMILY, length=LENGTH)
    def ask_for_the_longest(self, family: int, length: int) -> None:
        """Look up a prefix of the remote tier alone: it is found to its last block, if nothing here is in its way."""
        assert self.view is not None
        self.view.clear()
        self.ask_the_remote(family, length, 0)
        hasher, remote = self.hasher(family, length), {ref.prefix_key for ref in self.world.remote}
        whole, blocks = self.longest_there(hasher)
        is_free = remote.isdisjoint(self.index._chunks) and self.index._lookup._room(hasher).slots > whole
        if self.index._remote.answers and is_free:
            longest = whole * CHUNK + blocks * BLOCK
            assert self.index.lookup(hasher).num_tokens >= longest, "a longer prefix is there"

    @rule(answers=st.booleans())
    def disk_goes_or_comes_back(self, answers: bool) -> None:
        self.tiers = self.tiers._replace(disk_answers=answers)
        self.index.set_tiers(self.tiers)

    @precondition(lambda self: self.view is not None and self.checkpoints is None)
    @rule(family=FAMILY, length=LENGTH)
    def load_what_others_stored(self, family: int, length: int) -> None:
        """Load the longest sequence in the remote tier, or what begins with it."""
        self.others_use_the_remote(family, 36, stored=True, tells=True)
        self.ask_the_remote(family, length, 0)
        self.prepare_load(family, length, 0)

    @rule(family=FAMILY, length=LENGTH, skip_blocks=st.integers(0, 9), is_use=st.booleans())
    def prepare_load(self, family: int, length: int, skip_blocks: int, *, is_use: bool = True) -> None:
        skip_tokens = skip_blocks * BLOCK
        match = self.index.lookup(self.hasher(family, length), skip_tokens)
        end = match.first_chunk * CHUNK + sum(ref.num_blocks for ref in match.refs) * BLOCK
        assert end - CHUNK < match.num_tokens <= min(end, length)
        assert match.num_tokens > skip_tokens or not match.refs
        self.check_longest(family, length, match)
        for ref in match.refs:
            is_remote = self.view is not None and bool(self.view.holds(ref, self.now_s))
            is_remote = is_remote or self.index.is_loading(ref.prefix_key)
            assert is_remote or ref.prefix_key in self.stored, "found what was never stored, or was removed"
        busy = self.world.busy_slots()
        held = self.held()
        front_blocks = 0 if self.checkpoints else match.front_blocks(BLOCK, CHUNK // BLOCK)
        owner = self.index.owners.of(self.hasher(family, length))
        steps = self.index.prepare_load(match.refs, front_blocks=front_blocks, is_use=is_use, owner=owner)
        self.check_held(held)
        self.world.loads += [steps] if steps else []
        assert [step.read for step in steps] == list(match.refs), "lookup promised more than can be loaded"
        earlier = [step for load in self.world.loads[:-1] for step in load]
        coming = {step.slot: step.ref for step in earlier if step.source is not Place.MEMORY}
        for step in steps:
            if step.source is Place.REMOTE and step.ref not in self.world.disk:
                self.expiries.pop(step.ref.prefix_key, None)  # of one that was stored here, and displaced
            if step.holder is not None:
                assert step.source is Place.REMOTE
                assert step.ref.num_blocks == front_blocks, "not the blocks that are wanted"
                assert all_trails()[step.holder].startswith(all_trails()[step.ref])
            if step.source is Place.DISK:
                assert step.ref in self.world.disk
                assert self.tiers.disk_answers, "promised what a disk holds that does not answer"
            if step.source is not Place.MEMORY:
                assert step.slot not in busy, "a slot in use was given away"
                self.world.slots.pop(step.slot, None)
            else:
                assert {**self.world.slots, **coming}[step.slot] == step.ref

    @precondition(lambda self: self.world.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        steps = self.world.loads.pop(0)  # loads are carried out in the order in which they were planned
        failed, lost = set(), set()
        for step in steps:
            if not self.is_there(step) or data.draw(st.integers(0, 5)) == 0:
                failed.add(step.ref.prefix_key)
                chunk = self.index._chunks[step.ref.prefix_key]
                is_here = step.source is Place.MEMORY and chunk.in_memory and chunk.slot == step.slot
                if step.source is Place.REMOTE:
                    self.mark_stale(step)
                elif is_here or (step not in self.world.stale and data.draw(st.booleans())):
                    lost.add(step.ref.prefix_key)
                elif step.source is Place.DISK:
                    self.mark_stale(step)
            elif step.source is not Place.MEMORY:
                self.world.slots[step.slot] = step.ref
                if not self.index._chunks[step.ref.prefix_key].forgotten:
                    self.stored.add(step.ref.prefix_key)
        # A load that was to read from a slot and fails is forgotten, even if the mover does not call it lost.
        named = {key for key in lost if data.draw(st.booleans())} | {
            s.ref.prefix_key for s in steps if s.source is Place.DISK
        } & lost
        remote = {step.ref.prefix_key for step in steps if step.source is Place.REMOTE} & failed
        self.index.complete_load(steps, failed, named | remote if data.draw(st.booleans()) else named)
        if self.index._chunks.whole_blocks:
            self.check_superseded(
                s.ref.prefix_key for s in steps if s.source is not Place.MEMORY and s.ref.prefix_key not in failed
            )
        self.world.stale.difference_update(steps)
        self.forget(list(lost))

    def is_there(self, step: LoadStep) -> bool:
        if step.source is Place.MEMORY:
            return self.world.slots.get(step.slot) == step.ref
        return step.read in (self.world.disk if step.source is Place.DISK else self.world.remote)

    @invariant()
    def consistent(self) -> None:
        check_invariants(self.index)
        writing = self.world.written_to_disk()
        held = sum(stored_bytes(ref.num_blocks) for ref in writing)
        held += sum(self.world.sizes.get(ref, stored_bytes(ref.num_blocks)) for ref in self.world.disk - writing)
        assert held <= self.capacity_bytes, "more on disk than fits"
        on_disk = {chunk.ref for chunk in self.index._chunks.values() if chunk.on_disk and not chunk.forgotten}
        assert on_disk <= self.world.disk, "the index believes in a file that is not there"
        for chunk in self.index._chunks.values():
            if chunk.in_memory and not chunk.forgotten:
                assert self.world.slots[chunk.slot] == chunk.ref
        pending = [*self.world.stores, *self.world.loads, *self.world.writes]
        leases = self.index._leases._leases
        leased = sum(len(lease.keys) for lease in leases.values())
        assert (uses_of(self.index) > leased) == bool(pending)
        for name, lease in leases.items():
            assert all(self.leases[name][1].intersection(self.keys_in(key)) for key in lease.keys), (
                "a lease on what was never leased, or has ended"
            )
        if not pending:
            assert on_disk == self.world.disk, "files that nobody knows of"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for load in self.world.loads:
            keys = {step.ref.prefix_key for step in load}
            self.index.complete_load(load, keys, keys)
        for steps in self.world.stores:
            self.index.complete_store(steps, {step.ref.prefix_key for step in steps})
            for step in steps:
                self.fail_writes(step)
        self.carry_out_removals()
        for target, ref in self.world.writes:
            self.index.complete_write(ref.prefix_key, target, stored=False)
        self.world = World(self.world.slots, self.world.disk, self.world.sizes, self.world.ends)
        self.carry_out_removals()
        self.consistent()
