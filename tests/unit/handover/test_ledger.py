"""A sender's ledger of its hand-overs, and the progress that it reports to each receiver."""

from __future__ import annotations

import pytest

from kvstore.handover import ledger as ledger_module
from kvstore.handover.ledger import Ledger, PushJob, Settled
from kvstore.handover.transport import Receiver
from kvstore.model.chunks import ChunkRef
from kvstore.protocol.progress import ALL_TOKENS, Progress
from kvstore.transfer.mover import as_block_ids

HERE, THERE = Receiver("here", 1), Receiver("there", 2)


def job(handover: int, begin_tokens: int = 0, *, is_needed: bool = True) -> PushJob:
    return PushJob(ChunkRef(bytes(16), 1), as_block_ids([1]), handover, begin_tokens, is_needed)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.sender = "me"
    return ledger


def test_a_hand_over_is_open_until_its_last_chunk_is_settled(ledger: Ledger) -> None:
    ledger.begin(HERE, [job(3), job(3, 16)])
    ledger.settle(job(3), has_arrived=True)
    assert ledger.progress(HERE) == Progress("me", 4, {3: ALL_TOKENS})
    assert ledger.complete(3) == HERE
    assert ledger.progress(HERE).end_tokens(3) == ALL_TOKENS
    ledger.settle(job(3, 16), has_arrived=True)
    assert ledger.progress(HERE) == Progress("me", 4, {})
    assert ledger.progress(HERE).end_tokens(3) == 0
    assert ledger.progress(HERE).end_tokens(4) == ALL_TOKENS, "not begun yet"
    assert ledger.take_settled().arrived == {(3, 0): 1, (3, 16): 1}
    assert not ledger.take_settled()


def test_each_receiver_is_told_of_its_own_only(ledger: Ledger) -> None:
    ledger.begin(HERE, [job(0)])
    ledger.begin(THERE, [job(1)])
    assert ledger.progress(HERE).open.keys() == {0}
    assert ledger.progress(THERE).open.keys() == {1}
    assert ledger.progress(HERE).end_tokens(1) == 0


def test_behind_a_lost_chunk_nothing_is_wanted(ledger: Ledger) -> None:
    jobs = [job(0, begin) for begin in (0, 16, 32)]
    ledger.begin(HERE, jobs)
    ledger.settle(jobs[1], has_arrived=False)
    assert [ledger.wants(one) for one in jobs] == [True, False, False]
    assert ledger.progress(HERE).open == {0: 16}
    assert ledger.take_settled().lost == {0: 16}


def test_a_lost_checkpoint_does_not_make_chunks_useless(ledger: Ledger) -> None:
    part = job(0, 0, is_needed=False)
    ledger.begin(HERE, [job(0), part, job(0, 16)])
    ledger.settle(part, has_arrived=False)
    assert ledger.wants(job(0, 16))
    assert ledger.take_settled() == Settled()


def test_a_hand_over_of_which_nothing_was_sent_is_over(ledger: Ledger) -> None:
    assert ledger.complete(5) is None
    assert ledger.progress(HERE).end_tokens(5) == 0


def test_of_too_many_the_newest_count_as_not_begun(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Therefore they are waited for."""
    monkeypatch.setattr(ledger_module, "MAX_OPEN", 2)
    ledger.begin(HERE, [job(number) for number in range(4)])
    progress = ledger.progress(HERE)
    assert progress == Progress("me", 2, {0: ALL_TOKENS, 1: ALL_TOKENS})
    assert all(progress.end_tokens(number) for number in range(4))


def test_what_lacks_chunks_is_told_after_its_end(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of several ranks would wait for the parts that the others still send."""
    monkeypatch.setattr(ledger_module, "_MAX_LOST", 2)
    for number in range(4):
        ledger.begin(HERE, [job(number), job(number, 16)])
        ledger.settle(job(number), has_arrived=True)
        ledger.settle(job(number, 16), has_arrived=number == 1)
        ledger.complete(number)
    assert ledger.progress(HERE) == Progress("me", 4, {}, {2: 16, 3: 16}), "of the last ones"
    assert ledger.progress(HERE).limit_tokens(3) == 16
    assert ledger.progress(HERE).limit_tokens(1) == ALL_TOKENS
    assert not ledger.progress(THERE).lost
