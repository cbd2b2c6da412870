"""Leading blocks of a longer chunk at a remote tier, which a load brings alone and which are a tail from then on."""

from __future__ import annotations

import pytest
from support.index import BLOCK, hasher_of
from support.invariants import check_invariants
from support.uses import uses_of

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Place, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PrefixHasher

CHUNK = 8 * BLOCK


def hasher(shared_blocks: int, seed: int = 0) -> PrefixHasher:
    """Return a sequence of one chunk and more that shares so many blocks with all others."""
    made = PrefixHasher(CHUNK, BLOCK)
    made.update([*range(shared_blocks * BLOCK), *range(1000 * (seed + 1), 1000 * (seed + 1) + CHUNK)])
    return made


THERE = hasher(8)
(HOLDER,) = chunk_refs(THERE, with_tail=False)[:1]
TRAIL = b"".join(THERE.block_keys(0))


def make(*, reads_fronts: bool = True, keep: bool = True, num_slots: int = 4) -> ChunkIndex:
    """Make an index whose remote tier has named a chunk of eight blocks."""
    view = RemoteView(60.0)
    view.note([HOLDER, TRAIL], [True, (TRAIL,)], 0.0)
    return ChunkIndex(num_slots, keep_in_memory=keep, remote=view, max_sends=4, reads_fronts=reads_fronts)


def load(index: ChunkIndex, sequence: PrefixHasher) -> list[LoadStep]:
    match = index.lookup(sequence)
    blocks = match.front_blocks(BLOCK, CHUNK // BLOCK)
    steps = index.prepare_load(match.refs, hasher=sequence, front_blocks=blocks)
    check_invariants(index)
    return steps


@pytest.mark.parametrize("shared", range(1, 8))
def test_up_to_half_of_a_chunk_comes_alone(shared: int) -> None:
    index, sequence = make(), hasher(shared)
    (step,) = load(index, sequence)
    tail = ChunkRef(sequence.block_keys(0)[shared - 1], shared)
    is_front = shared <= 4
    assert (step.ref, step.holder) == ((tail, HOLDER) if is_front else (HOLDER, None))
    assert (step.read, step.source) == (HOLDER, Place.REMOTE)
    index.complete_load([step], set(), set())
    check_invariants(index)
    assert uses_of(index) == 0
    assert index.in_memory(tail.prefix_key) is is_front
    assert index.in_memory(HOLDER.prefix_key) is not is_front, "a part must not pass for the whole"
    match = index.lookup(sequence)
    assert match.num_tokens == shared * BLOCK
    assert index.source(match.refs[0]) is Place.MEMORY


@pytest.mark.parametrize("how", [{"reads_fronts": False}, {"keep": False}], ids=str)
def test_where_parts_do_not_come_alone_the_chunk_does(how: dict[str, bool]) -> None:
    (step,) = load(make(**how), hasher(2))
    assert (step.ref, step.holder) == (HOLDER, None)


def test_a_chunk_that_is_wanted_as_a_whole_is_read_as_a_whole() -> None:
    (step,) = load(make(), THERE)
    assert (step.ref, step.holder) == (HOLDER, None)


def test_who_wants_more_of_it_reads_more() -> None:
    """The tail keeps its blocks, and once the whole chunk is loaded, nothing is kept twice."""
    index = make()
    index._chunks.whole_blocks = CHUNK // BLOCK
    for shared in (2, 4):
        steps = load(index, hasher(shared))
        assert [step.ref.num_blocks for step in steps] == [shared]
        index.complete_load(steps, set(), set())
    assert index.slots_in_use == 2
    steps = load(index, THERE)
    assert steps[0].source is Place.REMOTE
    index.complete_load(steps, set(), set())
    check_invariants(index)
    assert index.slots_in_use == 1
    assert index.lookup(hasher(2)).refs == (HOLDER,)


def test_two_that_want_the_same_part_read_it_once() -> None:
    index = make()
    first, second = load(index, hasher(2)), load(index, hasher(2, seed=5))
    assert [step.source for step in (*first, *second)] == [Place.REMOTE, Place.MEMORY]
    assert first[0][:2] == second[0][:2]
    index.complete_load(first, set(), set())
    index.complete_load(second, set(), set())
    check_invariants(index)
    assert uses_of(index) == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_part_that_does_not_come_leaves_nothing_and_its_chunk_is_not_asked_again_at_once(*, is_lost: bool) -> None:
    index, sequence = make(), hasher(2)
    (step,) = load(index, sequence)
    key = step.ref.prefix_key
    index.complete_load([step], {key}, {key} if is_lost else set())
    check_invariants(index)
    assert len(index) == index.slots_in_use == 0
    assert index.lookup(sequence).num_tokens == 0


def test_a_part_that_is_removed_while_it_comes_is_not_found() -> None:
    index, sequence = make(), hasher(2)
    (step,) = load(index, sequence)
    index.clear()
    index.complete_load([step], set(), set())
    check_invariants(index)
    assert len(index) == index.slots_in_use == 0


def test_without_a_slot_nothing_is_planned() -> None:
    index = make(num_slots=1)
    assert load(index, hasher(2, seed=3))
    other = hasher_of(4, seed=9)
    steps = index.prepare_load([HOLDER], hasher=other, front_blocks=3)
    check_invariants(index)
    assert steps == []


def test_a_part_is_sent_on_like_any_tail() -> None:
    """At the other tier it would be found by its own key only where trails are unknown."""
    index, sequence = make(), PrefixHasher(CHUNK, BLOCK)
    sequence.update(range(2 * BLOCK))
    index.complete_load(load(index, hasher(2)), set(), set())
    (step,) = index.prepare_store(chunk_refs(sequence, with_tail=True), hasher=sequence)
    assert (step.ref.num_blocks, step.gather, step.targets) == (2, False, (Place.REMOTE,))


def test_a_part_whose_bytes_are_wrong_condemns_the_chunk_that_it_was_read_from() -> None:
    """Otherwise it would be read from there again."""
    index, sequence = make(), hasher(2)
    (step,) = load(index, sequence)
    index.complete_load([step], set(), set())
    index.condemn([step.ref])
    assert set(index.take_recalls()) == {step.ref, HOLDER}
    assert index.lookup(sequence).num_tokens == 0
    check_invariants(index)
