"""Waits for a hand-over with several ranks: which requests wait, and until when."""

from __future__ import annotations

import pytest

from kvstore.adapters.vllm.plan import StepReport
from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.adapters.vllm.scheduler.waits import ABSENT_S, Waits
from kvstore.protocol.progress import ALL_TOKENS, Progress

COMING = Progress("prefill", 4, {3: ALL_TOKENS})
OVER = Progress("prefill", 4, {})


def waiting(*told: Progress | None) -> Waits:
    """Return the waits of a request for 64 tokens, with its sender's report to each rank."""
    waits = Waits()
    waits.num_ranks = len(told)
    waits.begin("request", 64, 3600.0, DisaggSpec("request", "127.0.0.1", (1,), sender="prefill", handover=3))
    waits.note_senders({rank: {"prefill": said} for rank, said in enumerate(told) if said is not None})
    return waits


def test_what_still_comes_to_one_rank_is_waited_for() -> None:
    waits = waiting(OVER, COMING)
    assert all(waits.must_wait("request", 32) for _ in range(5))


def test_a_sender_that_left_one_rank_is_waited_for_on_none() -> None:
    """The parts that other ranks still get are of no use without that rank's part."""
    waits = waiting(None, COMING)
    assert waits.must_wait("request", 32), "it may be about to come"
    wait = waits._waits["request"]
    assert wait.absent_s is not None
    wait.absent_s -= 2 * ABSENT_S
    assert waits.must_wait("request", 32), "what has come is asked for once more"
    assert not waits.must_wait("request", 32)
    assert waits.timeouts == 0


def test_a_sender_of_fewer_ranks_says_nothing_to_some() -> None:
    waits = waiting(COMING, None)
    waits.takes_parts = True
    assert waits.must_wait("request", 32)
    assert waits._waits["request"].absent_s is None
    waits.note_senders({0: {"prefill": OVER}})
    assert waits.must_wait("request", 32), "what has come is asked for once more"
    assert not waits.must_wait("request", 32)
    assert waits.timeouts == 0


def test_what_has_come_is_asked_for_once_more() -> None:
    waits = waiting(OVER, OVER)
    assert waits.must_wait("request", 32)
    assert not waits.must_wait("request", 32)


@pytest.mark.parametrize(
    "lost", [Progress("prefill", 4, {3: 0}), Progress("prefill", 4, {}, {3: 0})], ids=["under way", "over"]
)
def test_what_one_rank_has_lost_is_waited_for_on_none(lost: Progress) -> None:
    """The other one hangs in the middle of it, and stays connected."""
    waits = waiting(lost, COMING)
    assert waits.must_wait("request", 0), "what has come is asked for once more"
    assert not waits.must_wait("request", 0)
    assert waits.timeouts == 0


def test_what_comes_before_a_lost_chunk_is_waited_for() -> None:
    waits = waiting(Progress("prefill", 4, {}, {3: 48}), COMING)
    assert all(waits.must_wait("request", 32) for _ in range(5))
    assert waits.must_wait("request", 48)
    assert not waits.must_wait("request", 48)


def test_a_rank_says_only_what_has_changed() -> None:
    waits = waiting(COMING)
    waits.note_senders({0: {"another": COMING}})
    assert all(waits.must_wait("request", 32) for _ in range(5))
    waits.note_senders({0: {"prefill": None}})
    waits.must_wait("request", 32)
    assert waits._waits["request"].absent_s is not None
    assert waits._senders[0].keys() == {"another"}


def test_what_several_reports_of_a_rank_say_counts() -> None:
    report, later = StepReport(), StepReport()
    report.senders = {0: {"a": COMING, "b": COMING}, 1: {"a": COMING}}
    later.senders = {0: {"b": None, "c": OVER}}
    report.merge(later)
    assert report.senders == {0: {"a": COMING, "b": None, "c": OVER}, 1: {"a": COMING}}
