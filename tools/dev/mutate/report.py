"""Reports of the results of mutations, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from kvstore.tools.dev.mutate.running import Result, Verdict

MIN_CAUGHT = 0.95


def faults(results: Sequence[Result]) -> list[str]:
    """Return the reasons why the run failed, one per line; none if it succeeded."""
    lines = [
        f"{result.mutation.name}: {result.verdict}: {result.by}"
        for result in results
        if result.verdict in {Verdict.STALE, Verdict.BROKEN, Verdict.UNTESTED}
    ]
    lines += [
        f"{result.mutation.name}: survived: write a test that fails, or a reason ('survives') into the list"
        for result in results
        if result.verdict is Verdict.SURVIVED and not result.mutation.survives
    ]
    caught = sum(result.verdict.is_caught for result in results)
    if caught < MIN_CAUGHT * len(results):
        lines.append(f"{caught} of {len(results)} are caught: fewer than {MIN_CAUGHT:.0%}")
    return lines


def explained(results: Sequence[Result]) -> list[str]:
    """Return the survivors with a written reason, such as defects that only CUDA shows, with their names."""
    survivors = [result.mutation for result in results if result.verdict is Verdict.SURVIVED]
    return [f"{mutation.name} survived: {mutation.survives}" for mutation in survivors if mutation.survives]


def summary(results: Sequence[Result]) -> str:
    """Return a sentence with the number of caught mutations."""
    caught = sum(result.verdict.is_caught for result in results)
    return f"{caught} of {len(results)} mutations are caught ({caught / max(1, len(results)):.0%})"


def table(results: Sequence[Result]) -> Table:
    """Return a table with the test that caught each mutation or, for a survivor, the reason why none did."""
    # Folded, not cut off, because running a test again needs its whole name.
    columns = (Column(name, overflow="fold") for name in ("mutation", "place", "result", "by"))
    shown = Table(*columns, Column("s", justify="right"), title="Mutations")
    for result in results:
        mutation, verdict = result.mutation, result.verdict
        place = mutation.file if result.line is None else f"{mutation.file}:{result.line}"
        by = result.by or (mutation.survives or "" if verdict is Verdict.SURVIVED else "")
        style = "green" if verdict.is_caught else "red"
        shown.add_row(mutation.name, place, f"[{style}]{verdict}[/]", escape(by), f"{result.seconds:.1f}")
    return shown


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return the results as a JSON object."""
    return {
        "caught": sum(result.verdict.is_caught for result in results),
        "total": len(results),
        "faults": faults(results),
        "mutations": [
            {
                "name": result.mutation.name,
                "file": result.mutation.file,
                "line": result.line,
                "verdict": str(result.verdict),
                "by": result.by,
                "survives": result.mutation.survives,
                "seconds": round(result.seconds, 2),
            }
            for result in results
        ],
    }
