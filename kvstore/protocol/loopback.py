"""Programs on this machine, which need no password, and whose payload stays in the processor's caches."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

_BUFFER_BYTES: Final = 96 << 10  # the kernel takes twice as much
_SYSTEMS_CHOICE: Final = -1
_KNOWN_NAMES: Final = 64  # clients of a proxy send the same one in every request


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Tell if a request comes from a program on this machine, and not from a page in a browser.

    Browsers name the site of a page in ``Origin``. A page whose name was made to point here (DNS rebinding) requests
    another ``Host``.
    """
    return "origin" not in headers and is_loopback(_host_name(headers.get("host", "")))


@lru_cache(maxsize=_KNOWN_NAMES)
def is_loopback(host: str) -> bool:
    """Tell if a name or address means this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def buffer_bytes(address: str) -> int:
    """Return the bytes that a ZeroMQ socket should let the kernel buffer, in each direction.

    It is small on loopback, so that sent bytes are received while they are still in a processor's own cache; with the
    system's default of megabytes they go through memory. For a network it is -1, the system's choice.
    """
    host = urlsplit(address).hostname or ""
    return _BUFFER_BYTES if address.startswith("tcp:") and is_loopback(host) else _SYSTEMS_CHOICE


@lru_cache(maxsize=_KNOWN_NAMES)
def _host_name(header: str) -> str:
    """Return the name in a ``Host`` header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
