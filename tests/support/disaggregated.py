"""Prefill and decode engines with a proxy in front of them, as processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from kvstore.tools.demo.client import read_counter
from kvstore.tools.demo.server import VllmServer
from kvstore.tools.processes import free_port
from support.redis_server import wait_for
from support.vllm_engine import Prompt, whole_blocks

STOP_WAIT_S = 60.0


class ProxyProcess:
    """``kvstore proxy``, from ``start`` to ``kill``."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        log: Path,
        options: Sequence[str] = (),
        *,
        scheme: str = "http",
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        engines = [word for url in prefill for word in ("--prefill", url)]
        engines += [word for url in decode for word in ("--decode", url)]
        command = [sys.executable, "-m", "kvstore.tools.cli", "proxy", *engines, "--port", str(self.port), "--json"]
        self._command = [*command, *options]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Returns when it says that it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log.read_text(encoding="utf-8")
        report = json.loads(line)
        assert (report["url"], report["status"]) == (self.url, "ready")
        return self

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        assert self._process is not None
        return self._process.wait(STOP_WAIT_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@dataclass
class EngineServer(VllmServer):
    """``vllm serve`` on one core of its own, so that two of them do not take each other's time.

    Attributes:
        cores: which; with several ranks that of each, with ``|`` between them.
        arguments: more of vLLM's command line.
    """

    cores: str = "0"
    arguments: tuple[str, ...] = ()

    def command(self) -> list[str]:
        bound = ["env", f"VLLM_CPU_OMP_THREADS_BIND={self.cores}", "taskset", "-c", self.cores.replace("|", ",")]
        return [*bound, *super().command(), *self.arguments]

    def start(self) -> None:
        """Start it again, after ``kill``."""
        self.__enter__()

    def kill(self) -> None:
        """End all of its processes at once."""
        assert self._process is not None
        self._kill_group(self._process)

    def computed_of(self, prompt_tokens: int) -> int:
        """How many tokens of prompts it has computed since its start, after it was given ``prompt_tokens`` of them.

        Neither its own cache nor the connector had those. vLLM counts a little after it has answered.
        """
        wait_for("vLLM counts", lambda: read_counter(self.url, "vllm:prompt_tokens_total") == prompt_tokens)
        return prompt_tokens - read_counter(self.url, "vllm:prompt_tokens_cached_total")


class Disaggregation:
    """A prefill engine, a decode engine, and the proxy in front of them. A context manager.

    Args:
        model: folder of the model.
        folder: for configurations and logs.
        prefill: the YAML of the prefill engine's connector.
        decode: that of the decode engine's.
        arguments: more of vLLM's command line, for both.
        options: more of the proxy's.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        prefill: str,
        decode: str,
        arguments: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        self.model = str(model)
        engines = []
        for core, (name, role, lines) in enumerate(
            (("prefill", "kv_producer", prefill), ("decode", "kv_consumer", decode))
        ):
            config = folder / f"{name}.yaml"
            config.write_text(lines, encoding="utf-8")
            log = folder / f"{name}.log"
            engine = EngineServer(
                model, config, log, drains=False, role=role, cores=str(core), arguments=tuple(arguments)
            )
            engines.append(engine)
        self.prefill, self.decode = engines
        self.proxy = ProxyProcess([self.prefill.url], [self.decode.url], folder / "proxy.log", options)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for engine in (self.prefill, self.decode):
                stack.push(engine)  # ended also if the other one did not start
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(VllmServer.__enter__, (self.prefill, self.decode)))
            stack.callback(self.proxy.kill)
            self.proxy.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A whole answer through the proxy, greedy."""
        asked = {"model": self.model, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False, **body}
        with httpx.Client(trust_env=False, timeout=300) as client:
            answer = client.post(f"{self.proxy.url}{path}", json=asked)
        assert answer.status_code == 200, answer.text
        tree: dict[str, Any] = answer.json()
        return tree


class Work:
    """What an engine computes of prompts, from now on."""

    def __init__(self, engine: EngineServer) -> None:
        self._url = engine.url
        self._asked_tokens, self._cached_tokens = self._read()

    def of(self, prompt: Prompt) -> int:
        """Tokens computed of a prompt that has just been answered; vLLM counts a little later."""
        asked_tokens, cached_tokens = self._asked_tokens + len(prompt), self._cached_tokens
        wait_for("vLLM counts", lambda: self._read()[0] == asked_tokens)
        self._asked_tokens, self._cached_tokens = self._read()
        return len(prompt) - (self._cached_tokens - cached_tokens)

    def _read(self) -> tuple[int, int]:
        asked = read_counter(self._url, "vllm:prompt_tokens_total")
        return asked, read_counter(self._url, "vllm:prompt_tokens_cached_total")


def unshared(prompt: Prompt) -> int:
    """What is left to compute of a prompt all of whose whole blocks are there."""
    return len(prompt) - whole_blocks(len(prompt))
