"""Address of a Mooncake Store, from a URL ``mooncake://master:port``, and from options.

LMCache's ``mooncakestore://`` means the same, and its ``device`` is ``devices`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qsl

from kvstore.model.errors import ConfigError
from kvstore.tiers.url_options import (
    COUNT,
    SECONDS,
    TEXT,
    WHOLE,
    host_and_port,
    option_types_of,
    read_options,
    split_url,
)

_PORT = 50051
_SCHEMES = ("mooncake", "mooncakestore")


@dataclass(frozen=True)
class MooncakeTarget:
    """Store, and all settings to use it.

    Attributes:
        host: of the master.
        port: of the master.
        protocol: of the transfers, ``tcp`` or ``rdma``.
        devices: names of network devices, separated by commas; empty for those that Mooncake finds.
        metadata_server: of Mooncake's transfer engine.
        hostname: this host's name for others; None for the address from which the master is reached.
        segment_mib: memory that each worker gives to the pool, which is lost with it.
        staging_mib: the most memory for chunks under way; at least four chunks.
        http_port: of the master's own pages, for ``kvstore inspect``.
        connections: calls at the same time.
        timeout_s: the deadline of a call.
    """

    host: str
    port: int
    protocol: Annotated[str, TEXT] = "tcp"
    devices: Annotated[str, TEXT] = ""
    metadata_server: Annotated[str, TEXT] = "P2PHANDSHAKE"
    hostname: Annotated[str | None, TEXT] = None
    segment_mib: Annotated[int, WHOLE] = 0
    staging_mib: Annotated[int, COUNT] = 256
    http_port: Annotated[int, COUNT] = 9003
    connections: Annotated[int, COUNT] = 8
    timeout_s: Annotated[float, SECONDS] = 5.0

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_TYPES = option_types_of(MooncakeTarget)


def parse_target(url: object, options: Mapping[str, object]) -> MooncakeTarget:
    """Parse a URL. Options that are None are ignored.

    Raises:
        ConfigError: names the error, without the URL.
    """
    parts = split_url(url, "mooncake", "mooncake://master:50051")
    _require(parts.scheme in _SCHEMES, f"it must begin with mooncake://, not with {parts.scheme!r}")
    _require("@" not in parts.netloc, "Mooncake has no logins: leave out what precedes the @")
    _require(parts.path in ("", "/"), "nothing follows the address of the master but options")
    host, port = host_and_port(parts, "the URL of Mooncake")
    _require(bool(host) and "," not in parts.netloc, "it must name the host of one master")
    asked = dict(parse_qsl(parts.query))
    if parts.scheme == "mooncakestore" and "device" in asked:
        asked["devices"] = asked.pop("device")
    return MooncakeTarget(host, port or _PORT, **read_options("Mooncake Store", _TYPES, asked, options))


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise ConfigError(f"the URL of Mooncake cannot be used: {otherwise}")
