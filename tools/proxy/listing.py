"""Engines of a proxy, as the options or the engines' file list them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvstore.model.errors import ConfigError

_HOST: Final = r"(?:\[[^\]\s,]+\]|[^\s:/?#@\[\],]+)"
_RECEIVER: Final = re.compile(rf"kvs://({_HOST}(?:,{_HOST})*):(\d{{1,5}}(?:,\d{{1,5}})*)", re.ASCII)


class Receiver(NamedTuple):
    """Address at which a decode engine receives KV.

    Attributes:
        host: host of the engine, or its hosts with commas, each for as many of the ports.
        port: port for the first prefill worker.
        more_ports: ports for the other workers; empty if worker n sends to ``port`` + n.
    """

    host: str
    port: int
    more_ports: tuple[int, ...] = ()

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]" if ":" in host else host for host in self.host.split(","))
        return f"kvs://{hosts}:{','.join(map(str, (self.port, *self.more_ports)))}"

    @classmethod
    def parse(cls, url: str, name: str = "--decode-kv") -> Receiver:
        """Parse ``kvs://host:port``, ``kvs://host:port,port`` or ``kvs://host,host:port,port``, given as ``name``.

        Raises:
            ConfigError: the URL has another form.
        """
        found = _RECEIVER.fullmatch(url)
        ports = [int(port) for port in found[2].split(",")] if found else []
        hosts = [host.strip("[]").lower() for host in found[1].split(",")] if found else []
        if not hosts or len(ports) % len(hosts) or not all(0 < port < 1 << 16 for port in ports):
            raise ConfigError(
                f"{name} is {url!r}: it must be kvs://HOST:PORT, or a port for each prefill worker; of several hosts, "
                "with commas, each has as many"
            )
        return cls(",".join(hosts), ports[0], tuple(ports[1:]))


class Listed(NamedTuple):
    """One listed engine.

    Attributes:
        url: address of the engine, without a trailing slash.
        receiver: address at which it receives KV; None if it receives none.
        weight: share of requests, relative to other engines.
    """

    url: str
    receiver: Receiver | None = None
    weight: float = 1.0


class Listing(NamedTuple):
    """Listed engines of both roles."""

    prefill: tuple[Listed, ...]
    decode: tuple[Listed, ...]

    def check(self, prefill_name: str, decode_name: str) -> None:
        """Check that each address is valid, and that none is listed twice in a role.

        Raises:
            ConfigError: an address is invalid or listed twice; the message names it and a remedy.
        """
        for name, engines in ((prefill_name, self.prefill), (decode_name, self.decode)):
            for engine in engines:
                _check_url(name, engine.url)
            urls = {engine.url for engine in engines}
            if len(urls) < len(engines):
                raise ConfigError(f"{name} names an engine twice: name each of {', '.join(sorted(urls))} once")


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{name} is {url!r}: it must be http://HOST:PORT or https://HOST:PORT, and nothing behind it")
