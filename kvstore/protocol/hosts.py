"""Hosts: the one of this process, and addresses that mean another place on each host."""

from __future__ import annotations

import ipaddress
import socket
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvstore.protocol.loopback import is_loopback

_SOCKET_SCHEMES: Final = frozenset({"kvs+ipc", "unix"})  # name folders or files of sockets
_BOOT: Final = "/proc/sys/kernel/random/boot_id"
_SPACES: Final = ("net", "mnt")  # what loopback and paths mean


@cache
def this_host() -> str:
    """Return a name that is equal in processes for which paths and loopback mean the same.

    Containers have separate names, and so have clones of a virtual machine, whose host names may be equal.
    """
    parts = [_text_of(Path(_BOOT)) or socket.gethostname(), *(_space(name) for name in _SPACES)]
    return " ".join(parts)


def is_on_each_host(url: str) -> bool:
    """Tell if a URL means another place on each host: a socket's path, or an address of the host itself."""
    try:
        parts = urlsplit(url)
    except ValueError:  # refused where it is opened
        return False
    if parts.scheme in _SOCKET_SCHEMES:
        return True
    listed = parts.netloc.rpartition("@")[2].split(",")
    return any(is_loopback(name) or _is_unspecified(name) for name in map(_name_of, listed))


def _name_of(place: str) -> str:
    """Return the name in ``name:port`` or ``[v6]:port``."""
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0].lower()


def _is_unspecified(name: str) -> bool:
    """Tell if a name is 0.0.0.0 or ::, which clients take for loopback."""
    try:
        return ipaddress.ip_address(name).is_unspecified
    except ValueError:
        return False


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _space(name: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{name}").stat().st_ino)
    except OSError:
        return ""
