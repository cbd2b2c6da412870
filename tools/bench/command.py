"""Implementation of ``kvstore bench``: runs the measurements with a progress bar, prints, plots and compares.

Each function raises ``ConfigError`` if the options are wrong or it cannot run here, and ``BenchError`` if a path lost a
byte or a process failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstore.tools.bench.bidirectional import MODELS, bidirectional_table, measure_bidirectional, to_json
from kvstore.tools.bench.codecs import CodecLine, codec_lines, codec_table, measure_codecs
from kvstore.tools.bench.conversations import measure_turns, parse_connectors, turns_table
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.plot import plot_report
from kvstore.tools.bench.report import (
    BenchReport,
    bench_table,
    change_table,
    compare,
    failure,
    read_fractions,
    timed_table,
)
from kvstore.tools.bench.run import BenchOptions, run_bench
from kvstore.tools.bench.users import count_computed, parse_shares, users_table
from kvstore.tools.console import FAILED, bar
from kvstore.tools.figures import require_plotting
from kvstore.tools.interrupts import INTERRUPTED, Interruption, interruptible

_WIDTH = 160  # where the output is no terminal
_ENDING = "ending the measurement under way, then showing what was measured before"


def measure_and_print(
    options: BenchOptions, *, plot: Path | None = None, compare_with: Path | None = None, as_json: bool = False
) -> int:
    """Run the bench, print tables or one JSON object, and return the exit code, which tells of lines below floors."""
    old = read_fractions(compare_with, options.geometry.name) if compare_with else None
    if plot is not None:
        require_plotting()
    console = Console(stderr=True)
    report, codecs = _measure(options)
    if plot is not None:
        plot_report(report, plot)
    tables = [bench_table(report), timed_table(report), *([codec_table(codecs)] if codecs else [])]
    _print(report.to_json() | {"codecs": codecs}, tables, as_json=as_json)
    if old is not None:
        console.print(change_table(compare(old, report), str(compare_with)))
    for line in report.failed:
        console.print(failure(line), style=report.failure_style, highlight=False)
    if report.failed and report.load.is_busy:
        console.print(report.load.warning, highlight=False)
    return INTERRUPTED if report.interrupted else FAILED if report.failed else 0


def converse_and_print(connectors: str, rounds: int, folder: Path, redis_server: Path | None, *, as_json: bool) -> int:
    """Run conversations over real vLLM, print their table or one JSON object, and return the exit code."""
    wanted = parse_connectors(connectors)
    with interruptible(_ENDING, at_once=True):
        found = measure_turns(wanted, rounds, folder, redis_server)
    _print({"turns": found}, [turns_table(found)], as_json=as_json)
    return 0 if len(found) == len({*wanted}) else INTERRUPTED


def measure_both_ways_and_print(rounds: int, folder: Path, *, as_json: bool) -> int:
    """Measure chats over a prefill and a decode engine, print tables or one JSON object, and return the exit code."""
    with interruptible(_ENDING, at_once=True):
        found = measure_bidirectional(rounds, folder)
    tables = [bidirectional_table(name, cases) for name, cases in found.items()]
    _print({"bidirectional": to_json(found)}, tables, as_json=as_json)
    return 0 if len(found) == len(MODELS) else INTERRUPTED


def count_and_print(shares: str, geometry: Geometry, *, as_json: bool) -> None:
    """Count the tokens computed for many users, and print a table or one JSON object."""
    counts = count_computed(parse_shares(shares), geometry)
    _print({"users": counts}, [users_table(counts, geometry)], as_json=as_json)


def _print(tree: dict[str, object], tables: Iterable[Table], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(tree, default=asdict))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(*tables)


def _measure(options: BenchOptions) -> tuple[BenchReport, list[CodecLine]]:
    """Run the bench with a progress bar on a terminal, then the codecs unless the bench was interrupted."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with interruptible(_ENDING, at_once=True):
        with bar(*columns) as progress:
            task = progress.add_task("memory", total=options.total_ticks)
            report = run_bench(options, lambda what: progress.update(task, description=what, advance=1))
        if report.interrupted:
            return report, []
        try:
            codecs = measure_codecs(options.geometry, options.rounds)
            return replace(report, lines=[*report.lines, *codec_lines(codecs)]), codecs
        except Interruption:
            return replace(report, skipped=[*report.skipped, "codecs: interrupted"], interrupted=True), []
