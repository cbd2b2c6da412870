"""Questions to a remote tier, on other threads or on the caller's."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate
from support.rig import FakeTier

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ClosedError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import make_ref
from kvstore.tiers.directory import RemoteDirectory, all_have
from kvstore.tiers.guards import Statistics
from kvstore.tiers.guards.guard import TierWrapper


def test_an_answer_waits_for_the_reset_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would report chunks of the old weights."""
    tier, gate = FakeTier(), Gate()
    entered: list[Namespace] = []

    def contains(refs: Sequence[ChunkRef]) -> list[bool]:
        entered.extend(tier.namespaces)
        return [False] * len(refs)

    monkeypatch.setattr(tier, "reset", gate.before(tier.reset))
    monkeypatch.setattr(tier, "contains", contains)
    directory = RemoteDirectory([tier])
    new = Namespace({"model": "new"})
    directory.reset([new])
    assert gate.reached.wait(HANG_GUARD_S)
    asking = threading.Thread(target=directory.answer, args=([make_ref(1)],))
    asking.start()
    asking.join(0.1)  # long enough to ask, if it did not wait
    gate.open()
    asking.join(HANG_GUARD_S)
    directory.close()
    assert entered == [new]


@pytest.mark.parametrize(
    ("parts", "whole"),
    [((True, True), True), ((True, False), False), ((None, False), False), ((True, None), None), ((False,), False)],
)
def test_a_chunk_is_there_if_all_its_parts_are(parts: tuple[bool | None, ...], whole: bool | None) -> None:
    assert all_have(parts) is whole


def test_a_close_during_a_question_about_trails_says_that_it_is_closed() -> None:
    """Its threads are gone then, and a caller that waits for an answer is told."""
    directory = RemoteDirectory([FakeTier()])
    assert directory.answer([bytes(16), make_ref(1)]) == [(), False]
    directory.close()
    with pytest.raises(ClosedError):
        directory.answer([bytes(16)])


def test_where_no_thread_can_be_started_answers_are_unknown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once there is one again, questions are asked as before."""
    directory = RemoteDirectory([FakeTier()])
    with monkeypatch.context() as patch:
        refuse_threads(patch, "kvstore-ask")
        question = directory.ask([make_ref(1)])
        assert question.is_done
        assert list(question.answers) == [None]
    again = directory.ask([make_ref(1)])
    assert directory.wait([again], HANG_GUARD_S)
    assert list(again.answers) == [False]
    directory.close()


def test_a_reset_is_carried_out_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, new = FakeTier(), Namespace({"model": "new"})
    directory = RemoteDirectory([tier])
    refuse_threads(monkeypatch, "kvstore-ask")
    directory.reset([new])
    assert directory.answer([make_ref(1)]) == [False]
    assert tier.namespaces == [new]
    directory.close()


class Full(TierWrapper):
    """Wrapper that answers itself."""

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        return [True] * len(refs)


def test_a_wrapper_that_answers_itself_is_asked() -> None:
    """Also below and above others, which only forward."""
    for tier in (Full(FakeTier()), Statistics(Full(FakeTier())), Full(Statistics(FakeTier()))):
        directory = RemoteDirectory([tier])
        assert directory.answer([make_ref(1)]) == [True]
        directory.close()
