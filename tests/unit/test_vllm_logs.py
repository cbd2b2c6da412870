"""Our lines among vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvstore.adapters.vllm import logs


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """vLLM's logger with one handler, and ours without; both put back afterwards."""
    pair = logging.getLogger("vllm"), logging.getLogger("kvstore")
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in pair]
    pair[0].handlers[:] = [logging.NullHandler()]
    pair[1].handlers.clear()
    pair[1].propagate = True  # pytest gives loggers that do not propagate a handler of its own
    yield pair
    for logger, (handlers, level, propagate) in zip(pair, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def test_vllms_handlers_are_used_once(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    theirs, ours = loggers
    before = (theirs.handlers[:], theirs.level, theirs.propagate)
    logs.join_vllm()
    logs.join_vllm()
    assert ours.handlers == theirs.handlers
    assert ours.level == logging.INFO
    assert not ours.propagate, "or the root logger would say everything twice"
    assert (theirs.handlers[:], theirs.level, theirs.propagate) == before


@pytest.mark.parametrize(
    ("name", "level"), [("debug", logging.DEBUG), ("WARNING", logging.WARNING), ("", logging.INFO)]
)
def test_the_level_comes_from_the_environment(
    loggers: tuple[logging.Logger, logging.Logger], monkeypatch: pytest.MonkeyPatch, name: str, level: int
) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, name)
    logs.join_vllm()
    assert loggers[1].level == level


def test_an_unknown_level_is_said(
    loggers: tuple[logging.Logger, logging.Logger], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "LOUD")
    loggers[0].addHandler(caplog.handler)
    logs.join_vllm()
    assert "KVSTORE_LOG_LEVEL=LOUD" in caplog.text


def test_an_application_that_decided_keeps_its_way(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    mine = logging.NullHandler()
    loggers[1].addHandler(mine)
    logs.join_vllm()
    assert loggers[1].handlers == [mine]
    assert loggers[1].propagate


def test_without_vllms_handlers_nothing_changes(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    loggers[0].handlers.clear()
    logs.join_vllm()
    assert loggers[1].handlers == []
    assert loggers[1].propagate
