"""Times to live that change while a lane writes and removes chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.gate import HANG_GUARD_S, Gate
from support.lane_bench import Bench, ref_of

from kvstore.model.lifetime import Lifetime

if TYPE_CHECKING:
    from kvstore.model.chunks import ChunkRef


def await_thread(bench: Bench) -> None:
    """Wait until the thread that tells the tier has done all it was asked, for which no flush waits."""
    bench.lane.remove([ref_of(15)])
    assert bench.lane.settle(HANG_GUARD_S)


def test_a_time_to_live_that_changes_during_a_write_is_told_after_it(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[set[ChunkRef], list[Lifetime]]] = []
    monkeypatch.setattr(bench.tier, "limit", lambda lifetimes: told.append((bench.held(), list(lifetimes))))
    bench.tier.before_put = gate
    bench.write(1)
    assert gate.reached.wait(HANG_GUARD_S)
    for until_s in (7.0, 8.0):
        bench.lane.note_times((), [Lifetime(ref_of(1), until_s)])
    await_thread(bench)
    assert told == []
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    await_thread(bench)
    bench.lane.note_times((), [Lifetime(ref_of(1), None)])
    await_thread(bench)
    bench.lane.close()
    assert told == [({ref_of(1)}, [Lifetime(ref_of(1), until_s)]) for until_s in (8.0, None)]


@pytest.mark.parametrize("event", ["remove", "clear", "write"])
def test_a_time_to_live_is_not_told_of_what_is_stored_later(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """Its removal joins one that waits already, so the next write does not wait for what was asked before."""
    told: list[Lifetime] = []
    monkeypatch.setattr(bench.tier, "limit", told.extend)
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(3)])
    assert gate.reached.wait(HANG_GUARD_S)
    bench.lane.remove([ref_of(4)])
    bench.lane.note_times((), [Lifetime(ref_of(1), None)])
    if event == "remove":
        bench.lane.remove([ref_of(1)])
    elif event == "clear":
        bench.lane.clear()
    else:
        bench.write(1)
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    bench.lane.close()
    assert told == []


def test_many_times_to_live_are_told_in_parts(bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[Lifetime]] = []
    monkeypatch.setattr(bench.tier, "limit", told.append)
    monkeypatch.setattr("kvstore.transfer.lane._MAX_LIMITS", 3)
    bench.before_forgetting = gate
    bench.lane.remove([ref_of(20)])
    assert gate.reached.wait(HANG_GUARD_S)
    for until_s in (5.0, 6.0):
        bench.lane.note_times((), [Lifetime(ref_of(number), until_s) for number in range(8)])
    gate.open()
    assert bench.lane.settle(HANG_GUARD_S)
    bench.lane.close()
    assert [len(some) for some in told] == [3, 3, 2]
    assert {one.until_s for some in told for one in some} == {6.0}
