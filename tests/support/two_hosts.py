"""Two hosts with a cache server and a disk each. Paths mean another place on each of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvstore.protocol.keyfiles import make_keys
from kvstore.tools.processes import free_port
from support.cache_server import ServerProcess, short_folder
from support.forked import ForkedProcess, forker
from support.network import OtherHost, other_host
from support.redis_server import wait_for


class TwoHosts:
    """Both hosts; this process, with the scheduler, is on the near one.

    Attributes:
        host: the other one.
        folder: of everything.
        run, disk: the folders that are different on each host, and
        binds: what the other one has there.
        far_url: the address of its server for this host, which needs ``keys``.
    """

    def __init__(self, folder: Path, host: OtherHost, opened: ExitStack) -> None:
        self.host = host
        self.folder = folder
        self.port = free_port()
        self.far_url = f"kvs://{host.far}:{self.port}"
        self.keys = {"client_key_file": f"{folder}/clients/scheduler.key", "server_key_file": f"{folder}/server.pub"}
        self.run, self.disk = folder / "run", folder / "disk"
        self.binds: Mapping[Path, Path] = {self.run: folder / "far-run", self.disk: folder / "far-disk"}
        for path in (*self.binds, *self.binds.values()):
            path.mkdir(mode=0o700)
        make_keys(folder, "server")
        make_keys(folder / "clients", "scheduler")
        self.near_server = ServerProcess(self.run)
        opened.callback(self.near_server.kill)
        self.near_server.start()
        self.far_server: ForkedProcess | None = None
        opened.callback(self.kill_far_server)
        self.start_far_server()

    def start_far_server(self) -> None:
        folder = self.folder
        config, log = folder / "far.yaml", folder / "far.log"
        config.write_text(
            f"max_local_cpu_size: 0.05\nlocal_disk: {self.disk}\nmax_local_disk_size: 0.1\n"
            f"server_listen: kvs+ipc://{self.run}, kvs://{self.host.far}:{self.port}\n"
            f"server_key_file: {folder}/server.key\nserver_clients: {folder}/clients\n"
        )
        words = self.host.words(["kvstore.tools.cli", "serve", "--config", config], binds=self.binds)
        with log.open("wb") as said:
            self.far_server = forker().start(words, stdout=said, stderr=said)
        wait_for("the far server is ready", lambda: b"ready" in log.read_bytes())

    def kill_far_server(self) -> None:
        if self.far_server is not None:
            self.far_server.kill()
            self.far_server.wait()

    def end_far_server(self) -> None:
        assert self.far_server is not None
        self.far_server.terminate()
        assert self.far_server.wait(60) == 0


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make both, and remove them at the end. The test is skipped where that is not allowed."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs unshare, and mounts of its own")
    with other_host() as host, short_folder() as folder, ExitStack() as opened:
        yield TwoHosts(folder, host, opened)
