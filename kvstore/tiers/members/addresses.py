"""Addresses of several cache servers, from one URL.

kvs://a:5566,b:5566               a fixed list
kvs+dns://cache:5566              every address of a host name, such as a headless service of Kubernetes
kvs+srv://_kvs._tcp.cache         every target of an SRV record, with its port
kvs+file:///etc/kvstore/members   every line of a file; # begins a comment

Names decide where chunks are, so all engines must use the same ones. A name is what is written above, the address of
``kvs+dns``, or the target of ``kvs+srv``, which stays when its address changes. Of a host with both kinds of addresses
only those of IPv4 count, so that a server is one member.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kvstore.model.errors import ConfigError, TierError
from kvstore.tiers.url_options import host_and_port, split_url

MAX_MEMBERS: Final = 64
LOOKED_UP: Final = frozenset({"kvs+dns", "kvs+srv", "kvs+file"})
"""Schemes of URLs whose members come and go."""
LOOK_INTERVAL_S: Final = (3.0, 6.0)  # at random, so that engines that start together do not ask together
_MAX_FILE_BYTES: Final = 1 << 16
_ANSWER_WITHIN_S: Final = 2.0
_DNS_PORT: Final = 53
_Ask = Callable[[str, str], Sequence[Any]]


class Member(NamedTuple):
    """Cache server of several: the name that decides which chunks it has, and its URL."""

    name: str
    url: str


class Members(NamedTuple):
    """Members that a URL names.

    Attributes:
        find: returns them as they are now; raises ``TierError`` if nobody knows, and ``ConfigError`` for a wrong file.
        query: options of each member, as in a URL.
        is_asked: ``find`` asks a name server.
        keeps_names: a server that comes again has its former name, and no other server has it.
    """

    find: Callable[[], list[Member]]
    query: str
    is_asked: bool = False
    keeps_names: bool = True


def parse_members(url: object) -> Members:
    """Parse the URL of several cache servers. Asks no name server, and reads no file.

    Raises:
        ConfigError: names the part that is wrong, or the package that is missing.
    """
    parts = split_url(url, "cache server", "kvs://host:port,host:port")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    server, scheme = options.pop("nameserver", None), parts.scheme
    query, asks = urlencode(options), scheme in {"kvs+dns", "kvs+srv"} and not parts.path
    host, port = host_and_port(parts, "the URL of the cache servers") if asks else ("", None)
    ask = _name_server(server) if asks and (server is not None or scheme == "kvs+srv") else None
    if scheme == "kvs" and server is None and not parts.path:
        listed = [_member(address) for address in parts.netloc.split(",")]
        if len(listed) <= MAX_MEMBERS and len({member.name for member in listed}) == len(listed):
            return Members(lambda: listed, query)
        raise ConfigError(f"a list of cache servers names at most {MAX_MEMBERS}, each once: {parts.netloc[:200]}")
    if scheme == "kvs+file" and server is None and parts.path and not parts.netloc:
        return Members(partial(_in_file, Path(unquote(parts.path))), query)
    if scheme == "kvs+dns" and host and port:
        return Members(lambda: [_member(f"{at}:{port}") for at in _addresses(host, ask)], query, True, False)
    if scheme == "kvs+srv" and ask is not None and host and port is None:
        return Members(partial(_targets, host, ask, with_addresses=server is not None), query, True)
    raise ConfigError(
        f"{str(url)[:200]!r} names no cache servers: write kvs://host:port,host:port or kvs+dns://host:port or "
        "kvs+srv://_service._tcp.name or kvs+file:///path; ?nameserver=ip:port is for dns and srv only"
    )


def _member(address: str, name: str = "") -> Member:
    try:
        parts = urlsplit(f"//{address}")
        is_right = bool(parts.hostname and parts.port) and parts.netloc == address and "@" not in address
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"{address[:200]!r} is no address of a cache server: write host:port")
    return Member(name or address.lower(), f"kvs://{address}")


def _in_file(path: Path) -> list[Member]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise TierError(f"the list of cache servers {path} cannot be read: {error.strerror}") from error
    return [_member(address) for line in text.splitlines() if (address := line.partition("#")[0].strip())]


def _targets(service: str, ask: _Ask, *, with_addresses: bool) -> list[Member]:
    """Return the targets of an SRV record. If the system does not know them, the name server has their addresses."""
    found = []
    for record in ask(service, "SRV"):
        host = record.target.to_text(omit_final_dot=True).lower()
        at = next(iter(_addresses(host, ask)), None) if with_addresses else host
        found += [_member(f"{at}:{record.port}", f"{host}:{record.port}")] if at else []
    return found


def _addresses(host: str, ask: _Ask | None) -> list[str]:
    """Return the addresses of a host as the system finds them, which knows /etc/hosts, or as a name server does."""
    try:
        if ask is not None:
            found = [*map(str, ask(host, "A"))] or [*map(str, ask(host, "AAAA"))]
        else:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = [str(info[4][0]) for info in infos]
    except (OSError, UnicodeError) as error:
        raise TierError(f"the addresses of {host} are not known: {error}") from error
    return sorted({at for at in found if ":" not in at}) or sorted({f"[{at}]" for at in found})


def _name_server(text: str | None) -> _Ask:
    """Return a function that asks for records; None stands for the name server of the system."""
    try:
        import dns.exception  # noqa: PLC0415 - an extra
        import dns.resolver  # noqa: PLC0415

        parts = urlsplit(f"//{text}")
        at = None if text is None else (str(ipaddress.ip_address(parts.hostname or "")), parts.port or _DNS_PORT)
    except ImportError as error:
        raise ConfigError(f"this URL needs {error.name}: pip install 'vllm-kvstore[discovery]'") from error
    except ValueError as error:
        raise ConfigError(f"nameserver is {text!r}: it must be an IP address, or one with a port") from error

    def ask(name: str, kind: str) -> Sequence[Any]:
        try:
            resolver = dns.resolver.Resolver(configure=at is None)
            if at is not None:
                resolver.nameservers, resolver.port = [at[0]], at[1]
            return [*resolver.resolve(name, kind, lifetime=_ANSWER_WITHIN_S, search=at is None)]
        except dns.resolver.NoAnswer:
            return []
        except (dns.exception.DNSException, OSError, UnicodeError) as error:
            raise TierError(f"the {kind} records of {name} are not known: {error}") from error

    return ask
