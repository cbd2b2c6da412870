"""Options of a server, with checks that refuse unsafe ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvstore.model.errors import ConfigError
from kvstore.protocol.keyfiles import KeyPair, ListedKey
from kvstore.protocol.loopback import is_loopback
from kvstore.server.clients import ANYBODY
from kvstore.server.disk_tiers import DiskOptions
from kvstore.tiers.url_options import host_and_port

MAX_SOCKET_PATH_BYTES: Final = 107  # of sun_path


@dataclass(frozen=True)
class TcpAddress:
    """An address for clients that do not map the pool; port 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        pool_bytes: size of the memory pool.
        folder: folder of the sockets for clients on the same host; None for no such clients.
        tcp: the address for other clients; None for no such clients.
        keys: the server's keys; None for no encryption.
        listed: the public keys of the clients that may connect, and their rights.
        disk: options of the disk; None without one.
        policy: eviction policy of the memory.
        disk_policy: eviction policy of the disk.
        quotas: bytes by tenant, model, namespace or owner; see ``Quotas``.
        drain_s: longest time that writes to disk may take at the end.
        max_writes: number of chunks that are written to disk at once.
        operators: names of the listed clients that also have the right to operate; ``*`` for all.
        pin_max_s: longest time for which a chunk may be pinned.
        channel: name of the channel through which clients' memory is read; None for none.
    """

    pool_bytes: int
    folder: Path | None = None
    tcp: TcpAddress | None = None
    keys: KeyPair | None = None
    listed: Mapping[bytes, ListedKey] = field(default_factory=dict)
    disk: DiskOptions | None = None
    policy: str = "ADAPTIVE"
    disk_policy: str = "ADAPTIVE"
    quotas: Mapping[str, int] = field(default_factory=dict)
    drain_s: float = 30.0
    max_writes: int = 64
    operators: frozenset[str] = frozenset()
    pin_max_s: float = 86_400.0
    channel: str | None = None

    def check(self) -> None:
        """Refuse options that are not safe or cannot work.

        Raises:
            ConfigError: names the option.
        """
        if self.folder is None and self.tcp is None:
            raise ConfigError("a cache server needs an address: kvs+ipc:///run/kvstore, or kvs://127.0.0.1:5566")
        if self.folder is not None and len(bytes(self.folder)) > MAX_SOCKET_PATH_BYTES - len("/control"):
            raise ConfigError(f"the path {self.folder} is too long for a socket in it: name a shorter one")
        self._check_operators()
        if self.tcp is not None and not is_loopback(self.tcp.host) and (self.keys is None or not self.listed):
            raise ConfigError(
                f"{self.tcp} can be reached from other hosts, so it needs server_key_file and server_clients: make "
                "keys with kvstore keygen, or listen on 127.0.0.1"
            )

    def _check_operators(self) -> None:
        names = {client.name for client in self.listed.values()}
        unknown = sorted(self.operators - {ANYBODY} - names)
        if unknown:
            known = ", ".join(sorted(names)) or "nobody"
            raise ConfigError(f"server_operators names {unknown[0]!r}, and server_clients lists {known}")


def parse_listen(urls: tuple[str, ...]) -> tuple[Path | None, TcpAddress | None]:
    """Parse the addresses of a server: at most one folder and one network address.

    Raises:
        ConfigError: one cannot be understood, or there are two of a kind.
    """
    folder, tcp = None, None
    for url in urls:
        parts = _split(url)
        if parts.scheme == "kvs+ipc" and parts.path.startswith("/") and not parts.netloc and folder is None:
            folder = Path(parts.path)
        elif parts.scheme == "kvs" and not parts.path and tcp is None:
            tcp = _tcp_address(url)
        else:
            raise ConfigError(
                f"a cache server cannot listen on {url!r}: name at most one kvs+ipc:///folder and one kvs://host:port"
            )
    return folder, tcp


def _split(url: str) -> SplitResult:
    try:
        url.encode()  # half of a character, which JSON may hold, is in no address
        return urlsplit(url)
    except ValueError:
        raise ConfigError(f"a cache server cannot listen on {url!r}, which is no URL: write kvs://[::1]:5566") from None


def _tcp_address(url: str) -> TcpAddress:
    host, port = host_and_port(_split(url), f"a cache server cannot listen on {url!r}: it")
    if not host or port is None:
        raise ConfigError(f"a cache server cannot listen on {url!r}: name host and port, as in kvs://127.0.0.1:5566")
    return TcpAddress(host, port)
