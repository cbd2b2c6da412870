"""Cache servers for tests: in a thread, to inspect their state, and as processes, to freeze and kill them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.server.succession.taking import Succession
from support.forked import ForkedProcess, forker
from support.redis_server import wait_for

POOL_BYTES = 64 << 20


def mapped_pools() -> int:
    """Count the pools of cache servers that this process has mapped, those of servers in it included."""
    return Path("/proc/self/maps").read_text().count("memfd:kvstore-pool")


class ServerThread:
    """A server in this process, whose state may be inspected while no client calls it."""

    def __init__(self, options: ServerOptions, succession: Succession | None = None) -> None:
        self.hub = Hub(options, succession=succession)
        self.drained: bool | None = None
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()

    def _run(self) -> None:
        self.drained = self.hub.run()

    @property
    def url(self) -> str:
        """URL of the server."""
        if self.hub.options.folder is not None:
            return f"kvs+ipc://{self.hub.options.folder}"
        assert self.hub.options.tcp is not None
        return f"kvs://{self.hub.options.tcp.host}:{self.hub.tcp_port}"

    def close(self) -> None:
        """End the server. Idempotent."""
        if self._thread.is_alive():
            self.hub.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for a socket in it."""
    path = Path(tempfile.mkdtemp(prefix="kvs-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def serving(options: ServerOptions) -> Iterator[ServerThread]:
    server = ServerThread(options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def serving_ipc(**options: object) -> Iterator[ServerThread]:
    with short_folder() as folder, serving(replace(ServerOptions(POOL_BYTES, folder=folder), **options)) as server:  # type: ignore[arg-type]
        yield server


@contextmanager
def serving_tcp(**options: object) -> Iterator[ServerThread]:
    given = replace(ServerOptions(POOL_BYTES, tcp=TcpAddress("127.0.0.1", 0)), **options)  # type: ignore[arg-type]
    with serving(given) as server:
        yield server


def raw_peer(server: ServerThread) -> socket.socket:
    """Open a connection and complete ZeroMQ's handshake."""
    connection = socket.create_connection(("127.0.0.1", server.hub.tcp_port))
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + len(b"DEALER").to_bytes(4, "big") + b"DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    _read(connection, 64)  # its greeting, and then its command: it takes no message before that
    _read(connection, _read(connection, 2)[1])
    return connection


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        assert part
        data += part
    return data


class ServerProcess:
    """``kvstore serve`` over a folder, and at a port if one is given."""

    def __init__(self, folder: Path, lines: str = "", port: int | None = None) -> None:
        self.folder = folder
        self.url = f"kvs+ipc://{folder}"
        self.tcp_url = f"kvs://127.0.0.1:{port}"
        self.config = folder / "cache.yaml"
        listen = f"{self.url}, {self.tcp_url}" if port else self.url
        self.config.write_text(f"max_local_cpu_size: 0.25\nserver_listen: {listen}\n{lines}")
        self.log = folder / "server.log"
        self.process: ForkedProcess | subprocess.Popen[bytes] | None = None

    def start(self, *options: str, forks: bool = True) -> ServerProcess:
        """Start it, and wait until it listens; ``forks`` spares the import of all modules."""
        words = ["kvstore.tools.cli", "serve", "--config", str(self.config), *options]
        with self.log.open("ab") as log:
            begin = log.tell()
            if forks:
                self.process = forker().start(words, stdout=log, stderr=log)
            else:
                self.process = subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log)
        wait_for("the server is ready", lambda: b"ready" in self.log.read_bytes()[begin:])
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.thaw()
            self.process.kill()
            self.process.wait()
            self.process = None

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(60)
        self.process = None
        return code

    def files_in_shared_memory(self) -> int:
        """Count the files of ``/dev/shm`` that it has mapped."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/maps").read_text().count("/dev/shm/")

    def freeze(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def serving_process(disk_gib: float, *, forks: bool = True) -> Iterator[ServerProcess]:
    """Run ``kvstore serve`` in a new folder, with a disk."""
    with short_folder() as folder:
        server = ServerProcess(folder, f"local_disk: {folder}/disk\nmax_local_disk_size: {disk_gib}\n")
        try:
            yield server.start(forks=forks)
        finally:
            server.kill()
