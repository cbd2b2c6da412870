"""Prefixes of chunks, compared with a table of all parents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.schedules import schedules

from kvstore.policies.prefixes import Prefixes

KEYS = [bytes([number]) for number in range(5)]


@schedules(200)
@given(steps=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([*KEYS, None])), max_size=30))
def test_children_are_counted_as_chunks_come_and_go(steps: list[tuple[bytes, bytes | None]]) -> None:
    prefixes, parents = Prefixes(), dict[bytes, bytes]()
    for key, parent in steps:
        if parent is None:
            prefixes.unlink(key)
            parents.pop(key, None)
        elif parent != key and key not in parents:
            prefixes.link(key, parent)
            parents[key] = parent
        for each in KEYS:
            assert (each in prefixes) == (each in parents)
            assert prefixes.parent(each) == parents.get(each)
            assert prefixes.num_children(each) == [*parents.values()].count(each)
    for key in KEYS:
        prefixes.unlink(key)
    assert not prefixes._parents
    assert not prefixes._counts
