"""User of the process at the other end of a unix socket, as the kernel tells it."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class Credentials(NamedTuple):
    """A process and its user, by their numbers."""

    process: int
    user: int

    @property
    def are_trusted(self) -> bool:
        """True for a process of this user or root."""
        return is_trusted(self.user)


def credentials_of(unix_socket: socket.socket) -> Credentials:
    """Return those of the other end: of a client as it connected, of a server as it began to listen.

    Raises:
        OSError: the socket is closed.
    """
    sent = unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(sent)
    return Credentials(process, user)


def is_trusted(user: int) -> bool:
    """Tell if a user is this process's or root, who can do everything anyway."""
    return user in {0, os.geteuid()}
