"""Hosts and ports as an operator lists them: which of them requests may name."""

from __future__ import annotations

from typing import Final, NamedTuple

_END_PORT: Final = 65_536


class ListedPlace(NamedTuple):
    """A host in lower case, and a port of it, or None where only the host is listed."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> ListedPlace:
        """``host``, ``host:port``, ``[v6]:port``, or a bare IPv6 address.

        Raises:
            ValueError: what stands behind the host is no port.
        """
        host, colon, port = text.rpartition(":")
        if not colon or (":" in host and not host.endswith("]")):
            return cls(text.strip("[]").lower(), None)
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < _END_PORT or not host.strip("[]"):
            raise ValueError(text)
        return cls(host.strip("[]").lower(), int(port))
