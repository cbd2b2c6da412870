"""Chunks that the index may not evict (a request's own prefix, leased ones), and chunks that it does not send back."""

from __future__ import annotations

import pytest
from support.invariants import check_invariants
from support.uses import uses_of

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, TierState, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.model.keys import PrefixHasher
from kvstore.policies import POLICIES

BLOCK, CHUNK = 4, 16
HOLD_S = 3.0


def hasher_of(num_tokens: int, seed: int = 0) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK)
    hasher.update(range(seed * 1000, seed * 1000 + num_tokens))
    return hasher


@pytest.mark.parametrize("policy", [*POLICIES, "FIFO"])
@pytest.mark.parametrize("noted", [True, False], ids=["in one request", "in another one"])
def test_a_store_never_evicts_its_own_prefix(policy: str, noted: bool) -> None:
    """A pool smaller than the request keeps the front of it, because the rest alone would never be found."""
    refs = chunk_refs(hasher_of(8 * CHUNK), with_tail=False)
    index = ChunkIndex(3, cache_policy=policy)
    front = [ref.prefix_key for ref in refs[:3]]
    index.complete_store(index.prepare_store(refs[:3]), set())
    for begin in range(3, 8):  # chunk after chunk, as prefill computes them
        prefix = [ref.prefix_key for ref in refs[:begin]]
        steps = index.prepare_store([refs[begin]], prefix, noted=set(prefix) if noted else None)
        assert steps == []
        check_invariants(index)
    assert all(index.in_memory(key) for key in front)
    assert index.prepare_store(refs) == []
    assert index.lookup(hasher_of(8 * CHUNK)).num_tokens == 3 * CHUNK
    assert (uses_of(index), index.counters.evicted_memory) == (0, 0)


@pytest.mark.parametrize("why", ["silent", "unread"])
def test_a_leased_chunk_on_a_disk_that_gives_nothing_is_not_discarded(why: str) -> None:
    """It cannot be used now, but it is leased; without the lease it is stored again."""
    refs = chunk_refs(hasher_of(CHUNK), with_tail=False)
    index = ChunkIndex(4, disk_capacity_bytes=400, stored_bytes=lambda blocks: 25 * blocks)
    index.adopt([(refs[0], 100)])
    if why == "unread":  # a failed read of a chunk that may well be there
        loads = index.prepare_load(index.lookup(hasher_of(CHUNK)).refs)
        assert index.lease("one", refs, 10) == 1
        index.complete_load(loads, {refs[0].prefix_key}, set())
    else:
        assert index.lease("one", refs, 10) == 1
        index.set_tiers(TierState(disk_answers=False))
    assert index.prepare_store(refs) == []
    check_invariants(index)
    assert (index.leases, uses_of(index), index.disk_used_bytes) == (1, 1, 100)
    assert index.holds(refs[0].prefix_key, Place.DISK)
    index.release("one")
    steps = index.prepare_store(refs)
    assert [step.ref for step in steps] == refs, "now it is"
    index.complete_store(steps, set())
    check_invariants(index)


def test_what_came_from_the_remote_tier_is_not_sent_there() -> None:
    """This holds even if knowledge of that tier has expired."""
    refs = chunk_refs(hasher_of(3 * CHUNK), with_tail=False)
    view = RemoteView(HOLD_S)
    index = ChunkIndex(4, remote=view)
    view.note(refs[:2], [True, True], 0.0)
    loads = index.prepare_load(index.lookup(hasher_of(3 * CHUNK)).refs)
    assert [load.source for load in loads] == [Place.REMOTE] * 2
    index.complete_load(loads, set(), set())
    index.advance(HOLD_S + 1)
    assert view.unknown(refs, HOLD_S + 1) == refs
    steps = index.prepare_store(refs)
    assert [(step.ref, step.targets) for step in steps] == [(refs[2], (Place.REMOTE,))], "only what it did not have"
    assert index.queued_writes(Place.REMOTE) == 1
    index.complete_store(steps, set())
    index.complete_write(refs[2].prefix_key, Place.REMOTE, stored=True)
    check_invariants(index)
