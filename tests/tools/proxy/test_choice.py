"""Choice of the engine: the least loaded, the one that knows a prompt's beginning, in proportion to the weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tools.proxy import choice
from kvstore.tools.proxy.choice import Beginning, Rota, beginnings_of
from kvstore.tools.proxy.requests import Ask

KIB = b"0123456789abcdef" * 64


@dataclass(eq=False)
class Engine:
    name: str
    weight: float = 1.0
    load: int = 0
    is_well: bool = True
    credit: float = 0.0


def rota(*weights: float) -> Rota[Engine]:
    return Rota(Engine(name, weight) for name, weight in zip("abcdefgh", weights, strict=False))


def chosen(engines: Rota[Engine], prompt: bytes = b"") -> str:
    return engines.candidates(beginnings_of([b"m"], prompt))[0].name


class TestLoad:
    def test_equals_take_turns(self) -> None:
        assert "".join(chosen(engines) for engines in [rota(1, 1, 1)] for _ in range(6)) == "abcabc"

    def test_as_often_as_their_weights_say(self) -> None:
        engines = rota(3, 1)
        assert Counter(chosen(engines) for _ in range(40)) == {"a": 30, "b": 10}

    def test_the_least_loaded_for_its_weight(self) -> None:
        engines = rota(1, 1, 4)
        a, b, c = engines.engines
        a.load, b.load, c.load = 2, 1, 3
        assert [engine.name for engine in engines.candidates()] == ["c", "b", "a"]
        c.load = 5
        assert chosen(engines) == "b"

    def test_only_those_that_answer(self) -> None:
        engines = rota(1, 1)
        engines.engines[0].is_well = False
        assert [chosen(engines) for _ in range(3)] == ["b"] * 3
        engines.engines[1].is_well = False
        assert engines.candidates() == []

    @given(st.lists(st.tuples(st.floats(0.001, 1000), st.integers(0, 50), st.booleans()), min_size=1, max_size=6))
    def test_all_that_answer_are_candidates_once(self, given_: list[tuple[float, int, bool]]) -> None:
        engines = Rota([Engine(str(at), *one) for at, one in enumerate(given_)])
        found = engines.candidates()
        assert {engine.name for engine in found} == {engine.name for engine in engines.engines if engine.is_well}
        loads = [engine.load / engine.weight for engine in found]
        assert loads == sorted(loads)


class TestBeginnings:
    def test_what_begins_alike_goes_to_one_engine(self) -> None:
        engines = rota(1, 1, 1)
        first = chosen(engines, KIB + b"one user")
        others = [chosen(engines, b"%d" % number + KIB) for number in range(2)]
        assert sorted([first, *others]) == ["a", "b", "c"]
        assert [chosen(engines, KIB + b"another user, who says more") for _ in range(5)] == [first] * 5
        assert [chosen(engines, b"1" + KIB) for _ in range(3)] == [others[1]] * 3

    def test_until_it_has_too_much_to_do(self) -> None:
        """A prompt that is known in full is worth a queue of four; a small part of it is worth none."""
        engines = rota(1, 1)
        owner = next(engine for engine in engines.engines if engine.name == chosen(engines, KIB))
        (other,) = {*engines.engines} - {owner}
        owner.load = 4
        assert chosen(engines, KIB) == owner.name
        assert chosen(engines, KIB + b"x" * 60_000) == other.name
        owner.load = 5
        assert chosen(engines, KIB) == other.name
        owner.load = 0
        assert chosen(engines, KIB) == other.name, "which has computed it since"

    def test_a_longer_beginning_counts_before_a_shorter_one(self) -> None:
        engines = rota(1, 1)
        long = KIB + b"a" * 7168
        owner = next(engine for engine in engines.engines if engine.name == chosen(engines, long))
        owner.load = 5
        assert chosen(engines, KIB) != owner.name
        owner.load = 0
        assert chosen(engines, KIB) != owner.name, "the other one has that now"
        assert chosen(engines, long + b"the next turn") == owner.name

    def test_not_of_an_engine_that_is_gone(self) -> None:
        engines = rota(1, 1)
        owner = chosen(engines, KIB)
        next(engine for engine in engines.engines if engine.name == owner).is_well = False
        assert chosen(engines, KIB) != owner
        left = [engine for engine in engines.engines if engine.name == owner]
        engines.replace(left)
        left[0].is_well = True
        assert chosen(engines, KIB) == owner
        engines.replace([Engine("new")])
        assert chosen(engines, KIB) == "new"
        assert set(engines._known.values()) == {*engines.engines}, "what is gone is not kept"

    def test_other_models_and_salts_begin_differently(self) -> None:
        def keys(**body: str) -> set[Beginning]:
            members = ", ".join(f'"{name}": "{value}"' for name, value in body.items())
            return {*Ask.parse(f"{{{members}}}".encode()).beginnings()}

        prompt = "x" * 600
        assert keys(model="a", prompt=prompt) == keys(prompt=prompt, model="a", temperature="1")
        assert not keys(model="a", prompt=prompt) & keys(model="b", prompt=prompt)
        assert not keys(model="a", prompt=prompt) & keys(model="a", cache_salt="s", prompt=prompt)
        assert keys(model="a", messages=prompt)
        assert not keys(model="a", prompt="short")

    def test_keys_are_few_and_of_the_leading_bytes_only(self) -> None:
        found = beginnings_of([], KIB * 64)
        assert [beginning.share for beginning in found] == [2.0**-power for power in range(8)]
        assert found == beginnings_of([], KIB * 64 + b"more")
        odd = beginnings_of([], KIB + b"x")
        assert [round(beginning.share * 1025) for beginning in odd] == [1025, 1024, 512]

    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choice, "_MAX_BEGINNINGS", 8)
        engines = rota(1)
        for number in range(100):
            chosen(engines, b"%d" % number + KIB)
        assert len(engines._known) == 8
        last = beginnings_of([b"m"], b"99" + KIB)
        assert {beginning.key for beginning in last} <= engines._known.keys()
