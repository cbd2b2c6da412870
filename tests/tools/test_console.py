"""A command's dataclass parameters are options, and its errors are a line and an exit code."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner, Result

from kvstore.model.errors import ConfigError, InvalidCallError, LayoutError, TierError
from kvstore.tools.console import FAILED, WRONG_USAGE, Answer, for_typer, log_to_stderr, parse_numbers, some


@dataclass(frozen=True)
class Place:
    host: Annotated[str, typer.Option(help="Where.")]
    port: Annotated[int, typer.Option(min=1)] = 80


def invoke(command: object, *arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(for_typer(command))  # type: ignore[arg-type] # whatever its options are
    return CliRunner().invoke(app, list(arguments))


def test_fields_are_options() -> None:
    def show(name: str, place: Place, *, loud: bool = False) -> None:
        """Show a place."""
        print(name, place, loud)

    assert invoke(show, "x", "--host", "h").stdout == "x Place(host='h', port=80) False\n"
    assert invoke(show, "x", "--host", "h", "--port", "2", "--loud").stdout == "x Place(host='h', port=2) True\n"
    assert invoke(show, "x").exit_code == invoke(show, "x", "--host", "h", "--port", "0").exit_code == WRONG_USAGE
    help_text = invoke(show, "--help").stdout
    assert "Show a place." in help_text
    assert "Where." in help_text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("why"), WRONG_USAGE),
        (LayoutError("why"), WRONG_USAGE),
        (TierError("why"), WRONG_USAGE),
        (ImportError("why"), WRONG_USAGE),
        (InvalidCallError("why"), FAILED),
    ],
)
def test_errors_are_a_line_and_an_exit_code(error: Exception, code: int) -> None:
    def fail() -> None:
        raise error

    result = invoke(fail)
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "error: why\n")


def test_other_errors_are_not_hidden() -> None:
    def fail() -> None:
        raise KeyError("a mistake of ours")

    assert isinstance(invoke(fail).exception, KeyError)


def test_an_answer_is_text_or_json() -> None:
    """Notes belong to the text, and the exit code is the same for both."""

    def look(name: str) -> Answer:
        """Look at something."""
        return Answer({"name": name}, [name, "more"], FAILED, ["a note"])

    shown, told = invoke(look, "x"), invoke(look, "x", "--json")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (FAILED, "x\nmore\n", "a note\n")
    assert (told.exit_code, told.stdout, told.stderr) == (FAILED, '{"name": "x"}\n', "")


@pytest.mark.parametrize(
    ("text", "message"),
    [("1,x", "it must be numbers of GiB"), ("1.5", "it must be"), ("0", "every number"), ("1,inf", "it must be")],
)
def test_numbers_between_commas(text: str, message: str) -> None:
    assert parse_numbers("2,1", "--memory", "numbers of GiB", kind=int) == [2.0, 1.0]
    with pytest.raises(ConfigError, match=f"--memory is '{text}': {message}"):
        parse_numbers(text, "--memory", "numbers of GiB", kind=int)


def test_some_of_many() -> None:
    assert some([1, 2], "skipped") == ["skipped: 1", "skipped: 2"]
    assert some(range(51), "skipped")[-2:] == ["skipped: 49", "skipped: 1 more; --json names all"]


ESCAPES = "m\x1b]0;title\x07\x1b[2J\x9b1m\u202e\r"


def test_what_others_name_does_not_reach_the_terminal_as_orders() -> None:
    """A terminal would obey control characters in names of models, fields of packs and messages of servers."""

    def show() -> Answer:
        return Answer(
            {"name": ESCAPES},
            [f"all of {ESCAPES}", "\ttwo\nlines, \u00e9\u6771"],
            notes=[ESCAPES],
            error=ESCAPES,
            exit_code=1,
        )

    def fail() -> None:
        raise TierError(ESCAPES)

    shown = invoke(show)
    written = "m\\x1b]0;title\\x07\\x1b[2J\\x9b1m\\x202e\\x0d"
    assert shown.stdout == f"all of {written}\n\ttwo\nlines, \u00e9\u6771\n"
    assert shown.stderr == f"{written}\nerror: {written}\n"
    assert invoke(fail).stderr == f"error: {written}\n"


def test_nor_as_those_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        log_to_stderr()
        logging.getLogger("kvstore").warning("a client calls itself %s", ESCAPES)
    finally:
        root.handlers = before
    assert "\x1b" not in capsys.readouterr().err
