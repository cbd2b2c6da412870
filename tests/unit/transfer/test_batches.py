"""Sizes of batches: they grow while calls are short, so that a tier that is slow, but works, keeps its deadlines."""

from __future__ import annotations

import pytest

from kvstore.model.chunks import Outcome
from kvstore.transfer import batches
from kvstore.transfer.batches import Batches

SHORT_S = 0.001


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batches, "time", clock)
    return clock


def call(made: Batches, clock: Clock, took_s: float, outcome: Outcome = Outcome.STORED) -> int:
    """Write as many chunks as a batch has, and return the number."""
    size = made.size
    with made.call() as outcomes:
        clock.now_s += took_s
        outcomes.extend([outcome] * size)
    return size


def test_it_grows_while_calls_are_short(clock: Clock) -> None:
    made = Batches(1 << 20)
    assert [call(made, clock, SHORT_S) for _ in range(5)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize(("slot_bytes", "most"), [(3 << 20, 4), (6 << 20, 2), (7 << 20, 1), (1 << 40, 1), (1, 8)])
def test_large_chunks_go_alone(clock: Clock, slot_bytes: int, most: int) -> None:
    made = Batches(slot_bytes)
    assert max(call(made, clock, SHORT_S) for _ in range(9)) == most


@pytest.mark.parametrize(("chunk_s", "size"), [(0.015, 6), (0.03, 3), (0.06, 1), (1.5, 1)])
def test_a_call_of_a_slow_tier_stays_short(clock: Clock, chunk_s: float, size: int) -> None:
    made = Batches(1)
    sizes = [call(made, clock, made.size * chunk_s) for _ in range(9)]
    assert max(sizes) <= 2 * size
    assert sizes[-1] == made.size == size


def test_after_a_failure_one_is_tried(clock: Clock) -> None:
    made = Batches(1)
    for _ in range(4):
        call(made, clock, SHORT_S)
    with pytest.raises(ZeroDivisionError), made.call():
        raise ZeroDivisionError
    assert [call(made, clock, SHORT_S) for _ in range(3)] == [1, 2, 4]


def test_a_tier_that_is_left_out_is_tried_with_one(clock: Clock) -> None:
    """It answers at once, although it may be slow when it works again."""
    made = Batches(1)
    assert [call(made, clock, SHORT_S, Outcome.FULL) for _ in range(4)] == [1, 2, 4, 8]
    assert [call(made, clock, SHORT_S, Outcome.FAILED) for _ in range(3)] == [8, 1, 1]
