"""Pins and queries of operators, about a model that needs checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.index import BLOCK, CHUNK, hasher_of, stored_bytes
from support.uses import uses_of

from kvstore.adapters.vllm.scheduler.hints import PromptHints
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup, find_tokens
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.config import StoreConfig
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.index.retained import Limits
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.chunks import ChunkRef
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.layout import KVLayout
from kvstore.tiers.directory import RemoteDirectory

LAYOUT = KVLayout(page_bytes=(10,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
FULL = Group(GroupKind.FULL, BLOCK, 10)
WINDOW = Group(GroupKind.WINDOW, BLOCK, 40, span_tokens=2 * BLOCK)  # two blocks, each a part


class RemoteHolding(RemoteLookup):
    """A remote tier that answers at once."""

    def __init__(self, held: Sequence[ChunkRef] = ()) -> None:
        super().__init__(RemoteDirectory(()), RemoteView(0.0), 0.0)
        self.held = set(held)
        self.num_questions = 0

    @property
    def is_open(self) -> bool:
        return bool(self.held)

    def ask(self, refs: Sequence[ChunkRef]) -> list[bool]:
        self.num_questions += 1
        return [ref in self.held for ref in refs]


def make(*groups: Group, num_slots: int = 40) -> ChunkIndex:
    checkpoints = Checkpoints((Groups(groups),), (LAYOUT,))
    return ChunkIndex(num_slots, disk_capacity_bytes=4000, stored_bytes=stored_bytes, checkpoints=checkpoints)


def parts_at(index: ChunkIndex, end_tokens: int) -> tuple[ChunkRef, ...]:
    assert index.checkpoints is not None
    return tuple(index.checkpoints.refs(hasher_of(end_tokens).block_keys((end_tokens - 1) // CHUNK)[-1], end_tokens))


def store(index: ChunkIndex, num_tokens: int, ends: Sequence[int]) -> None:
    assert index.checkpoints is not None
    refs = chunk_refs(hasher_of(num_tokens), with_tail=True) if index.checkpoints.groups.full else []
    checkpoints = [parts_at(index, end) for end in ends]
    steps = index.prepare_store([*refs, *(ref for parts in checkpoints for ref in parts)], checkpoints=checkpoints)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=False)


def pinned(index: ChunkIndex, num_tokens: int) -> set[bytes]:
    hints = PromptHints(index, StepTracker(), StoreConfig(), lambda _hint, _result: None)
    hints.add("pin", hasher_of(num_tokens), 0)
    held = set(index._leases._holders)
    hints.end("pin")
    assert uses_of(index) == 0
    return held


def keys(refs: Sequence[ChunkRef]) -> set[bytes]:
    return {ref.prefix_key for ref in refs}


def test_a_pin_holds_the_checkpoint_too() -> None:
    index = make(FULL, WINDOW)
    store(index, 3 * CHUNK, [CHUNK, 2 * CHUNK])
    wanted = [*chunk_refs(hasher_of(2 * CHUNK), with_tail=False), *parts_at(index, 2 * CHUNK)]
    assert pinned(index, 3 * CHUNK) == keys(wanted)


@pytest.mark.parametrize(("num_slots", "end_tokens"), [(20, 8 * CHUNK), (19, 4 * CHUNK), (12, 4 * CHUNK), (11, 0)])
def test_a_pin_without_room_for_all_holds_what_an_earlier_checkpoint_makes_useful(
    num_slots: int, end_tokens: int
) -> None:
    index = make(FULL, WINDOW, num_slots=num_slots)
    if num_slots < 14:  # the pool does not even hold all
        store(index, 4 * CHUNK, [4 * CHUNK])
    else:
        store(index, 10 * CHUNK, [4 * CHUNK, 8 * CHUNK])
    held = pinned(index, 10 * CHUNK)
    if end_tokens:
        assert held >= keys(parts_at(index, end_tokens))
        assert held == keys([*chunk_refs(hasher_of(end_tokens), with_tail=False), *parts_at(index, end_tokens)])
    else:
        assert held == set()


@pytest.mark.parametrize("end_tokens", [0, CHUNK, 2 * CHUNK, 2 * CHUNK + BLOCK])
def test_what_is_known_of_a_prompt_ends_at_a_checkpoint(end_tokens: int) -> None:
    index = make(FULL, WINDOW)
    store(index, 2 * CHUNK + 3 * BLOCK, [])
    store(index, 2 * CHUNK + BLOCK, [end_tokens] if end_tokens else [])
    found = find_tokens(hasher_of(3 * CHUNK), index, RemoteHolding())
    assert found == ({Place.MEMORY: end_tokens} if end_tokens else {})
    assert found.total() == index.lookup(hasher_of(3 * CHUNK)).num_tokens


def test_a_remote_tier_is_asked_a_few_times_only() -> None:
    index = make(FULL, WINDOW)
    store(index, CHUNK, [])
    there = [*chunk_refs(hasher_of(20 * CHUNK), with_tail=False), *parts_at(index, 9 * CHUNK)]
    remote = RemoteHolding([*there, parts_at(index, 12 * CHUNK)[0]])
    found = find_tokens(hasher_of(30 * CHUNK), index, remote)
    assert found == {Place.MEMORY: CHUNK, Place.REMOTE: 8 * CHUNK}
    assert remote.num_questions <= 4


def test_windows_alone_are_known_up_to_their_checkpoint_by_its_slowest_part() -> None:
    index = make(WINDOW)
    assert find_tokens(hasher_of(3 * CHUNK), index, RemoteHolding()) == {}
    store(index, 2 * CHUNK, [2 * CHUNK])
    assert find_tokens(hasher_of(3 * CHUNK), index, RemoteHolding()) == {Place.MEMORY: 2 * CHUNK}
    remote = RemoteHolding(parts_at(index, 2 * CHUNK)[1:])
    index.remove([parts_at(index, 2 * CHUNK)[1].prefix_key])
    assert find_tokens(hasher_of(3 * CHUNK), index, remote) == {Place.REMOTE: 2 * CHUNK}


def test_retention_keeps_the_longest_front_that_fits_with_its_checkpoint() -> None:
    checkpoints = Checkpoints((Groups((FULL, WINDOW)),), (LAYOUT,))
    index = ChunkIndex(
        40,
        disk_capacity_bytes=4000,
        stored_bytes=stored_bytes,
        checkpoints=checkpoints,
        retention=Limits(4, of_tenant=4),
    )
    hasher = hasher_of(8 * CHUNK)
    refs = chunk_refs(hasher, with_tail=True)
    parts = [parts_at(index, end) for end in (2 * CHUNK, 8 * CHUNK)]
    steps = index.prepare_store([*refs, *parts[0], *parts[1]], checkpoints=parts)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=True)
    counted: list[tuple[str, str]] = []
    hints = PromptHints(index, StepTracker(), StoreConfig(), lambda hint, result: counted.append((hint, result)))
    hints.retain("one", hasher, 0, 60.0)
    kept = {*index._disk.retained._stays}
    assert kept == {ref.prefix_key for ref in (*refs[:2], *parts[0])}
    assert counted == [("retain", "partly")]
