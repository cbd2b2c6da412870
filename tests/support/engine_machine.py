"""The engine against a model: any calls in any order, over tiers whose calls take time, fail, or lose chunks.

A load brings what was stored last for these tokens under the present epoch, or nothing. The content of a chunk has a
version, which changes when the chunk is removed, and with the weights. So content that outlives its removal, in
memory, on the device, on disk, at the remote tier or on the way to one of them, is seen as soon as it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.engine import opening
from kvstore.engine.requests import hash_tokens
from kvstore.index.plans import Place, all_refs
from kvstore.model.keys import NO_EXTRAS, PrefixHasher, PrefixKey
from kvstore.tiers import open_tier
from kvstore.transfer import layerwise
from kvstore.transfer.lane import WRITE_THREADS, Lane
from support.gate import HANG_GUARD_S
from support.gated_store import BEGINNING, OPERATIONS, GatedStore, GatedTier
from support.invariants import check_invariants
from support.remote import REMOTE
from support.rig import BLOCK, BLOCKS_PER_CHUNK, NAMESPACE, POISON, SLOT_BYTES, Rig
from support.uses import uses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from kvstore.tiers.base import Tier, TierSetup

LAYERS = 4
COMMON = list(range(100, 132))
FAMILIES = [COMMON + list(range(16)), COMMON[:16] + list(range(50, 82))]
LONGEST = 48
BLOCKS = LONGEST // BLOCK
ROOMS = 5  # each with the blocks of one call: one for calls that end at once, the others for generators


@dataclass(eq=False)
class Loading:
    """A ``retrieve_layer`` that has not ended."""

    tokens: list[int]
    skip: int
    room: int
    generator: Generator[torch.Tensor | None, None, None]
    layers: int = 0
    is_overtaken: bool = False  # by the discovery of a wrong chunk: what it has loaded stays loaded


@dataclass(eq=False)
class Storing:
    """A ``store_layer`` that has not ended."""

    tokens: list[int]
    room: int
    generator: Generator[int | None, None, None]
    layers: int = 0


@dataclass
class Versions:
    """Version of each chunk's content that may be found, as content computed before its last removal may not."""

    newest: int = 0
    base: int = 0
    since: dict[PrefixKey, int] = field(default_factory=dict)

    def of(self, key: PrefixKey) -> int:
        return self.since.get(key, self.base)

    def end(self, keys: list[PrefixKey]) -> None:
        self.newest += 1
        self.since.update(dict.fromkeys(keys, self.newest))

    def end_all(self) -> None:
        self.newest += 1
        self.base = self.newest
        self.since.clear()


def all_wait(lane: Lane, waiting: Mapping[str, int]) -> bool:
    """Tell if every write of the tier that is on its way waits at the gate."""
    return waiting["put"] >= min(WRITE_THREADS, len(lane._writing))


# Few sequences, and one of them often, because a defect needs several calls about the same chunk.
SEQUENCES = st.sampled_from([(0, 8), (0, 8), (0, 8), (0, 8), (0, 6), (0, 12), (1, 9), (1, 3)]).map(
    lambda chosen: FAMILIES[chosen[0]][: chosen[1] * BLOCK]
)
REMOVALS = ["sequence", "sequence", "condemn", "condemn", "all", "weights"]
TROUBLE = ["hold put", "hold put", "hold more", "go on", "go on", "flush", "lose", "damage", *OPERATIONS]
STORES = st.sampled_from(["remote", "remote", "disk"])


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(3, 8),
        hot_slots=st.sampled_from([6, 6, 2, 0]),
        local_cpu=st.sampled_from([True, True, False]),
        has_disk=st.booleans(),
        reads_layers=st.booleans(),
    )
    def start(self, slots: int, hot_slots: int, local_cpu: bool, has_disk: bool, reads_layers: bool) -> None:
        self.rig = Rig(num_blocks=ROOMS * BLOCKS, num_layers=LAYERS)
        self.stores = {"remote": GatedStore(), "disk": GatedStore()}
        self.versions = Versions()
        self.epoch = 0
        self.epochs: dict[bytes, int] = {}  # of each content, by its first bytes
        self.namespaces = {NAMESPACE.id: 0}  # and their epochs
        self.loading: list[Loading] = []
        self.storing: list[Storing] = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(opening, "PROBE_INTERVAL_S", 0.0)
        self.patch.setattr(layerwise, "READ_BYTES", 1)

        def open_gated(kind: str, setup: TierSetup) -> Tier:
            if kind == "gpu":
                return open_tier(kind, setup)
            return GatedTier(self.stores["remote"], setup.namespace, setup.layout, reads_layers=reads_layers)

        def open_disk(
            _folders: object, namespace: Any, layout: Any, *_: object, wrap: Callable[[Tier], Tier], **__: object
        ) -> Tier:
            return wrap(GatedTier(self.stores["disk"], namespace, layout, reads_layers=reads_layers))

        self.patch.setattr(opening, "open_tier", open_gated)
        self.patch.setattr(opening, "open_folders", open_disk)
        self.engine = self.rig.open(
            slots=slots,
            local_cpu=local_cpu,
            max_local_gpu_bytes=hot_slots * SLOT_BYTES,
            io_timeout_s=HANG_GUARD_S,
            remote=replace(REMOTE, lookup_timeout_s=HANG_GUARD_S),
            **({"local_disk": __file__} if has_disk else {}),
        )
        complete_write = self.engine._planner.index.complete_write

        def note_write(*arguments: Any, **keywords: Any) -> None:
            complete_write(*arguments, **keywords)
            for store in self.stores.values():
                store.notice()

        self.patch.setattr(self.engine._planner.index, "complete_write", note_write)

    # What the tests know

    def hasher(self, tokens: list[int]) -> PrefixHasher:
        return hash_tokens(self.rig.layout, tokens, NO_EXTRAS)

    def expected(self, tokens: list[int], block: int, version: int) -> Any:
        self.rig.version = version
        return self.rig.expected(tokens, block)

    def room(self, number: int, tokens: list[int]) -> list[int]:
        return [number * BLOCKS + block for block in range(len(tokens) // BLOCK)]

    def calls(self) -> list[Loading | Storing]:
        return [*self.loading, *self.storing]

    def free_room(self) -> int | None:
        taken = {call.room for call in self.calls()}
        return next((room for room in range(1, ROOMS) if room not in taken), None)

    def computed(self, tokens: list[int]) -> list[Any]:
        """Compute the content that the model would produce now, block by block."""
        hasher = self.hasher(tokens)
        contents = []
        for block in range(len(tokens) // BLOCK):
            key = hasher.block_keys(block // BLOCKS_PER_CHUNK)[-1]
            contents.append(self.expected(tokens, block, self.versions.of(key)))
        return contents

    def write(self, room: int, contents: list[Any]) -> None:
        for block, content in enumerate(contents):
            self.epochs[content[:BEGINNING].tobytes()] = self.epoch
            for cache, part in zip(self.rig.caches.values(), np.split(content, LAYERS), strict=True):
                cache[room * BLOCKS + block] = torch.from_numpy(part).view(cache.shape[1:])

    def poison(self, room: int) -> None:
        for cache in self.rig.caches.values():
            cache[room * BLOCKS : (room + 1) * BLOCKS] = POISON

    def check(self, tokens: list[int], skip: int, room: int, loaded: torch.Tensor) -> None:
        """Assert that every loaded block holds a content of a chunk that was not removed since it was stored."""
        count = int(loaded.sum())
        assert bool(loaded[skip : skip + count].all())
        block_ids = self.room(room, tokens)
        for block in range(skip // BLOCK, (skip + count) // BLOCK):
            chunk, inside = divmod(block, BLOCKS_PER_CHUNK)
            begun = [family for family in FAMILIES if family[: (block + 1) * BLOCK] == tokens[: (block + 1) * BLOCK]]
            keys = (key for family in begun for key in self.hasher(family).block_keys(chunk)[inside:])
            versions = {self.versions.of(key) for key in keys}  # of all chunks that hold the block
            right = [self.expected(tokens, block, version) for version in sorted(versions)]
            held = self.rig.held(block_ids[block])
            assert any(np.array_equal(held, content) for content in right), f"block {block} of {tokens} is wrong"

    def settle(self) -> None:
        """Wait until every write that was begun waits at its gate or for a thread, or has ended."""
        for place, lane in self.engine._mover._lanes.items():
            store = self.stores[place.value]
            assert store.wait_for(partial(all_wait, lane)), "a write neither waits nor ends"
            assert lane.settle(HANG_GUARD_S)

    def let_reads_through(self) -> None:
        for store in self.stores.values():
            store.release("more")

    # Calls

    @rule(tokens=SEQUENCES, loads=st.integers(0, 3))
    def store(self, tokens: list[int], loads: int = 0) -> None:
        self.write(0, self.computed(tokens))
        self.let_reads_through()
        self.engine.store(tokens, slot_mapping=self.rig.slot_mapping(self.room(0, tokens), len(tokens)))
        self.settle()
        self.retrieve(tokens, times=loads)

    @rule(tokens=SEQUENCES, skip_blocks=st.sampled_from([0, 0, 0, 1, 4, 5]), times=st.integers(1, 3))
    def retrieve(self, tokens: list[int], skip_blocks: int = 0, times: int = 1) -> None:
        self.let_reads_through()
        skip = min(skip_blocks * BLOCK, len(tokens))
        mask = [position >= skip for position in range(len(tokens))]
        mapping = self.rig.slot_mapping(self.room(0, tokens), len(tokens))
        for _ in range(times):
            self.poison(0)
            self.check(tokens, skip, 0, self.engine.retrieve(tokens, mask, slot_mapping=mapping))

    @precondition(lambda self: self.free_room() is not None)
    @rule(tokens=SEQUENCES, skip_blocks=st.sampled_from([0, 0, 0, 1, 4, 5]), advances=st.integers(0, LAYERS))
    def begin_load(self, tokens: list[int], skip_blocks: int = 0, advances: int = 1) -> None:
        room = self.free_room()
        assert room is not None
        skip = min(skip_blocks * BLOCK, len(tokens))
        mask = [position >= skip for position in range(len(tokens))]
        self.poison(room)
        mapping = self.rig.slot_mapping(self.room(room, tokens), len(tokens))
        self.let_reads_through()
        generator = self.engine.retrieve_layer(tokens, mask, slot_mapping=mapping)
        self.loading.append(Loading(tokens, skip, room, generator))
        self.advance_load(self.loading[-1], advances)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), advances=st.sampled_from([1, 2, LAYERS + 1, LAYERS + 1]))
    def go_on_with_load(self, data: st.DataObject, advances: int) -> None:
        self.let_reads_through()
        self.advance_load(data.draw(st.sampled_from(self.loading)), advances)

    def advance_load(self, call: Loading, advances: int) -> None:
        for _ in range(advances):
            loaded = next(call.generator)
            call.layers += 1
            if loaded is not None:
                assert call.layers == LAYERS + 1
                self.loading.remove(call)
                if not call.is_overtaken:
                    self.check(call.tokens, call.skip, call.room, loaded)
                return

    @precondition(lambda self: self.loading or self.storing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Close a generator, after which its blocks may be used for something else at once."""
        self.abandon(data.draw(st.sampled_from(self.calls())))

    def abandon(self, call: Loading | Storing) -> None:
        self.let_reads_through()
        call.generator.close()
        self.poison(call.room)
        (self.loading if isinstance(call, Loading) else self.storing).remove(call)  # type: ignore[arg-type]

    @rule(tokens=SEQUENCES, advances=st.sampled_from([1, 2, LAYERS + 1, LAYERS + 1]), goes_on=st.booleans())
    def store_by_layer(self, tokens: list[int], advances: int, goes_on: bool) -> None:
        self.let_reads_through()
        room = self.free_room()
        if not (goes_on and self.storing) and room is not None:
            mapping = self.rig.slot_mapping(self.room(room, tokens), len(tokens))
            self.storing.append(Storing(tokens, room, self.engine.store_layer(tokens, slot_mapping=mapping)))
        if self.storing:
            self.advance_store(self.storing[-1], advances)

    def advance_store(self, call: Storing, advances: int) -> None:
        if advances and not call.layers:  # it begins now
            self.write(call.room, self.computed(call.tokens))
        for _ in range(advances):
            stored = next(call.generator)
            call.layers += 1
            if stored is not None:
                assert call.layers == LAYERS + 1
                self.storing.remove(call)
                break
        self.settle()

    # Removals

    @rule(tokens=SEQUENCES, how=st.sampled_from(REMOVALS), loads=st.none() | st.integers(0, 3))
    def remove(self, tokens: list[int], how: str, loads: int | None = None) -> None:
        """Remove chunks and, most of the time, store the right content again."""
        if how == "sequence":
            self.clear_sequence(tokens)
        elif how == "condemn":
            self.condemn(tokens)
        elif how == "all":
            self.clear()
        else:
            self.reset()
        if loads is not None:
            self.store(tokens, loads)

    def clear_sequence(self, tokens: list[int]) -> None:
        self.engine.clear(tokens)
        self.versions.end([ref.prefix_key for ref in all_refs(self.hasher(tokens))])

    def clear(self) -> None:
        """Clear all tiers. Chunks of a tier that fails to clear may be found again, because they were right."""
        if not any(store.faults["clear"] for store in self.stores.values()):
            self.versions.end_all()
        self.engine.clear()

    def reset(self) -> None:
        self.versions.end_all()
        self.epoch += 1
        name = f"epoch {self.epoch}"
        self.namespaces[NAMESPACE.at_epoch(name).id] = self.epoch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore.engine.engine.new_epoch", lambda: name)
            self.engine.reset_cache()

    def condemn(self, tokens: list[int]) -> None:
        """Remove chunks as vLLM's scheduler and workers do if they deviate from the same computed again."""
        index, mover = self.engine._planner.index, self.engine._mover
        with self.engine._planner.lock:
            refs = [ref for ref in index.lookup(self.hasher(tokens)).refs if index.in_memory(ref.prefix_key)]
            index.condemn(refs)
            removals = index.take_removals()
        mover.remove(Place.DISK, removals)
        mover.remove(Place.REMOTE, refs)
        self.versions.end([ref.prefix_key for ref in refs])
        for call in self.loading:
            call.is_overtaken = call.layers > 0

    @invariant()
    def what_was_put_belongs_to_the_epoch(self) -> None:
        """Check puts that were removed at once, too: a write on its way during a change of weights stores nothing."""
        for store in self.stores.values() if hasattr(self, "stores") else ():
            for namespace_id, beginning in store.stored:
                assert self.epochs[beginning] == self.namespaces[namespace_id], "KV of other weights than the namespace"

    @invariant()
    def the_index_is_consistent(self) -> None:
        if hasattr(self, "engine"):
            with self.engine._planner.lock:
                check_invariants(self.engine._planner.index)

    # Behaviour of the storage

    @rule(where=STORES, what=st.sampled_from(TROUBLE), numbers=st.lists(st.integers(0, 11), min_size=1, max_size=3))
    def trouble(self, where: str, what: str, numbers: list[int]) -> None:
        store = self.stores[where]
        if what.startswith("hold"):
            store.hold(what.removeprefix("hold "))
        elif what in ("lose", "damage"):
            self.lose(store, numbers, is_damage=what == "damage")
        elif what in OPERATIONS:
            store.faults[what] = len(numbers)
        else:
            store.release(*OPERATIONS)
            self.settle()
            if what == "flush" and not any(other.is_held("put") for other in self.stores.values()):
                assert not self.engine.flush(HANG_GUARD_S).pending

    def lose(self, store: GatedStore, numbers: list[int], *, is_damage: bool) -> None:
        held = sorted({ref for chunks in store.chunks.values() for ref in chunks})
        for ref in {held[number % len(held)] for number in numbers} if held else ():
            if is_damage:
                store.damaged.add(ref)
            else:
                for chunks in store.chunks.values():
                    chunks.pop(ref, None)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            for store in self.stores.values():
                store.faults.clear()
                store.release(*OPERATIONS)
            for call in self.calls():
                call.generator.close()
            self.engine.prefetch([])
            assert not self.engine.flush(HANG_GUARD_S).pending
            with self.engine._planner.lock:
                check_invariants(self.engine._planner.index)
                assert uses_of(self.engine._planner.index) == 0
            for blocks in (7, 10, 12):
                for family in range(len(FAMILIES)):
                    self.retrieve(FAMILIES[family][: blocks * BLOCK], times=3)
        finally:
            self.engine.close(HANG_GUARD_S)
            self.patch.undo()
