"""Plot for ``kvstore bench --plot``: a bar for each path, relative to its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.tools.bench.lines import Line
from kvstore.tools.bench.load import cpu_name
from kvstore.tools.bench.report import BenchReport
from kvstore.tools.figures import new_figure, save_figure

_COLOURS = {"ok": "tab:green", "below goal": "tab:orange", "BELOW FLOOR": "tab:red"}
_WIDEST = 1.5  # longer bars are cut, because the distance beyond the limit matters little
_CUT = "\u00bb"


def plot_report(report: BenchReport, file: Path) -> None:
    """Draw the fractions of a run, with the limit as a line, goals as ticks, and a mark at the end of each cut bar.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write this file.
    """
    lines = report.lines[::-1]
    figure = new_figure(9.0, 1.8 + 0.3 * len(lines))
    axes = figure.subplots()
    limit = axes.axvline(1.0, color="black", linestyle="--", zorder=0, label="limit")
    bars = _draw_bars(axes, lines)
    places = range(len(lines))
    goals = axes.vlines(
        [line.bound.goal for line in lines],
        [place - 0.4 for place in places],
        [place + 0.4 for place in places],
        color="black",
        linewidth=2,
        label="goal",
    )
    axes.set_yticks(places, [line.subject.name for line in lines])
    axes.set(xlabel=f"fraction of the limit ({_CUT}: the bar is cut)", xlim=(0, _WIDEST), ylim=(-0.6, len(lines) - 0.4))
    busy = "\nthe machine was BUSY: run again on a quiet one" if report.load.is_busy else ""
    figure.suptitle(f"kvstore bench, {report.geometry.name}, on {cpu_name()}\n{report.load}{busy}", fontsize=10)
    figure.legend(handles=[*bars.values(), goals, limit], loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, file)


def _draw_bars(axes: Any, lines: list[Line]) -> dict[str, Any]:  # noqa: ANN401 - matplotlib's
    """Draw a bar for each line, and return the bars by verdict, for the legend."""
    drawn = {}
    for verdict, colour in _COLOURS.items():
        chosen = [(place, line) for place, line in enumerate(lines) if line.verdict == verdict]
        widths = [min(line.fraction, _WIDEST) for _, line in chosen]
        if chosen:
            drawn[verdict] = axes.barh([place for place, _ in chosen], widths, color=colour, label=verdict.lower())
    for place, line in enumerate(lines):
        below = ": BELOW FLOOR" if line.failed else ""
        axes.text(0.02, place, f"{line.fraction:.2f} of {line.subject.limit_name}{below}", va="center", fontsize=8)
        if line.fraction > _WIDEST:
            axes.text(_WIDEST - 0.01, place, _CUT, va="center", ha="right", color="white", fontsize=12, weight="bold")
    return drawn
