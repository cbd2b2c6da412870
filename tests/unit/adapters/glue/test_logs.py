"""Log lines of kvstore among vLLM's."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.adapters.vllm.glue import logs


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Yield vLLM's logger with one handler, and ours without; both are restored afterwards."""
    pair = logging.getLogger("vllm"), logging.getLogger("kvstore")
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in pair]
    pair[0].handlers[:] = [logging.NullHandler()]
    pair[1].handlers.clear()
    pair[1].propagate = True  # pytest adds a handler to loggers that do not propagate
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
    assert len(ours.handlers) == 1
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


class Printed(logging.StreamHandler[io.StringIO]):
    """A handler like vLLM's, with its own level and a format that names the origin of a line."""

    def __init__(self, level: int) -> None:
        super().__init__(io.StringIO())
        self.setLevel(level)
        self.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("name", "theirs", "seen"),
    [
        ("DEBUG", logging.INFO, {"DEBUG", "INFO", "WARNING"}),
        ("INFO", logging.WARNING, {"INFO", "WARNING"}),
        ("WARNING", logging.DEBUG, {"WARNING"}),
        ("", logging.INFO, {"INFO", "WARNING"}),
        ("", logging.WARNING, {"WARNING"}),
        ("LOUD", logging.WARNING, {"WARNING"}),
    ],
)
def test_the_level_that_was_asked_for_counts_over_that_of_vllms_handler(
    loggers: tuple[logging.Logger, logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    theirs: int,
    seen: set[str],
) -> None:
    """vLLM's handler holds DEBUG back even if our logger lets it through."""
    monkeypatch.setenv(logs.LEVEL_VARIABLE, name)
    printed = Printed(theirs)
    loggers[0].handlers[:] = [printed]
    logs.join_vllm()
    ours = logging.getLogger("kvstore.adapters.vllm.scheduler.scheduler")
    for level in ("DEBUG", "INFO", "WARNING"):
        ours.log(getattr(logging, level), "a line")
    assert {line.split()[0] for line in printed.lines()} == seen


def test_every_line_of_ours_is_marked(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    printed = Printed(logging.INFO)
    loggers[0].handlers[:] = [printed]
    logs.join_vllm()
    here = Path(__file__).name
    logging.getLogger("kvstore.tiers.disk.tier").warning("%d chunks\nin two lines", 3)
    loggers[0].warning("theirs")
    assert printed.lines() == [
        f"WARNING [{here}] kvstore: 3 chunks",
        "kvstore: in two lines",
        f"WARNING [{here}] theirs",
    ]


def test_handlers_that_vllm_changes_later_are_used(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    logs.join_vllm()
    printed = Printed(logging.INFO)
    loggers[0].handlers[:] = [printed]
    loggers[1].info("later")
    assert len(printed.lines()) == 1


def test_a_message_that_cannot_be_made_harms_nobody(
    loggers: tuple[logging.Logger, logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    loggers[0].handlers[:] = [Printed(logging.INFO)]
    logs.join_vllm()
    loggers[1].warning("%d chunks", "no number")
    assert "TypeError" in capsys.readouterr().err


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
