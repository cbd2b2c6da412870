"""Runs vLLM engines in a separate process: a job as JSON on standard input, the outputs as JSON on standard output.

    {"model": "...", "two_processes": true, "max_tokens": 12,
     "engines": [{"store": {"disk": "..."} | null, "rounds": ["cold", "again"], "prompts": [[1, 2], ...],
                  "overrides": {...}, "unlink": {"1": ["files that disappear before round 1", ...]},
                  "asks": {fields of kv_transfer_params}, "begins_after": "a file that must be there"}]}

A round other than the first begins with vLLM's own prefix cache emptied. With ``"stays": true`` an engine is closed
only when standard input ends, and the results come before. ``"ends_steps_at_states": true`` is for models of Mamba2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from tempfile import TemporaryFile
from typing import IO, Any

from kvstore.tools.dev.mamba2 import end_steps_at_states
from kvstore.tools.processes import kill_group
from support.forked import VLLM, ForkedProcess, forker
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, prepare_environment

_MARK = "RUNNER RESULT "
_MODULE = "support.runner"


def run_elsewhere(
    job: dict[str, Any], *, timeout_s: float = 300.0, python: str = sys.executable
) -> list[list[list[Completion]]]:
    """Carry a job out in a new process. Returns the completions by engine and round."""
    if python == sys.executable:
        with TemporaryFile("w+") as output:
            with started(job, output) as process:
                process.wait(timeout_s)
            output.seek(0)
            said = output.read()
    else:
        done = subprocess.run(
            [python, "-m", _MODULE],
            input=json.dumps(job),
            stdout=PIPE,
            stderr=STDOUT,
            text=True,
            timeout=timeout_s,
            env=_environment(),
            check=False,
        )
        said = done.stdout
    results = [line for line in said.splitlines() if line.startswith(_MARK)]
    assert results, f"the runner failed:\n{said[-8000:]}"
    return _parse(results[0])


@contextmanager
def started(job: dict[str, Any], output: IO[str] | int) -> Iterator[ForkedProcess]:
    """Yield the process that carries a job out; it is killed at the end of the block, with its children."""
    process = forker(VLLM).start(
        [_MODULE],
        stdin=PIPE,
        stdout=output,
        stderr=DEVNULL if output == PIPE else STDOUT,
        text=True,
        env=_environment(),
    )
    try:
        assert process.stdin is not None
        process.stdin.write(f"{json.dumps(job)}\n")
        process.stdin.flush()
        yield process
    finally:
        kill_group(process.pid)
        process.wait()


def generated_elsewhere(
    model: Path, store: StoreSetup, prompts: list[Prompt], *, two_processes: bool
) -> list[Completion]:
    """Return the completions of one engine without a disk, in a new process, which also stores them."""
    engine = {"store": vars(store) | {"disk": None}, "rounds": ["cold"], "prompts": prompts}
    job = {"model": str(model), "two_processes": two_processes, "max_tokens": 12, "engines": [engine]}
    ((cold,),) = run_elsewhere(job)
    return cold


@contextmanager
def staying_elsewhere(job: dict[str, Any], *, timeout_s: float = 120.0) -> Iterator[list[list[Completion]]]:
    """Do the same for one engine, which stays in its process with all it has stored until the block ends."""
    (engine,) = job["engines"]
    with started({**job, "two_processes": False, "engines": [{**engine, "stays": True}]}, PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        results = next((line for line in process.stdout if line.startswith(_MARK)), None)
        assert results is not None, "the runner failed"
        yield _parse(results)[0]
        process.stdin.close()
        assert process.wait(timeout_s) == 0


def _environment() -> dict[str, str]:
    tests = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}


def _parse(line: str) -> list[list[list[Completion]]]:
    return [
        [[Completion(*completion) for completion in a_round] for a_round in engine]
        for engine in json.loads(line[len(_MARK) :])
    ]


def main() -> None:
    """Carry out the job on standard input, one line."""
    job = json.loads(sys.stdin.readline())
    prepare_environment(two_processes=job["two_processes"])
    if job.get("ends_steps_at_states"):
        end_steps_at_states()
    results = []
    for part in job["engines"]:
        setup = part["store"]
        store = None
        if setup is not None:
            store = StoreSetup(**{**setup, "disk": Path(setup["disk"]) if setup.get("disk") else None})
        rounds = []
        with Engine(Path(job["model"]), store, **part.get("overrides", {})) as engine:
            while "begins_after" in part and not Path(part["begins_after"]).exists():
                time.sleep(0.1)
            for number, _ in enumerate(part["rounds"]):
                for path in part.get("unlink", {}).get(str(number), ()):
                    Path(path).unlink()
                if number:
                    engine.forget_local()
                asks = part.get("asks")
                rounds.append(engine.generate(part["prompts"], max_tokens=job["max_tokens"], asks=asks))
            if part.get("stays"):
                engine.settle()
                print(f"\n{_MARK}{json.dumps([rounds])}", flush=True)
                sys.stdin.read()
        results.append(rounds)
    print(f"\n{_MARK}{json.dumps(results)}", flush=True)  # whatever line of progress has not ended


if __name__ == "__main__":
    main()
