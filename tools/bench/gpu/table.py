"""Table at the end of a GPU run: every figure next to its limit, and the outcome of every step."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from kvstore.tools.bench.gpu.figures import Figure
from kvstore.tools.bench.gpu.run import Ended
from kvstore.tools.console import numbers

_STYLES = {"ok": "green", "short": "yellow", "failed": "red", "timed out": "red"}


def figure_table(ended: Sequence[Ended], title: str) -> Table:
    """Return a table with a line for each figure, and one for each step that failed or has no figures."""
    table = Table("step", "figure", *numbers("limit", "measured", "ratio", "goal"), "verdict", title=title)
    for step in ended:
        for figure in step.figures:
            table.add_row(step.name, figure.name, *_cells(figure), _styled(figure.verdict))
        if step.is_failed or not step.figures:
            verdict = "failed" if step.is_failed else "ok" if step.outcome == "done" else step.outcome
            table.add_row(step.name, escape(step.said), "", "", "", "", _styled(verdict))
    return table


def _cells(figure: Figure) -> tuple[str, str, str, str]:
    sign = "<= " if figure.at_most else ""
    goal = "" if figure.goal is None else f"{sign}{figure.goal:.2f}"
    return _shown(figure.limit, figure.unit), _shown(figure.value, figure.unit), f"{figure.ratio:.2f}", goal


def _shown(value: float, unit: str) -> str:
    if not unit:
        return f"{value:g}"
    return f"{value:.2f} {unit}"


def _styled(verdict: str) -> str:
    style = _STYLES.get(verdict)
    return f"[{style}]{verdict}[/]" if style else verdict
