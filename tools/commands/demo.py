"""Command ``kvstore demo``, which shows that a prompt's KV survives a restart of vLLM."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstore.tools.console import FAILED, AsJson, errors, give_up, stage_progress


def demo(
    folder: Annotated[Path, typer.Option(help="Working folder, which keeps the model between runs.")] = Path(".demo"),
    as_json: AsJson = False,
) -> None:
    """Run vLLM, store a long prompt's KV, restart vLLM and load it from disk.

    Exits with 1 if the outputs differ, or if a whole chunk of the prompt was not loaded.
    """
    from kvstore.tools.demo.report import result_table  # noqa: PLC0415
    from kvstore.tools.demo.run import STAGES, run_demo  # noqa: PLC0415 - an extra
    from kvstore.tools.vllmserver import ServerFailedError, log_excerpt  # noqa: PLC0415

    console = Console(stderr=as_json)
    try:
        with stage_progress(console, STAGES) as report:
            result = run_demo(folder, report=report)
    except ServerFailedError as error:
        if error.log is not None:
            errors().print(log_excerpt(error.log))
            errors().print(f"(end of {error.log})")
        give_up(error, FAILED)
    problems = result.problems()
    if as_json:
        print(json.dumps({**asdict(result), "ratio": result.ratio, "problems": problems}))
    else:
        console.print(result_table(result))
    for problem in problems:
        errors().print(f"failed: {problem} (logs are in {folder})")
    if problems:
        raise typer.Exit(FAILED)
