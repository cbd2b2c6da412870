"""Limit of open files of this process, and the number of clients that can connect within it.

Clients get only a part of the limit, because some more may connect before the excess ones are cut off.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.server.clients import IPC, TCP

_WANTED: Final = 65_536
_KEPT: Final = 512
_OWN: Final = 32  # files that the server itself opens later, for its disk and its pages
_PER_CLIENT: Final = 2  # two sockets for a client of this host; a socket and its duplicate for one of the network
_FEWEST: Final = 128  # clients
_MOST: Final = {IPC: 2048, TCP: 16_384}


def allowed_clients(*, has_ipc: bool, has_tcp: bool) -> dict[int, int]:
    """Raise the limit as far as needed; return the number of clients that may be connected to each socket at once.

    Raises:
        ConfigError: the limit allows too few.
    """
    _raise_limit()
    limit = limit_of_files()
    used = sum(1 for _ in Path("/proc/self/fd").iterdir()) + _OWN
    clients = (room_for_clients(limit) - used) // _PER_CLIENT
    if clients < _FEWEST:
        raise ConfigError(
            f"this process may open {limit} files and has {used} of its own: too few for clients; raise the limit "
            "(ulimit -n, LimitNOFILE of systemd), best to 65536"
        )
    if not has_tcp:
        return {IPC: min(clients, _MOST[IPC])}
    if not has_ipc:
        return {TCP: min(clients, _MOST[TCP])}
    near = min(max(clients // 8, _FEWEST // 2), _MOST[IPC])
    return {IPC: near, TCP: min(clients - near, _MOST[TCP])}


def room_for_clients(limit: int) -> int:
    """Return the number of files for clients and server; the rest of the limit is kept for a flood of connections."""
    return limit - max(limit // 4, _KEPT)


def limit_of_files() -> int:
    """Read the number of files that this process may have open; at most as many as are useful."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else min(soft, _WANTED)


def _raise_limit() -> None:
    """Raise the limit to what many clients need, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
