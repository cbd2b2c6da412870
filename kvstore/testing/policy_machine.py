"""Tests of any order of calls: a policy, and a model of the chunks held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.model.keys import PrefixKey
from kvstore.policies.base import Policy

SETTINGS = settings(
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


class PolicyMachine(RuleBasedStateMachine):
    """A policy for a small tier; the model has the sizes of the chunks, and those that are leased.

    Args:
        open_policy: makes a policy for a capacity.
    """

    def __init__(self, open_policy: Callable[[int], Policy]) -> None:
        super().__init__()
        self.policy = open_policy(_CAPACITY_BYTES)
        self.here: dict[PrefixKey, int] = {}
        self.leased: set[PrefixKey] = set()
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

    @rule(key=st.sampled_from(_KEYS), size_bytes=st.integers(1, 6))
    def bring_up(self, key: PrefixKey, size_bytes: int) -> None:
        """Bring a chunk up from a lower tier, regardless of its value."""
        if key not in self.here:
            self.store(key, size_bytes, set(), newcomer=None)

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

    def store(self, key: PrefixKey, size_bytes: int, own: set[PrefixKey], newcomer: PrefixKey | None) -> bool:
        """Make room for a chunk and add it; return False if it was refused."""
        missing_bytes = sum(self.here.values()) + size_bytes - _CAPACITY_BYTES
        may_go = {other for other in self.here if other not in self.leased | own}
        victims = self.policy.make_room(missing_bytes, may_go.__contains__, newcomer)
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
        self.linked.discard(key)

    @invariant()
    def agrees(self) -> None:
        """Check that the policy knows the chunks held, to the byte."""
        assert {*self.policy} == {*self.here}
        assert len(self.policy) == len(self.here)
        assert self.policy.used_bytes == sum(self.here.values()) <= _CAPACITY_BYTES
        assert 0 <= self.policy.num_ghosts <= self.policy.max_ghosts
