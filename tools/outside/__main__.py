"""Runs load generators of others against real `vllm serve`: without kvstore twice, and with it.

Every generator's own figures are compared with those of plain vLLM in the same round. Finished runs are kept, so that a
comparison that was stopped goes on where it was. A generator that cannot be installed is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.tools.bench.load import cpu_name
from kvstore.tools.bench.vllm import require_vllm
from kvstore.tools.console import FAILED, WRONG_USAGE
from kvstore.tools.figures import require_plotting
from kvstore.tools.interrupts import INTERRUPTED, Interruption, interruptible
from kvstore.tools.outside.generator import Place
from kvstore.tools.outside.page import page_of
from kvstore.tools.outside.plot import plot
from kvstore.tools.outside.report import failures_of, headline, outputs_of, rows_of, table_of, to_json
from kvstore.tools.outside.run import GENERATORS, Comparison, compare
from kvstore.tools.processes import handled
from kvstore.tools.vllmserver import ServerFailedError, log_excerpt

EXAMPLES: Final = """examples:
  make bench-outside ARGS="--traces /data/traces"          all that can run here: half an hour on two cores
  make bench-outside ARGS="--only vllm-bench-prefix"       one load; --only vllm-bench takes both of vllm bench serve
  make bench-outside ARGS="--for 60"                       go on for a minute; the next call goes on from there
  make bench-outside ARGS="--lmbenchmark ~/LMBenchmark"    with a checkout of LMBenchmark, which is not changed
  make bench-outside ARGS="--again --share 0.2"            forget finished runs; a fifth of each load

exit status: 0 if nothing failed and all outputs are equal, 1 if not, 2 if it could not begin
"""
FILES: Final = ("report.json", "report.html", "ttft.svg")
_ROOT: Final = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loads, write the report, print its table, and return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    names = [one.name for one in GENERATORS if not given.only or any(map(one.name.startswith, given.only))]
    if not (names and given.rounds > 0 and given.limit_s > 0 and given.share > 0):
        parser.error(f"nothing to do: --only {given.only}, --rounds {given.rounds}, --for {given.limit_s}")
    told = Console(stderr=given.json, width=None if sys.stdout.isatty() else 180)
    folder = given.folder.absolute()
    place = Place(folder, folder / "model", given.traces, given.lmbenchmark, given.share)
    load = f"load {os.getloadavg()[0]:.1f} at the beginning"
    machine = {"processor": f"{cpu_name()}, {os.cpu_count()} cores", "load": load, "kvstore": __version__}
    try:
        require_vllm()
        if given.again:
            shutil.rmtree(place.folder / f"share-{place.share:g}", ignore_errors=True)
        # A closed terminal must not leave a vLLM behind, which has a session of its own.
        with interruptible("ending vLLM; finished runs are kept", at_once=True), handled((signal.SIGHUP,), _hang_up):
            comparison = compare(
                *(place, names, given.rounds, given.limit_s),
                lambda line: told.print(line, markup=False, highlight=False),
            )
        _write(comparison, place, machine, arguments or sys.argv[1:], given.figure)
    except Interruption:
        return INTERRUPTED
    except (ConfigError, ServerFailedError) as error:
        if isinstance(error, ServerFailedError) and error.log is not None:
            print(log_excerpt(error.log), file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    if given.json:
        print(json.dumps(to_json(comparison), indent=2))
    else:
        _tell(told, comparison, place)
    return FAILED if failures_of(comparison) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-outside",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(one.name for one in GENERATORS)
    parser.add_argument("--only", metavar="LOAD", action="append", help=f"beginning of a name, of {names}")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="the engines' order alternates")
    parser.add_argument("--for", dest="limit_s", type=float, default=7200.0, metavar="S", help="begin no run after S")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="of full size, for each load")
    parser.add_argument("--again", action="store_true", help="forget the finished runs of this size")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with public traces")
    parser.add_argument("--lmbenchmark", type=Path, metavar="DIR", help="checkout of LMBenchmark")
    parser.add_argument("--folder", type=Path, default=_ROOT / ".outside", metavar="DIR", help="for all files")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the plot there, too")
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    return parser


def _write(
    comparison: Comparison, place: Place, machine: dict[str, str], arguments: Sequence[str], figure: Path | None
) -> None:
    """Write the report, its page, and the plot where matplotlib is installed.

    Raises:
        ConfigError: a plot was asked for, and cannot be drawn.
    """
    rows, drawn = rows_of(comparison), ""
    tree, page, svg = (place.runs / name for name in FILES)
    try:
        require_plotting()
    except ConfigError:
        if figure is not None:
            raise
    else:
        plot(rows, svg)
        drawn = svg.read_text(encoding="utf-8")
        drawn = drawn[drawn.index("<svg") :]
        if figure is not None:
            plot(rows, figure)
    tree.write_text(json.dumps({**to_json(comparison), "machine": machine}, indent=2) + "\n", encoding="utf-8")
    command = f'make bench-outside ARGS="{" ".join(arguments)}"'
    page.write_text(page_of(comparison, machine, command, drawn), encoding="utf-8")


def _hang_up(*_: object) -> None:
    raise Interruption


def _tell(told: Console, comparison: Comparison, place: Place) -> None:
    told.print(table_of(comparison))
    outputs = outputs_of(comparison)
    lines = [headline(rows_of(comparison))]
    if outputs.compared:
        same = outputs.compared - outputs.different
        lines.append(f"outputs equal to plain vLLM's: {same} of {outputs.compared}")
    lines += [f"left out: {name}: {reason}" for name, reason in comparison.skipped.items()]
    lines += [f"failed: {line}" for line in failures_of(comparison)]
    lines.append(f"written: {place.runs}/{', '.join(FILES[:2])}")
    for line in filter(None, lines):
        told.print(escape(line), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
