"""Run of GPU steps: one process per step, with figures written as they arrive, and the outcome of every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from kvstore.model.errors import ConfigError
from kvstore.tools.bench.gpu.bed import Scale
from kvstore.tools.bench.gpu.figures import Ended, Figure, append_line, figure_table
from kvstore.tools.bench.gpu.steps import MODULE, PLANS, STEPS, Step
from kvstore.tools.bench.workbench import one_torch_thread
from kvstore.tools.processes import kill_group

ROOT = Path(__file__).resolve().parents[3]
RESULTS, LOG = "gpu.jsonl", "gpu.log"
WRONG_USAGE = 2
_WIDTH = 160  # where the output is no terminal
END_WAIT_S = 10.0  # for a killed process, because one that hangs in the driver never ends


def execute(plan: str, only: str, scale: Scale) -> int:
    """Run the selected steps of a plan, each in a separate process, and print the table; return the exit status."""
    globs = only.split(",")
    steps = [step for step in PLANS[plan] if any(fnmatchcase(step.name, glob) for glob in globs)]
    if not steps:
        print(f"error: --only {only!r} matches no step", file=sys.stderr)
        return WRONG_USAGE
    ended = []
    for step in run_steps(steps, scale):
        print(f"{step.outcome:<9} {step.name:<22} {step.seconds:5.0f} s  {step.said}", file=sys.stderr, flush=True)
        ended.append(step)
    title = f"{plan} on {_machine(scale)['device']}; every figure and sample is in {scale.folder / RESULTS}"
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(figure_table(ended, title))
    return int(any(step.is_failed for step in ended))


def execute_one(name: str, scale: Scale, *, prints: bool) -> None:
    """Measure one step in this process, and write or print every figure as soon as it is known.

    Raises:
        ConfigError: there is no such step, the step is a program, or it cannot run here.
        BenchError: a byte was wrong.
    """
    if name not in STEPS:
        raise ConfigError(f"there is no step {name!r}: take one of {', '.join(STEPS)}")
    measure, hindrance = STEPS[name].measure, STEPS[name].hindrance(scale)
    if measure is None or hindrance:
        raise ConfigError(f"step {name} does not run here: {hindrance or 'it is a program'}")
    with one_torch_thread():
        for figure in measure(scale):
            line = {"step": name, **figure.to_json()}
            if prints:
                print(json.dumps(line), flush=True)
            else:
                append_line(scale.folder / RESULTS, line)


def run_steps(steps: Iterable[Step], scale: Scale) -> Iterator[Ended]:
    """Run steps one after the other, and write their figures and outcomes to the folder's ``gpu.jsonl`` at once."""
    scale.folder.mkdir(parents=True, exist_ok=True)
    results = scale.folder / RESULTS
    append_line(results, {"run": _machine(scale)})
    for step in steps:
        why_not = step.hindrance(scale)
        ended = Ended(step.name, "skipped", why_not) if why_not else _run(step, scale)
        outcome = {"step": ended.name, "outcome": ended.outcome, "said": ended.said, "seconds": ended.seconds}
        append_line(results, outcome)
        yield ended


def _machine(scale: Scale) -> dict[str, object]:
    """Return facts about the machine that the figures were measured on."""
    return {
        "device": torch.cuda.get_device_name(scale.device) if scale.is_cuda else "CPU",
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _run(step: Step, scale: Scale) -> Ended:
    results, log = scale.folder / RESULTS, scale.folder / LOG
    command = step.program(scale.folder) if step.program else _one(step.name, scale)
    begin_bytes, begin_s = results.stat().st_size, perf_counter()
    with log.open("ab") as output:
        output.write(f"== {step.name}: {' '.join(command)}\n".encode())
        output.flush()
        logged_bytes = output.tell()
        process = subprocess.Popen(  # noqa: S603 - our own steps
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            has_ended = _end(process)
    seconds = perf_counter() - begin_s
    figures = _figures(results, begin_bytes)
    said = _last_line(log, logged_bytes)
    if status == 0:
        return Ended(step.name, "done", said if step.program else "", seconds, figures)
    outcome = "answered" if step.is_question else "timed out" if status is None else "failed"
    why = f"ended after its {step.limit_s:.0f} s" if status is None else f"status {status}"
    if not has_ended:
        why = f"killed after its {step.limit_s:.0f} s, but it cannot be ended, and may disturb what follows"
    return Ended(step.name, outcome, f"{why}: {said}", seconds, figures)


def _one(name: str, scale: Scale) -> list[str]:
    given = ["--device", str(scale.device), "--out", str(scale.folder), *(["--small"] if scale.is_small else [])]
    return [sys.executable, "-m", MODULE, "one", name, *given]


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Kill a step's process group, and return False if the step's process does not end."""
    kill_group(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_WAIT_S)
    return process.returncode is not None


def _figures(results: Path, begin_bytes: int) -> list[Figure]:
    """Return the figures in a results file from a byte position on."""
    with results.open("rb") as lines:
        lines.seek(begin_bytes)
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [Figure.from_json(line) for line in found if "figure" in line]


def _last_line(log: Path, begin_bytes: int) -> str:
    with log.open("rb") as lines:
        lines.seek(begin_bytes)
        said = lines.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
