"""Processes next to the bench: modules of ours that answer line by line, and private servers."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from kvstore.model.errors import ConfigError
from kvstore.tools.processes import free_port, is_listening, running, wait_until

# As docs/redis.md recommends. Otherwise the server returns memory to the system and faults it in again page by page.
# Debian's redis-server reads the first name, Redis built with its own allocator the second.
MALLOC_CONF = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"
MALLOC_NAMES = ("MALLOC_CONF", "JE_MALLOC_CONF")
_START_TIMEOUT_S = 10.0
_SEAWEED_TIMEOUT_S = 60.0
_MAX_SEAWEED_PORT = 55_535


class Child:
    """One of our modules in a process of its own, whose answers are lines that begin with a mark."""

    def __init__(self, process: subprocess.Popen[str], mark: str, log: IO[bytes]) -> None:
        self.process = process
        self._mark, self._log = mark, log

    def said(self) -> str:
        """Return the next answer without its mark, skipping other output; empty if the process has ended."""
        assert self.process.stdout is not None
        lines = (line for line in self.process.stdout if line.startswith(self._mark))
        return next(lines, "").removeprefix(self._mark).strip()

    def tell(self, text: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def complaint(self) -> str:
        """Return the end of the standard error of a process that has ended; it shares the place in the file."""
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace").strip()


@contextmanager
def child(*words: str, mark: str = "", env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Run a module with arguments until the end of the block."""
    command = [sys.executable, "-m", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with TemporaryFile() as log, running(command, **pipes, stderr=log, env=env) as process:
        yield Child(process, mark, log)


@contextmanager
def private_redis(program: str | Path | None, folder: Path) -> Iterator[int]:
    """Run a private Redis server without persistence, and yield its port.

    Raises:
        ConfigError: the server does not start, or ``program`` is None.
    """
    if program is None:
        raise ConfigError("redis-server is not on the PATH")
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--logfile", "redis.log"]
    environment = {**os.environ, **dict.fromkeys(MALLOC_NAMES, MALLOC_CONF)}
    with running([program, *options], stdout=subprocess.DEVNULL, env=environment) as process:
        wait_until(lambda: is_listening(port) or process.poll() is not None, _START_TIMEOUT_S, every_s=0.02)
        if process.poll() is not None or not is_listening(port):
            raise ConfigError("redis-server does not start")
        yield port


@contextmanager
def private_seaweed(program: Path, folder: Path, bucket: str) -> Iterator[int]:
    """Run a private SeaweedFS with one bucket, and yield the port of its S3 interface.

    Raises:
        ConfigError: the server does not start.
    """
    # It listens on each port plus 10,000, too.
    port, *others = islice((port for port in iter(free_port, None) if port < _MAX_SEAWEED_PORT), 4)
    command: list[str | Path] = [
        program,
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.port={port}",
    ]
    command += [f"-{name}.port={other}" for name, other in zip(("master", "volume", "filer"), others, strict=True)]
    command += ["-master.telemetry=false", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]

    def has_bucket() -> bool:
        with suppress(OSError, http.client.HTTPException), closing(http.client.HTTPConnection("127.0.0.1", port)) as s3:
            s3.request("PUT", f"/{bucket}")
            return s3.getresponse().status in (http.client.OK, http.client.CONFLICT)
        return False

    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with running([*command, "-volume.max=20"], **silent, cwd=folder) as process:
        wait_until(lambda: process.poll() is not None or has_bucket(), _SEAWEED_TIMEOUT_S, every_s=0.2)
        if process.poll() is not None or not has_bucket():
            raise ConfigError("SeaweedFS does not start")
        yield port


@contextmanager
def private_server(folder: Path, pool_bytes: int) -> Iterator[tuple[str, str]]:
    """Run a private cache server, and yield its URLs over ipc and over TCP.

    Raises:
        ConfigError: the server does not start.
    """
    config = folder / "cache.yaml"
    url = f"kvs+ipc://{folder / 'run'}"
    config.write_text(f"max_local_cpu_size: {pool_bytes / 2**30}\nserver_listen: '{url}, kvs://127.0.0.1:0'\n")
    with child("kvstore.tools.cli", "serve", "--config", str(config), "--json") as server:
        line = server.said()
        if not line:
            reason = " ".join(server.complaint().splitlines()[-1:])
            raise ConfigError(f"the cache server does not start: {reason}")
        yield url, f"kvs://127.0.0.1:{json.loads(line)['tcp_port']}"
