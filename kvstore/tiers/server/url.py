"""Address of a cache server, from a URL, and from options for values that should not be in a URL.

kvs+ipc:///run/kvstore      on this host: the folder of its sockets
kvs://host:port             anywhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from kvstore.model.errors import ConfigError
from kvstore.protocol.keyfiles import KeyPair, read_pair, read_public
from kvstore.tiers.url_options import COUNT, FILE, SECONDS, host_and_port, option_types_of, read_options, split_url


@dataclass(frozen=True)
class ServerTarget:
    """Cache server, and the settings to reach it.

    Attributes:
        folder: of its sockets, if it is on this host; None if it is reached over the network.
        address: in messages, and for ZeroMQ.
        connections: maximum open at once.
        timeout_s: longest wait for an answer.
        keys: of this client; None for no encryption.
        server_key: the server's public key; needed with ``keys``.
    """

    folder: Path | None
    address: str
    connections: Annotated[int, COUNT] = 8
    timeout_s: Annotated[float, SECONDS] = 5.0
    keys: KeyPair | None = None
    server_key: bytes | None = None


_KINDS = {**option_types_of(ServerTarget), "client_key_file": FILE, "server_key_file": FILE}


def parse_server(url: object, options: Mapping[str, object]) -> ServerTarget:
    """Parse a URL, with options that add to it. Options that are None are ignored.

    Raises:
        ConfigError: names the part that is wrong.
    """
    parts = split_url(url, "cache server", "kvs+ipc:///run/kvstore")
    if "," in parts.netloc or parts.scheme in {"kvs+dns", "kvs+srv", "kvs+file"}:
        raise ConfigError("this URL names several cache servers; here it must be that of one: kvs://host:port")
    given = read_options("cache server", _KINDS, dict(parse_qsl(parts.query)), options)
    files = given.pop("client_key_file", None), given.pop("server_key_file", None)
    if parts.scheme == "kvs+ipc":
        if parts.netloc or not parts.path.startswith("/"):
            raise ConfigError("a cache server on this host is named by a whole path: kvs+ipc:///run/kvstore")
        folder = Path(unquote(parts.path))
        return ServerTarget(folder, f"ipc://{folder}/control", **given)
    host, port = host_and_port(parts, "the URL of the cache server")
    if parts.scheme != "kvs" or not host or port is None or parts.path:
        raise ConfigError("the URL of a cache server is kvs+ipc:///folder or kvs://host:port")
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return ServerTarget(None, address, **given, **_keys(*files))


def _keys(own: Path | None, server: Path | None) -> dict[str, Any]:
    if own is None and server is None:
        return {}
    if own is None or server is None:
        raise ConfigError(
            "client_key_file and server_key_file go together: the client's secret, the server's public key"
        )
    return {"keys": read_pair(own), "server_key": read_public(server)}
