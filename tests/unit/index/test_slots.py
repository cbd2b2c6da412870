"""Order in which free slots are used."""

from __future__ import annotations

import pytest
from support.index import CHUNK, refs_of

from kvstore.index.entries import LOADING, READY, Entries, Entry
from kvstore.index.slots import Slots
from kvstore.policies import open_policy


@pytest.mark.parametrize(("take_turns", "last"), [(False, [2, 1, 0]), (True, [1, 2, 0])])
def test_the_slot_of_a_read_that_may_hang_is_used_last_of_all(last: list[int], *, take_turns: bool) -> None:
    order = open_policy("LRU", 3)
    chunks = Entries(tracks_changes=False)
    slots = Slots(chunks, 3, order, take_turns=take_turns)
    held = [Entry(*ref) for ref in refs_of(3 * CHUNK)]
    for chunk, state in zip(held, (LOADING, READY, READY), strict=True):
        slots.fill(chunk, slots.take() or 0, state)
    for chunk in held:
        slots.drop(chunk)
    assert [slots.take() for _ in held] == last
    slots.free.extend((0, 1))  # all were used: none of these hangs
    slots.fill(held[2], 2, READY)
    slots.drop(held[2])
    assert slots.free[-1] == (1 if take_turns else 2)
