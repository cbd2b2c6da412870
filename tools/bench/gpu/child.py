"""Run of one step in this process, with its figures written to the run's file or to standard output."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvstore.errors import ConfigError
from kvstore.tools.bench.gpu.figures import append_line
from kvstore.tools.bench.gpu.run import RESULTS
from kvstore.tools.bench.gpu.scale import make_scale
from kvstore.tools.bench.gpu.steps import find_step
from kvstore.tools.bench.samples import one_torch_thread


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
