"""Checkpoints in the index: found only if complete, and kept, given room and evicted as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from support.index import BLOCK, CHUNK, hasher_of, keys, stored_bytes
from support.invariants import check_invariants
from support.uses import uses_of

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Match, MissReason, Place, StoreStep, TierState, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.model import checkpoints as parts_module
from kvstore.model.checkpoints import Checkpoints
from kvstore.model.chunks import ChunkRef
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.keys import PrefixKey
from kvstore.model.layout import KVLayout

LAYOUT = KVLayout(page_bytes=(10,), planes=1, block_tokens=BLOCK, chunk_tokens=CHUNK)
FULL = Group(GroupKind.FULL, BLOCK, 10)
WINDOW = Group(GroupKind.WINDOW, BLOCK, 40, span_tokens=2 * BLOCK)  # two blocks, each a part
WIDE = Group(GroupKind.WINDOW, BLOCK, 40, span_tokens=6 * BLOCK)  # up to six


def of(*groups: Group) -> Checkpoints:
    return Checkpoints((Groups(groups),), (LAYOUT,))


def make(
    num_slots: int = 20,
    checkpoints: Checkpoints | None = None,
    *,
    disk_chunks: int = 0,
    keep: bool = True,
    remote: RemoteView | None = None,
) -> ChunkIndex:
    return ChunkIndex(
        num_slots,
        keep_in_memory=keep,
        disk_capacity_bytes=disk_chunks * 100,
        stored_bytes=stored_bytes if disk_chunks else None,
        max_writes=20,
        remote=remote,
        max_sends=20,
        cache_policy="LRU",
        checkpoints=checkpoints or of(FULL, WINDOW),
    )


def key_at(end_tokens: int, seed: int = 0) -> PrefixKey:
    return hasher_of(end_tokens, seed).block_keys((end_tokens - 1) // CHUNK)[-1]


def parts_at(index: ChunkIndex, end_tokens: int, seed: int = 0) -> tuple[ChunkRef, ...]:
    assert index.checkpoints is not None
    return tuple(index.checkpoints.refs(key_at(end_tokens, seed), end_tokens))


def plan(index: ChunkIndex, num_tokens: int, ends: Sequence[int], seed: int = 0) -> list[StoreStep]:
    """Plan to store a sequence, and checkpoints at some ends of its chunks."""
    refs: list[ChunkRef] = []
    end_tokens = 0
    for ref in chunk_refs(hasher_of(num_tokens, seed), with_tail=True):
        end_tokens += ref.num_blocks * BLOCK
        assert index.checkpoints is not None
        refs += [ref] if index.checkpoints.groups.full else []
        refs += parts_at(index, end_tokens, seed) if end_tokens in ends else ()
    return index.prepare_store(refs, checkpoints=[parts_at(index, end, seed) for end in ends], noted=set())


def store(index: ChunkIndex, num_tokens: int, ends: Sequence[int], seed: int = 0) -> list[StoreStep]:
    """Store with success what ``plan`` plans."""
    steps = plan(index, num_tokens, ends, seed)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=True)
    check_invariants(index)
    return steps


def found(index: ChunkIndex, num_tokens: int, seed: int = 0, limit_tokens: int | None = None) -> int:
    return index.lookup(hasher_of(num_tokens, seed), limit_tokens=limit_tokens).num_tokens


def known(index: ChunkIndex, refs: Sequence[ChunkRef]) -> list[bool]:
    return [ref.prefix_key in index for ref in refs]


def load(index: ChunkIndex, match: Match, failed: Sequence[ChunkRef] = (), *, lost: bool = True) -> None:
    steps = index.prepare_load((*match.refs, *match.checkpoint), checkpoint=match.checkpoint)
    index.complete_load(steps, keys(failed), keys(failed) if lost else set())
    check_invariants(index)


# Lookup


def test_a_hit_ends_at_the_last_checkpoint_within_its_limit() -> None:
    index = make()
    store(index, 4 * CHUNK, [CHUNK, 3 * CHUNK])
    assert [found(index, 4 * CHUNK, limit_tokens=limit) for limit in (None, 48, 47, 15)] == [48, 48, 16, 0]
    match = index.lookup(hasher_of(4 * CHUNK), CHUNK)
    assert match == Match(tuple(chunk_refs(hasher_of(3 * CHUNK), with_tail=False)[1:]), 48, 1, parts_at(index, 48), 64)
    assert index.lookup(hasher_of(4 * CHUNK), 3 * CHUNK).num_tokens == 0


def test_a_hit_needs_every_chunk_and_every_part() -> None:
    for missing in (*chunk_refs(hasher_of(2 * CHUNK), with_tail=False), *parts_at(make(), 2 * CHUNK)):
        index = make()
        store(index, 2 * CHUNK, [2 * CHUNK])
        assert found(index, 2 * CHUNK) == 2 * CHUNK
        index.remove([missing.prefix_key])
        assert found(index, 2 * CHUNK) == 0


def test_the_tail_that_has_a_checkpoint_counts_and_not_the_longest() -> None:
    index = make()
    store(index, CHUNK + BLOCK, [CHUNK + BLOCK])
    store(index, CHUNK + 3 * BLOCK, [])
    match = index.lookup(hasher_of(2 * CHUNK))
    assert (match.num_tokens, match.chunk_tokens) == (CHUNK + BLOCK, CHUNK + 3 * BLOCK)
    assert match.refs[-1] == ChunkRef(key_at(CHUNK + BLOCK), 1)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,)])
def test_a_checkpoint_inside_the_last_chunk_counts_where_the_last_token_must_be_computed(
    groups: tuple[Group, ...],
) -> None:
    index = make(checkpoints=of(*groups))
    store(index, CHUNK + 3 * BLOCK, [CHUNK + 3 * BLOCK])
    store(index, 2 * CHUNK, [])
    match = index.lookup(hasher_of(2 * CHUNK), limit_tokens=2 * CHUNK - 1)
    assert match.num_tokens == CHUNK + 3 * BLOCK
    whole = chunk_refs(hasher_of(2 * CHUNK), with_tail=False)
    assert match.refs == (tuple(whole) if FULL in groups else ())


def test_where_nothing_is_needed_to_go_on_there_is_always_a_checkpoint() -> None:
    index = make(checkpoints=of(FULL, Group(GroupKind.LOCAL, BLOCK, 40, span_tokens=2 * CHUNK)))
    store(index, 3 * CHUNK, [])
    assert found(index, 3 * CHUNK) == 2 * CHUNK


def test_a_hit_has_slots_for_its_chunks_and_its_parts() -> None:
    index = make(3, disk_chunks=20)
    for end in (CHUNK, 2 * CHUNK):
        for refs in (chunk_refs(hasher_of(end), with_tail=False)[-1:], parts_at(index, end)):
            steps = index.prepare_store(refs, checkpoints=[refs] if len(refs) == 2 else [], noted=set())
            index.complete_store(steps, set())
            for step in steps:
                index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert found(index, 2 * CHUNK) == CHUNK, "four slots for the longer one"


def test_the_second_lookup_names_no_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index, named = make(60, of(FULL, WIDE)), []
    store(index, 40 * CHUNK, [])

    def count(data: bytes) -> object:
        named.append(data)
        return hashlib.sha256(data)

    monkeypatch.setattr(parts_module, "sha256", count)
    hasher = hasher_of(40 * CHUNK)
    assert index.lookup(hasher).chunk_tokens == 40 * CHUNK
    assert len(named) == 40, "the first part of each"
    index.lookup(hasher)
    assert len(named) == 40
    assert index.checkpoints is not None
    assert len(index.checkpoints._known.of) == 2, "all behind the first window are cut alike"


def test_what_is_remembered_of_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_MOST_KNOWN", 10)
    index = make(60)
    for seed in range(3):
        store(index, 15 * CHUNK, [15 * CHUNK], seed)
        assert found(index, 15 * CHUNK, seed) == 15 * CHUNK
        index.clear()
        assert index.lookup(hasher_of(15 * CHUNK, seed)).num_tokens == 0
    assert index.checkpoints is not None
    assert len(index.checkpoints._known.at) <= 11
    assert len(index.checkpoints._known.first) <= 10 + 15


# Whole or not at all


@pytest.mark.parametrize("which", [0, 1])
def test_a_part_that_was_not_stored_takes_the_others_with_it(which: int) -> None:
    index = make(disk_chunks=20)
    parts = parts_at(index, CHUNK)
    steps = plan(index, CHUNK, [CHUNK])
    index.complete_store(steps, {parts[which].prefix_key})
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=step.ref != parts[which])
    index.advance(1.0)
    assert known(index, parts) == [False, False]
    assert set(index.take_removals()) >= {parts[1 - which]}
    assert (index.slots_in_use, index.disk_used_bytes) == (1, 100)
    check_invariants(index)


@pytest.mark.parametrize("which", [0, 1])
def test_a_part_that_was_lost_takes_the_others_with_it(which: int) -> None:
    index = make()
    store(index, CHUNK, [CHUNK])
    match = index.lookup(hasher_of(CHUNK))
    load(index, match, [match.checkpoint[which]])
    index.advance(1.0)
    assert known(index, (*match.refs, *match.checkpoint)) == [True, False, False]


def test_a_part_that_is_removed_or_expires_takes_the_others_with_it() -> None:
    index = make()
    store(index, CHUNK, [CHUNK])
    parts = parts_at(index, CHUNK)
    index.lease("held", parts, 100.0)
    index.remove([parts[0].prefix_key])
    assert known(index, parts) == [False, True]
    index.advance(1.0)
    assert known(index, parts) == [False, False]
    assert (index.leases, uses_of(index)) == (0, 0)
    refs = [*chunk_refs(hasher_of(CHUNK), with_tail=False), *parts]
    index.complete_store(index.prepare_store(refs[-1:], ttl_s=5.0), set())
    index.complete_store(index.prepare_store(refs, checkpoints=[parts]), set())
    index.advance(9.0)
    assert found(index, CHUNK) == CHUNK, "the longer time counts"


def test_an_evicted_part_takes_the_others_with_it() -> None:
    index = make(4)
    store(index, CHUNK, [CHUNK])
    store(index, 2 * CHUNK, [], seed=1)
    parts = parts_at(index, CHUNK)
    assert known(index, parts).count(True) == 1
    index.advance(1.0)
    assert known(index, parts) == [False, False]
    assert index.slots_in_use == 3


def test_what_the_remote_tier_has_of_a_checkpoint_is_part_of_it() -> None:
    view = RemoteView(1000.0)
    index = make(4, remote=view)
    store(index, CHUNK, [CHUNK])
    store(index, 2 * CHUNK, [], seed=1)
    index.advance(1.0)
    assert known(index, parts_at(index, CHUNK)).count(True) == 1
    assert found(index, CHUNK) == CHUNK


def test_a_part_that_was_removed_takes_the_others_with_it_also_where_the_remote_tier_has_it() -> None:
    index = make(remote=RemoteView(1000.0))
    store(index, CHUNK, [CHUNK])
    parts = parts_at(index, CHUNK)
    index.condemn(parts[:1])
    index.advance(1.0)
    assert known(index, parts) == [False, False]


def test_parts_that_only_pass_memory_do_not_break_their_checkpoint() -> None:
    view = RemoteView(1000.0)
    index = make(keep=False, remote=view)
    steps = plan(index, CHUNK, [CHUNK])
    index.complete_store(steps, set())
    for number, step in enumerate(steps):
        index.complete_write(step.ref.prefix_key, Place.REMOTE, stored=True)
        index.advance(float(number))
    assert len(index) == 0
    assert found(index, CHUNK) == CHUNK


def test_a_checkpoint_stored_again_at_once_is_whole() -> None:
    index = make(keep=False, disk_chunks=20)
    store(index, CHUNK, [CHUNK])
    index.set_tiers(TierState(disk_answers=False))
    steps = plan(index, CHUNK, [CHUNK])
    assert len(steps) == 3, "what is out of reach is stored again"
    index.set_tiers(TierState())
    index.advance(1.0)
    index.complete_store(steps, set())
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    index.advance(2.0)
    assert found(index, CHUNK) == CHUNK


def test_a_checkpoint_that_has_no_room_as_a_whole_displaces_nothing() -> None:
    index = make(4, of(FULL, WIDE))
    store(index, 2 * CHUNK, [], seed=1)
    steps = plan(index, CHUNK, [CHUNK])
    assert [step.ref for step in steps] == chunk_refs(hasher_of(CHUNK), with_tail=False)
    assert index.counters.refused == 4
    assert known(index, chunk_refs(hasher_of(2 * CHUNK, 1), with_tail=False)) == [True, True]
    index.complete_store(steps, set())
    check_invariants(index)


def test_parts_found_on_disk_at_start_go_together_once_they_were_loaded() -> None:
    index = make(disk_chunks=20)
    parts = parts_at(index, CHUNK)
    survivors = [*chunk_refs(hasher_of(CHUNK), with_tail=False), *parts]
    index.adopt((ref, stored_bytes(ref.num_blocks)) for ref in survivors)
    load(index, index.lookup(hasher_of(CHUNK)))
    index.remove([parts[0].prefix_key])
    index.advance(1.0)
    assert known(index, parts) == [False, False]


def test_a_load_that_brings_nothing_says_nothing_of_its_checkpoint() -> None:
    index = make()
    store(index, CHUNK, [CHUNK])
    parts = parts_at(index, CHUNK)
    assert index.prepare_load([], checkpoint=(*parts, ChunkRef(b"m" * 16, 1))) == []
    index.advance(1.0)
    assert known(index, parts) == [True, True]


def test_nothing_is_remembered_of_checkpoints_that_have_gone() -> None:
    index = make(disk_chunks=20)
    for seed in range(5):
        store(index, 2 * CHUNK, [CHUNK, 2 * CHUNK], seed)
        load(index, index.lookup(hasher_of(2 * CHUNK, seed)))
        index.advance(float(seed))
    index.clear()
    index.advance(9.0)
    assert not index._chunks._siblings
    assert not index._chunks._broken


# Eviction


def test_a_checkpoint_goes_before_the_chunks_it_stands_on_and_not_after_those_behind_it() -> None:
    index = make(6)
    store(index, 2 * CHUNK, [CHUNK, 2 * CHUNK])  # fills the pool
    load(index, index.lookup(hasher_of(2 * CHUNK)))
    early, late = parts_at(index, CHUNK), parts_at(index, 2 * CHUNK)
    chunks = chunk_refs(hasher_of(2 * CHUNK), with_tail=False)
    gone: list[ChunkRef] = []
    for seed in range(1, 7):
        before = [ref for ref in (*early, *late, *chunks) if ref.prefix_key in index]
        index.complete_store(index.prepare_store(chunk_refs(hasher_of(CHUNK, seed), with_tail=False)), set())
        gone += [ref for ref in before if ref.prefix_key not in index]
    assert [set(gone[:2]), set(gone[2:4]), gone[4:]] == [set(early), set(late), chunks[::-1]]


# The remote tier


def ask(index: ChunkIndex, view: RemoteView, held: Sequence[ChunkRef], num_tokens: int) -> tuple[int, int]:
    """Return the tokens found once all questions are answered, and the number of rounds."""
    hasher = hasher_of(num_tokens)
    for rounds in range(index.question_rounds):
        match = index.lookup(hasher)
        questions = index.questions(hasher, match)
        if not questions:
            return match.num_tokens, rounds
        assert len(set(questions)) == len(questions)
        view.note(questions, [ref in held for ref in questions], 0.0)
    raise AssertionError("there is always another question")


@pytest.mark.parametrize("end_tokens", [2 * CHUNK, 2 * CHUNK + BLOCK, 2 * CHUNK + 3 * BLOCK])
def test_a_checkpoint_of_many_parts_is_found_in_a_few_rounds(end_tokens: int) -> None:
    view = RemoteView(1000.0)
    index = make(remote=view, checkpoints=of(FULL, WIDE))
    held = [*chunk_refs(hasher_of(end_tokens), with_tail=True), *parts_at(index, end_tokens)]
    assert len(parts_at(index, end_tokens)) == 6
    found_tokens, rounds = ask(index, view, held, 4 * CHUNK + BLOCK)
    assert found_tokens == end_tokens
    assert rounds <= 3


def test_of_checkpoints_behind_the_chunks_only_the_first_part_is_asked_about() -> None:
    view = RemoteView(1000.0)
    index = make(remote=view, checkpoints=of(FULL, WIDE))
    parts = parts_at(index, 2 * CHUNK)
    ask(index, view, [*chunk_refs(hasher_of(CHUNK), with_tail=False), *parts], 2 * CHUNK)
    assert [view.holds(ref, 0.0) for ref in parts] == [True, None, None, None, None, None]


def test_windows_alone_ask_about_no_chunk() -> None:
    view = RemoteView(1000.0)
    index = make(remote=view, checkpoints=of(WINDOW))
    held = [*chunk_refs(hasher_of(3 * CHUNK), with_tail=True), *parts_at(index, 2 * CHUNK)]
    assert ask(index, view, held, 3 * CHUNK + BLOCK) == (2 * CHUNK, 2)
    assert not any(view.holds(ref, 0.0) for ref in held[:3])


# Other facts about them


def test_what_had_not_arrived_is_asked_about_again() -> None:
    view = RemoteView(60.0)
    index, hasher = make(remote=view), hasher_of(3 * CHUNK + 2 * BLOCK)
    match = index.lookup(hasher)
    questions = index.questions(hasher, match)
    view.note(questions, [False] * len(questions), 0.0, view.serial)
    assert index.questions(hasher, match) == []
    view.forget_missing(index.asked_again(hasher, match))
    assert index.questions(hasher, match) == questions
    first = {ref for end in range(CHUNK, 3 * CHUNK + 1, CHUNK) for ref in parts_at(index, end)[:1]}
    assert first < set(questions)


def test_why_a_prompt_was_not_found() -> None:
    index = make()
    store(index, 2 * CHUNK, [])
    assert index.why_missing(hasher_of(2 * CHUNK), 0, 2 * CHUNK) is MissReason.NO_CHECKPOINT
    windows = make(checkpoints=of(WINDOW))
    store(windows, 2 * CHUNK, [2 * CHUNK])
    assert windows.why_missing(hasher_of(2 * CHUNK, 1), 0, 2 * CHUNK) is MissReason.NEVER_STORED
    windows.remove(ref.prefix_key for ref in parts_at(windows, 2 * CHUNK))
    assert windows.why_missing(hasher_of(2 * CHUNK), 0, 2 * CHUNK) is MissReason.REMOVED
    assert windows.why_missing(hasher_of(2 * CHUNK + BLOCK), 2 * CHUNK, 2 * CHUNK + BLOCK) is MissReason.NEVER_STORED


def test_a_part_on_its_way_out_makes_no_checkpoint_whole() -> None:
    index = make(disk_chunks=20)
    steps = plan(index, CHUNK, [CHUNK])
    first, second = parts_at(index, CHUNK)
    index.complete_store(steps, {first.prefix_key})
    index.advance(1.0)
    for step in steps:
        if step.ref != first:
            index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    assert plan(index, CHUNK, [CHUNK]) == [], "the first is still being written"
    index.advance(2.0)
    assert second.prefix_key not in index
    index.complete_write(first.prefix_key, Place.DISK, stored=False)
    check_invariants(index)
    assert len(index) == 1
