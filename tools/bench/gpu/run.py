"""Run of GPU steps: one process per step, with figures written as they arrive, and the outcome of every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from kvstore.errors import ConfigError
from kvstore.tools.bench.gpu.bed import Scale, make_scale
from kvstore.tools.bench.gpu.figures import Ended, Figure, append_line
from kvstore.tools.bench.gpu.steps import MODULE, Step, find_step
from kvstore.tools.bench.workbench import one_torch_thread

ROOT = Path(__file__).resolve().parents[3]
RESULTS, LOG = "gpu.jsonl", "gpu.log"
END_WAIT_S = 10.0  # for a killed process, because one that hangs in the driver never ends


def run_steps(steps: Iterable[Step], scale: Scale, folder: Path, *, small: bool) -> Iterator[Ended]:
    """Run steps one after the other, and write their figures and outcomes to the folder's ``gpu.jsonl`` at once.

    Args:
        steps: steps to run.
        scale: device and sizes.
        folder: folder of the results; created if missing.
        small: whether steps run at the small scale.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / RESULTS
    append_line(results, {"run": machine(scale)})
    for step in steps:
        why_not = step.hindrance(scale)
        ended = Ended(step.name, "skipped", why_not) if why_not else _run(step, scale, folder, small=small)
        append_line(
            results, {"step": ended.name, "outcome": ended.outcome, "said": ended.said, "seconds": ended.seconds}
        )
        yield ended


def machine(scale: Scale) -> dict[str, object]:
    """Return facts about the machine that the figures were measured on."""
    return {
        "device": torch.cuda.get_device_name(scale.device) if scale.is_cuda else "CPU",
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _run(step: Step, scale: Scale, folder: Path, *, small: bool) -> Ended:
    results, log = folder / RESULTS, folder / LOG
    command = step.program(folder) if step.program else _one(step.name, scale, folder, small=small)
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


def _one(name: str, scale: Scale, folder: Path, *, small: bool) -> list[str]:
    command = [sys.executable, "-m", MODULE, "one", name, "--device", str(scale.device), "--out", str(folder)]
    return [*command, "--small"] if small else command


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Kill a step's process group, and return False if the step's process does not end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
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


def run_one(name: str, device: torch.device, folder: Path | None, *, small: bool) -> None:
    """Measure a step, and write every figure as soon as it is known.

    Args:
        name: name of the step.
        device: device of the paged cache.
        folder: folder of the run's results; None prints the figures, and keeps no files.
        small: use the small scale.

    Raises:
        ConfigError: there is no such step, the step is a program, or it cannot run here.
        BenchError: a byte was wrong.
    """
    step, scale = find_step(name), make_scale(device, small=small)
    hindrance = step.hindrance(scale)
    if step.measure is None or hindrance:
        raise ConfigError(f"step {name} does not run here: {hindrance or 'it is a program'}")
    with TemporaryDirectory(prefix="kvstore-bench-") as scratch, one_torch_thread():
        for figure in step.measure(scale, folder or Path(scratch)):
            line = {"step": name, **figure.to_json()}
            if folder is None:
                print(json.dumps(line), flush=True)
            else:
                append_line(folder / RESULTS, line)
