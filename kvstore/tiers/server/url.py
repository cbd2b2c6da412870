"""The address of a cache server, from a URL, and from options for what does not belong into one.

kvs+ipc:///run/kvstore      on this host: the folder of its sockets
kvs://host:port             anywhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.errors import ConfigError
from kvstore.protocol.keyfiles import KeyPair, read_pair, read_public

OPTIONS = ("connections", "timeout_s", "client_key_file", "server_key_file")


@dataclass(frozen=True)
class ServerTarget:
    """A cache server, and how to reach it.

    Attributes:
        folder: of its sockets, if it is on this host; None if it is reached over the network.
        address: in messages, and for ZeroMQ.
        connections: how many may be open at once.
        timeout_s: how long an answer may take.
        keys: of this client; None for no encryption.
        server_key: the server's public key; needed with ``keys``.
    """

    folder: Path | None
    address: str
    connections: int = 8
    timeout_s: float = 5.0
    keys: KeyPair | None = None
    server_key: bytes | None = None


def parse_server(url: object, options: Mapping[str, object]) -> ServerTarget:
    """Parse a URL, with options that add to it. Options that are None are ignored.

    Raises:
        ConfigError: names the part that is wrong.
    """
    if not isinstance(url, str):
        raise ConfigError("the server tier needs the option 'url', such as kvs+ipc:///run/kvstore")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the URL of the cache server cannot be read: {error}") from error
    given: dict[str, object] = dict(parse_qsl(parts.query))
    given.update((name, value) for name, value in options.items() if value is not None)
    unknown = next((name for name in given if name not in OPTIONS), None)
    if unknown is not None:
        raise ConfigError(f"a cache server has no option {unknown!r}: it knows {', '.join(OPTIONS)}")
    common = {
        "connections": _positive(given.get("connections", 8), "connections", int),
        "timeout_s": _positive(given.get("timeout_s", 5.0), "timeout_s", float),
    }
    if parts.scheme == "kvs+ipc":
        if parts.netloc or not parts.path.startswith("/"):
            raise ConfigError("a cache server on this host is named by a whole path: kvs+ipc:///run/kvstore")
        folder = Path(unquote(parts.path))
        return ServerTarget(folder, f"ipc://{folder}/control", **common)  # type: ignore[arg-type]
    if parts.scheme != "kvs" or not host or port is None or parts.path:
        raise ConfigError("the URL of a cache server is kvs+ipc:///folder or kvs://host:port")
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return ServerTarget(None, address, **common, **_keys(given))  # type: ignore[arg-type]


def _keys(given: Mapping[str, object]) -> dict[str, object]:
    own, server = given.get("client_key_file"), given.get("server_key_file")
    if own is None and server is None:
        return {}
    if not isinstance(own, str | Path) or not isinstance(server, str | Path):
        raise ConfigError(
            "client_key_file and server_key_file go together: the client's secret, the server's public key"
        )
    return {"keys": read_pair(Path(own)), "server_key": read_public(Path(server))}


def _positive(value: object, name: str, kind: type[int | float]) -> float:
    try:
        number = kind(str(value))
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise ConfigError(f"the option {name!r} of a cache server is a positive number, not {value!r}")
    return number
