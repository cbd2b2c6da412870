"""Address and login of a Redis, from a URL, and from options for values that should not be in a URL.

    redis://[user:password@]host[:port][/db]          one server
    rediss://...                                      the same over TLS
    unix://[user:password@]/path/to/socket[?db=1]     the same through a unix socket
    redis-sentinel://host[:port],host[:port]/service[/db]
    redis-cluster://host[:port],host[:port]

Options follow ``?`` or come from the tier's options, which take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvstore.model.errors import ConfigError
from kvstore.tiers.url_options import (
    COUNT,
    FLAG,
    SECONDS,
    TEXT,
    WHOLE,
    host_and_port,
    option_types_of,
    read_options,
    split_url,
)

_PORT = 6379
_SENTINEL_PORT = 26379
_FORMS = "redis://, rediss://, unix://, redis-sentinel:// or redis-cluster://"


class Address(NamedTuple):
    """Host and port of a server; or the path of a unix socket, and 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Deployment(Enum):
    """Organisation of the servers."""

    SINGLE = "a single server"
    SENTINEL = "servers under Sentinel"
    CLUSTER = "a cluster"


@dataclass(frozen=True)
class RedisTarget:
    """Servers, and all settings to connect to them.

    Attributes:
        kind: their organisation.
        addresses: of the server, of the Sentinels, or of some nodes of the cluster.
        service: the Sentinels' name of the group of servers.
        db: number of the database.
        username: of the ACL, or None for the default user.
        password: of that user, or None.
        sentinel_username: the same at the Sentinels.
        sentinel_password: the same at the Sentinels.
        tls: encrypt connections.
        tls_ca: file of the certificates to trust; None for the system's.
        tls_cert: file of the client's own certificate, if the server wants one.
        tls_key: file of its key.
        tls_check_hostname: require that the server's certificate names the host.
        connections: maximum to each server at the same time.
        timeout_s: longest silence of the server in the middle of a call.
        connect_timeout_s: longest time to connect.
        ttl_s: lifetime of a chunk in seconds, or None.
    """

    kind: Deployment
    addresses: tuple[Address, ...]
    service: str = ""
    db: Annotated[int, WHOLE] = 0
    username: Annotated[str | None, TEXT] = None
    password: Annotated[str | None, TEXT] = field(default=None, repr=False)
    sentinel_username: Annotated[str | None, TEXT] = None
    sentinel_password: Annotated[str | None, TEXT] = field(default=None, repr=False)
    tls: Annotated[bool, FLAG] = False
    tls_ca: Annotated[str | None, TEXT] = None
    tls_cert: Annotated[str | None, TEXT] = None
    tls_key: Annotated[str | None, TEXT] = None
    tls_check_hostname: Annotated[bool, FLAG] = True
    connections: Annotated[int, COUNT] = 8
    timeout_s: Annotated[float, SECONDS] = 5.0
    connect_timeout_s: Annotated[float, SECONDS] = 2.0
    ttl_s: Annotated[int | None, COUNT] = None

    def __str__(self) -> str:
        places = ", ".join(map(str, self.addresses))
        return f"{places} ({self.service})" if self.service else places

    def connect_to(self, address: Address, parser_class: object) -> AbstractConnection:
        """Return a connection that is not connected yet."""
        common: dict[str, Any] = {
            "db": self.db,
            "username": self.username,
            "password": self.password,
            "protocol": 2,
            "parser_class": parser_class,
            "retry": Retry(NoBackoff(), 0),
            **self._timeouts(),
        }
        if not address.port:
            return UnixDomainSocketConnection(path=address.host, **common)  # type: ignore[abstract] # so it is declared
        kind = SSLConnection if self.tls else Connection
        return kind(host=address.host, port=address.port, **self._tls_files(), **common)

    def sentinel(self) -> Sentinel:
        """Return a client of the Sentinels."""
        login: dict[str, Any] = {
            "ssl": self.tls,
            "username": self.sentinel_username,
            "password": self.sentinel_password,
            "retry": Retry(NoBackoff(), 0),
            **self._tls_files(),
            **self._timeouts(),
        }
        return Sentinel(list(self.addresses), sentinel_kwargs=login)

    def _timeouts(self) -> dict[str, float]:
        return {"socket_timeout": self.timeout_s, "socket_connect_timeout": self.connect_timeout_s}

    def _tls_files(self) -> dict[str, Any]:
        if not self.tls:
            return {}
        return {
            "ssl_ca_certs": self.tls_ca,
            "ssl_certfile": self.tls_cert,
            "ssl_keyfile": self.tls_key,
            "ssl_check_hostname": self.tls_check_hostname,
        }


_KINDS = option_types_of(RedisTarget)


def parse_target(url: object, options: Mapping[str, object]) -> RedisTarget:
    """Parse a URL. Options that are None are ignored.

    Raises:
        ConfigError: names the error, without the URL, which may contain a password.
    """
    parts = split_url(url, "Redis", "redis://localhost:6379/0")
    login, _, places = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")

    def settings(db: Sequence[str] = (), *, tls: bool | None = None) -> dict[str, Any]:
        first = {"username": unquote(user) or None, "password": unquote(password) or None, "db": next(iter(db), None)}
        return read_options("Redis", _KINDS, first, dict(parse_qsl(parts.query)), options, {"tls": tls})

    path = [unquote(part) for part in parts.path.split("/") if part]
    match parts.scheme:
        case "redis" | "rediss":
            _require(len(path) <= 1, "after the address of a server comes at most the number of a database")
            addresses = _addresses(places, _PORT)
            _require(len(addresses) == 1, "redis:// names one server: redis-cluster:// names several")
            return RedisTarget(Deployment.SINGLE, addresses, **settings(path, tls=parts.scheme == "rediss" or None))
        case "unix":
            _require(bool(path) and not places, "a unix socket is named by its whole path: unix:///run/redis.sock")
            return RedisTarget(Deployment.SINGLE, (Address(unquote(parts.path), 0),), **settings())
        case "redis-sentinel":
            _require(1 <= len(path) <= 2, "after the Sentinels comes the name of the service: host:26379/mymaster")
            return RedisTarget(Deployment.SENTINEL, _addresses(places, _SENTINEL_PORT), path[0], **settings(path[1:]))
        case "redis-cluster":
            found = settings()
            _require(not path and not found.get("db"), "a cluster has no databases: leave out the number")
            return RedisTarget(Deployment.CLUSTER, _addresses(places, _PORT), **found)
    raise ConfigError(f"a Redis URL begins with {_FORMS}, not {parts.scheme!r}")


def _addresses(places: str, default_port: int) -> tuple[Address, ...]:
    found = []
    for place in places.split(","):
        host, port = host_and_port(split_url(f"//{place}", "Redis", "redis://localhost:6379/0"), "the Redis URL")
        _require(bool(host), "the Redis URL names no host")
        found.append(Address(host, port or default_port))
    return tuple(found)


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise ConfigError(f"the Redis URL cannot be used: {otherwise}")
