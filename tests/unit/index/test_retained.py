"""Retention: chunks that stay on disk until a time, within the shares of their tenants."""

from __future__ import annotations

import pytest
from support.index import BLOCK, CHUNK, FULL_BYTES, hasher_of, keys, known_tokens, load, make, refs_of, store
from support.invariants import check_invariants

from kvstore.index import retained as retaining
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, chunk_refs
from kvstore.index.retained import Limits
from kvstore.model.keys import PrefixHasher
from kvstore.policies import POLICIES
from kvstore.policies.arc import ARC

ROOM = Limits(2, of_tenant=2)


def others_come(index: ChunkIndex, number: int = 9) -> None:
    """Store other prompts, which take all the room that there is."""
    for seed in range(10, 10 + number):
        store(index, 16, seed)
        load(index, 16, seed)  # a second use, or some policies refuse the next one


def make_full(policy: str = "LRU", retention: Limits = ROOM) -> ChunkIndex:
    index = ChunkIndex(
        2,
        disk_capacity_bytes=4 * FULL_BYTES,
        stored_bytes=lambda num_blocks: 25 * num_blocks,
        max_writes=8,
        cache_policy=policy,
        retention=retention,
    )
    store(index, 32)
    return index


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_retained_chunks_stay_on_disk_while_others_come_and_go(policy: str) -> None:
    index = make_full(policy)
    assert index.retain(refs_of(32), 100) == 2
    others_come(index)
    assert known_tokens(index, 32) == 32
    assert not any(index.in_memory(key) for key in keys(refs_of(32))), "memory has no room for them"
    index.advance(99)
    others_come(index)
    assert (known_tokens(index, 32), index.retained) == (32, 2)
    index.advance(100)
    assert index.retained == 0
    for _ in range(3):
        others_come(index, 20)
    assert known_tokens(index, 32) == 0


def test_the_longest_time_counts() -> None:
    index = make_full()
    index.retain(refs_of(32), 100)
    index.retain(refs_of(32), 10)
    index.advance(99)
    assert index.retained == 2
    index.retain(refs_of(16), 109)
    index.advance(108)
    assert index.retained == 1


def test_an_end_that_is_asked_for() -> None:
    """It leaves what others depend on; the workers hear of it, or a restart would retain it again."""
    index = make(8, disk_chunks=16, retention=Limits(8, of_tenant=8))
    store(index, 64)
    other = PrefixHasher(CHUNK, BLOCK)
    other.update([*range(32), *range(900, 932)])
    branch = chunk_refs(other, with_tail=True)
    steps = index.prepare_store(branch, hasher=other)
    index.complete_store(steps, set())
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    for refs in (refs_of(64), branch):
        assert index.retain(refs, 100) == 4
    index.take_retentions()
    assert index.end_retention(branch) == 2
    assert {one.ref: one.until_s for one in index.take_retentions()} == dict.fromkeys(branch[2:], 0.0)
    assert (index.retained, index.end_retention(branch)) == (4, 0)
    assert index.end_retention(refs_of(64)) == 2, "the stem has another branch"
    index.remove(keys(branch[2:]))
    assert index.end_retention(refs_of(64)) == 2
    assert index.retained == 0
    check_invariants(index)


def test_shares_of_all_and_of_one_tenant() -> None:
    index = make(8, disk_chunks=8, retention=Limits(3, of_tenant=2))
    store(index, 64)
    store(index, 48, seed=1)
    assert index.retain(refs_of(64), 100, b"one") == 2
    assert index.retain(refs_of(64), 100, b"one") == 2, "the same ones count once"
    assert index.retain(refs_of(48, 1), 100, b"other") == 1
    assert index.retain(refs_of(48, 1)[1:], 100, b"third") == 0
    index.remove(keys(refs_of(16)))
    assert index.retain(refs_of(48, 1), 100, b"other") == 2
    check_invariants(index)


def test_a_tenant_that_retains_everything_leaves_room_for_others() -> None:
    index = make(2, disk_chunks=8, retention=Limits(4, of_tenant=2))
    for seed in range(100):
        store(index, 64, seed)
        assert index.retain(refs_of(64, seed), 1000, b"greedy") <= 2
        assert index.retained <= 2
    store(index, 32, 1000)
    others_come(index, 4)
    assert known_tokens(index, 32, 1000) == 32


def test_only_chunks_on_disk_or_on_their_way_from_the_front() -> None:
    index = make(4, retention=ROOM)
    store(index, 32)
    assert index.retain(refs_of(32), 100) == 0, "no disk"
    index = make(4, disk_chunks=4, retention=ROOM)
    steps = index.prepare_store(refs_of(32), hasher=hasher_of(32))
    assert index.retain(refs_of(48), 100) == 2
    index.complete_store(steps, set())
    check_invariants(index)
    index.complete_write(steps[0].ref.prefix_key, Place.DISK, stored=False)
    index.complete_write(steps[1].ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    assert index.retained == 1, "the first was not written"
    assert index.retain(refs_of(32), 100) == 0


def test_chunks_that_are_removed_lost_or_cleared_stay_no_longer() -> None:
    index = make(4, disk_chunks=8, retention=Limits(4, of_tenant=4))
    store(index, 64)
    assert index.retain(refs_of(64), 100) == 4
    index.remove(keys(refs_of(16)))
    assert index.retained == 3
    steps = index.prepare_load(refs_of(64)[1:2])
    index.complete_load(steps, keys(steps), keys(steps))
    check_invariants(index)
    assert index.retained == 2
    index.clear()
    check_invariants(index)
    assert index.retained == 0
    index.advance(1000)
    check_invariants(index)


def test_a_tail_hands_its_time_to_the_chunk_that_holds_it() -> None:
    index = make(4, disk_chunks=4, retention=ROOM)
    store(index, 24)
    assert index.retain(refs_of(24), 100) == 2
    store(index, 32)
    assert refs_of(24)[1].prefix_key not in index, "superseded"
    assert index.retained == 2
    others_come(index)
    assert known_tokens(index, 32) == 32


def test_what_is_fresh_is_told_once() -> None:
    index = make(4, disk_chunks=4, retention=ROOM)
    steps = index.prepare_store(refs_of(32), hasher=hasher_of(32))
    index.retain(refs_of(32), 100, b"one")
    assert [(one.ref, one.until_s, one.tenant) for one in index.take_retentions()] == [
        (ref, 100, b"one") for ref in refs_of(32)
    ]
    index.complete_store(steps, set())
    index.retain(refs_of(32), 100, b"one")
    index.retain(refs_of(32), 50, b"one")
    assert index.take_retentions() == []
    index.retain(refs_of(16), 101, b"one")
    assert [one.until_s for one in index.take_retentions()] == [101]
    index.retain(refs_of(32), 200, b"one")
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=False)
    check_invariants(index)
    assert {(one.ref, one.until_s) for one in index.take_retentions()} == {(ref, 0.0) for ref in refs_of(32)}
    assert index.take_retentions() == []


def test_thousands_do_not_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retaining, "_ENDED_AT_ONCE", 2)
    index = make(8, disk_chunks=8, retention=Limits(5, of_tenant=5))
    store(index, 80)
    index.retain(refs_of(80), 100)
    for left in (3, 1, 0, 0):
        index.advance(1000)
        check_invariants(index)
        assert index.retained == left


def test_uses_of_what_is_retained_do_not_change_what_arc_keeps_of_others() -> None:
    index = make_full("ARC")
    arc = index._disk.order
    assert isinstance(arc, ARC)
    arc._target_bytes = 200.0
    index.retain(refs_of(32), 100)
    for _ in range(5):
        load(index, 32)
    assert (arc._target_bytes, arc.num_ghosts) == (200.0, 0)


def test_how_many_would_be_kept() -> None:
    index = make(8, disk_chunks=8, retention=Limits(5, of_tenant=3))
    store(index, 80)
    assert index.retainable(refs_of(80), b"one") == 3
    index.retain(refs_of(32), 100, b"one")
    assert index.retainable(refs_of(80), b"one") == 3
    assert index.retainable(refs_of(80)[2:], b"one") == 1
    assert index.retainable(refs_of(80)[2:], b"other") == 3
    assert index.retainable(refs_of(96)[5:], b"other") == 0
    assert index.retained == 2
