"""Quotas of owners: what one fills, pins and retains never takes what belongs to another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.index import BLOCK, CHUNK, FULL_BYTES, stored_bytes, trails_of
from support.invariants import check_invariants

from kvstore.index.index import ChunkIndex
from kvstore.index.owners import Owner, Owners
from kvstore.index.plans import Place, StoreStep, chunk_refs
from kvstore.index.retained import Limits
from kvstore.model.errors import ConfigError
from kvstore.model.keys import KeyExtras, PrefixHasher
from kvstore.model.quotas import OTHERS, QuotaRules
from kvstore.policies import POLICIES

SMALL, LARGE, NOBODY = "small", "large", ""
SLOTS, DISK_CHUNKS = 8, 16


def make(
    memory: dict[str, int] | None = None,
    disk: dict[str, int] | None = None,
    *,
    policy: str = "LRU",
    slots: int = SLOTS,
    disk_chunks: int = DISK_CHUNKS,
) -> ChunkIndex:
    """Return an index with quotas in chunks."""
    rules = QuotaRules("team", memory or {}, {name: count * FULL_BYTES for name, count in (disk or {}).items()})
    return ChunkIndex(
        slots,
        disk_capacity_bytes=disk_chunks * FULL_BYTES,
        stored_bytes=stored_bytes,
        max_writes=99,
        cache_policy=policy,
        retention=Limits(disk_chunks // 2, disk_chunks // 2),
        owners=Owners(rules, chunk_bytes=FULL_BYTES),
    )


def hasher_of(team: str, number: int, num_chunks: int = 1) -> PrefixHasher:
    hasher = PrefixHasher(CHUNK, BLOCK, KeyExtras(tags=(("team", team),) if team else ()))
    hasher.update(range(number * 1000, number * 1000 + num_chunks * CHUNK))
    return hasher


def store(index: ChunkIndex, team: str, number: int, num_chunks: int = 1, *, fails: bool = False) -> list[StoreStep]:
    hasher = hasher_of(team, number, num_chunks)
    steps = index.prepare_store(chunk_refs(hasher, with_tail=True), hasher=hasher)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=not fails)
    check_invariants(index)
    return steps


def found(index: ChunkIndex, team: str, number: int, num_chunks: int = 1) -> int:
    """Return the chunks of a prompt that would be found."""
    return index.lookup(hasher_of(team, number, num_chunks)).num_tokens // CHUNK


def owner_of(index: ChunkIndex, team: str) -> Owner:
    owner = index.owners.of(hasher_of(team, 0))
    assert owner is not None
    return owner


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_floods_evicts_its_own_chunks_only(policy: str) -> None:
    index = make({SMALL: 2, LARGE: 6}, {SMALL: 4, LARGE: 12}, policy=policy)
    store(index, LARGE, 0, 6)
    for number in range(1, 20):
        store(index, SMALL, number)
    assert found(index, LARGE, 0, 6) == 6
    assert all(index.in_memory(ref.prefix_key) for ref in chunk_refs(hasher_of(LARGE, 0, 6), with_tail=False))
    assert [found(index, SMALL, number) for number in range(1, 20)] == [0] * 15 + [1] * 4, "its last ones stay"
    small, large = owner_of(index, SMALL), owner_of(index, LARGE)
    assert (small.stored, small.evicted_memory, small.evicted_disk, small.refused) == (19, 17, 15, 0)
    assert (large.stored, large.evicted_memory, large.evicted_disk, large.refused) == (6, 0, 0, 0)


def test_the_least_recently_used_goes_first_and_a_prefix_last() -> None:
    index = make({SMALL: 3}, disk_chunks=0)
    store(index, SMALL, 1)
    store(index, SMALL, 2, 2)
    hasher = hasher_of(SMALL, 1)
    index.complete_load(index.prepare_load(chunk_refs(hasher, with_tail=True), hasher=hasher), set(), set())
    store(index, SMALL, 3)
    assert [found(index, SMALL, number, 2) for number in (1, 2, 3)] == [1, 1, 1]
    store(index, SMALL, 4)
    assert [found(index, SMALL, number, 2) for number in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_all_that_are_not_named_share_one_quota() -> None:
    index = make({SMALL: 2, "*": 3}, disk_chunks=0)
    for number, team in enumerate(("x", "y", "z", NOBODY)):
        store(index, team, number)
    assert [found(index, team, number) for number, team in enumerate(("x", "y", "z", NOBODY))] == [0, 1, 1, 1]
    assert owner_of(index, "x") is owner_of(index, NOBODY)
    assert owner_of(index, "x").name == OTHERS


def test_without_a_quota_for_others_only_the_tier_bounds_them() -> None:
    index = make({SMALL: 2}, disk_chunks=0)
    store(index, NOBODY, 0, SLOTS)
    assert found(index, NOBODY, 0, SLOTS) == SLOTS
    assert not owner_of(index, NOBODY).memory.is_bounded


def test_what_is_pinned_is_at_most_half_and_never_another_makes_room_for_it() -> None:
    index = make({SMALL: 4, LARGE: 4}, {SMALL: 4, LARGE: 12})
    store(index, LARGE, 0, 4)
    store(index, SMALL, 1, 4)
    assert index.lease("all of it", chunk_refs(hasher_of(SMALL, 1, 4), with_tail=False), 99) == 2
    assert index.lease("another", chunk_refs(hasher_of(SMALL, 1, 4), with_tail=False)[2:], 99) == 0
    check_invariants(index)
    for number in range(2, 9):
        store(index, SMALL, number)
    assert (found(index, SMALL, 1, 4), found(index, LARGE, 0, 4)) == (2, 4)
    index.release("all of it")
    assert owner_of(index, SMALL).num_leased == 0


def test_a_quota_full_of_what_is_in_use_refuses() -> None:
    index = make({SMALL: 2, LARGE: 6}, {SMALL: 4})
    store(index, LARGE, 3)
    busy = hasher_of(SMALL, 0, 2)
    steps = index.prepare_store(chunk_refs(busy, with_tail=False), hasher=busy)
    assert store(index, SMALL, 1) == []
    assert owner_of(index, SMALL).refused == 1
    assert index.disk_used_bytes == 3 * FULL_BYTES, "no room on disk was reserved for what was refused"
    assert len(store(index, LARGE, 2)) == 1
    index.complete_store(steps, {steps[0].ref.prefix_key})
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=False)
    check_invariants(index)
    assert len(store(index, SMALL, 1)) == 1


def test_a_load_takes_slots_within_the_quota_and_is_promised_no_more() -> None:
    index = make({SMALL: 2, LARGE: 6}, {})
    hasher = hasher_of(SMALL, 1, 5)
    refs = chunk_refs(hasher, with_tail=False)
    index.adopt([(ref, FULL_BYTES) for ref in refs], {}, {ref.prefix_key: index.owners.id_of(hasher) for ref in refs})
    store(index, LARGE, 0, 6)
    match = index.lookup(hasher)
    assert len(match.refs) == 2, "a load of five would need the slots of others"
    loads = index.prepare_load(match.refs, hasher=hasher)
    assert len(loads) == 2
    index.complete_load(loads, set(), set())
    check_invariants(index)
    assert all(index.in_memory(ref.prefix_key) for ref in chunk_refs(hasher_of(LARGE, 0, 6), with_tail=False))


def test_retention_takes_at_most_half_of_a_quota() -> None:
    index = make({}, {SMALL: 4, LARGE: 12})
    store(index, LARGE, 0, 6)
    store(index, SMALL, 1, 4)
    refs = chunk_refs(hasher_of(SMALL, 1, 4), with_tail=False)
    assert (index.retainable(refs), index.retain(refs, 50)) == (2, 2)
    check_invariants(index)
    for number in range(2, 9):
        store(index, SMALL, number)
    assert (found(index, SMALL, 1, 4), found(index, LARGE, 0, 6)) == (2, 6)
    index.advance(51)
    assert owner_of(index, SMALL).num_retained == 0


@pytest.mark.parametrize("is_known", [True, False], ids=["noted", "not noted"])
def test_a_restart_knows_whose_a_chunk_is_or_counts_it_against_others(is_known: bool) -> None:
    former = make({}, {SMALL: 6, "*": 9})
    steps = store(former, SMALL, 1, 6)
    owners = {step.ref.prefix_key: step.owner for step in steps}
    index = make({}, {SMALL: 2, "*": 9})
    refs = [step.ref for step in reversed(steps)]
    index.adopt(
        [(ref, FULL_BYTES) for ref in refs], trails_of(hasher_of(SMALL, 1, 6), refs), owners if is_known else {}
    )
    index.settle()
    check_invariants(index)
    assert found(index, SMALL, 1, 6) == (2 if is_known else 6), "a smaller quota holds from the start"
    assert len(index.take_removals()) == (4 if is_known else 0)
    assert owner_of(index, NOBODY).disk.used_bytes == (0 if is_known else 6 * FULL_BYTES)


def test_a_store_without_block_ends_tells_whose_its_chunks_are_too() -> None:
    """As of a model with windows or states: their encryption chooses a key by the tenant."""
    index, hasher = make({SMALL: 2}), hasher_of(SMALL, 1)
    (step,) = index.prepare_store(chunk_refs(hasher, with_tail=False), hasher=hasher, by_blocks=False)
    assert (step.tenant, step.owner, step.trail) == (hasher.tenant, index.owners.id_of(hasher), b"")
    assert owner_of(index, SMALL).memory.used_bytes == 1


def test_a_note_of_another_tag_names_nobody() -> None:
    mine, other = QuotaRules("team", {}, {SMALL: 1}), QuotaRules("user", {}, {SMALL: 1})
    assert mine.owner_of(SMALL) != other.owner_of(SMALL)
    assert Owners(other).by_id(mine.owner_of(SMALL)) is not Owners(other).by_id(other.owner_of(SMALL))


def test_a_salt_is_told_by_its_hash_only() -> None:
    salted = KeyExtras(cache_salt="a secret")
    name = "4e4b8a3b0a7d6c3d"
    rules = QuotaRules(None, {salted.salt_name: 4}, {})
    assert len(salted.salt_name) == len(name)
    assert rules.name_of(salted) == salted.salt_name
    assert (rules.name_of(KeyExtras()), rules.owner_of("")) == ("", b"")
    hasher = PrefixHasher(CHUNK, BLOCK, salted)
    owner = Owners(rules).of(hasher)
    assert owner is not None
    assert owner.name == salted.salt_name


def test_a_quota_of_memory_alone_bounds_no_retention() -> None:
    index = make({SMALL: 4}, {})
    store(index, SMALL, 1, 4)
    refs = chunk_refs(hasher_of(SMALL, 1, 4), with_tail=False)
    assert (index.lease("a", refs, 9), index.retain(refs, 50)) == (2, 4)
    check_invariants(index)


def test_a_quota_smaller_than_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="quota 2 of local_disk_quotas"):
        make({}, {LARGE: 3, SMALL: 0})


def test_a_reset_and_removals_leave_nothing_behind() -> None:
    index = make({SMALL: 4}, {SMALL: 8})
    store(index, SMALL, 1, 4)
    running = hasher_of(SMALL, 2)
    steps = index.prepare_store(chunk_refs(running, with_tail=False), hasher=running)
    index.lease("a", chunk_refs(hasher_of(SMALL, 1, 4), with_tail=False)[:1], 9)
    index.clear()
    check_invariants(index)
    index.complete_store(steps, set())
    for step in steps:
        index.complete_write(step.ref.prefix_key, Place.DISK, stored=True)
    check_invariants(index)
    small = owner_of(index, SMALL)
    assert (small.memory.used_bytes, small.disk.used_bytes, small.num_leased, small.memory.num_idle) == (0, 0, 0, 0)


TEAMS = st.sampled_from([SMALL, LARGE, NOBODY, "x"])


@given(
    st.lists(st.tuples(TEAMS, st.integers(0, 5), st.integers(1, 4), st.sampled_from(["", "write fails", "removed"]))),
    st.sampled_from(sorted(POLICIES)),
)
def test_no_history_takes_from_who_is_within_its_quota(history: list[tuple[str, int, int, str]], policy: str) -> None:
    """The tier has room for all quotas, so nothing of the one that stores little is ever evicted."""
    index = make({SMALL: 2, LARGE: 3, "*": 3}, {SMALL: 3, LARGE: 6, "*": 7}, policy=policy)
    store(index, LARGE, 99, 2)
    for team, number, num_chunks, how in history:
        if team != LARGE:
            store(index, team, number, num_chunks, fails=how == "write fails")
        if how == "removed":
            index.remove(ref.prefix_key for ref in chunk_refs(hasher_of(team, number, num_chunks), with_tail=False))
            check_invariants(index)
    assert found(index, LARGE, 99, 2) == 2
    large = owner_of(index, LARGE)
    assert (large.evicted_memory, large.evicted_disk, large.memory.used_bytes) == (0, 0, 2)
