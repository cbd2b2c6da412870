"""Hosts and ports listed by an operator, which requests may name."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import urlsplit

END_PORT: Final = 65_536


class ListedPlace(NamedTuple):
    """A host in lower case and one of its ports, or None if only the host is listed."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> ListedPlace:
        """Read ``host``, ``host:port``, ``[v6]:port``, or a bare IPv6 address.

        Raises:
            ValueError: the text after the host is not a port.
        """
        host, colon, port = text.rpartition(":")
        if not colon or (":" in host and not host.endswith("]")):
            return cls(text.strip("[]").lower(), None)
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < END_PORT or not host.strip("[]"):
            raise ValueError(text)
        return cls(host.strip("[]").lower(), int(port))

    @classmethod
    def of_url(cls, url: str) -> ListedPlace:
        """Read ``kvs://host:port``; options after it are ignored.

        Raises:
            ValueError: the URL is no such address.
        """
        parts = urlsplit(url)
        if parts.scheme != "kvs" or not parts.hostname or not parts.port or parts.path:
            raise ValueError(url)
        return cls(parts.hostname, parts.port)
