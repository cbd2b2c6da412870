"""Process of ``vllm serve``, for every tool that starts one: waited for, and ended with all its children."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final, Self

import httpx
import psutil

from kvstore.model.errors import KVStoreError
from kvstore.tools.processes import kill_group, wait_until
from kvstore.tools.vllmclient import client_of

DRAIN_TIMEOUT_S: Final = 30  # with vLLM's default of 0, SIGTERM kills the workers in the middle of a write
START_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
_STRAGGLERS_TIMEOUT_S: Final = 10.0
_ERROR: Final = re.compile(r"\b[A-Z]\w*(Error|Exception): ")


class ServerFailedError(KVStoreError):
    """A server that a tool started did not start, answer or stop; ``log`` is its log, if there is one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


def find_vllm() -> Path:
    """Return the ``vllm`` command of this environment.

    Raises:
        ServerFailedError: vLLM is not installed.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise ServerFailedError(
            "vLLM is not installed in this environment: run `make demo`, or `pip install 'vllm-kvstore[vllm]'`"
        )
    return Path(found)


def log_excerpt(log: Path, lines: int = 20) -> str:
    """Return the end of a server's log, with earlier errors above it, because vLLM logs a cause before its effects."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    above, end = text.splitlines()[:-lines], text.splitlines()[-lines:]
    causes = [line for line in above if _ERROR.search(line) and " WARNING " not in line][:5]
    return "\n".join([*causes, "..." if causes else "", *end]).strip()


class VllmProcess:
    """Context manager that starts vLLM, waits until it answers, and at the end leaves none of its processes.

    Subclasses have a ``log`` for vLLM's output and a ``port``. ``drains`` ends vLLM with SIGTERM, so that all writes to
    disk finish; otherwise it is killed.
    """

    log: Path
    port: int
    drains: bool = True
    start_timeout_s = START_TIMEOUT_S
    stop_timeout_s = STOP_TIMEOUT_S
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return its environment."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        with self.log.open("wb") as output:
            self._process = self._launch(self.command(), self.variables(), output)
        with ExitStack() as undo:
            undo.callback(self._kill_group, self._process)
            self._wait_until_healthy(self._process)
            undo.pop_all()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        try:
            if exception_type is None and self.drains:
                self.stop()
        finally:
            self._kill_group(self._process)

    def _launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        # A new session is a process group, so vLLM's engine and worker processes can be killed with it.
        return subprocess.Popen(  # noqa: S603 - the command is ours
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def stop(self) -> None:
        """Stop vLLM with SIGTERM, and wait until it has ended.

        Raises:
            ServerFailedError: vLLM did not end in time, and was killed.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self.stop_timeout_s)
        except subprocess.TimeoutExpired as error:
            self._kill_group(process)
            message = f"vLLM did not stop within {self.stop_timeout_s:.0f} s of SIGTERM"
            raise ServerFailedError(message, self.log) from error
        self._wait_for_stragglers(process)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        def is_healthy() -> bool:
            if process.poll() is not None:
                message = f"vLLM ended while starting, with exit code {process.returncode}"
                raise ServerFailedError(message, self.log)
            try:
                return client.get("/health").is_success
            except httpx.TransportError:  # not listening yet
                return False

        with client_of(self.url, 5.0) as client:
            if not wait_until(is_healthy, self.start_timeout_s, every_s=0.2):
                raise ServerFailedError(f"vLLM did not answer within {self.start_timeout_s:.0f} s", self.log)

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        kill_group(process.pid)
        process.wait()
        self._wait_for_stragglers(process)

    @staticmethod
    def _wait_for_stragglers(process: subprocess.Popen[bytes]) -> None:
        """Wait until the other processes of the group have ended, which may still hold the port and memory."""
        wait_until(lambda: not _group_alive(process.pid), _STRAGGLERS_TIMEOUT_S, every_s=0.1)


def _group_alive(group: int) -> bool:
    """Tell if a process of the group still runs; zombies do not count."""
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue  # it has just ended
    return False
