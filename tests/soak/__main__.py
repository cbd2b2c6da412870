"""Soak at full size, in parts; a run that was interrupted goes on where it was.

Each part does batches, each of which follows from its seed, and a file keeps the counts after every batch. At the end a
table says how many things were done, and how many were wrong or failed, which must be none. A part stops when it has
enough, when its time is over, or after ten failures.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.model.errors import ConfigError
from soak import course, memory
from soak.part import Part
from soak.parts import PARTS
from soak.progress import Tally, opened

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = """examples:
  make soak-long                                         all parts at full size: many hours
  make soak-long ARGS="--only kills --for 600"           one part, ten minutes of it, or what is left of it
  make soak-long ARGS="--share 0.01 --state /tmp/s.json" a hundredth of every part, kept elsewhere
  make soak-long ARGS="--only kills --seed 17"           one batch again: the seed is that of a failure

exit status: 0 if nothing was wrong or failed, 1 if something was, 2 if it could not begin
"""
_LIMIT_S: Final = 2 * 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="make soak-long",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", metavar="PART", action="append", choices=names, help=f"one of {', '.join(names)}")
    parser.add_argument("--for", dest="limit_s", type=float, default=_LIMIT_S, metavar="S", help="for each part")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="of full size, for each part")
    parser.add_argument("--seed", type=int, help="do only the batch of this seed, of the one part of --only")
    parser.add_argument("--state", type=Path, default=ROOT / ".soak" / "progress.json", help="keeps the progress")
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    given = parser.parse_args(arguments)
    parts = [part for part in PARTS if not given.only or part.name in given.only]
    if not (given.limit_s > 0 and given.share > 0):
        parser.error(f"nothing to do: --for {given.limit_s}, --share {given.share}")
    if given.seed is not None and len(parts) != 1:
        parser.error("--seed repeats a batch of one part: name it with --only")
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)  # each fault would be a line
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended, too
    told = Console(stderr=given.json, width=None if sys.stdout.isatty() else 160)
    wanted = {part.name: max(1, round(given.share * part.wanted)) for part in parts}
    if given.seed is not None:
        tallies = {parts[0].name: course.once(parts[0], given.seed)}
    else:
        try:
            tallies = soak(parts, given.state, wanted, given.limit_s, told)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    if given.json:
        print(json.dumps([row(part, tallies[part.name], wanted[part.name]) for part in parts], indent=2))
    else:
        told.print(table(parts, tallies, wanted))
    for part in parts:
        for failure in tallies[part.name].failures:
            again = f'make soak-long ARGS="--only {part.name} --seed {failure.seed}"'
            told.print(f"{part.name}: {escape(failure.what)}\n  again: {again}", highlight=False)
    return int(any(tally.wrong + tally.failed for tally in tallies.values()))


def soak(
    parts: Sequence[Part], state: Path, wanted: dict[str, int], limit_s: float, console: Console
) -> dict[str, Tally]:
    """Run the parts one after the other. An interruption ends all of them, and loses the present batch only.

    Raises:
        ConfigError: the file of the progress cannot be used.
    """

    def tell(part: Part, tally: Tally) -> None:
        line = f"{part.name}: {tally.count:,} of {wanted[part.name]:,} {part.unit}"
        bad = f"{tally.wrong} wrong, {tally.failed} failed"
        console.print(f"{line} in {tally.seconds:,.0f} s, {bad}, {tally.batches} batches", highlight=False)

    with opened(state) as progress:
        try:
            for part in parts:
                course.run(part, progress, wanted[part.name], limit_s, tell)
        except KeyboardInterrupt:
            console.print("interrupted: the same command goes on here")
        return {part.name: progress.of(part.name) for part in parts}


def row(part: Part, tally: Tally, wanted: int) -> dict[str, object]:
    """Return a part's line of the table."""
    slopes = [slope for life in tally.memory if (slope := memory.slope_mib_per_hour(life)) is not None]
    return {
        "part": part.name,
        "unit": part.unit,
        "count": tally.count,
        "wanted": wanted,
        "wrong": tally.wrong,
        "failed": tally.failed,
        "seconds": round(tally.seconds, 1),
        "mib_per_hour": round(max(slopes), 1) if slopes else None,
        "notes": tally.notes,
    }


def table(parts: Sequence[Part], tallies: dict[str, Tally], wanted: dict[str, int]) -> Table:
    """Return a table with a row for each part."""
    shown = Table("part", "unit", "count", "wanted", "wrong", "failed", "minutes", "MiB/h", "notes")
    for part in parts:
        cells = row(part, tallies[part.name], wanted[part.name])
        notes = ", ".join(f"{number:,} {name}" for name, number in tallies[part.name].notes.items())
        slope = cells["mib_per_hour"]
        shown.add_row(
            part.name,
            part.unit,
            f"{cells['count']:,}",
            f"{cells['wanted']:,}",
            str(cells["wrong"]),
            str(cells["failed"]),
            f"{tallies[part.name].seconds / 60:.1f}",
            "-" if slope is None else str(slope),
            notes,
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
