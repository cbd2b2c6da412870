"""Log throttle: one message per cause and minute, even with many causes."""

from __future__ import annotations

import logging
import time

import pytest

from kvstore.model.throttle import MAX_CAUSES, Throttle

logger = logging.getLogger(__name__)


def test_causes_that_strangers_choose_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limited = Throttle(logger, 60.0)
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
    limited = Throttle(logger, 60.0)
    assert limited.is_due("")
    now_s = 30.0
    assert limited.is_due("disk")
    now_s = 60.0
    assert [limited.is_due(cause) for cause in ("", "disk")] == [True, False]
    now_s = 90.0
    assert [limited.is_due(cause) for cause in ("", "disk")] == [False, True]


def test_a_message_says_that_further_ones_are_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    limited = Throttle(logger)
    limited.log("read", "cannot read %d of %s: 100%%", 1, "them")
    limited.log("read", "cannot read %d of %s", 2, "them")
    limited.log("write", "cannot write", level=logging.ERROR, exc_info=OSError("full"))
    assert [(record.levelno, record.message, record.funcName) for record in caplog.records] == [
        (
            logging.WARNING,
            "cannot read 1 of them: 100%; further messages suppressed for 60 s",
            "test_a_message_says_that_further_ones_are_suppressed",
        ),
        (
            logging.ERROR,
            "cannot write; further messages suppressed for 60 s",
            "test_a_message_says_that_further_ones_are_suppressed",
        ),
    ]
    assert "OSError: full" in caplog.text
