"""Page of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from kvstore.tools.outside.engines import LEFT_OUT
from kvstore.tools.outside.report import (
    CLAIMS,
    TITLES,
    about,
    cells,
    failures_of,
    headline,
    outputs_of,
    rows_of,
)
from kvstore.tools.outside.run import Comparison
from kvstore.tools.reportpage import document, section, table


def page_of(comparison: Comparison, machine: Mapping[str, str], command: str, plot: str) -> str:
    """Return the page; ``plot`` is an image in SVG, or empty."""
    rows, failures, outputs = rows_of(comparison), failures_of(comparison), outputs_of(comparison)
    sign = failures[0] if failures else headline(rows) or "no request failed, and no output differs"
    loads = dict.fromkeys(row.load for row in rows)
    figures = [f"<td>{escape(row.load)}</td><td>{escape(row.engine)}</td>" + _cells(cells(row)) for row in rows]
    own = [
        f"<td>{escape(row.load)}</td><td>{escape(row.engine)}</td>" + _cells((name, f"{value:.3g}"))
        for row in rows
        for name, value in row.own.items()
    ]
    same = (
        f"{outputs.compared - outputs.different} of {outputs.compared} answers equal those of plain vLLM; "
        f"kvstore loaded {outputs.loaded_tokens:,} tokens for them"
    )
    left_out = [f"{name}: {reason}" for name, reason in comparison.skipped.items()] + [LEFT_OUT]
    sections = [
        section("Figures", table(["".join(f"<th>{escape(title)}</th>" for title in TITLES), *figures])),
        section("TTFT", f'<div class="plot">{plot}</div>' if plot else "no plot"),
        section("Loads", table(_pairs({load: about(load) for load in loads}))),
        section("Outputs", escape(same)),
        section("Generators' further figures", table(own)),
        section("Failures", table(f"<td>{escape(line)}</td>" for line in failures or ["none"])),
        section("Left out", table(f"<td>{escape(line)}</td>" for line in left_out)),
        section("Machine", table(_pairs(machine))),
        section("Claims", escape(CLAIMS)),
        section("Repeat it", f"<pre>{escape(command)}</pre>"),
    ]
    title = "kvstore: load generators of others"
    return document("make bench-outside", title, (sign, "bad" if failures else "good"), machine["load"], sections)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f'<td class="number">{escape(text)}</td>' for text in texts)


def _pairs(tree: Mapping[str, str]) -> Iterable[str]:
    return [f'<td class="soft">{escape(name)}</td><td>{escape(value)}</td>' for name, value in tree.items()]
