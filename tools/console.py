"""Shared parts of all commands: answers, exit codes, standard error, progress, and options as dataclasses."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, get_type_hints

import typer
from rich.console import Console
from rich.table import Column

from kvstore.model.errors import ConfigError, KVStoreError, LayoutError, TierError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

Tick = Callable[[int, int], None]
FAILED = 1
WRONG_USAGE = 2
UNPROVEN = 3
_MAX_SHOWN = 50

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
_AS_JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)


class Answer(NamedTuple):
    """Result of a command.

    Attributes:
        tree: object that ``--json`` prints.
        text: lines that are printed otherwise.
        exit_code: exit code of the command.
        notes: lines about the text, for standard error.
        error: reason of a failure in spite of a text; the last line on standard error.
    """

    tree: Mapping[str, object]
    text: Sequence[str]
    exit_code: int = 0
    notes: Sequence[str] = ()
    error: str = ""

    def show(self, *, as_json: bool) -> None:
        """Print the answer, and exit if the command has failed."""
        if as_json:
            print(json.dumps(self.tree))
        else:
            for note in self.notes:
                errors().print(printable(note))
            for line in self.text:
                print(printable(line), flush=bool(self.error))
        if self.error:
            errors().print(printable(f"error: {self.error}"))
        if self.exit_code:
            raise typer.Exit(self.exit_code)


def for_typer(command: Callable[..., Answer | None]) -> Callable[..., None]:
    """Wrap a command for Typer: a parameter whose type is a dataclass becomes one option for each of its fields.

    A command that returns an answer has an option ``--json``. An error of the library, or a missing package, ends the
    command with one line and an exit code.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = groups.get(name)
        parts = inspect.signature(group).parameters if group else {name: parameter}
        types = get_type_hints(group, include_extras=True) if group else hints
        parameters += [part.replace(kind=part.KEYWORD_ONLY, annotation=types[part.name]) for part in parts.values()]
    answers = hints.get("return") is Answer
    if answers:
        parameters.append(_AS_JSON)

    def run(**given: Any) -> None:  # noqa: ANN401 - whatever the options are
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        as_json = answers and given.pop(_AS_JSON.name)
        try:
            answer = command(**given)
        except (KVStoreError, ImportError) as error:
            give_up(error)
        if answer is not None:
            answer.show(as_json=as_json)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what Typer reads
    return run


def printable(text: str) -> str:
    """Return the text with its control characters escaped, because names from clients or files may contain some."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else f"\\x{ord(letter):02x}" for letter in text)


def errors() -> Console:
    """Return a console on standard error that prints text without markup."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def give_up(error: Exception, exit_code: int | None = None) -> NoReturn:
    """Print an error and exit.

    The default exit code is 2 if the command could not start, because of wrong usage, a configuration or target that
    cannot be used, or a package that is not installed. Otherwise it is 1.
    """
    errors().print(printable(f"error: {error}"))
    if exit_code is None:
        is_unusable = isinstance(error, ConfigError | LayoutError | TierError | ImportError)
        exit_code = WRONG_USAGE if is_unusable else FAILED
    raise typer.Exit(exit_code) from error


def print_report(report: Mapping[str, object], *, as_json: bool) -> None:
    """Print a report and flush it: one line per non-empty field, or one JSON object."""
    if as_json:
        print(json.dumps(report), flush=True)
        return
    for name, value in report.items():
        if isinstance(value, dict):
            value = [f"{inner} {text}" for inner, text in value.items()]  # noqa: PLW2901 - the same, as text
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if shown:
            print(printable(f"{name.replace('_', ' ')}: {shown}"), flush=True)


def some(things: Sequence[object], kind: str) -> list[str]:
    """Return a line for each of the first things of one kind, and a line with the number of further ones."""
    more = [f"{kind}: {len(things) - _MAX_SHOWN} more; --json names all"] if len(things) > _MAX_SHOWN else []
    return [f"{kind}: {thing}" for thing in things[:_MAX_SHOWN]] + more


def parse_numbers(text: str, option: str, meant: str, *, kind: Callable[[str], float] = float) -> list[float]:
    """Parse positive numbers separated by commas; errors say that ``option`` must be ``meant``.

    Raises:
        ConfigError: a part is not a positive number.
    """
    try:
        found = [float(kind(part)) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: it must be {meant}") from error
    if not all(0 < number < float("inf") for number in found):
        raise ConfigError(f"{option} is {text!r}: every number must be greater than 0")
    return found


class _PrintableFormatter(logging.Formatter):
    """Formatter that escapes control characters, also in a traceback's last line."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Configure logging of a server process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on standard error, which is disabled if that is no terminal."""
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def progress(unit: str) -> Progress:
    """Return a progress bar with the rate in ``unit`` per second and the time left.

    Tasks have a field ``rate``, which ``update`` sets.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    rate = TextColumn("{task.fields[rate]}" + f" {unit}/s")
    return bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())


@contextmanager
def stage_progress(console: Console, stages: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the text of each stage when it begins: a bar on a terminal, lines elsewhere."""
    begin = time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(f"[{time.monotonic() - begin:6.1f} s] {text}", markup=False, highlight=False)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=stages, completed=-1, visible=False)
        yield lambda text: progress.update(task, description=text, advance=1, visible=True)


@contextmanager
def chunk_progress(what: str) -> Iterator[Tick]:
    """Show a bar that counts chunks, and yield its tick, to call after each chunk with the total and its bytes."""
    with progress("chunks") as shown:
        task = shown.add_task(what, total=None, rate="")

        def tick(total: int, _size_bytes: int) -> None:
            speed = shown.tasks[0].speed
            shown.update(task, total=total, advance=1, rate=f"{speed:,.0f}" if speed else "")

        yield tick


def numbers(*titles: str) -> list[Column]:
    """Return right-justified table columns, for numbers."""
    return [Column(title, justify="right") for title in titles]


def size(num_bytes: float) -> str:
    """Format bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
