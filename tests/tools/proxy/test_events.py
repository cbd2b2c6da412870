"""Streams of events, cut where they end."""

from __future__ import annotations

import pytest

from kvstore.tools.proxy.events import EventCutter
from kvstore.tools.proxy.reply import AnswerError


def test_events_are_cut_at_their_ends() -> None:
    stream = b"data: 1\n\n: x\r\n\r\ndata: 2\ndata: 3\n\ndata: rest"
    events = [b"data: 1\n\n", b": x\r\n\r\n", b"data: 2\ndata: 3\n\n"]
    for size in range(1, len(stream) + 1):
        cutter = EventCutter()
        found = [event for at in range(0, len(stream), size) for event in cutter.feed(stream[at : at + size])]
        assert found == events


def test_an_event_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tools.proxy.events._MAX_EVENT_BYTES", 10)
    cutter = EventCutter()
    assert cutter.feed(b"data: 0123\n\ndata: 01") == [b"data: 0123\n\n"]
    with pytest.raises(AnswerError, match="more than 10 bytes"):
        cutter.feed(b"2345")
