"""Programs on this machine: they need no password, and their payload stays in the processor's caches."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

_BUFFER_BYTES: Final = 96 << 10  # the kernel takes twice as much
_SYSTEMS_CHOICE: Final = -1
_KNOWN_NAMES: Final = 64  # clients of a proxy say the same one in every request


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a program on this machine, and not from a page in a browser.

    Pages of other sites name themselves in ``Origin``; one whose name was made to point here (DNS rebinding) asks for
    another ``Host``.
    """
    return "origin" not in headers and is_loopback(_host_name(headers.get("host", "")))


@lru_cache(maxsize=_KNOWN_NAMES)
def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def buffer_bytes(address: str) -> int:
    """How much a ZeroMQ socket should let the kernel buffer, in each direction.

    Little on loopback: what was sent is then received while it is still in a processor's own cache, where the system's
    default of megabytes goes through memory. For a network the system decides: -1.
    """
    host = urlsplit(address).hostname or ""
    return _BUFFER_BYTES if address.startswith("tcp:") and is_loopback(host) else _SYSTEMS_CHOICE


@lru_cache(maxsize=_KNOWN_NAMES)
def _host_name(header: str) -> str:
    """The name in a ``Host`` header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
