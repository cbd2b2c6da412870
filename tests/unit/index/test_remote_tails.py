"""Tails at a remote tier: not sent if a longer chunk leads to them, and removed once one does."""

from __future__ import annotations

import pytest
from support.index import hasher_of, keys, known_tokens, refs_of
from support.invariants import check_invariants

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, StoreStep, TierState
from kvstore.index.remote_view import RemoteView
from kvstore.model.chunks import ChunkRef

TAIL, LONGER, WHOLE = 8, 12, 16  # tokens


def make(*, keeps_trails: bool = True, max_sends: int = 4, num_slots: int = 8) -> ChunkIndex:
    index = ChunkIndex(num_slots, remote=RemoteView(9.0), max_sends=max_sends)
    index.set_tiers(TierState(remote_keeps_trails=keeps_trails))
    return index


def ref(num_tokens: int) -> ChunkRef:
    return refs_of(num_tokens)[-1]


def trail(num_tokens: int) -> bytes:
    return b"".join(hasher_of(num_tokens).block_keys(0))


def offer(index: ChunkIndex, num_tokens: int) -> list[StoreStep]:
    """Plan a store and return its steps, of which none is carried out."""
    steps = index.prepare_store(refs_of(num_tokens), hasher=hasher_of(num_tokens))
    check_invariants(index)
    return steps


def send(index: ChunkIndex, num_tokens: int, *, stored: bool = True) -> list[StoreStep]:
    """Store a sequence, and end its writes to the remote tier."""
    steps = offer(index, num_tokens)
    index.complete_store(steps, set())
    for step in steps:
        if Place.REMOTE in step.targets:
            index.complete_write(step.ref.prefix_key, Place.REMOTE, stored=stored)
    check_invariants(index)
    return steps


def others_have(index: ChunkIndex, num_tokens: int, *, is_told: bool) -> None:
    """Let another engine store a sequence, and the tier report it."""
    view = index._remote.view
    view.note([ref(num_tokens)], [True], 0.0)
    view.note([trail(num_tokens)], [(trail(num_tokens),) if is_told else ()], 0.0)


@pytest.mark.parametrize("longer", [LONGER, WHOLE])
def test_a_tail_that_a_chunk_there_holds_is_not_sent(longer: int) -> None:
    index = make()
    send(index, longer)
    assert offer(index, TAIL) == []
    assert known_tokens(index, TAIL) == TAIL


@pytest.mark.parametrize("stored", [True, False])
def test_a_tail_is_sent_where_only_its_key_leads_to_it(stored: bool) -> None:
    index = make(keeps_trails=False)
    send(index, WHOLE, stored=stored)
    assert keys(offer(index, TAIL)) == {ref(TAIL).prefix_key}


def test_a_chunk_sent_before_the_tier_kept_trails_stands_in_for_nothing() -> None:
    index = make(keeps_trails=False)
    send(index, WHOLE)
    index.set_tiers(TierState(remote_keeps_trails=True))
    assert keys(offer(index, TAIL)) == {ref(TAIL).prefix_key}


def test_a_chunk_that_could_not_be_sent_is_sent_in_the_stead_of_its_tail() -> None:
    index = make()
    send(index, WHOLE, stored=False)
    (step,) = offer(index, TAIL)
    assert (step.ref, step.targets, step.gather) == (ref(WHOLE), (Place.REMOTE,), False)
    assert step.trail == trail(WHOLE)
    assert offer(index, TAIL) == [], "it is on its way"
    index.complete_store([step], set())
    index.complete_write(step.ref.prefix_key, Place.REMOTE, stored=False)
    index.remove([ref(WHOLE).prefix_key])
    assert keys(send(index, TAIL)) == {ref(TAIL).prefix_key}, "it is gone, and was never there"


def test_a_chunk_that_is_being_gathered_and_not_sent_stands_in_for_nothing() -> None:
    index = make(max_sends=1)
    first = offer(index, 2 * WHOLE)  # the second chunk has no place in the queue
    assert [step.targets for step in first] == [(Place.REMOTE,), ()]
    second = WHOLE + TAIL
    assert ref(second).prefix_key in keys(offer(index, second))


@pytest.mark.parametrize("is_told", [True, False])
def test_another_engines_chunk_stands_in_if_its_trail_was_told(is_told: bool) -> None:
    """A chunk of an older engine is found by its key only, so a lookup of the tail does not find it."""
    index = make()
    others_have(index, WHOLE, is_told=is_told)
    assert [step.targets for step in send(index, WHOLE)] == [()]
    assert keys(offer(index, TAIL)) == (set() if is_told else {ref(TAIL).prefix_key})


@pytest.mark.parametrize("is_told", [True, False])
def test_a_chunk_loaded_from_there_stands_in_if_its_trail_was_told(is_told: bool) -> None:
    index = make()
    others_have(index, WHOLE, is_told=is_told)
    loads = index.prepare_load(refs_of(WHOLE), hasher=hasher_of(WHOLE))
    index.complete_load(loads, set(), set())
    steps = offer(index, TAIL)
    assert [(step.ref, step.targets) for step in steps] == ([] if is_told else [(ref(TAIL), (Place.REMOTE,))])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_tail_is_kept_here_and_not_sent_where_another_engines_chunk_holds_it(is_there: bool) -> None:
    """That chunk has never been here; the tail was computed, although it could have been loaded."""
    index = make()
    others_have(index, WHOLE, is_told=True)
    if not is_there:
        index._remote.view.deny([ref(WHOLE)], 0.0)
    assert [step.targets for step in send(index, TAIL)] == [() if is_there else (Place.REMOTE,)]
    assert known_tokens(index, TAIL) == TAIL


def test_what_the_tier_has_lost_stands_in_for_nothing() -> None:
    index = make()
    send(index, WHOLE)
    index._remote.view.deny([ref(WHOLE)], 0.0)
    (step,) = offer(index, TAIL)
    assert (step.ref, step.targets) == (ref(TAIL), (Place.REMOTE,))


@pytest.mark.parametrize("longer", [LONGER, WHOLE])
def test_a_tail_goes_from_there_once_a_longer_chunk_has_come(longer: int) -> None:
    index = make()
    send(index, TAIL)
    steps = offer(index, longer)
    index.complete_store(steps, set())
    assert index.take_recalls() == [], "the longer one is not there yet"
    index.complete_write(steps[0].ref.prefix_key, Place.REMOTE, stored=True)
    assert index.take_recalls() == [ref(TAIL)]
    assert index.take_recalls() == []
    assert index._remote.view.holds(ref(TAIL), 0.0) is False
    assert known_tokens(index, TAIL) == TAIL
    assert offer(index, TAIL) == []


@pytest.mark.parametrize("way", ["failed", "removed", "keeps no trails"])
def test_a_tail_stays_there_if_nothing_leads_to_its_blocks(way: str) -> None:
    index = make()
    send(index, TAIL)
    steps = offer(index, WHOLE)
    index.complete_store(steps, set())
    index.set_tiers(TierState(remote_keeps_trails=way != "keeps no trails"))
    if way == "removed":
        index.remove([ref(WHOLE).prefix_key])
    index.complete_write(steps[0].ref.prefix_key, Place.REMOTE, stored=way != "failed")
    assert index.take_recalls() == []


def test_a_tail_that_comes_after_its_chunk_goes_at_once() -> None:
    """It was on its way when the chunk was stored."""
    index = make()
    tail = offer(index, TAIL)
    index.complete_store(tail, set())
    send(index, WHOLE)
    assert index.take_recalls() == [], "it would come again"
    index.complete_write(tail[0].ref.prefix_key, Place.REMOTE, stored=True)
    assert index.take_recalls() == [ref(TAIL)]


@pytest.mark.parametrize("is_told", [True, False])
def test_an_older_engines_tail_stays(is_told: bool) -> None:
    """An older engine looks for it by its key; a newer one is led to the longer chunk."""
    index = make()
    others_have(index, TAIL, is_told=is_told)
    send(index, WHOLE)
    assert index.take_recalls() == ([ref(TAIL)] if is_told else [])


def test_a_tail_that_is_being_read_stays() -> None:
    index = make()
    others_have(index, TAIL, is_told=True)
    loads = index.prepare_load(refs_of(TAIL), hasher=hasher_of(TAIL))
    send(index, WHOLE)
    assert index.take_recalls() == []
    index.complete_load(loads, set(), set())
    check_invariants(index)


def test_what_is_remembered_of_tails_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.index.writes._MAX_SENT_TAILS", 2)
    index = make(num_slots=16)
    offered = [refs_of(TAIL, seed)[0] for seed in range(4)]
    for seed, tail in enumerate(offered):
        steps = index.prepare_store([tail], hasher=hasher_of(TAIL, seed))
        index.complete_store(steps, set())
        index.complete_write(tail.prefix_key, Place.REMOTE, stored=True)
    assert list(index._remote._sent_tails) == offered[2:]
    index.clear()
    assert not index._remote._sent_tails


def test_a_tail_that_would_be_recalled_is_not_sent() -> None:
    """Its file keeps it out of the longer chunk, which was sent and could not be written."""
    view = RemoteView(9.0)
    index = ChunkIndex(8, remote=view, max_sends=4, disk_capacity_bytes=1 << 20, stored_bytes=lambda blocks: blocks)
    index.set_tiers(TierState(remote_keeps_trails=True))

    def store(num_tokens: int, *, written: bool) -> set[Place]:
        targets = set()
        for step in offer(index, num_tokens):
            index.complete_store([step], set())
            for target in step.targets:
                index.complete_write(step.ref.prefix_key, target, stored=written or target is Place.REMOTE)
                targets.add(target)
        return targets

    assert store(TAIL, written=True) == {Place.DISK, Place.REMOTE}
    assert store(WHOLE, written=False) == {Place.DISK, Place.REMOTE}
    assert [ref.num_blocks for ref in index.take_recalls()]
    for _ in range(3):
        assert Place.REMOTE not in store(TAIL, written=False)
        assert index.take_recalls() == []
