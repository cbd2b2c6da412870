"""Processes of a prefill engine, a decode engine and the proxy in front of them, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvstore.tools.demo.server import VllmServer
from kvstore.tools.processes import free_port
from kvstore.tools.vllmserver import ServerFailedError


class ProxyServer:
    """Process of ``kvstore proxy``, from ``start`` to ``kill``.

    Args:
        prefill: URLs of the prefill engines.
        decode: URLs of the decode engines.
        log: file for its standard error.
        options: further options of its command line.
        scheme: ``https`` if the options include a certificate.
    """

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
        """Start the proxy, and return when it reports that it is ready.

        Raises:
            ServerFailedError: the proxy ended.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerFailedError("the proxy ended while starting", self.log)
        report = json.loads(line)
        assert (report["url"], report["status"]) == (self.url, "ready")
        return self

    def kill(self) -> None:
        """Kill the proxy, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@dataclass
class EngineServer(VllmServer):
    """Process of ``vllm serve`` pinned to a core, so that two engines do not slow each other down.

    Attributes:
        cores: number of the core; with several ranks one for each, separated by ``|``.
        arguments: further arguments of vLLM's command line.
        environment: further environment variables.
    """

    cores: str = "0"
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """Return the command line."""
        variables = {"VLLM_CPU_OMP_THREADS_BIND": self.cores, **self.environment}
        bound = ["env", *(f"{name}={value}" for name, value in variables.items())]
        bound += ["taskset", "-c", self.cores.replace("|", ",")]
        return [*bound, *super().command(), *self.arguments]

    def start(self) -> None:
        """Start the engine again, after ``kill``."""
        self.__enter__()

    def kill(self) -> None:
        """Kill all processes of the engine."""
        assert self._process is not None
        self._kill_group(self._process)


class Disaggregation:
    """Context manager that runs a prefill engine, a decode engine, and the proxy in front of them.

    Args:
        model: folder of the model.
        folder: folder for configurations and logs.
        prefill: YAML of the prefill engine's connector.
        decode: YAML of the decode engine's connector.
        arguments: further arguments of vLLM's command line, for both engines.
        options: further options of the proxy's command line.
        environment: further environment variables for both engines.
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
        environment: Mapping[str, str] | None = None,
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
                *(model, config, log),
                drains=False,
                role=role,
                cores=str(core),
                arguments=tuple(arguments),
                environment=environment or {},
            )
            engines.append(engine)
        self.prefill, self.decode = engines
        self.proxy = ProxyServer([self.prefill.url], [self.decode.url], folder / "proxy.log", options)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for engine in (self.prefill, self.decode):
                stack.push(engine)  # also ended if the other engine did not start
            with ThreadPoolExecutor(2, "kvstore-start") as pool:
                list(pool.map(VllmServer.__enter__, (self.prefill, self.decode)))
            stack.callback(self.proxy.kill)
            self.proxy.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()
