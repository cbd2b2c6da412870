"""What all subcommands share: exit codes, the option ``--json``, standard error, progress."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from kvstore.errors import ConfigError, KVStoreError, LayoutError, TierError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

FAILED = 1
WRONG_USAGE = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def errors() -> Console:
    """Standard error, printing what it gets as it is."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def output() -> Console:
    """Standard output for tables."""
    return Console(markup=False, highlight=False)


def give_up(error: KVStoreError | ImportError) -> NoReturn:
    """Say what was wrong, before anything was done, and exit.

    With 2 if it was the usage or the configuration, a target that cannot be used, or a package that is not installed;
    else with 1.
    """
    errors().print(f"error: {error}")
    is_unusable = isinstance(error, ConfigError | LayoutError | TierError | ImportError)
    raise typer.Exit(WRONG_USAGE if is_unusable else FAILED) from error


@contextmanager
def progress(unit: str) -> Iterator[Progress]:
    """A bar on standard error with a rate in ``unit`` a second and the time left; nothing where no one watches.

    A task's ``rate`` is what ``unit`` counts: pass it to ``update``, or leave it at the speed of the bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}" + f" {unit}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
