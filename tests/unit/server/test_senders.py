"""Reports to the owner of an embedded server of chunks on their way, and of senders from which nothing more comes."""

from __future__ import annotations

import random

import pytest
from support.shop import LAYOUT, Desk

from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.progress import ALL_TOKENS, BEAT_S, SILENT_BEATS, Progress
from kvstore.server import owner as owner_module
from kvstore.server.owner import Owner, Senders


def test_what_one_connection_of_a_sender_has_not_said_is_not_over() -> None:
    """After new weights one ends its old work while another begins, or they are of several ranks."""
    senders = Senders()
    first, second = Progress("a", 3, {2: 64}), Progress("a", 5, {4: 32}, {1: 16})
    senders.note(1, None, first)
    senders.note(2, None, second)
    senders.note(3, None, Progress("b", 1, {}))
    assert senders.view == {"a": Progress("a", 3, {2: 64, 4: 32}, {1: 16}), "b": Progress("b", 1, {})}
    senders.note(1, first, None)
    assert senders.view["a"] == second
    senders.note(2, second, None)
    assert senders.view.keys() == {"b"}


def test_what_one_rank_has_lost_does_not_come_from_the_others() -> None:
    senders = Senders()
    senders.note(1, None, Progress("a", 6, {}, {5: 256}))
    senders.note(2, None, Progress("a", 6, {5: ALL_TOKENS}))
    assert senders.view["a"].limit_tokens(5) == 256
    assert senders.view["a"].end_tokens(5), "it has not ended on the other one"


def test_what_clients_say_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "_MAX_SENDERS", 3)
    monkeypatch.setattr(owner_module, "_MAX_OPEN", 10)
    senders = Senders()
    for number in range(100):
        senders.note(number, None, Progress(str(number), 1, {}))
    assert len(senders.view) == 3
    much = Progress("0", 1, dict.fromkeys(range(11), 1))
    senders.note(0, Progress("0", 1, {}), much)
    assert senders.view.keys() == {"1", "2"}
    senders.note(0, much, little := Progress("0", 1, {}, dict.fromkeys(range(10), 1)))
    assert senders.view["0"] == little, "there is room again"


def test_the_view_is_what_all_of_them_say_together() -> None:
    choose = random.Random(5)
    senders = Senders()
    said: dict[int, Progress | None] = dict.fromkeys(range(6))
    for _ in range(500):
        number = choose.choice(list(said))
        open_ = {choose.randrange(9): choose.randrange(4) for _ in range(choose.randrange(3))}
        now = Progress(choose.choice("ab"), choose.randrange(9), open_) if choose.random() < 0.7 else None
        before = senders.view
        senders.note(number, said[number], now)
        said[number] = now
        assert senders.view is not before
        told = [progress for progress in said.values() if progress is not None]
        assert senders.view.keys() == {progress.sender for progress in told}
        for progress in told:
            merged = senders.view[progress.sender]
            assert merged.following <= progress.following
            assert merged.open.keys() >= progress.open.keys()


def sending(desk: Desk, open_: list[tuple[int, int]], beat_ms: int) -> None:
    assert desk.ask(messages.Sending(2, "prefill", 5, open_, [], beat_ms)) is None


@pytest.mark.parametrize(
    ("open_", "beat_ms", "is_known"),
    [([(4, 64)], int(BEAT_S * 1000), False), ([], int(BEAT_S * 1000), False), ([(4, 64)], 0, True)],
    ids=["it hangs", "it hangs before it says more", "an older one says nothing"],
)
def test_a_sender_that_is_silent_is_forgotten(open_: list[tuple[int, int]], beat_ms: int, *, is_known: bool) -> None:
    owner = Owner(Namespace({"model": "mine"}), LAYOUT)
    desk = Desk(owner)
    desk.hello()
    sending(desk, open_, beat_ms)
    desk.now_s += SILENT_BEATS * BEAT_S
    desk.service.forget_silent()
    assert "prefill" in owner.senders.view, "it may be late"
    desk.now_s += 0.1
    desk.service.forget_silent()
    assert ("prefill" in owner.senders.view) == is_known
    sending(desk, open_, beat_ms)
    assert "prefill" in owner.senders.view, "it is back"
