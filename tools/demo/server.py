"""One ``vllm serve`` process with the connector, started as the README shows and always ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
import psutil

if TYPE_CHECKING:
    from types import TracebackType

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
    # vLLM would leave one core to its HTTP front end: of two, that makes computing take twice as long.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


class DemoError(Exception):
    """The demonstration could not be carried out. ``log`` is the server's log, where there is one."""

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
        raise DemoError("vLLM is not installed in this environment: run `make demo`, or `pip install vllm==0.32.*`")
    return Path(found)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class VllmServer:
    """A context manager: on entry vLLM is started and answers, on exit none of its processes is left.

    Attributes:
        model: folder of the model.
        config: the YAML file of the connector.
        log: file that takes what vLLM prints.
        drains: end as an operator would, so that nothing on its way to the disk is lost; else just end.
        role: ``kv_both``, ``kv_producer`` or ``kv_consumer``.
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
        # The YAML file alone decides: settings of the caller's shell would go before it.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "LMCACHE_"))}
        environment = {**inherited, **_ENVIRONMENT, "KVSTORE_CONFIG_FILE": str(self.config)}
        with self.log.open("wb") as output:
            # Its own session, hence process group: vLLM's engine and worker processes can be ended with it.
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                self.command(), stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self._kill_group(self._process)
            raise
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        if exception_type is None and self.drains:
            self.stop()
        self._kill_group(self._process)

    def stop(self) -> None:
        """Ask vLLM to end, as an operator would, and wait until it has.

        Raises:
            DemoError: it did not end in time; it has been killed.
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
        deadline = time.monotonic() + STRAGGLERS_TIMEOUT_S
        while _group_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise DemoError(f"vLLM ended while starting, with exit code {process.returncode}", self.log)
                try:
                    if client.get(f"{self.url}/health").is_success:
                        return
                except httpx.TransportError:
                    pass  # it does not listen yet
                time.sleep(0.2)
        raise DemoError(f"vLLM did not answer within {START_TIMEOUT_S:.0f} s", self.log)

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        if _group_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_alive(group: int) -> bool:
    """Whether a process of the group still runs; one that ended and only waits to be reaped does not."""
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue  # it ended meanwhile
    return False
