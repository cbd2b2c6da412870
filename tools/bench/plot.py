"""``kvstore bench --plot``: a bar for each path, against its limit."""

from __future__ import annotations

from pathlib import Path

from kvstore.tools.bench.lines import BenchReport
from kvstore.tools.figures import new_figure, save_figure

_COLOURS = {"ok": "tab:green", "below goal": "tab:orange", "BELOW FLOOR": "tab:red"}
_WIDEST = 1.5  # longer bars are cut: how far a path is beyond the limit matters little


def plot_report(report: BenchReport, file: Path) -> None:
    """Draw the fractions of a run; the limit is a line, goals are ticks.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write this file.
    """
    lines = report.lines[::-1]
    figure = new_figure(9.0, 1.2 + 0.32 * len(lines))
    axes = figure.subplots()
    places = range(len(lines))
    fractions = [line.fraction for line in lines]
    axes.barh(places, [min(one, _WIDEST) for one in fractions], color=[_COLOURS[line.verdict] for line in lines])
    axes.plot([line.bound.goal for line in lines], places, "|", color="black", markersize=14, label="goal")
    axes.axvline(1.0, color="black", linestyle="--", label="limit")
    for place, line in zip(places, lines, strict=True):
        axes.text(0.02, place, f"{line.fraction:.2f} of {line.subject.limit_name}", va="center", fontsize=8)
    axes.set_yticks(places, [line.subject.name for line in lines])
    axes.set(title=f"kvstore bench, {report.geometry.name}", xlabel="fraction of the limit", xlim=(0, _WIDEST))
    axes.legend(loc="lower right")
    save_figure(figure, file)
