"""Course of a comparison: each engine in turn, and on each every load from empty caches.

Each finished run is a line of a file, so a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from kvstore.model.errors import ConfigError
from kvstore.tools.models import build_llama
from kvstore.tools.outside.aiperf import AIPerf
from kvstore.tools.outside.cache_pressure import CachePressure
from kvstore.tools.outside.engines import ENGINES, SHAPE, Counts, OutsideVllm
from kvstore.tools.outside.generator import Generator, Numbers, Place, SkippedError, UnreadableError
from kvstore.tools.outside.lmbenchmark import LMBenchmark
from kvstore.tools.outside.origin import origin
from kvstore.tools.outside.vllm_bench import PrefixRepetition, TimedTrace
from kvstore.tools.processes import kill_group
from kvstore.tools.vllmserver import ServerFailedError, log_excerpt

GENERATORS: Final[tuple[Generator, ...]] = (PrefixRepetition(), TimedTrace(), CachePressure(), AIPerf(), LMBenchmark())
OUTPUTS: Final = "outputs"
"""Name of the runs that answer fixed prompts, so that outputs can be compared."""
_TIMEOUT_S: Final = 600.0
_LINES_OF_ERROR: Final = 5

Report = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One load on one engine.

    Attributes:
        load: name of the load.
        engine: name of the engine.
        round: number of the round, from 0.
        counts: what was counted meanwhile.
        numbers: the generator's figures; None if it failed.
        error: reason of the failure.
        texts: answers to the fixed prompts.
        origin: code and machine of the run, see ``origin``.
    """

    load: str
    engine: str
    round: int
    counts: Counts
    numbers: Numbers | None = None
    error: str = ""
    texts: tuple[str, ...] = ()
    origin: str = ""

    def to_json(self) -> str:
        """Return the run as a line of JSON."""
        return json.dumps({**asdict(self), "counts": self.counts._asdict()})

    @classmethod
    def from_json(cls, line: str) -> Run:
        """Return the run of a line.

        Raises:
            ValueError: it is not such a line; also ``KeyError`` and ``TypeError``.
        """
        tree: dict[str, Any] = json.loads(line)
        numbers = tree.pop("numbers")
        texts, counts = tuple(tree.pop("texts")), Counts(**tree.pop("counts"))
        return cls(**tree, counts=counts, texts=texts, numbers=Numbers(**numbers) if numbers else None)


@dataclass
class Comparison:
    """Runs of a comparison, and the loads that were left out.

    Attributes:
        rounds: wanted rounds.
        runs: finished runs.
        skipped: reasons, by load.
    """

    rounds: int
    runs: list[Run] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def find(self, load: str, engine: str, number: int) -> Run | None:
        """Return the run of a load on an engine in a round, if it is finished."""
        wanted = (load, engine, number)
        return next((run for run in self.runs if (run.load, run.engine, run.round) == wanted), None)


def read_runs(file: Path) -> list[Run]:
    """Return the runs in a file; none if there is no such file.

    Raises:
        ConfigError: the file has another format.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [Run.from_json(line) for line in lines]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file} is not a file of runs, remove it: {error!r}") from error


def compare(place: Place, names: Sequence[str], rounds: int, limit_s: float, report: Report) -> Comparison:
    """Run what the file of runs lacks, for at most ``limit_s``, though a run that has begun is finished.

    Raises:
        ConfigError: the file of runs is in another format, or has runs of other code or of another machine.
        ServerFailedError: an engine did not start, answer or stop.
    """
    place.runs.mkdir(parents=True, exist_ok=True)
    file = place.runs / "runs.jsonl"
    comparison, end_s, own = Comparison(rounds, read_runs(file)), time.monotonic() + limit_s, origin()
    for other in {run.origin for run in comparison.runs} - {own}:
        raise ConfigError(f"{file} has runs of {other or 'unknown code'}, not of {own}: forget them by --again")
    build_llama(place.model, SHAPE)
    generators = _prepared(place, names, comparison, report)
    for number in range(rounds):
        for engine in ENGINES[:: -1 if number % 2 else 1]:
            loads = [one for one in generators if comparison.find(one.name, engine, number) is None]
            wants_outputs = comparison.find(OUTPUTS, engine, number) is None
            if (loads or wants_outputs) and time.monotonic() < end_s:
                for run in _Course(place, number, end_s, report, own).on(engine, loads, outputs=wants_outputs):
                    comparison.runs.append(run)
                    if not run.error:  # a failed run is tried again
                        with file.open("a", encoding="utf-8") as lines:
                            lines.write(run.to_json() + "\n")
    return comparison


def _prepared(place: Place, names: Sequence[str], comparison: Comparison, report: Report) -> list[Generator]:
    """Prepare the wanted generators, and return those that can run."""
    ready = []
    for one in GENERATORS:
        if one.name in names:
            report(f"preparing {one.name}")
            try:
                one.prepare(place)
            except SkippedError as reason:
                comparison.skipped[one.name] = str(reason)
            else:
                ready.append(one)
    return ready


class _Course(NamedTuple):
    """One round, as far as the time allows."""

    place: Place
    number: int
    end_s: float
    report: Report
    origin: str

    def on(self, engine: str, loads: Sequence[Generator], *, outputs: bool) -> Iterator[Run]:
        """Start an engine, and yield its runs."""
        folder = self.place.runs / f"round-{self.number}" / engine.replace(", ", "-").replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        self._tell(engine, "starting")
        with OutsideVllm(engine, self.place.model, folder) as vllm:
            try:
                if outputs:
                    self._tell(engine, OUTPUTS)
                    before = vllm.counts()
                    texts = tuple(vllm.sample_outputs())
                    counts = vllm.counts().since(before)
                    yield Run(OUTPUTS, engine, self.number, counts, texts=texts, origin=self.origin)
                for one in loads:
                    if time.monotonic() < self.end_s:
                        self._tell(engine, one.name)
                        yield self._measure(vllm, one, folder / one.name)
            except httpx.HTTPError as error:
                raise ServerFailedError(f"vLLM did not answer: {error!r}", vllm.log) from error

    def _measure(self, vllm: OutsideVllm, one: Generator, out: Path) -> Run:
        """Run a generator from empty caches, and in an empty folder, so that no earlier result is read."""
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        vllm.forget()
        before = vllm.counts()
        command, added = one.command(self.place, vllm.url, out), one.variables(self.place)
        error = _execute(command, {**os.environ, **added}, out / "generator.log")
        counts = vllm.counts().since(before)
        try:
            numbers = None if error else one.read(out)
        except UnreadableError as unreadable:
            numbers, error = None, str(unreadable)
        return Run(one.name, vllm.engine, self.number, counts, numbers, error, origin=self.origin)

    def _tell(self, engine: str, what: str) -> None:
        self.report(f"round {self.number + 1}: {engine}: {what}")


def _execute(command: Sequence[str], environment: dict[str, str], log: Path) -> str:
    """Run a generator, with its output in ``log``, and return the reason if it fails; none of its processes is left."""
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - the generators' own commands
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
    except OSError as error:
        return str(error)
    try:
        status = process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        return str(error)
    finally:
        kill_group(process.pid)
        process.wait()
    return f"exit status {status}: {log_excerpt(log, _LINES_OF_ERROR)}" if status else ""
