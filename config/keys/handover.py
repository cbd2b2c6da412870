"""Keys of engines that hand over KV to each other, or read it from each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, LiteralString, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvstore.channels import known_channels
from kvstore.config.keys.base import GIB_BYTES, MAX_TIMEOUT_S, Keys, Tokens, Unit, as_tuple, require_one_of
from kvstore.model.errors import ConfigError
from kvstore.protocol.loopback import is_loopback
from kvstore.tiers.members.addresses import LOOKED_UP, parse_members

PD_ROLES: Final = {"sender": "kv_producer", "receiver": "kv_consumer", "both": "kv_both"}
"""LMCache's ``pd_role``, and the corresponding ``kv_role`` of vLLM."""

_END_PORT: Final = 65_536
_MAX_SIZE: Final = 1024  # of tensor parallelism
_MIN_BUFFER_BYTES: Final = 4096  # no chunk is smaller


class ListedHost(NamedTuple):
    """A host that an operator listed, in lower case, and one of its ports; None if only the host is listed."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> ListedHost:
        """Read ``host``, ``host:port``, ``[v6]:port``, or a bare IPv6 address.

        Raises:
            ValueError: the text after the host is not a port.
        """
        host, colon, port = text.rpartition(":")
        if not colon or (":" in host and not host.endswith("]")):
            return cls(text.strip("[]").lower(), None)
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < _END_PORT or not host.strip("[]"):
            raise ValueError(text)
        return cls(host.strip("[]").lower(), int(port))

    @classmethod
    def of_url(cls, url: str) -> ListedHost:
        """Read ``kvs://host:port``; options after it are ignored.

        Raises:
            ValueError: the URL is no such address.
        """
        parts = urlsplit(url)
        if parts.scheme != "kvs" or not parts.hostname or not parts.port or parts.path:
            raise ValueError(url)
        return cls(parts.hostname, parts.port)


def is_looked_up(url: str) -> bool:
    """Tell if a URL of ``peers`` stands for engines that DNS or a file names."""
    return url.partition("://")[0] in LOOKED_UP


def _check_peers(urls: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for url in urls:
            if is_looked_up(url):
                parse_members(url)
            else:
                ListedHost.of_url(url)
    except ConfigError as error:
        raise PydanticCustomError("place", "{problem}", {"problem": str(error)}) from error
    except ValueError as error:
        raise PydanticCustomError("place", "must name engines by host and port: kvs://10.0.0.5:7300") from error
    return urls


def _as_ports(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _check_ports(value: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    ports = (value,) if isinstance(value, int) else value
    if ports is not None and (not ports or not all(0 < port < _END_PORT for port in ports)):
        raise PydanticCustomError("port", "must be a port, or a list with a port for each worker")
    return value


def _as_sizes(value: object) -> object:
    values = as_tuple((value,) if isinstance(value, int) else value)
    if not isinstance(values, tuple):
        return values
    return tuple(int(size) if isinstance(size, str) and size.isdecimal() else size for size in values)


def _check_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not all(0 < size <= _MAX_SIZE for size in sizes) or len(set(sizes)) < len(sizes):
        raise PydanticCustomError("sizes", "must be tensor-parallel sizes, each once, such as [1, 4]")
    return sizes


def _check_bytes(value: int) -> int:
    if value >= _MIN_BUFFER_BYTES:
        return value
    example = {"size": value * GIB_BYTES}
    raise PydanticCustomError("size", "looks like GiB; bytes are expected, such as {size}", example)


def _check_role(value: str | None) -> str | None:
    return value if value is None else require_one_of(value, PD_ROLES)


def _check_channel(value: str | None) -> str | None:
    if value is None or value in {"tcp", "py_socket"}:  # ``py_socket`` is LMCache's
        return None
    return require_one_of(value, known_channels())


def _each(read: Callable[[str], ListedHost], demand: LiteralString) -> AfterValidator:
    """Return a validator that checks if every text can be read."""

    def check(texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        try:
            for text in texts or ():
                read(text)
        except ValueError as error:
            raise PydanticCustomError("place", demand) from error
        return texts

    return AfterValidator(check)


_Ports = Annotated[int | tuple[int, ...] | None, BeforeValidator(_as_ports), AfterValidator(_check_ports)]
_Hosts = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(as_tuple),
    _each(ListedHost.parse, "must name hosts, or hosts with a port: 10.0.0.5:7300"),
]
_Peers = Annotated[
    tuple[str, ...],
    BeforeValidator(as_tuple),
    AfterValidator(_check_peers),
]
_Sizes = Annotated[tuple[int, ...], BeforeValidator(_as_sizes), AfterValidator(_check_sizes)]


class HandoverKeys(Keys):
    """Prefill and decode engines, and peers."""

    enable_pd: bool = False
    """Hand KV over between prefill and decode engines ([disaggregation.md](disaggregation.md))."""
    pd_role: Annotated[str | None, AfterValidator(_check_role)] = None
    """LMCache's `sender`, `receiver` or `both`. A `sender` does not listen, unless `pd_bidirectional` is set. vLLM's
    `kv_role` decides which engine stores and which loads; a warning says if the two differ."""
    pd_bidirectional: bool = False
    """A prefill engine also reads what the decode engine holds of the next turn, if that one is in `pd_allowed_hosts`
    with its port, or in `peers`."""
    pd_buffer_size: Annotated[int, Unit("bytes per worker"), Field(gt=0), AfterValidator(_check_bytes)] = GIB_BYTES
    """Memory of the server that each worker opens at `pd_peer_init_port`."""
    pd_peer_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address at which this engine's workers listen and others reach them. `{host}`: vLLM's of each host."""
    pd_peer_init_port: _Ports = None
    """Port of this engine's first worker, for other engines to send to it and read from it. Worker n adds n; a list
    gives each worker its port. Needs `enable_pd`. A `remote_url` is then only read. If null, the engine does not
    listen."""
    transfer_channel: Annotated[str | None, AfterValidator(_check_channel)] = None
    """Transport of hand-overs: `nixl`, if both engines set and have it, else TCP
    ([disaggregation.md](disaggregation.md#nixl))."""
    pd_allowed_hosts: _Hosts = None
    """Hosts to which requests may have KV sent: a list, or text with commas. If null, loopback, `pd_peer_host` and the
    hosts in `peers`. With `pd_bidirectional`, an entry `host:port` is also an engine that a request may name as a
    holder of its KV."""
    pd_timeout_ms: Annotated[int, Unit("milliseconds"), Field(ge=1, le=MAX_TIMEOUT_S * 1000)] = 10_000
    """Longest wait of a request for KV on its way to this engine. After that it is computed."""
    peers: _Peers = ()
    """Other engines whose KV is read: `kvs://host:port` of their first worker, a list or text with commas. Nothing is
    sent to them. `kvs+dns://`, `kvs+srv://` and `kvs+file://` name
    [engines that come and go](disaggregation.md#peers-that-come-and-go)."""
    reshard_from: _Sizes = ()
    """[Other tensor-parallel sizes](parallelism.md#another-size): what engines of these sizes have stored is read, too.
    A list, or text with commas."""
    min_remote_tokens: Tokens = 0
    """If the remote tier or peers would add fewer tokens to a hit, these are computed."""

    @property
    def listens(self) -> bool:
        """True if workers open servers, which other engines send to and read from."""
        return self.pd_peer_init_port is not None and accepts_kv(self.enable_pd, self.pd_role, self.pd_bidirectional)

    @property
    def goes_both_ways(self) -> bool:
        """True if producers also load, and consumers also save."""
        return self.enable_pd and self.pd_bidirectional

    @property
    def fixed_peers(self) -> tuple[str, ...]:
        """The peers that are listed one by one."""
        return tuple(url for url in self.peers if not is_looked_up(url))

    @property
    def watched_peers(self) -> tuple[str, ...]:
        """URLs by which DNS or a file names further peers, which come and go."""
        return tuple(filter(is_looked_up, self.peers))

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Hosts to which requests may have KV sent, in lower case, except those of ``watched_peers``."""
        if self.pd_allowed_hosts is not None:
            return frozenset(ListedHost.parse(text).host for text in self.pd_allowed_hosts)
        return frozenset({self.pd_peer_host.lower(), *(ListedHost.of_url(url).host for url in self.fixed_peers)})

    def allows_host(self, host: str) -> bool:
        """Tell if a request may have KV sent to a host."""
        is_listed = host.lower() in self.allowed_hosts
        return is_listed or (self.pd_allowed_hosts is None and is_loopback(host))

    @property
    def sources(self) -> frozenset[ListedHost]:
        """Engines that a request may name as holders of its KV, with ports, except those of ``watched_peers``."""
        if not self.goes_both_ways:
            return frozenset()
        listed = map(ListedHost.parse, self.pd_allowed_hosts or ())
        peers = map(ListedHost.of_url, self.fixed_peers)
        return frozenset(place for place in (*listed, *peers) if place.port is not None)


def accepts_kv(enable_pd: object, pd_role: object, pd_bidirectional: object) -> bool:
    """Tell if an engine accepts KV. A sender does not, because its LMCache file names the receiver's port."""
    return bool(enable_pd) and (pd_role != "sender" or bool(pd_bidirectional))
