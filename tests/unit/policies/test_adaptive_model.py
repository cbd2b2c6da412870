"""The adaptive policy's order, compared with that of a plain model after any calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.plain_adaptive import PlainAdaptive

from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import PrefixKey
from kvstore.policies import Adaptive
from kvstore.policies import adaptive as adaptive_module

_SETTINGS = settings(max_examples=100, stateful_step_count=30, deadline=None, database=None)
_KEYS = [b"%d" % number for number in range(12)]
_CHAIN = st.lists(st.sampled_from(_KEYS), unique=True, max_size=6)


class AdaptiveMachine(RuleBasedStateMachine):
    """Both policies, given the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.model = Adaptive(1000), PlainAdaptive(1000)
        self.is_exact = int(adaptive_module._ADOPTED_TOGETHER) == 1

    def both(self, call: Callable[[Adaptive | PlainAdaptive], object]) -> None:
        """Call both."""
        assert call(self.policy) == call(self.model)

    @rule(keys=_CHAIN)
    def adopt(self, keys: list[PrefixKey]) -> None:
        """Adopt chunks, of which some may be remembered."""
        new = [(key, 1, None) for key in keys if key not in self.model]
        self.both(lambda policy: policy.adopt(iter(new)))

    @rule(keys=_CHAIN, noted=st.sets(st.sampled_from(_KEYS), max_size=3), leaves=st.sets(st.sampled_from(_KEYS)))
    def touch(self, keys: list[PrefixKey], noted: set[PrefixKey], leaves: set[PrefixKey]) -> None:
        """Use a chain."""
        self.both(lambda policy: policy.touch_chain(keys, noted, leaves))

    @rule(keys=_CHAIN)
    def refresh(self, keys: list[PrefixKey]) -> None:
        """Refresh a chain."""
        self.both(lambda policy: policy.refresh_chain(keys))

    @rule(keys=_CHAIN)
    def add(self, keys: list[PrefixKey]) -> None:
        """Add chunks."""
        for key in keys:
            if key not in self.model:
                self.both(lambda policy, key=key: policy.add(key))  # type: ignore[misc]

    @rule(keys=_CHAIN, how=st.sampled_from(["evict", "remove", "hold", "free"]))
    def change(self, keys: list[PrefixKey], how: str) -> None:
        """Evict, remove, hold or free chunks, unknown ones and held ones, too."""
        for key in keys:
            self.both(lambda policy, key=key: getattr(policy, how)(key))  # type: ignore[misc]

    @rule(keys=_CHAIN)
    def give_up(self, keys: list[PrefixKey]) -> None:
        """Give up a chain's end."""
        self.both(lambda policy: policy.give_up(keys))

    @rule(keys=_CHAIN, tokens=st.sampled_from([0, 100, 1 << 40]))
    def end(self, keys: list[PrefixKey], tokens: int) -> None:
        """End a request, also one that has touched nothing."""
        self.both(lambda policy: policy.end_chain(keys, tokens))

    @rule(missing=st.integers(1, 12), newcomer=st.sampled_from([None, *_KEYS]), stay=st.sets(st.sampled_from(_KEYS)))
    def make_room(self, missing: int, newcomer: PrefixKey | None, stay: set[PrefixKey]) -> None:
        """Make room, and evict."""
        newcomer = None if newcomer is None or newcomer in self.model else newcomer
        victims = self.policy.make_room(missing, lambda key: key not in stay, newcomer)
        others = self.model.make_room(missing, lambda key: key not in stay, newcomer)
        assert victims == others or (not self.is_exact and (victims is None) == (others is None))
        for victim in victims or ():
            self.both(lambda policy, key=victim: policy.evict(key))  # type: ignore[misc]

    @invariant()
    def agrees(self) -> None:
        """Compare everything that can be seen."""
        order, expected = list(self.policy._order(None)), list(self.model._order(None))
        assert sorted(order) == sorted(expected), "each chunk once"
        if self.is_exact:  # else those that were evicted return to their place of equal value
            assert order == expected
            assert self.policy.by_value() == self.model.by_value()
        assert self.policy.num_ghosts == self.model.num_ghosts
        units = self.policy._units
        assert {key: (unit.cls, unit.time) for key, unit in units.items()} == {
            key: (unit.cls, unit.time) for key, unit in self.model._units.items()
        }
        for unit in {*units.values()}:
            assert unit.num_keys == sum(known is unit for known in units.values())
            assert unit.num_here == len(list(self.policy._deepest_first(unit)))
            assert len({*unit.keys}) == len(unit.keys)


@pytest.mark.parametrize("together", [1, 3, 64])
def test_any_calls(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_module, "_ADOPTED_TOGETHER", together)
    run_state_machine_as_test(
        AdaptiveMachine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None, database=None)
    )


@pytest.mark.parametrize("number", [1, 64, 65, 1000])
def test_adopted_chunks_go_in_their_order(number: int) -> None:
    policy = Adaptive(number)
    keys = [b"%d" % place for place in range(number)]
    policy.adopt((key, 1, None) for key in keys)
    assert policy.make_room(number, lambda _: True) == keys
    assert len(policy) == policy.used_bytes == number


def test_an_adopted_chunk_that_was_removed_comes_back_once() -> None:
    policy = Adaptive(8)
    policy.adopt((key, 1, None) for key in (b"a", b"b", b"c"))
    policy.remove(b"b")
    policy.adopt([(b"b", 1, None)])
    assert policy.make_room(3, lambda _: True) == [b"a", b"c", b"b"]


def test_what_is_adopted_twice_is_refused_and_the_rest_is_kept() -> None:
    policy = Adaptive(8)
    with pytest.raises(InvalidCallError, match="added twice"):
        policy.adopt([(b"a", 1, None), (b"b", 1, None), (b"a", 1, None), (b"c", 1, None)])
    assert policy.make_room(2, lambda _: True) == [b"a", b"b"]


def test_a_request_that_ends_changes_no_chunks_of_others_that_were_adopted_with_its_own() -> None:
    policy = Adaptive(8)
    policy.adopt((key, 1, None) for key in (b"a", b"b"))
    policy.end_chain([b"a"], 100)
    assert {policy._units[key].cls for key in (b"a", b"b")} == {0}
