"""Tests that every policy must pass, those of other packages too.

A policy's test is a class that says how to open it::

    class TestMyPolicy(PolicyConformance):
        def open_policy(self, capacity_bytes: int) -> Policy:
            return MyPolicy(capacity_bytes)
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import FunctionType, MethodType, ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy
from kvstore.policies.simulation import SimulatedStore

_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
_CAPACITY_BYTES = 24
_COMMON = [b"a", b"ab", b"abc"]
_CHAINS = [
    [*_COMMON, b"abcd", b"abcde", b"abcdef"],
    [*_COMMON, b"abcx", b"abcxy"],
    [b"a", b"aq", b"aqr"],
    [b"z", b"zz", b"zzz", b"zzzz"],
    *([name * length for length in (1, 2)] for name in (b"m", b"n", b"o", b"p", b"r", b"s")),
]
_PARENTS = {key: parent for chain in _CHAINS for parent, key in pairwise(chain)}
_KEYS = sorted({key for chain in _CHAINS for key in chain})
_ENTRIES_PER_KEY = 16  # objects that a policy may hold for a remembered key; generous, but a leak soon exceeds it


def chain_of(name: int, length: int, *, shared: int = 0) -> list[PrefixKey]:
    """Return the keys of a chain, head first; chains whose names differ in the last digit share ``shared`` chunks."""
    return [b"%d/%d" % (name // 10 if place < shared else name + (1 << 40), place) for place in range(length)]


def everything(key: PrefixKey) -> bool:  # noqa: ARG001 - a caller who holds nothing
    """Allow the eviction of every chunk."""
    return True


class PolicyMachine(RuleBasedStateMachine):
    """A policy for a small tier; the model has the sizes of the chunks, and those that are leased or held.

    Args:
        open_policy: makes a policy for a capacity.
    """

    def __init__(self, open_policy: Callable[[int], Policy]) -> None:
        super().__init__()
        self.policy = open_policy(_CAPACITY_BYTES)
        self.here: dict[PrefixKey, int] = {}
        self.leased: set[PrefixKey] = set()
        self.held: set[PrefixKey] = set()
        self.linked: set[PrefixKey] = set()  # keys whose prefix the policy was shown

    @rule(
        chain=st.sampled_from(_CHAINS),
        length=st.integers(1, 6),
        noted=st.sets(st.sampled_from(_KEYS), max_size=3),
        sizes=st.lists(st.integers(1, 6), min_size=6, max_size=6),
    )
    def request(self, chain: list[PrefixKey], length: int, noted: set[PrefixKey], sizes: list[int]) -> None:
        """Use a chain in a request, which stores the missing chunks as far as it can."""
        keys = chain[:length]
        self.policy.touch_chain(iter(keys), noted)
        self.linked.update(key for key in keys[1:] if key in self.here)
        for key, size_bytes in zip(keys, sizes, strict=False):
            if key not in self.here and not self.store(key, size_bytes, {*keys}, newcomer=key):
                break
            self.linked.update({key} & {*keys[1:]})
        self.policy.refresh_chain(keys)

    @rule(
        chain=st.sampled_from(_CHAINS),
        length=st.integers(0, 6),
        answer_tokens=st.sampled_from([0, 100, 1 << 40]),
    )
    def end(self, chain: list[PrefixKey], length: int, answer_tokens: int) -> None:
        """End a request, also one that used nothing."""
        self.policy.end_chain(iter(chain[:length]), answer_tokens)

    @rule(key=st.sampled_from(_KEYS), size_bytes=st.integers(1, 6))
    def bring_up(self, key: PrefixKey, size_bytes: int) -> None:
        """Bring a chunk up from a lower tier, regardless of its value."""
        if key not in self.here:
            self.store(key, size_bytes, set(), newcomer=None)

    @rule(keys=st.lists(st.sampled_from(_KEYS), unique=True, max_size=6))
    def adopt(self, keys: list[PrefixKey]) -> None:
        """Adopt chunks that an earlier process left, as many as there is room for."""
        room_bytes = _CAPACITY_BYTES - sum(self.here.values())
        added = [key for key in keys if key not in self.here][:room_bytes]
        self.policy.adopt((key, 1, None) for key in added)
        self.here.update(dict.fromkeys(added, 1))

    @rule(keys=st.lists(st.sampled_from(_KEYS), max_size=3))
    def remove(self, keys: list[PrefixKey]) -> None:
        """Remove chunks, held or not."""
        for key in keys:
            self.policy.remove(key)
            self.forget(key)

    @rule(chain=st.sampled_from(_CHAINS), length=st.integers(0, 6))
    def lease(self, chain: list[PrefixKey], length: int) -> None:
        """Lease the front of a chain, in place of the earlier lease."""
        self.leased = {*chain[:length]}

    @rule(keys=st.lists(st.sampled_from(_KEYS), max_size=3))
    def hold(self, keys: list[PrefixKey]) -> None:
        """Hold chunks, unknown ones and held ones, too."""
        for key in keys:
            self.policy.hold(key)
        self.held.update({*keys} & {*self.here})

    @rule(chain=st.sampled_from(_CHAINS), length=st.integers(0, 6))
    def give_up(self, chain: list[PrefixKey], length: int) -> None:
        """Give up the end of a chain."""
        given_up = self.policy.give_up(iter(chain[:length]))
        assert given_up <= len({*chain[:length]} & {*self.here} - self.held)

    @rule(keys=st.lists(st.sampled_from(_KEYS), max_size=3))
    def free(self, keys: list[PrefixKey]) -> None:
        """Free chunks, held or not."""
        for key in keys:
            self.policy.free(key)
        self.held.difference_update(keys)

    @rule(key=st.sampled_from(_KEYS), size_bytes=st.integers(1, 6))
    def shrink(self, key: PrefixKey, size_bytes: int) -> None:
        """Correct the size of a chunk to a smaller one."""
        if size_bytes <= self.here.get(key, 0):
            self.policy.resize(key, size_bytes)
            self.here[key] = size_bytes

    def store(self, key: PrefixKey, size_bytes: int, own: set[PrefixKey], newcomer: PrefixKey | None) -> bool:
        """Make room for a chunk and add it; return False if it was refused."""
        missing_bytes = sum(self.here.values()) + size_bytes - _CAPACITY_BYTES
        may_go = {other for other in self.here if other not in self.leased | own}
        victims = self.policy.make_room(missing_bytes, may_go.__contains__, newcomer)
        may_go -= self.held
        if victims is None:
            room_bytes = sum(self.here[other] for other in may_go)
            is_choice = self.policy.filters and newcomer is not None
            assert is_choice or room_bytes < missing_bytes, "refused, although room could be made"
            return False
        self.check_victims(victims, may_go, missing_bytes)
        for victim in victims:
            self.policy.evict(victim)
            self.forget(victim)
        self.policy.add(key, size_bytes)
        self.here[key] = size_bytes
        return True

    def check_victims(self, victims: Sequence[PrefixKey], may_go: set[PrefixKey], missing_bytes: int) -> None:
        """Check that victims may be evicted, suffice, are all needed, and leave no evictable chunk behind them."""
        assert len({*victims}) == len(victims)
        assert {*victims} <= may_go
        freed_bytes = [self.here[key] for key in victims]
        assert sum(freed_bytes) >= missing_bytes
        assert sum(freed_bytes[:-1]) < missing_bytes or not victims
        for place, victim in enumerate(victims):
            orphans = {key for key in self.linked if _PARENTS[key] == victim and key in self.here} - {*victims[:place]}
            assert not orphans & may_go, "a prefix went before what hangs on it"

    def forget(self, key: PrefixKey) -> None:
        """Forget a chunk that is no longer held."""
        self.here.pop(key, None)
        self.held.discard(key)
        self.linked.discard(key)

    @invariant()
    def orders_each_once(self) -> None:
        """All chunks have a place in the order of value."""
        assert sorted(self.policy.by_value()) == sorted(self.policy)

    @invariant()
    def agrees(self) -> None:
        """Check that the policy knows the chunks held, to the byte."""
        assert {*self.policy} == {*self.here}
        assert len(self.policy) == len(self.here)
        assert self.policy.used_bytes == sum(self.here.values()) <= _CAPACITY_BYTES
        assert 0 <= self.policy.num_ghosts <= self.policy.max_ghosts


class PolicyConformance:
    """Tests of a policy. Subclass it under a name that begins with ``Test``, and fill in the hook."""

    def open_policy(self, capacity_bytes: int) -> Policy:
        """Return a new policy for a tier of this capacity."""
        raise NotImplementedError

    def fill(self, *sizes_bytes: int) -> tuple[Policy, list[PrefixKey]]:
        """Return a policy that is full with one chain, and the chain's keys."""
        policy = self.open_policy(sum(sizes_bytes))
        keys = chain_of(0, len(sizes_bytes))
        policy.touch_chain(keys)
        for key, size_bytes in zip(keys, sizes_bytes, strict=True):
            policy.add(key, size_bytes)
        policy.refresh_chain(keys)
        return policy, keys

    def test_a_new_one_is_empty(self) -> None:
        """A new policy is empty and has nothing to evict."""
        policy = self.open_policy(10)
        assert (len(policy), policy.used_bytes, policy.num_ghosts, list(policy)) == (0, 0, 0, [])
        assert policy.make_room(1, everything) is None
        assert policy.make_room(0, everything) == []

    def test_bytes_are_counted(self) -> None:
        """Used bytes are exact after evictions and removals."""
        policy, keys = self.fill(5, 1, 7, 3)
        assert (policy.used_bytes, len(policy), set(policy)) == (16, 4, set(keys))
        policy.evict(keys[3])
        policy.evict(keys[3])
        assert (policy.used_bytes, keys[3] in policy, keys[2] in policy) == (13, False, True)
        policy.remove(keys[2])
        policy.remove(keys[2])
        assert (policy.used_bytes, len(policy)) == (6, 2)

    def test_sizes_may_turn_out_smaller(self) -> None:
        """Sizes may shrink after a put, as a codec reports them late; room is then made by the new sizes."""
        policy, keys = self.fill(5, 5)
        policy.resize(keys[1], 2)
        policy.resize(b"unknown", 2)
        assert policy.used_bytes == 7
        assert policy.make_room(2, everything) == [keys[1]]
        assert policy.make_room(3, everything) == keys[::-1]
        policy.evict(keys[1])
        assert policy.used_bytes == 5
        policy.remove(keys[0])
        assert policy.used_bytes == 0

    def test_adding_twice_is_refused(self) -> None:
        """A second add is refused, because the chunk would be counted twice."""
        policy, keys = self.fill(1, 1)
        with pytest.raises(InvalidCallError, match="twice"):
            policy.add(keys[0])
        assert policy.used_bytes == 2

    def test_a_chain_goes_from_its_end(self) -> None:
        """Chains are evicted from their end, as far as needed and no further."""
        policy, keys = self.fill(2, 2, 2, 2)
        assert policy.make_room(3, everything) == [keys[3], keys[2]]
        assert policy.make_room(8, everything) == keys[::-1]

    def test_all_that_is_needed_or_nothing(self) -> None:
        """``make_room`` frees all bytes needed or none, and by itself changes nothing."""
        policy, keys = self.fill(2, 2, 2)
        assert policy.make_room(7, everything) is None
        assert policy.make_room(6, lambda key: key != keys[1]) is None
        assert policy.make_room(6, everything) == policy.make_room(6, everything) == keys[::-1]
        assert (policy.used_bytes, set(policy)) == (6, set(keys))

    def test_what_is_leased_stays(self) -> None:
        """Leased chunks stay; others are evicted in their place, even their prefix if nothing else can be."""
        policy, keys = self.fill(1, 1, 1)
        assert policy.make_room(1, lambda key: key != keys[2]) == [keys[1]]
        assert policy.make_room(2, lambda key: key != keys[2]) == [keys[1], keys[0]]
        assert policy.make_room(3, lambda key: key != keys[2]) is None

    def test_what_is_held_is_not_offered(self) -> None:
        """Held chunks are not offered until they are freed; they are counted, resized and removed like others."""
        policy, keys = self.fill(2, 2, 2, 2)
        for key in (keys[3], keys[3], keys[2], b"unknown"):
            policy.hold(key)
        assert policy.make_room(6, everything) is None
        assert policy.make_room(4, {*keys[:2]}.__contains__) == [keys[1], keys[0]]
        assert (len(policy), policy.used_bytes) == (4, 8)
        policy.resize(keys[3], 1)
        policy.touch_chain(keys)
        for key in (keys[3], keys[3], b"unknown"):
            policy.free(key)
        assert policy.make_room(1, everything) == [keys[3]]
        policy.evict(keys[2])
        policy.free(keys[2])
        assert (len(policy), policy.used_bytes) == (3, 5)
        policy.hold(keys[1])
        policy.remove(keys[1])
        policy.free(keys[1])
        assert (set(policy), policy.used_bytes) == ({keys[0], keys[3]}, 3)
        assert {*(policy.make_room(3, everything) or ())} == {keys[0], keys[3]}

    def test_what_is_given_up_goes_first(self) -> None:
        """It goes from its end, until it is used again; what others depend on, or what is held, is not given up."""
        policy = self.open_policy(9)
        kept, given_up, fork = chain_of(0, 3), chain_of(10, 3), chain_of(20, 3)
        for chain in (given_up, kept, [*given_up[:1], *fork[1:]]):
            policy.touch_chain(chain)
            for key in chain:
                if key not in policy:
                    policy.add(key)
        for _ in range(3):
            policy.touch_chain(given_up)
        assert policy.give_up(given_up) == 2, "the stem has another branch"
        assert policy.give_up([b"unknown"]) == 0
        assert policy.make_room(2, everything) == [given_up[2], given_up[1]]
        assert policy.make_room(1, lambda key: key != given_up[2]) not in ([given_up[1]], [given_up[0]])
        policy.evict(given_up[2])
        policy.touch_chain(given_up[:2])
        assert policy.give_up(given_up[:1]) == 0
        assert given_up[1] not in (policy.make_room(1, everything) or ())
        policy.hold(given_up[1])
        assert policy.give_up(given_up[:2]) == 0
        assert list(policy.own_end(given_up)) == [given_up[1]]
        assert list(policy.own_end(kept)) == kept[::-1]

    def test_a_chunk_goes_before_its_prefix(self) -> None:
        """Chunks are evicted before a shared prefix, although it is older and only other chains used it since."""
        chooser = random.Random(5)  # noqa: S311 - not a secret
        store = SimulatedStore([self.open_policy(120)])
        parents: dict[PrefixKey, PrefixKey] = {}
        for _ in range(1500):
            keys = chain_of(chooser.randrange(300) ** 2 // 300, chooser.randint(1, 8), shared=4)
            parents.update(zip(keys[1:], keys, strict=False))
            store.request(keys, [chooser.randint(1, 4) for _ in keys])
            here = store.tiers[0].policy
            assert all(parents[key] in here for key in here if key in parents)
        assert store.tiers[0].counts.evicted_chunks > 100

    def test_nothing_is_refused_while_there_is_room(self) -> None:
        """A chunk is never refused while there is room, even an unknown one."""
        store = SimulatedStore([self.open_policy(400)])
        for name in range(100):
            store.request(chain_of(10 * name, 4), [1] * 4)
        assert (store.tiers[0].counts.written_chunks, store.tiers[0].policy.used_bytes) == (400, 400)

    def test_what_is_used_again_is_found(self) -> None:
        """A small hot set stays in the tier during a stream of chunks that are used once."""
        store = SimulatedStore([self.open_policy(200)])
        for number in range(3000):
            store.request(chain_of(10 * (number % 10), 4), [1] * 4)
            store.request(chain_of(1000 + 10 * number, 4), [1] * 4)
        assert store.hit_rate > 0.4

    def test_a_chunk_larger_than_the_tier_is_refused(self) -> None:
        """A chunk larger than the tier is refused, and nothing is evicted for it."""
        store = SimulatedStore([self.open_policy(10)])
        store.request(chain_of(0, 2), [5, 5])
        store.request(chain_of(10, 1), [11])
        assert set(store.tiers[0].policy) == set(chain_of(0, 2))

    def test_removed_chunks_leave_no_trace(self) -> None:
        """Removed keys, held or only remembered, vanish from the answers at once and from its objects soon after."""
        policy = self.open_policy(40)
        store = SimulatedStore([policy])
        keys = [key for name in range(0, 300, 10) for key in chain_of(name, 4)]
        for _ in range(3):
            for name in range(0, 300, 10):
                store.request(chain_of(name, 4), [1] * 4)
        for key in keys:
            policy.remove(key)
        assert (len(policy), policy.used_bytes, policy.num_ghosts) == (0, 0, 0)
        for name in range(10_000, 30_000, 10):
            store.request(chain_of(name, 4), [1] * 4)
        assert not {*keys} & {thing for thing in _reached(policy) if isinstance(thing, bytes)}

    def test_memory_is_bounded(self) -> None:
        """Memory is bounded by the chunks held and the keys that may be remembered."""
        self.check_memory(touches=100_000)

    @pytest.mark.soak
    def test_memory_is_bounded_for_long(self) -> None:
        """Memory stays bounded over ten million touches."""
        self.check_memory(touches=10_000_000)

    def check_memory(self, touches: int) -> None:
        """Touch mostly new keys and some old ones, and check the bound of the memory."""
        chooser = random.Random(9)  # noqa: S311 - not a secret
        policy = self.open_policy(2_000)
        store = SimulatedStore([policy])
        name = 0
        while store.chunks < touches:
            name += 10
            keys = chain_of(name if chooser.random() < 0.8 else chooser.randrange(0, name, 10), 8)
            store.request(keys, [1] * 8)
            assert policy.num_ghosts <= policy.max_ghosts
        assert policy.used_bytes <= 2_000
        assert sum(1 for _ in _reached(policy)) < _ENTRIES_PER_KEY * (policy.max_ghosts + len(policy))

    def test_any_order_of_calls(self) -> None:
        """Compare with a model of the chunks held and of their prefixes."""
        # Any factory works, although the type asks for a class.
        run_state_machine_as_test(lambda: PolicyMachine(self.open_policy), settings=_SETTINGS)  # type: ignore[arg-type]


def _reached(root: object) -> Iterator[object]:
    """Yield every object reachable from ``root``, itself included, code and classes excluded."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        thing = waiting.pop()
        yield thing
        for other in gc.get_referents(thing):
            if id(other) not in seen and not isinstance(other, (type, ModuleType, FunctionType, MethodType)):
                seen.add(id(other))
                waiting.append(other)
