"""Do the tests notice? Put one small defect at a time into a copy of the tree, and see which test fails.

Defects of order, races and access are kept by hand in tools/dev/mutate/areas/, one YAML file per area: for each
mutation the place, the text before and after, and the tests that should fail. Others are made by mutmut's operators in
the rooms whose tests are quick, tools/dev/mutate/made.py, of which a run tries a sample. Exits with 1 if one of the
list survives, if fewer than 70% of the sample are caught, if a text is not found exactly once, or if the tests fail
without any mutation.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvstore.tools.dev.arguments import parser_of
from kvstore.tools.dev.mutate.made import MADE_TIMEOUT_S, make_mutations
from kvstore.tools.dev.mutate.mutations import ListError, read_mutations
from kvstore.tools.dev.mutate.report import as_json, diffs, faults, rooms, summary, table
from kvstore.tools.dev.mutate.running import Options, Result, run_mutations

ROOT = Path(__file__).resolve().parents[3]
AREAS = Path(__file__).resolve().parent / "areas"
EXAMPLE = """examples:
  make mutate                                             the list, and a sample of what is made
  make mutate ARGS="--only 'index/*'"                     one area, and its room's part of the sample
  make mutate ARGS="--only 'index/*' --every"             all that can be made in a room, which takes hours
  make mutate ARGS="--only 'index/leases.py:81*'"         all that can be made of a line
  make mutate ARGS="--only '*/redis.py' --jobs 1 --json"  those in one file, for a program
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations, print the table, and return the exit status."""
    parser = parser_of("mutate", __doc__, EXAMPLE)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--only", metavar="GLOB", default="*", help="those whose name (area/name) or file matches")
    parser.add_argument(
        "--sample", type=int, metavar="N", default=400, help="how many are made, in all rooms (0: none)"
    )
    parser.add_argument("--every", action="store_true", help="make all that can be made, instead of a sample")
    seed = random.randrange(10_000)  # noqa: S311 - a sample
    parser.add_argument("--seed", type=int, default=seed, help="of the sample (default: another in each run)")
    parser.add_argument("--jobs", type=int, default=cores, help="copies of the tree side by side (default: the cores)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for the tests of one mutation")
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--list", type=Path, default=AREAS, help="the folder of the list")
    given = parser.parse_args(arguments)
    console = Console(stderr=given.json, width=None if sys.stdout.isatty() else 160)
    try:
        listed = read_mutations(given.list, given.only)
    except ListError as error:
        parser.error(str(error))
    made = make_mutations(given.root, given.only, None if given.every else given.sample, given.seed)
    if not (listed or made) or given.jobs < 1:
        parser.error(f"nothing to do: --only {given.only!r} matches nothing, or --jobs {given.jobs}")
    begin_s = time.monotonic()

    def say(result: Result) -> None:
        console.print(f"{result.verdict:<9} {result.mutation.name}", markup=False, highlight=False)

    results: list[Result] = []
    for mutations, options in (
        (listed, Options(given.jobs, given.timeout)),
        (made, Options(given.jobs, min(given.timeout, MADE_TIMEOUT_S), arguments=("--quick",))),
    ):
        results += run_mutations(given.root, mutations, options, say)
    if given.json:
        print(json.dumps(as_json(results, given.seed), indent=2))
    else:
        console.print(table(results))
        for line in (*diffs(results), *rooms(results)):
            console.print(line, markup=False, highlight=False)
        console.print(f"{summary(results)} in {time.monotonic() - begin_s:.0f} s; --seed {given.seed}", highlight=False)
        for line in faults(results):
            console.print(f"error: {line}", style="red", markup=False, highlight=False)
    return 1 if faults(results) else 0


if __name__ == "__main__":
    sys.exit(main())
