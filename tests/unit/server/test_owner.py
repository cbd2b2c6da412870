"""What the owner of an embedded server hears of what is on its way."""

from __future__ import annotations

import pytest

from kvstore.protocol.progress import Progress
from kvstore.server import owner as owner_module
from kvstore.server.owner import Owner
from kvstore.testing.harness import EVEN, MINE


def test_a_sender_with_two_connections_has_said_it_in_either() -> None:
    """After new weights one ends what it had begun, while another begins."""
    owner = Owner(MINE, EVEN)
    owner.note_progress([Progress("a", 3, {2: 64}), Progress("a", 5, {4: 32}), Progress("b", 1, {})])
    assert owner.senders == {"a": Progress("a", 5, {2: 64, 4: 32}), "b": Progress("b", 1, {})}
    owner.note_progress([])
    assert owner.senders == {}


def test_what_clients_say_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "_MAX_SENDERS", 3)
    monkeypatch.setattr(owner_module, "_MAX_OPEN", 10)
    owner = Owner(MINE, EVEN)
    owner.note_progress(Progress(str(number), 1, {}) for number in range(100))
    assert len(owner.senders) == 3
    owner.note_progress(Progress(str(number), 1, dict.fromkeys(range(6), 1)) for number in range(100))
    assert len(owner.senders) == 1
