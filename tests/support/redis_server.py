"""Real Redis servers for tests: alone, with TLS, with users, under Sentinel, as a cluster. They can be killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.tools.processes import free_port
from support.frozen import Freezable

WAIT_S = 20.0


def require_server() -> str:
    """Return the path of redis-server. Without one tests are skipped, but fail where CI is set."""
    path = shutil.which("redis-server")
    if path is None:
        reason = "redis-server is not installed: apt-get install redis-server"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def wait_for(what: str, condition: Any, timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds; errors of a server that is not up yet count as no."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            if condition():
                return
        except (redis.RedisError, OSError):
            pass
        time.sleep(0.02)
    pytest.fail(f"waited {timeout_s} s in vain: {what}")


@dataclass
class RedisServer(Freezable):
    """A process with a separate folder. ``options`` are lines of redis.conf."""

    folder: Path
    options: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    tls: bool = False
    sentinel: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.unix_path = self.folder / "redis.sock"
        where = [f"port {self.port}", f"unixsocket {self.unix_path}"]
        if self.tls:
            where = [f"tls-port {self.port}", "port 0", f"unixsocket {self.unix_path}"]
        if self.sentinel:
            where = [f"port {self.port}"]
        quiet = [] if self.sentinel else ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        lines = [*where, "bind 127.0.0.1", f"dir {self.folder}", "logfile redis.log", *quiet, *self.options]
        self.config = self.folder / "redis.conf"
        self.config.write_text("\n".join(lines) + "\n")

    def start(self, *, wait: bool = True) -> RedisServer:
        command = [require_server(), str(self.config), *(["--sentinel"] if self.sentinel else [])]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if wait:
            wait_for(f"a server on port {self.port}", lambda: self.admin().ping())
        return self

    def admin(self, **options: Any) -> Any:
        """Return a client that bypasses the tier; through the unix socket, where certificates are not required."""
        options["retry"] = Retry(NoBackoff(), 0)
        if self.sentinel:
            return redis.Redis(port=self.port, socket_timeout=WAIT_S, **options)
        return redis.Redis(unix_socket_path=str(self.unix_path), socket_timeout=WAIT_S, **options)

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def running(*servers: RedisServer) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.kill()


def make_certificates(folder: Path) -> dict[str, Path]:
    """Make a CA, and certificates of a server (for 127.0.0.1) and of a client."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], cwd=folder, check=True, capture_output=True)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")
    openssl("req", "-x509", "-days", 2, *new, "ca.key", "-out", "ca.crt", "-subj", "/CN=tests")
    for name in ("server", "client"):
        openssl("req", *new, f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", 2, "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *sign)
    return {name: folder / name for name in ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")}


def tls_options(files: dict[str, Path]) -> list[str]:
    return [
        f"tls-ca-cert-file {files['ca.crt']}",
        f"tls-cert-file {files['server.crt']}",
        f"tls-key-file {files['server.key']}",
        "tls-auth-clients yes",
    ]


# The rights that docs/redis.md says a user needs.
ACL_USER = (
    "user kvstore on >s3cret ~kvs:* resetchannels -@all +get +set +exists +unlink +rename +persist +pttl "
    "+pexpire +scan +multi +exec +watch +unwatch +ping +zadd +zrem +zcard +zrange +zrangebylex +zrevrangebylex "
    "+expire"
)


def start_cluster(folder: Path, nodes: int = 3, options: Sequence[str] = ()) -> list[RedisServer]:
    """Start masters with equal shares of the slots, and wait until they agree. The caller kills them."""
    lines = ["cluster-enabled yes", "cluster-node-timeout 2000", *options]
    servers = [RedisServer(folder / str(number), lines).start() for number in range(nodes)]
    for number, server in enumerate(servers):
        first, last = 16384 * number // nodes, 16384 * (number + 1) // nodes - 1
        server.admin().execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        server.admin().execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        server.admin().execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)

    def agreed(server: RedisServer) -> bool:
        info = server.admin().execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes

    for server in servers:
        wait_for("the cluster agrees", lambda server=server: agreed(server))
    return servers


def start_sentinel(folder: Path, master: RedisServer, service: str = "chunks") -> RedisServer:
    """Start one Sentinel, which is enough for a failover."""
    lines = [
        f"sentinel monitor {service} 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds {service} 500",
        f"sentinel failover-timeout {service} 4000",
    ]
    return RedisServer(folder, lines, sentinel=True).start()
