"""Tables that ``kvstore bench`` prints."""

from __future__ import annotations

from rich.table import Table

from kvstore.tools.bench.compare import Change
from kvstore.tools.bench.lines import BenchReport, Line
from kvstore.tools.console import numbers

_STYLES = {"ok": "green", "below goal": "yellow"}


def bench_table(report: BenchReport) -> Table:
    """Return a table of the speed, fraction of the limit and p99 of every path."""
    chunks = report.batch_bytes // report.geometry.chunk_bytes
    figures = numbers("path's speed", "limit's speed", "fraction", "goal", "floor", "p99 of a call")
    title = (
        f"kvstore bench, {report.geometry.name}: {chunks} chunks of "
        f"{report.geometry.chunk_bytes / (1 << 20):.0f} MiB a call, medians of {report.rounds} rounds"
    )
    table = Table("path", "limit", *figures, "verdict", title=title)
    for line in report.lines:
        table.add_row(
            line.subject.name,
            line.subject.limit_name,
            _speed(line, line.path_s),
            _speed(line, line.limit_s),
            f"{line.fraction:.2f}",
            f"{line.bound.goal:.2f}",
            f"{line.bound.floor:.2f}",
            _sample(line, line.p99_s),
            f"[{failure_style(report) if line.failed else _STYLES[line.verdict]}]{line.verdict}[/]",
        )
    table.caption = f"machine: {report.load}"
    if report.skipped:
        table.caption += "\nnot measured: " + "; ".join(report.skipped)
    return table


def timed_table(report: BenchReport) -> Table:
    """Return a table of the steps in the timed part of every path."""
    table = Table(title="what is timed; every byte moved is compared outside of it", show_header=False)
    for line in report.lines:
        table.add_row(line.subject.name, line.subject.includes)
    return table


def change_table(changes: list[Change], old_name: str) -> Table:
    """Return a table of the fractions of an older run and of this one."""
    table = Table("path", *numbers("then", "now", "change"), title=f"fractions, compared with {old_name}")
    for change in changes:
        style = "red" if change.is_loss else "green" if change.is_gain else "dim"
        table.add_row(
            change.name,
            "" if change.then is None else f"{change.then:.2f}",
            "" if change.now is None else f"{change.now:.2f}",
            "" if change.share is None else f"[{style}]{change.share:+.0%}[/]",
        )
    return table


def failure_style(report: BenchReport) -> str:
    """Return the style of a line below its floor, which is milder if other processes kept the machine busy."""
    return "yellow" if report.load.is_busy else "red"


def failure(line: Line) -> str:
    """Return a message about a line below its floor."""
    return (
        f"{line.subject.name}: {line.fraction:.2f} of {line.subject.limit_name} is below the floor of "
        f"{line.bound.floor:.2f}"
    )


def _speed(line: Line, sample: float) -> str:
    return f"{line.size_bytes / sample / 1e9:.2f} GB/s" if line.size_bytes else _sample(line, sample)


def _sample(line: Line, sample: float) -> str:
    return f"{sample:,.0f} B" if line.subject.unit == "bytes" else _duration(sample)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
