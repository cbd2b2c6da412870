"""Who waits for a hand-over, and until when, with several ranks."""

from __future__ import annotations

from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.adapters.vllm.scheduler.waits import ABSENT_S, Waits
from kvstore.protocol.progress import ALL_TOKENS, Progress

COMING = Progress("prefill", 4, {3: ALL_TOKENS})
OVER = Progress("prefill", 4, {})


def waiting(*told: Progress | None) -> Waits:
    """A request that waits for 64 tokens, with what its sender says to each rank."""
    waits = Waits()
    waits.num_ranks = len(told)
    waits.begin("request", 64, 3600.0, DisaggSpec("request", "127.0.0.1", (1,), sender="prefill", handover=3))
    waits.note_senders({rank: {"prefill": said} for rank, said in enumerate(told) if said is not None})
    return waits


def test_what_still_comes_to_one_rank_is_waited_for() -> None:
    waits = waiting(OVER, COMING)
    assert all(waits.must_wait("request", 32) for _ in range(5))


def test_a_sender_that_left_one_rank_is_waited_for_on_none() -> None:
    """What the others still get is of no use without that one's part."""
    waits = waiting(None, COMING)
    assert waits.must_wait("request", 32), "it may be about to come"
    wait = waits._waits["request"]
    assert wait.absent_s is not None
    wait.absent_s -= 2 * ABSENT_S
    assert waits.must_wait("request", 32), "what has come is asked for once more"
    assert not waits.must_wait("request", 32)
    assert waits.timeouts == 0


def test_what_has_come_is_asked_for_once_more() -> None:
    waits = waiting(OVER, OVER)
    assert waits.must_wait("request", 32)
    assert not waits.must_wait("request", 32)
