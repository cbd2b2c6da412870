"""One line a cause and minute, however many causes there are."""

from __future__ import annotations

import time

import pytest

from kvstore.throttle import MAX_CAUSES, Throttle


def test_causes_that_strangers_choose_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limited = Throttle(60.0)
    due = [limited.is_due(f"10.0.{number // 256}.{number % 256}") for number in range(10_000)]
    assert sum(due) == MAX_CAUSES == len(limited._last_s)
    assert not limited.is_due("10.0.0.0")
    now_s += 59.0
    assert not limited.is_due("10.0.0.0")
    now_s += 1.0
    assert limited.is_due("10.0.0.0")
    assert len(limited._last_s) == 1


def test_each_cause_has_a_minute_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limited = Throttle(60.0)
    assert limited.is_due("")
    now_s = 30.0
    assert limited.is_due("disk")
    now_s = 60.0
    assert [limited.is_due(cause) for cause in ("", "disk")] == [True, False]
    now_s = 90.0
    assert [limited.is_due(cause) for cause in ("", "disk")] == [False, True]
