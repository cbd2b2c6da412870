"""Programs on real vLLM in forks of a process that has imported vLLM: importing takes longer than all else at a start.

As a program it answers lines of JSON on standard input, one for each fork, with the process id in a line.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.context
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NoReturn

from kvstore.tools.demo.server import ENVIRONMENT

TESTS = Path(__file__).parent.parent
_MODULES = (
    *("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    *("vllm.model_executor.models.llama", "transformers.models.auto.tokenization_auto"),
    "kvstore.adapters.vllm.connector",
)


_get_context = multiprocessing.get_context


class ForkedProcess:
    """The part of ``subprocess.Popen`` that servers of the tests need. Its process leads a process group."""

    returncode: int | None = None  # nobody learns it
    args: str = "vLLM"

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return 0 if the process has ended, with whatever code."""
        return self._wait(0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        if self._wait(timeout_s) is None:
            raise subprocess.TimeoutExpired("vllm serve", timeout_s or 0)
        return 0

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, number)

    def _wait(self, timeout_s: float | None) -> int | None:
        ended, _, _ = select.select([self._end], [], [], timeout_s)
        return 0 if ended else None

    def __del__(self) -> None:
        os.close(self._end)


class Forker:
    """The process that has imported vLLM. Thread-safe. It ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forked_vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )

    def launch(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> ForkedProcess:
        """Start a server as ``subprocess.Popen`` would, in a session of its own."""
        words = list(command)
        task: dict[str, Any] = {"environment": dict(environment), "output": output.name, "main": "vllm"}
        if words[0] == "env":
            del words[0]
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                task["environment"][name] = value
        if words[:2] == ["taskset", "-c"]:
            task["cores"] = [int(core) for core in words[2].split(",")]
            del words[:3]
        assert Path(words[0]).name == "vllm", words
        task["arguments"] = ["vllm", *words[1:]]
        return self._start(task)

    def run(self, module: str, given: str, environment: Mapping[str, str], timeout_s: float) -> str:
        """Run a module's ``main`` with this standard input; returns all that it printed.

        Raises:
            subprocess.TimeoutExpired: it took too long, and was killed.
        """
        with TemporaryDirectory() as folder:
            put, got = Path(folder) / "input", Path(folder) / "output"
            put.write_text(given)
            got.touch()
            task = {"environment": dict(environment), "input": str(put), "output": str(got), "main": module}
            process = self._start({**task, "arguments": [module]})
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return got.read_text()

    def _start(self, task: dict[str, Any]) -> ForkedProcess:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{json.dumps(task)}\n")
            self._process.stdin.flush()
            return ForkedProcess(int(self._process.stdout.readline()))


@cache
def forker() -> Forker:
    """Return the one of this process."""
    return Forker()


def main() -> None:
    """Import, then fork until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in _MODULES:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(json.loads(line))
        print(pid, file=answers, flush=True)


def _forking(method: str | None = None) -> multiprocessing.context.BaseContext:
    """Return a context that forks, also for vLLM's engine, which would be spawned on a CPU and import all again."""
    return _get_context("fork" if method == "spawn" else method)


def _become(task: dict[str, Any]) -> NoReturn:
    """Run the program, in the fork."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(task.get("input", os.devnull), os.O_RDONLY), 0)
        os.dup2(os.open(task["output"], os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the buffer of the old one may hold the next line
        os.environ.clear()
        os.environ.update(task["environment"])
        os.sched_setaffinity(0, task.get("cores", os.sched_getaffinity(0)))
        sys.argv = task["arguments"]
        multiprocessing.get_context = _forking  # type: ignore[assignment]
        name = "vllm.entrypoints.cli.main" if task["main"] == "vllm" else task["main"]
        with suppress(SystemExit):
            importlib.import_module(name).main()
    finally:
        if (error := sys.exception()) is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
