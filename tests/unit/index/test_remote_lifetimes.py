"""Times to live of chunks at a remote tier: sent if it keeps them, and heard of chunks that other engines stored."""

from __future__ import annotations

import pytest
from support.index import hasher_of, keys, known_tokens, refs_of
from support.invariants import check_invariants

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Place, StoreStep, TierState
from kvstore.index.remote_view import RemoteAnswers, RemoteView
from kvstore.model.lifetime import Lifetime

TAIL, WHOLE = 8, 16  # tokens
(REF,) = refs_of(WHOLE)
SENDS = (Place.REMOTE,)


def make(*, keeps_lifetimes: bool = True) -> tuple[ChunkIndex, RemoteView]:
    view = RemoteView(1000.0)
    index = ChunkIndex(8, remote=view, max_sends=4)
    index.set_tiers(TierState(remote_keeps_trails=True, remote_keeps_lifetimes=keeps_lifetimes))
    return index, view


def plan(index: ChunkIndex, num_tokens: int, ttl_s: float | None) -> list[StoreStep]:
    steps = index.prepare_store(refs_of(num_tokens), hasher=hasher_of(num_tokens), ttl_s=ttl_s)
    check_invariants(index)
    return steps


def send(index: ChunkIndex, num_tokens: int, ttl_s: float | None = None, *, stored: bool = True) -> list[StoreStep]:
    """Store a sequence, and end its writes to the remote tier."""
    steps = plan(index, num_tokens, ttl_s)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=stored)
    check_invariants(index)
    return steps


def load(index: ChunkIndex, num_tokens: int, told: RemoteAnswers | None = None) -> list[LoadStep]:
    told = told or RemoteAnswers()
    steps = index.prepare_load(index.lookup(hasher_of(num_tokens), told=told).refs, told, hasher=hasher_of(num_tokens))
    index.complete_load(steps, set(), set())
    check_invariants(index)
    return steps


@pytest.mark.parametrize("keeps_lifetimes", [True, False])
def test_chunks_with_an_end_go_to_a_tier_that_keeps_it(*, keeps_lifetimes: bool) -> None:
    index, view = make(keeps_lifetimes=keeps_lifetimes)
    (step,) = send(index, WHOLE, 5)
    assert (step.targets, step.until_s) == (SENDS if keeps_lifetimes else (), 5)
    assert view.holds(REF, 4.9) is (True if keeps_lifetimes else None)
    assert view.holds(REF, 5.0) is None, "it must be asked again, as others may keep it for longer"
    index.advance(5)
    assert known_tokens(index, WHOLE) == 0


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_loaded_ends_when_the_tier_says(*, is_told: bool) -> None:
    index, view = make()
    told = RemoteAnswers()
    if is_told:
        view.tell(told, {REF: 30.0}, 0.0, view.serial)
    else:
        view.note([REF], [30.0], 0.0)
    assert keys(load(index, WHOLE, told)) == {REF.prefix_key}
    index.advance(29)
    assert known_tokens(index, WHOLE) == WHOLE
    index.advance(30)
    assert known_tokens(index, WHOLE) == 0
    assert load(index, WHOLE, told) == [], "it must not come back from there"


def test_what_is_loaded_without_an_end_stays() -> None:
    index, view = make()
    view.note([REF], [True], 0.0)
    load(index, WHOLE)
    index.advance(1e9)
    assert known_tokens(index, WHOLE) == WHOLE


def test_leading_blocks_of_a_chunk_end_with_it() -> None:
    view = RemoteView(1000.0)
    index = ChunkIndex(8, remote=view, reads_fronts=True)
    (whole,), trail = refs_of(WHOLE), b"".join(hasher_of(WHOLE).block_keys(0))
    view.note([whole, trail], [30.0, (trail,)], 0.0)
    sequence = hasher_of(TAIL)
    match = index.lookup(sequence)
    steps = index.prepare_load(match.refs, hasher=sequence, front_blocks=2)
    index.complete_load(steps, set(), set())
    assert [(step.ref, step.holder) for step in steps] == [(refs_of(TAIL)[0], whole)]
    index.advance(30)
    assert known_tokens(index, TAIL) == 0


def test_a_load_that_failed_leaves_no_end() -> None:
    index, view = make()
    view.note([REF], [30.0], 0.0)
    steps = index.prepare_load([REF], hasher=hasher_of(WHOLE))
    index.complete_load(steps, keys(steps), set())
    check_invariants(index)
    send(index, WHOLE)
    index.advance(30)
    assert known_tokens(index, WHOLE) == WHOLE


def test_a_time_that_is_over_while_a_chunk_comes_ends_it() -> None:
    index, view = make()
    view.note([REF], [30.0], 0.0)
    steps = index.prepare_load([REF], hasher=hasher_of(WHOLE))
    index.advance(31)
    index.complete_load(steps, set(), set())
    check_invariants(index)
    assert known_tokens(index, WHOLE) == 0
    assert REF.prefix_key not in index


@pytest.mark.parametrize(
    ("heard", "ttl_s", "told"), [(30.0, 50, 50.0), (30.0, None, None), (30.0, 20, 30), (True, 50, 0)]
)
def test_a_longer_time_of_a_chunk_that_another_engine_stored_is_told(
    heard: float, ttl_s: float | None, told: float | None
) -> None:
    index, view = make()
    view.note([REF], [heard], 0.0)
    (step,) = send(index, WHOLE, ttl_s)
    assert step.targets == ()
    is_told = told not in {0, 30}
    assert index.take_lifetimes() == ([Lifetime(REF, told)] if is_told else [])


def test_longer_times_of_sent_chunks_are_told() -> None:
    index, _ = make()
    send(index, WHOLE, 5)
    assert index.take_lifetimes() == []
    plan(index, WHOLE, 9)
    assert index.take_lifetimes() == [Lifetime(REF, 9)]
    plan(index, WHOLE, None)
    assert index.take_lifetimes() == [Lifetime(REF, None)]


@pytest.mark.parametrize("stored", [True, False])
def test_what_is_told_while_a_chunk_is_sent_is_told_again(*, stored: bool) -> None:
    index, _ = make()
    (step,) = plan(index, WHOLE, 5)
    plan(index, WHOLE, None)
    told = [Lifetime(REF, None)]
    assert (index.take_lifetimes(), index.take_lifetimes()) == (told, [])
    index.complete_store([step], set())
    index.complete_write(REF.prefix_key, Place.REMOTE, stored=stored)
    assert (index.take_lifetimes(), index.take_lifetimes()) == (told if stored else [], [])


@pytest.mark.parametrize("ttl_s", [5, None])
def test_a_tail_stays_there_beside_a_longer_chunk_that_ends(ttl_s: float | None) -> None:
    index, _ = make()
    send(index, TAIL)
    send(index, WHOLE, ttl_s)
    assert index.take_recalls() == ([] if ttl_s else refs_of(TAIL))


@pytest.mark.parametrize("heard", [30.0, True])
def test_a_tail_is_sent_although_a_chunk_that_ends_holds_it(heard: float) -> None:
    index, view = make()
    view.note([REF, trail := b"".join(hasher_of(WHOLE).block_keys(0))], [heard, (trail,)], 0.0)
    (step,) = plan(index, TAIL, None)
    assert bool(step.targets) is (heard == 30)


def test_a_tail_with_an_end_is_not_sent_where_an_endless_chunk_holds_it() -> None:
    index, _ = make()
    send(index, WHOLE)
    assert plan(index, TAIL, 5) == []


def test_a_time_that_becomes_longer_while_a_chunk_comes_is_told() -> None:
    index, view = make()
    view.note([REF], [30.0], 0.0)
    steps = index.prepare_load([REF], hasher=hasher_of(WHOLE))
    plan(index, WHOLE, None)
    index.complete_load(steps, set(), set())
    assert index.take_lifetimes() == [Lifetime(REF, None)]
