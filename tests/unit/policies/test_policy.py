"""Behaviour particular to each policy; the conformance suite covers what all have in common."""

from __future__ import annotations

from typing import TypeVar

import pytest

from kvstore.index.index import ChunkIndex
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.policies import ARC, LFU, LRU, POLICIES, S3FIFO, Adaptive, Policy, choose_policy, open_policy
from kvstore.policies.survival import (
    EDGES,
    NUM_ANSWERS,
    NUM_BUCKETS,
    NUM_CLASSES,
    NUM_HALVES,
    NUM_USES,
    SurvivalTable,
    answer_of,
    bucket_of,
)

P = TypeVar("P", bound=Policy)


def anything(key: bytes) -> bool:
    return True


def full(policy: P, keys: str) -> P:
    for key in keys:
        use(policy, key)
    return policy


def use(policy: Policy, keys: str) -> None:
    """Make a request for a chain, one letter a chunk, as the index does with a full tier."""
    chain = [key.encode() for key in keys]
    policy.touch_chain(chain)
    for key in chain:
        if key not in policy:
            victims = policy.make_room(policy.used_bytes + 1 - policy.capacity_bytes, lambda k: k not in chain, key)
            if victims is None:
                break
            for victim in victims:
                policy.evict(victim)
            policy.add(key)
    policy.refresh_chain(chain)


def order_of(policy: Policy) -> str:
    return b"".join(policy.make_room(policy.used_bytes, anything) or []).decode()


def held(policy: Policy) -> str:
    return "".join(sorted(key.decode() for key in policy))


def test_lru_chains_go_from_their_end() -> None:
    lru = full(LRU(6), "abcdef")
    use(lru, "acd")
    assert order_of(lru) == "befdca"


def test_lru_skips_what_it_does_not_know() -> None:
    lru = full(LRU(2), "ab")
    lru.touch_chain(iter([b"a", b"z"]))
    assert (order_of(lru), lru.num_ghosts) == ("ba", 0)


def class_of(uses: int, answer_tokens: int | None = None) -> int:
    """Return the class of a chunk after so many uses, the last of them by a request with this answer."""
    return (uses - 1) * NUM_ANSWERS + (0 if answer_tokens is None else answer_of(answer_tokens))


def test_lfu_keeps_what_was_used_most() -> None:
    lfu = full(LFU(3), "aababc")
    use(lfu, "d")
    assert held(lfu) == "abd"


def test_lfu_counts_outlive_eviction() -> None:
    lfu = full(LFU(2), "ababcd")
    assert held(lfu) == "ab", "refused: all that is here was used more often"
    use(lfu, "c")
    assert held(lfu) == "bc", "its second use, although it was never here"


def test_lfu_takes_up_the_count_of_what_comes_back() -> None:
    lfu = full(LFU(2), "ababcc")
    assert held(lfu) == "bc"
    use(lfu, "d")
    assert held(lfu) == "bc", "both were used twice, one of them when it was not here"


def test_arc_learns_from_what_it_lost() -> None:
    arc = ARC(4)
    full(arc, "aebfabcdgh")
    used_once_bytes = arc._target_bytes
    lost = next(iter(arc._gone_once)).decode()
    use(arc, lost)
    assert arc._target_bytes > used_once_bytes
    assert lost.encode() in arc._again


def test_s3fifo_lets_a_scan_pass() -> None:
    policy = S3FIFO(20)
    hot = "abcdefgh"
    for _ in range(3):
        full(policy, hot)
    full(policy, "".join(chr(0x100 + i) for i in range(100)))
    assert set(hot) <= set(held(policy))


def test_s3fifo_brings_back_what_it_remembers() -> None:
    policy = full(S3FIFO(10), "abcdefghijk")
    assert b"a" not in policy
    use(policy, "a")
    assert b"a" in policy._main


def test_the_adaptive_one_starts_as_lru() -> None:
    policy = full(Adaptive(4), "abcd")
    use(policy, "b")
    assert order_of(policy)[:3] == "acd"


def test_the_adaptive_one_refuses_what_never_comes_back() -> None:
    policy = Adaptive(100)
    for number in range(8_000):
        use(policy, chr(0x100 + number % 95))
        use(policy, chr(0x1000 + number))
    hits = sum(chr(0x100 + name).encode() in policy for name in range(95))
    assert hits > 85


def test_one_request_is_one_use() -> None:
    policy = full(Adaptive(4), "a")
    policy.touch_chain([b"a"], {b"a"})
    policy.touch_chain([b"b"])
    policy.touch_chain([b"a", b"c"], {b"a"})
    assert policy._units[b"a"].cls == 0
    policy.touch_chain([b"a"])
    assert policy._units[b"a"].cls == NUM_ANSWERS, "another request may follow at once"


def test_what_all_use_says_nothing_about_others() -> None:
    """A system prompt is in every request, and no other chunk in frequent use would be evicted for a while."""
    policy = full(Adaptive(4), "a" * 100)
    assert (policy._units[b"a"].cls, policy._units[b"a"].time) == (class_of(NUM_USES), policy._ranking.clock)
    policy._ranking.table.update()
    assert (
        policy._ranking.table.values[class_of(NUM_USES)][0] == policy._ranking.table.values[class_of(NUM_USES - 1)][0]
    )


def test_values_follow_experience() -> None:
    table = SurvivalTable()
    flat = table.values[0]
    assert flat == sorted(flat, reverse=True), "without experience the oldest goes first"
    for _ in range(50):
        table.hit(class_of(2), 0, 100, 20)
        table.lose(class_of(1), 0, 5_000, 20)
        table.update()
    at = bucket_of(90)
    once, twice, often = (table.values[class_of(uses)] for uses in (1, 2, NUM_USES))
    assert twice[at] > 10 * once[at]
    assert twice[bucket_of(2_000)] < twice[at]
    assert all(upper >= lower for lower, upper in zip(once, often, strict=True))


def taught(returns_after_short: int, returns_after_long: int, *, rounds: int = 40) -> SurvivalTable:
    """Return a table that saw 100 chunks a round after short answers, and as many after long ones, return or not."""
    table = SurvivalTable()
    for number in range(rounds):
        for answer_tokens, returns in ((20, returns_after_short), (4_000, returns_after_long)):
            cls, half = class_of(1, answer_tokens), number % NUM_HALVES
            table.hit(cls, half, 100, returns)
            table.lose(cls, half, 5_000, 100 - returns)
    table.update()
    return table


def test_answers_tell_where_they_do() -> None:
    at = bucket_of(90)
    table = taught(90, 10)
    short, none, long = (table.values[class_of(1, answer)][at] for answer in (20, None, 4_000))
    assert short > 1.5 * none > 3 * long
    table = taught(50, 50)
    short, none, long = (table.values[class_of(1, answer)][at] for answer in (20, None, 4_000))
    assert short == pytest.approx(none, rel=0.02) == pytest.approx(long, rel=0.02)


def test_a_few_requests_with_many_chunks_are_not_taken_for_a_rule() -> None:
    """Chunks of one request share their fate. What holds in one half of the requests only does not count."""
    table, at = SurvivalTable(), bucket_of(90)
    for half, answer_tokens in enumerate((20, 4_000)):
        table.hit(class_of(1, answer_tokens), half, 100, 5_000)
        table.lose(class_of(1, 4_000 if answer_tokens == 20 else 20), half, 5_000, 5_000)
    table.update()
    short, none, long = (table.values[class_of(1, answer)][at] for answer in (20, None, 4_000))
    assert short == none == long


def test_lengths_of_answers() -> None:
    assert [answer_of(tokens) for tokens in (0, 63, 64, 127, 128, 1_023, 1_024, 1 << 40)] == [1, 1, 2, 2, 3, 5, 6, 6]
    assert answer_of(1 << 40) == NUM_ANSWERS - 1


def test_the_answer_belongs_to_the_request_that_ended() -> None:
    """The stem belongs to nobody: several conversations go on from there."""
    policy = Adaptive(8)
    use(policy, "abc")
    use(policy, "abde")
    policy.end_chain([b"c", b"a", b"b", b"unknown"], 20)
    classes = {key: policy._units[key.encode()].cls for key in "abcde"}
    assert classes == {"a": class_of(2), "b": class_of(2), "c": class_of(1, 20), "d": class_of(1), "e": class_of(1)}
    policy.end_chain([b"a", b"b", b"d", b"e"], 4_000)
    assert [policy._units[key].cls for key in (b"b", b"e")] == [class_of(2), class_of(1, 4_000)]
    use(policy, "abde")
    assert policy._units[b"e"].cls == class_of(2), "the next request has no answer yet"


def test_chunks_of_requests_that_will_not_return_go_first() -> None:
    policy = Adaptive(40)
    for number in range(4_000):
        for name, length in (("tool", 20), ("report", 4_000)):
            chain = [f"{name} {number}".encode()]
            for _ in range(1 + (name == "tool")):
                policy.touch_chain(chain)
                for key in chain:
                    if (
                        key not in policy
                        and (victims := policy.make_room(policy.used_bytes - 39, anything)) is not None
                    ):
                        for victim in victims:
                            policy.evict(victim)
                        policy.add(key)
                policy.end_chain(chain, length)
    use(policy, "ab")
    policy.end_chain([b"a", b"b"], 20)
    use(policy, "cd")
    policy.end_chain([b"c", b"d"], 4_000)
    order = list(policy._order(None))
    assert order.index(b"d") < order.index(b"b"), "although it was used later"


def test_age_buckets() -> None:
    assert (bucket_of(0), bucket_of(15), bucket_of(16), bucket_of(1 << 60)) == (0, 0, 1, NUM_BUCKETS - 1)
    assert len(EDGES) + 1 == NUM_BUCKETS
    assert len(SurvivalTable().values) == NUM_CLASSES


@pytest.mark.parametrize(("name", "used"), [("lru", "LRU"), ("S3-FIFO", "S3FIFO"), ("Adaptive", "ADAPTIVE")])
def test_names(name: str, used: str) -> None:
    assert choose_policy(name) == (used, None)
    assert open_policy(name, 7).capacity_bytes == 7


@pytest.mark.parametrize(("name", "used"), [("FIFO", "S3FIFO"), ("MRU", "ADAPTIVE")])
def test_names_of_others_are_taken_with_a_warning(name: str, used: str) -> None:
    chosen, warning = choose_policy(name)
    assert chosen == used
    assert warning is not None
    assert name in warning
    assert used in warning


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'CLOCK': use one of LRU, LFU, ARC, S3FIFO, ADAPTIVE"):
        open_policy("CLOCK", 1)


# -- in the index ------------------------------------------------------------------------------------------------------


def refs(names: str, num_blocks: int = 4) -> list[ChunkRef]:
    return [ChunkRef(name.encode() * 16, num_blocks) for name in names]


def store(index: ChunkIndex, names: str, num_blocks: int = 4, ttl_s: float | None = None) -> int:
    """Store a chain, its writes included. Returns the number of chunks that were taken."""
    steps = index.prepare_store(refs(names, num_blocks), ttl_s=ttl_s)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=True)
    return len(steps)


def here(index: ChunkIndex, name: str) -> bool:
    return index.in_memory(name.encode() * 16)


def experienced_index(num_slots: int) -> ChunkIndex:
    """Return an adaptive index that has seen one chain used again and again, and hundreds that were not."""
    index = ChunkIndex(num_slots, cache_policy="ADAPTIVE")
    for number in range(1500):
        store(index, "hot")
        index.complete_load(index.prepare_load(refs("hot")), set(), set())
        store(index, chr(0x1000 + number) + chr(0x3000 + number))
    return index


def test_conversations_one_after_the_other_are_stored() -> None:
    """A turn loads what the turn before has stored, with nothing in between; it must count as a use, or none would."""
    index = ChunkIndex(200)
    for number in range(300):
        first, second = (
            "".join(map(chr, range(begin, begin + 8))) for begin in (0x1000 + 8 * number, 0x4000 + 8 * number)
        )
        assert store(index, first) == 8
        loads = index.prepare_load(refs(first))
        index.complete_load(loads, set(), set())
        assert (len(loads), store(index, first + second)) == (8, 8)


def test_leased_chunks_stay_and_others_go() -> None:
    index = experienced_index(8)
    cold = [chunk.ref for key, chunk in index._chunks.items() if key not in {ref.prefix_key for ref in refs("hot")}]
    assert index.lease("request", cold[:2], 10.0) == 2
    for name in "abcdefghijk":
        for _ in range(3):
            store(index, name)
    assert all(index.in_memory(ref.prefix_key) for ref in cold[:2])


def test_expired_chunks_go_first_and_leave_no_trace() -> None:
    index = ChunkIndex(4, cache_policy="ADAPTIVE")
    store(index, "ab", ttl_s=5.0)
    store(index, "cd")
    index.advance(6.0)
    assert (index.slots_in_use, index._slots.order.num_ghosts) == (2, 0)
    assert store(index, "ef") == 2
    assert all(here(index, name) for name in "cdef")


def test_nothing_is_refused_while_there_is_room() -> None:
    index = experienced_index(50)
    free = 50 - index.slots_in_use
    index.remove([ref.prefix_key for ref in refs("hot")])
    assert store(index, "".join(chr(0x5000 + number) for number in range(free + 3))) == free + 3


def test_a_chunk_that_memory_refuses_may_be_worth_its_room_on_disk() -> None:
    index = ChunkIndex(4, disk_capacity_bytes=4_000_000, stored_bytes=lambda blocks: 100, cache_policy="ADAPTIVE")
    for number in range(1000):
        for name in "hot!":
            store(index, name)
            index.complete_load(index.prepare_load(refs(name)), set(), set())
        store(index, chr(0x1000 + number))
    for name in "hot!":
        index.complete_load(index.prepare_load(refs(name)), set(), set())
    assert index.counters.refused == 0
    assert index.disk_used_bytes == 100 * 1004
    assert index._slots.order.make_room(1, anything, b"never seen") is None, "memory alone would have refused them"


def test_sizes_on_disk_are_bytes() -> None:
    index = ChunkIndex(64, disk_capacity_bytes=1000, stored_bytes=lambda blocks: 100 * blocks, cache_policy="ADAPTIVE")
    store(index, "ab", num_blocks=1)
    store(index, "cd", num_blocks=4)
    assert index.disk_used_bytes == 1000
    assert store(index, "e", num_blocks=2) == 1
    assert index.disk_used_bytes == 1000
    assert index.counters.evicted_disk == 2, "two tails make room for the chunk, and nothing else goes"


def test_every_policy_runs_in_the_index() -> None:
    for name in POLICIES:
        index = ChunkIndex(3, cache_policy=name)
        store(index, "abc")
        store(index, "d")
        assert index.slots_in_use == 3


def test_a_request_does_not_give_up_its_own_front_for_its_end() -> None:
    policy = Adaptive(3)
    chain = [b"a", b"b", b"c", b"d"]
    policy.touch_chain(chain)
    for key in chain[:3]:
        policy.add(key)
    assert policy.make_room(1, anything, b"d") is None


def test_experience_fades() -> None:
    table = SurvivalTable()
    at_first = table.values[0][0]
    table.hit(0, 0, 0, 300)
    table.update()
    assert table.values[0][0] > 2 * at_first
    for _ in range(2_000):
        table.update()
    assert table.values[0][0] < 1.01 * at_first


@pytest.mark.parametrize("lost", ["", "c", "bd", "e"])
def test_adaptive_chains_go_from_their_end(lost: str) -> None:
    """This holds even if a chunk between was lost: chunks behind the gap are never found, but the head still is."""
    policy = Adaptive(6)
    for _ in range(2):
        use(policy, "abcdef")
        for key in lost:
            policy.remove(key.encode())
        assert order_of(policy) == "".join(key for key in "fedcba" if key not in lost)
