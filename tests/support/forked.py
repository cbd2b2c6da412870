"""Programs in forks of a process that has imported what they need: importing takes longer than all else at a start.

As a program it takes tasks from its standard input, a connection: one message each, with the descriptors of the fork's
streams and of a pipe for its exit code. It answers each with the fork's process id.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import multiprocessing.context
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import IO, Any, NoReturn, Self

TESTS = Path(__file__).parent.parent
MESSAGE_BYTES = 1 << 17
VLLM = (
    *("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    *("vllm.model_executor.models.llama", "transformers.models.auto.tokenization_auto"),
    "kvstore.adapters.vllm.connector",
)
KVSTORE = ("torch", "kvstore.tools.cli", "kvstore.server.hub", "kvstore.server.embedded", "kvstore.tools.bench.run")

Stream = IO[Any] | int | None

_get_context = multiprocessing.get_context


class ForkedProcess:
    """The part of ``subprocess.Popen`` that tests need. Its process leads a process group."""

    def __init__(self, words: Sequence[object], pid: int, end: int, pipes: Mapping[str, IO[Any] | None]) -> None:
        self.args = words
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (pipes[name] for name in ("stdin", "stdout", "stderr"))
        self._end = end

    def poll(self) -> int | None:
        """Return the exit code, as ``subprocess`` counts, if the process has ended."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired([*map(str, self.args)], timeout or 0)
        return code

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 - as there
        """Write the input, if any, and close standard input; return the rest of both outputs, after the end.

        Neither output may be longer than a pipe holds, if both are pipes.
        """
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                if input is not None:
                    self.stdin.write(input)
                self.stdin.close()
        said = [None if pipe is None or pipe.closed else pipe.read() for pipe in (self.stdout, self.stderr)]
        self.wait(timeout)
        self._close_pipes()
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_pipes()
        self.wait()

    def _close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._end, 16))
        return self.returncode

    def __del__(self) -> None:
        os.close(self._end)


class Forker:
    """The process that has imported modules. Thread-safe. It ends with this one."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.forked", *modules],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End it; its forks go on."""
        self._connection.shutdown(socket.SHUT_RDWR)  # also where a fork of this process still has it
        self._connection.close()
        self._process.wait()

    def start(
        self,
        words: Sequence[object],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        text: bool = False,
        cores: Sequence[int] = (),
    ) -> ForkedProcess:
        """Start a module's ``main`` as ``subprocess.Popen`` would start it with ``-m``, in a session of its own.

        Streams that are not given are the null device's.
        """
        environment = dict(os.environ if env is None else env)
        task = {"words": list(map(str, words)), "environment": environment, "cores": list(cores)}
        pipes: dict[str, IO[Any] | None] = {}
        theirs: list[int] = []
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            pipes[name], descriptor = _opened(stream, theirs[-1:], is_input=name == "stdin", text=text)
            theirs.append(descriptor)
        end, their_end = os.pipe()
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(task).encode()], [*theirs, their_end])
            pid = int(self._connection.recv(64))
        for descriptor in {*theirs, their_end}:
            os.close(descriptor)
        return ForkedProcess(words, pid, end, pipes)

    def launch(self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> ForkedProcess:
        """Start a command ``vllm``, which ``env`` and ``taskset`` may precede."""
        words, environment = list(command), dict(environment)
        cores: list[int] = []
        if words[0] == "env":
            del words[0]
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                environment[name] = value
        if words[:2] == ["taskset", "-c"]:
            cores = [int(core) for core in words[2].split(",")]
            del words[:3]
        assert Path(words[0]).name == "vllm", words
        words[0] = "vllm.entrypoints.cli.main"
        return self.start(words, stdout=output, stderr=output, env=environment, cores=cores)


def _opened(stream: Stream, before: Sequence[int], *, is_input: bool, text: bool) -> tuple[IO[Any] | None, int]:
    """Return this process's end of a pipe, if it is one, and a descriptor for the fork."""
    if stream == PIPE:
        reads, writes = os.pipe()
        ours, theirs = (writes, reads) if is_input else (reads, writes)
        return os.fdopen(ours, ("w" if is_input else "r") + ("" if text else "b")), theirs
    if stream == subprocess.STDOUT:
        return None, os.dup(before[0])
    if stream is None or stream == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    return None, os.dup(stream if isinstance(stream, int) else stream.fileno())


@cache
def forker(modules: tuple[str, ...] = KVSTORE) -> Forker:
    """Return the one of this process that has imported these modules."""
    return Forker(modules)


@cache
def import_vllm() -> None:
    """Import vLLM, and let all engines of this process, and of its forks, share what each would do again.

    At its start and end each engine collects all garbage, thrice and more, among all that vLLM's modules have made; and
    it searches all modules for kernels to replace. This took two thirds of the time of a tiny engine.
    """
    for name in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_model_runner", "vllm.model_executor.models.llama"):
        importlib.import_module(name)
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    if (replace_kernels := getattr(platform, "register_triton_kernel_overrides", None)) is not None:
        platform.register_triton_kernel_overrides = staticmethod(cache(replace_kernels))
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # else what an engine leaves would stay, and modules be searched again


def main() -> None:
    """Import, then fork until the other end of the connection is closed."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "vllm" in sys.modules:
        import_vllm()
    ends: dict[int, tuple[int, int]] = {}  # process ids, and where their exit codes go, by descriptors of the processes
    while True:
        for ready in select.select([connection.fileno(), *ends], [], [])[0]:
            if ready in ends:
                pid, end = ends.pop(ready)
                with suppress(BrokenPipeError):  # nobody waits for its end
                    os.write(end, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(end)
                os.close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
            if not message:
                return
            pid = os.fork()
            if not pid:
                connection.close()
                _become(json.loads(message), descriptors)
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            ends[os.pidfd_open(pid)] = pid, descriptors[3]
            connection.send(str(pid).encode())


def _forking(method: str | None = None) -> multiprocessing.context.BaseContext:
    """Return a context that forks, also for vLLM's engine, which would be spawned on a CPU and import all again."""
    return _get_context("fork" if method == "spawn" else method)


def _become(task: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run the program, in the fork."""
    code: Any = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(task["environment"])
        os.sched_setaffinity(0, task["cores"] or os.sched_getaffinity(0))
        found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in found if path and path not in sys.path]
        sys.argv = list(task["words"])
        if task["words"][0].startswith("vllm."):
            sys.argv[0] = "vllm"
        multiprocessing.get_context = _forking  # type: ignore[assignment]
        importlib.import_module(task["words"][0]).main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    finally:
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
        if (error := sys.exception()) is not None:
            traceback.print_exception(error)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    main()
