"""Deadlines by name, compared with a plain mapping, and bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.invariants import check_deadlines

from kvstore.index.deadlines import Deadlines

STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "withdraw", "take"]), st.sampled_from("abc"), st.integers(0, 20)), max_size=60
)


@given(STEPS)
def test_as_a_mapping_would(steps: list[tuple[str, str, int]]) -> None:
    deadlines, known = Deadlines[str](), dict[str, float]()
    for action, name, at_s in steps:
        if action == "set":
            deadlines.set(name, at_s)
            known[name] = at_s
        elif action == "withdraw":
            deadlines.withdraw(name)
            known.pop(name, None)
        else:
            due = deadlines.take_due(at_s)
            assert sorted(due) == sorted(name for name, moment in known.items() if moment <= at_s)
            moments = [known.pop(name) for name in due]
            assert moments == sorted(moments)
        check_deadlines(deadlines, known)


def test_moments_that_were_moved_are_cleared_away() -> None:
    deadlines = Deadlines[str]()
    for moment in range(10_000):
        deadlines.set("a", moment)
        deadlines.set(f"gone {moment}", float("inf"))
        deadlines.withdraw(f"gone {moment}")
        assert len(deadlines._heap) <= 70
    assert deadlines.take_due(9_998) == []
    assert deadlines.take_due(9_999) == ["a"]
    assert deadlines.take_due(float("inf")) == []
