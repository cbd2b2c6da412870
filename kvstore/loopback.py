"""Who may come in without a password: programs on this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Whether a program on this machine asks, and not a browser: any page that a user looks at could make that ask.

    Pages of other sites name themselves in ``Origin``, and one whose name was made to point here (DNS rebinding) asks
    for another ``Host``.
    """
    return "origin" not in headers and is_loopback(_host_name(headers.get("host", "")))


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str:
    """The name in a ``Host`` header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
