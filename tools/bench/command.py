"""Carries out ``kvstore bench``: runs it with a progress bar, prints, plots and compares."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from kvstore.tools.bench.codecs import codec_table, measure_codecs
from kvstore.tools.bench.compare import compare, read_fractions
from kvstore.tools.bench.lines import BenchReport
from kvstore.tools.bench.plot import plot_report
from kvstore.tools.bench.run import BenchOptions, run_bench
from kvstore.tools.bench.table import bench_table, change_table, failure, timed_table
from kvstore.tools.bench.turns import measure_turns, parse_connectors, turns_table
from kvstore.tools.console import bar
from kvstore.tools.figures import require_plotting

_WIDTH = 160  # where the output is no terminal


def measure_and_print(
    options: BenchOptions, *, plot: Path | None = None, compare_with: Path | None = None, as_json: bool = False
) -> bool:
    """Run the bench and print its tables, or one JSON object. False if a line is below its floor.

    Raises:
        ConfigError: too little memory, an older run that cannot be compared, or a plot that cannot be drawn.
        BenchError: a path lost a byte.
    """
    old = read_fractions(compare_with, options.geometry.name) if compare_with else None
    if plot is not None:
        require_plotting()
    console = Console(stderr=True)
    report = _run_shown(options)
    codecs = measure_codecs(options.geometry, options.rounds)
    if plot is not None:
        plot_report(report, plot)
    if as_json:
        print(json.dumps(report.to_json() | {"codecs": [asdict(line) for line in codecs]}))
    else:
        tables = [bench_table(report), timed_table(report), codec_table(codecs)]
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(*tables)
    if old is not None:
        console.print(change_table(compare(old, report), str(compare_with)))
    for line in report.failed:
        console.print(failure(line), style="red", highlight=False)
    return not report.failed


def converse_and_print(connectors: str, rounds: int, folder: Path, redis_server: Path | None, *, as_json: bool) -> None:
    """Run conversations over real vLLM and print their table, or one JSON object.

    Raises:
        ConfigError: an unknown connector, no vLLM, or a server that does not start.
        BenchError: a vLLM ended.
    """
    found = measure_turns(parse_connectors(connectors), rounds, folder, redis_server)
    if as_json:
        print(json.dumps({"turns": found}, default=asdict))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(turns_table(found))


def _run_shown(options: BenchOptions) -> BenchReport:
    """Run the bench, on a terminal with a progress bar."""
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bar(*columns) as progress:
        task = progress.add_task("memory", total=options.total_ticks)

        return run_bench(options, lambda what: progress.update(task, description=what, advance=1))
