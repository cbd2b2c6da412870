"""Addresses of the workers of another engine, given that of its first one."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from kvstore.model.errors import ConfigError

_MAX_PORT: Final = 65_535


def at_rank(url: str, rank: int) -> str:
    """Return the address of a rank's worker in another engine, whose port is the first worker's plus the rank.

    Raises:
        ConfigError: the address is no ``kvs://host:port``, or the port is too high.
    """
    try:
        parts = urlsplit(url)
        port = parts.port if parts.scheme == "kvs" and parts.hostname and not parts.path else None
    except ValueError:
        port = None
    if not port or port + rank > _MAX_PORT:
        raise ConfigError(f"{url[:100]!r} names no server of another engine's worker {rank}: it is kvs://host:port")
    before = parts.netloc.rpartition(":")[0]
    return parts._replace(netloc=f"{before}:{port + rank}").geturl()
