"""Runs vLLM engines in a process of their own: a job as JSON on standard input, the outputs as JSON on standard output.

    {"model": "...", "two_processes": true, "max_tokens": 12,
     "engines": [{"store": {"disk": "..."} | null, "rounds": ["cold", "again"], "prompts": [[1, 2], ...],
                  "overrides": {...}, "unlink": {"1": ["files that disappear before round 1", ...]}}]}

A round other than the first begins with vLLM's own prefix cache emptied.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.vllm_engine import Completion, Engine, StoreSetup, prepare_environment

_MARK = "RUNNER RESULT "


def run_elsewhere(job: dict[str, Any], *, timeout_s: float = 300.0) -> list[list[list[Completion]]]:
    """Carry a job out in a new process: for each engine, for each round, the completions."""
    tests = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "support.runner"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert results, f"the runner failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return [
        [[Completion(*completion) for completion in a_round] for a_round in engine]
        for engine in json.loads(results[0][len(_MARK) :])
    ]


def main() -> None:
    """Carry out the job on standard input."""
    job = json.load(sys.stdin)
    prepare_environment(two_processes=job["two_processes"])
    results = []
    for part in job["engines"]:
        setup = part["store"]
        store = None
        if setup is not None:
            store = StoreSetup(**{**setup, "disk": Path(setup["disk"]) if setup.get("disk") else None})
        rounds = []
        with Engine(Path(job["model"]), store, **part.get("overrides", {})) as engine:
            for number, _ in enumerate(part["rounds"]):
                for path in part.get("unlink", {}).get(str(number), ()):
                    Path(path).unlink()
                if number:
                    engine.forget_local()
                rounds.append(engine.generate(part["prompts"], max_tokens=job["max_tokens"]))
        results.append(rounds)
    print(_MARK + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
