"""Temporary protection from eviction: leases, and chunks with a time to live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.index import BLOCK, CHUNK, FULL_BYTES, hasher_of, keys, known_tokens, make, refs_of, store
from support.invariants import check_invariants
from support.uses import uses_of

from kvstore.model.chunks import ChunkRef

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_leases_hold_at_most_half_of_the_slots() -> None:
    index = make(4)
    store(index, 64)
    assert index.lease("one", refs_of(64), 10) == 2
    assert index.lease("two", refs_of(64), 10) == 2  # the same chunks count once
    assert index.lease("three", refs_of(64)[2:], 10) == 0
    assert (index.leases, uses_of(index)) == (2, 4)
    index.release("one")
    index.release("two")
    assert index.lease("one", refs_of(64), 10) == 2
    assert index.lease("one", refs_of(64)[2:], 10) == 2  # the new lease replaces the old one
    check_invariants(index)
    index.advance(10)
    assert (index.leases, uses_of(index)) == (0, 0)
    check_invariants(index)


def test_a_leased_chunk_stays_in_its_tier() -> None:
    index = make(2, disk_chunks=2)
    index.adopt((ref, FULL_BYTES) for ref in [*refs_of(16), *refs_of(16, 1)])
    index.lease("one", refs_of(16), 10)
    store(index, 16, seed=2)
    assert index.take_removals() == refs_of(16, 1)
    assert known_tokens(index, 16) == 16


def test_a_forgotten_chunk_is_no_longer_leased() -> None:
    """Otherwise it could not be stored before the lease ends, which a pin never does."""
    index = make(4, disk_chunks=4)
    store(index, 32)
    assert index.lease("one", refs_of(32), float("inf")) == 2
    steps = index.prepare_load(refs_of(32))
    index.complete_load(steps, keys(steps[:1]), keys(steps[:1]))
    check_invariants(index)
    assert (index.leases, uses_of(index)) == (1, 1)
    assert keys(store(index, 32)) == keys(steps[:1])
    assert index.clear() == 2
    check_invariants(index)
    assert (index.leases, uses_of(index), index.slots_in_use) == (0, 0, 0)


def test_a_time_to_live_ends_also_in_use() -> None:
    index = make(4, disk_chunks=4)
    index.advance(100)
    steps = index.prepare_store(refs_of(32), ttl_s=5)
    assert not any(bool(step.targets) for step in steps)
    index.complete_store(steps, set())
    loads = index.prepare_load(refs_of(32)[:1])
    index.advance(104)
    index.advance(50)  # a clock does not go back
    assert known_tokens(index, 32) == 32
    index.advance(105)
    assert known_tokens(index, 32) == 0
    assert (index.counters.expired, index.slots_in_use) == (2, 1)
    index.complete_load(loads, set(), set())
    check_invariants(index)
    assert index.slots_in_use == 0


def test_a_time_to_live_is_not_inherited() -> None:
    index = make(4)
    index.complete_store(index.prepare_store(refs_of(16), ttl_s=5), set())
    index.remove(keys(refs_of(16)))
    store(index, 16)
    index.advance(5)
    assert (known_tokens(index, 16), index.counters.expired) == (16, 0)


def single(number: int) -> ChunkRef:
    return ChunkRef(number.to_bytes(16, "little"), CHUNK // BLOCK)


@pytest.mark.parametrize("num_stores", [10_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_times_to_live_take_memory_only_while_their_chunks_are_there(num_stores: int) -> None:
    """Stores of a day in a small pool have each a time that ends long after the chunk was evicted."""
    index = make(16)
    most = 0
    for number in range(num_stores):
        index.complete_store(index.prepare_store([single(number)], ttl_s=86_400), set())
        most = max(most, len(index._chunks.expiries._heap))
    assert len(index) == 16
    assert most < 200
    index.advance(86_400)
    assert (len(index), index.counters.expired) == (0, 16)
    check_invariants(index)


def test_a_time_to_live_that_is_extended_again_and_again() -> None:
    index = make(4)
    for second in range(1, 10_000):
        index.advance(second)
        index.complete_store(index.prepare_store(refs_of(16), ttl_s=60), set())
    assert len(index._chunks.expiries._heap) < 200
    check_invariants(index)
    index.complete_store(index.prepare_store(refs_of(16)), set())  # without a time now
    index.advance(20_000)
    assert (known_tokens(index, 16), index.counters.expired) == (16, 0)


def test_leases_that_share_chunks_have_a_bound() -> None:
    index = make(16)
    shared = [single(number) for number in range(8)]
    index.complete_store(index.prepare_store(shared), set())
    held = [index.lease(f"lease {number}", shared, float("inf")) for number in range(50_000)]
    assert held[:32] == [8] * 32  # 16 holds for each slot
    assert not any(held[32:])
    assert index.leases == 32
    check_invariants(index)
    assert index.lease("lease 0", shared, float("inf")) == 8, "one that is renewed has its room"
    for view in index.lease_views():
        index.release(view.name)
    assert (index.leases, uses_of(index)) == (0, 0)


def test_the_time_is_told_without_a_look_at_every_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    index = make(4096)
    refs = [single(number) for number in range(2048)]
    index.complete_store(index.prepare_store(refs), set())
    for number, ref in enumerate(refs):
        index.lease(f"lease {number}", [ref], 1 + number)
    released = []
    withdraw = index._leases.withdraw

    def noted(name: str) -> list[bytes]:
        released.append(name)
        return withdraw(name)

    monkeypatch.setattr(index._leases, "withdraw", noted)
    monkeypatch.setattr(index._leases, "_leases", NoWalk(index._leases._leases))
    index.advance(0.5)
    assert released == []
    index.advance(3)
    assert released == ["lease 0", "lease 1", "lease 2"]


class NoWalk(dict[str, Any]):
    """A mapping that supports lookups by name only."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all leases are looked at")

    def items(self) -> Any:
        raise AssertionError("all leases are looked at")


def test_a_chunk_with_a_time_to_live_does_not_supersede_a_tail_for_good() -> None:
    index = make()
    store(index, 8)  # a tail of two blocks, without a time to live
    index.complete_store(index.prepare_store(refs_of(16), hasher=hasher_of(16), ttl_s=5), set())
    assert known_tokens(index, 16) == 16
    index.advance(6)
    assert known_tokens(index, 16) == 8, "the tail is still there"
