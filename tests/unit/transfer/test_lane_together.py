"""Small chunks that wait for a thread are written in one call, and each has its outcome."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from support.gate import HANG_GUARD_S, Gate, until
from support.lane_bench import Bench, ref_of
from support.rig import SLOT_BYTES

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError, TierTimeoutError
from kvstore.tiers.base import Transfer
from kvstore.transfer.lane import WRITE_THREADS, Flushed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Together:
    """A tier whose calls of ``put`` are held up, so that more chunks wait than there are threads."""

    def __init__(self, bench: Bench, gate: Gate) -> None:
        self.bench, self.gate = bench, gate
        bench.lane._batches.size = 8
        self.puts: list[list[ChunkRef]] = []
        self.answer: Callable[[Sequence[Transfer]], list[Outcome]] = bench.tier.put
        bench.tier.put = self.put  # type: ignore[method-assign]

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        if len(self.puts) < WRITE_THREADS:
            self.puts.append([transfer.ref for transfer in transfers])
            self.gate()
            return [Outcome.STORED] * len(transfers)
        self.puts.append([transfer.ref for transfer in transfers])
        return self.answer(transfers)

    def write(self, *numbers: int) -> None:
        """Write chunks that wait for a thread: at most three in a call."""
        for number in range(WRITE_THREADS):
            self.bench.write(number)
            assert until(lambda number=number: len(self.puts) > number)  # type: ignore[misc]
        self.bench.write(*numbers)

    def several(self) -> list[ChunkRef]:
        """Return the chunks that were written in one call with others."""
        return [ref for refs in self.puts if len(refs) > 1 for ref in refs]


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls that the gate holds up count as short."""
    monkeypatch.setattr("kvstore.transfer.batches._MAX_CALL_S", 1e6)


@pytest.fixture
def together(bench: Bench, gate: Gate) -> Together:
    return Together(bench, gate)


def test_small_chunks_that_wait_are_written_together(bench: Bench, together: Together, gate: Gate) -> None:
    together.write(*range(4, 16))
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S)
    assert bench.held() == {ref_of(number) for number in range(4, 16)}
    assert sorted(bench.written) == [(ref_of(number), True) for number in range(16)]
    assert len(together.puts[WRITE_THREADS]) == 3, "a share: each of the threads has one"
    assert all(refs == sorted(refs) for refs in together.puts)


def test_chunks_that_are_not_small_are_written_one_by_one(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, gate: Gate
) -> None:
    monkeypatch.setattr("kvstore.transfer.batches._MAX_BYTES", 2 * SLOT_BYTES - 1)
    other = Bench()
    together = Together(other, gate)
    together.write(*range(4, 16))
    gate.open()
    assert other.lane.flush(HANG_GUARD_S)
    assert together.several() == []
    other.lane.close()


def test_of_chunks_written_together_each_has_its_outcome(bench: Bench, together: Together, gate: Gate) -> None:
    outcomes = {5: Outcome.FULL, 6: Outcome.FAILED}
    together.answer = lambda transfers: [
        outcomes.get(transfer.ref.prefix_key[0], Outcome.STORED) for transfer in transfers
    ]
    together.write(*range(4, 16))
    bench.lane.remove([ref_of(4)])
    gate.open()
    assert bench.lane.flush(HANG_GUARD_S) == Flushed(failed=1, full=1)
    assert {ref for ref, stored in bench.written if not stored} == {ref_of(4), ref_of(5), ref_of(6)}
    assert bench.forgotten == [[ref_of(4)]]
    assert ref_of(4) not in together.several(), "one that was removed does not go with the others"


def test_chunks_written_together_are_in_use_until_a_late_call_ends(
    bench: Bench, together: Together, gate: Gate
) -> None:
    late: dict[Future[list[Outcome]], list[Outcome]] = {}

    def time_out(transfers: Sequence[Transfer]) -> list[Outcome]:
        outcomes = [Outcome.STORED if transfer.ref != ref_of(5) else Outcome.FULL for transfer in transfers]
        pending: Future[list[Outcome]] = Future()
        late[pending] = outcomes
        raise TierTimeoutError("too late", pending)

    together.answer = time_out
    together.write(*range(4, 16))
    gate.open()
    assert until(lambda: sum(map(len, late.values())) == 12)
    assert until(lambda: bench.lane.flush(0).pending == 12), "the others have been reported"
    assert {ref for ref, _ in bench.written} == {ref_of(number) for number in range(4)}
    for pending, outcomes in late.items():
        pending.set_result(outcomes)
    assert bench.lane.flush(HANG_GUARD_S) == Flushed(full=1)
    assert sorted(bench.written) == [(ref_of(number), number != 5) for number in range(16)]


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("how", ["fails", "answers late about one of them"])
def test_after_an_error_chunks_written_together_take_no_room(gate: Gate, how: str, *, is_shared: bool) -> None:
    """Some of them may be stored. Where other engines write, they may be theirs, too."""
    bench = Bench(asks=is_shared)
    together = Together(bench, gate)

    def break_down(transfers: Sequence[Transfer]) -> list[Outcome]:
        bench.tier.chunks[transfers[0].ref] = b""
        if how == "fails":
            raise TierError("broken")
        pending: Future[list[Outcome]] = Future()
        pending.set_result([Outcome.STORED])
        raise TierTimeoutError("too late", pending)

    together.answer = break_down
    together.write(*range(4, 16))
    gate.open()
    flushed = bench.lane.flush(HANG_GUARD_S)
    several = together.several()
    assert len(several) >= 3
    alone = [ref for refs in together.puts[WRITE_THREADS:] if len(refs) == 1 for ref in refs]
    stored_late = [] if how == "fails" else alone
    assert flushed == Flushed(failed=12 - len(stored_late))
    assert {ref for ref, stored in bench.written if stored} == {*map(ref_of, range(4)), *stored_late}
    assert {ref for refs in bench.forgotten for ref in refs} == (set() if is_shared else set(several))  # type: ignore[attr-defined]
    assert is_shared or bench.held().isdisjoint(several)
    bench.lane.close()
