"""A sender's tracker of its hand-overs, and the progress that it reports to each receiver."""

from __future__ import annotations

import pytest

from kvstore.handover import tracker as tracker_module
from kvstore.handover.tracker import HandoverTracker, PushJob, Settled
from kvstore.handover.transport import Receiver
from kvstore.model.chunks import ChunkRef
from kvstore.protocol.progress import ALL_TOKENS, Progress
from kvstore.transfer.mover import as_block_ids

HERE, THERE = Receiver("here", 1), Receiver("there", 2)


def job(handover: int, begin_tokens: int = 0, *, is_needed: bool = True) -> PushJob:
    return PushJob(ChunkRef(bytes(16), 1), as_block_ids([1]), handover, begin_tokens, is_needed)


@pytest.fixture
def tracker() -> HandoverTracker:
    tracker = HandoverTracker()
    tracker.sender = "me"
    return tracker


def test_a_hand_over_is_open_until_its_last_chunk_is_settled(tracker: HandoverTracker) -> None:
    tracker.begin(HERE, [job(3), job(3, 16)])
    tracker.settle(job(3), has_arrived=True)
    assert tracker.progress(HERE) == Progress("me", 4, {3: ALL_TOKENS})
    assert tracker.complete(3) == HERE
    assert tracker.progress(HERE).end_tokens(3) == ALL_TOKENS
    tracker.settle(job(3, 16), has_arrived=True)
    assert tracker.progress(HERE) == Progress("me", 4, {})
    assert tracker.progress(HERE).end_tokens(3) == 0
    assert tracker.progress(HERE).end_tokens(4) == ALL_TOKENS, "not begun yet"
    assert tracker.take_settled().arrived == {(3, 0): 1, (3, 16): 1}
    assert not tracker.take_settled()


def test_each_receiver_is_told_of_its_own_only(tracker: HandoverTracker) -> None:
    tracker.begin(HERE, [job(0)])
    tracker.begin(THERE, [job(1)])
    assert tracker.progress(HERE).open.keys() == {0}
    assert tracker.progress(THERE).open.keys() == {1}
    assert tracker.progress(HERE).end_tokens(1) == 0


def test_behind_a_lost_chunk_nothing_is_wanted(tracker: HandoverTracker) -> None:
    jobs = [job(0, begin) for begin in (0, 16, 32)]
    tracker.begin(HERE, jobs)
    tracker.settle(jobs[1], has_arrived=False)
    assert [tracker.wants(one) for one in jobs] == [True, False, False]
    assert tracker.progress(HERE).open == {0: 16}
    assert tracker.take_settled().lost == {0: 16}


def test_a_lost_checkpoint_does_not_make_chunks_useless(tracker: HandoverTracker) -> None:
    part = job(0, 0, is_needed=False)
    tracker.begin(HERE, [job(0), part, job(0, 16)])
    tracker.settle(part, has_arrived=False)
    assert tracker.wants(job(0, 16))
    assert tracker.take_settled() == Settled()


def test_a_hand_over_of_which_nothing_was_sent_is_over(tracker: HandoverTracker) -> None:
    assert tracker.complete(5) is None
    assert tracker.progress(HERE).end_tokens(5) == 0


def test_of_too_many_the_newest_count_as_not_begun(tracker: HandoverTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Therefore they are waited for."""
    monkeypatch.setattr(tracker_module, "MAX_OPEN", 2)
    tracker.begin(HERE, [job(number) for number in range(4)])
    progress = tracker.progress(HERE)
    assert progress == Progress("me", 2, {0: ALL_TOKENS, 1: ALL_TOKENS})
    assert all(progress.end_tokens(number) for number in range(4))


def test_what_lacks_chunks_is_told_after_its_end(tracker: HandoverTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of several ranks would wait for the parts that the others still send."""
    monkeypatch.setattr(tracker_module, "_MAX_LOST", 2)
    for number in range(4):
        tracker.begin(HERE, [job(number), job(number, 16)])
        tracker.settle(job(number), has_arrived=True)
        tracker.settle(job(number, 16), has_arrived=number == 1)
        tracker.complete(number)
    assert tracker.progress(HERE) == Progress("me", 4, {}, {2: 16, 3: 16}), "of the last ones"
    assert tracker.progress(HERE).limit_tokens(3) == 16
    assert tracker.progress(HERE).limit_tokens(1) == ALL_TOKENS
    assert not tracker.progress(THERE).lost
