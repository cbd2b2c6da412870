"""Reports of the results of mutations, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from kvstore.tools.dev.mutate.made import MadeMutation
from kvstore.tools.dev.mutate.running import Result, Verdict

MIN_CAUGHT_MADE = 0.7  # some of what is made changes nothing that matters


def faults(results: Sequence[Result]) -> list[str]:
    """Return the reasons why the run failed, one per line; none if it succeeded."""
    listed, made = _by_origin(results).values()
    says_nothing = [result for result in made if result.verdict in {Verdict.STALE, Verdict.BROKEN, Verdict.UNTESTED}]
    survived = [result for result in listed if not result.verdict.is_caught]
    lines = [f"{result.mutation.name}: {result.verdict}: {result.by}" for result in (*says_nothing, *survived)]
    if _num_caught(made) < MIN_CAUGHT_MADE * len(made):
        lines.append(f"{_num_caught(made)} of {len(made)} made are caught: fewer than {MIN_CAUGHT_MADE:.0%}")
    return lines


def diffs(results: Sequence[Result]) -> Iterator[str]:
    """Yield what the made survivors change: a line with name and place, then lines that are taken away and added."""
    for result in results:
        if isinstance(result.mutation, MadeMutation) and result.verdict is Verdict.SURVIVED:
            yield f"{result.mutation.name} in {result.mutation.file} survived:\n{result.mutation.diff()}"


def rooms(results: Sequence[Result]) -> Iterator[str]:
    """Yield the share of each room in what was made: a line with the room, and how many are caught."""
    found: dict[str, list[Result]] = {}
    for result in _by_origin(results)["made"]:
        found.setdefault(result.mutation.name.partition("/")[0], []).append(result)
    for room, some in sorted(found.items()):
        yield f"{room}: {_num_caught(some)} of {len(some)} made mutations are caught"


def summary(results: Sequence[Result]) -> str:
    """Return a sentence with the number of caught mutations."""
    told = [
        f"{_num_caught(some)} of {len(some)} {origin} mutations are caught ({_num_caught(some) / len(some):.0%})"
        for origin, some in _by_origin(results).items()
        if some
    ]
    return ", ".join(told)


def table(results: Sequence[Result]) -> Table:
    """Return a table with the test that caught each mutation."""
    # Folded, not cut off, because running a test again needs its whole name.
    columns = (Column(name, overflow="fold") for name in ("mutation", "place", "result", "by"))
    shown = Table(*columns, Column("s", justify="right"), title="Mutations")
    for result in results:
        mutation, verdict = result.mutation, result.verdict
        place = mutation.file if result.line is None else f"{mutation.file}:{result.line}"
        style = "green" if verdict.is_caught else "red"
        shown.add_row(mutation.name, place, f"[{style}]{verdict}[/]", escape(result.by), f"{result.seconds:.1f}")
    return shown


def as_json(results: Sequence[Result], seed: int) -> dict[str, Any]:
    """Return the results as a JSON object."""
    return {
        "caught": _num_caught(results),
        "total": len(results),
        "seed": seed,
        "faults": faults(results),
        "mutations": [
            {
                "name": result.mutation.name,
                "file": result.mutation.file,
                "line": result.line,
                "verdict": str(result.verdict),
                "by": result.by,
                "seconds": round(result.seconds, 2),
            }
            for result in results
        ],
    }


def _by_origin(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {"listed": [], "made": []}
    for result in results:
        found["made" if isinstance(result.mutation, MadeMutation) else "listed"].append(result)
    return found


def _num_caught(results: Sequence[Result]) -> int:
    return sum(result.verdict.is_caught for result in results)
