"""Private servers for measurements: Redis, and the cache server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tools.processes import free_port, is_listening, running, wait_until

# As docs/redis.md recommends. Otherwise the server returns memory to the system and faults it in again page by page.
# Debian's redis-server reads the first name, Redis built with its own allocator the second.
MALLOC_CONF = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"
MALLOC_NAMES = ("MALLOC_CONF", "JE_MALLOC_CONF")
_START_TIMEOUT_S = 10.0


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
def private_server(folder: Path, pool_bytes: int) -> Iterator[tuple[str, str]]:
    """Run a private cache server, and yield its URLs over ipc and over TCP.

    Raises:
        ConfigError: the server does not start.
    """
    config = folder / "cache.yaml"
    url = f"kvs+ipc://{folder / 'run'}"
    config.write_text(f"max_local_cpu_size: {pool_bytes / 2**30}\nserver_listen: '{url}, kvs://127.0.0.1:0'\n")
    command = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(config), "--json"]
    log = folder / "server.log"
    with log.open("wb") as errors, running(command, stdout=subprocess.PIPE, stderr=errors) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            reason = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise ConfigError(f"the cache server does not start: {' '.join(reason)}")
        yield url, f"kvs://127.0.0.1:{json.loads(line)['tcp_port']}"
