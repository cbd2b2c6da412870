"""Cuts off connections that send bytes without ever completing a message.

ZeroMQ bounds the length of a frame but not the number of frames, and delivers only complete messages. So a message that
never ends would fill the memory unseen. The kernel counts the bytes that a connection has received. If they grow while
no message arrives, the connection is cut off, and ZeroMQ frees the partial message.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvstore.protocol import messages
from kvstore.server.sessions import MAX_PIECES

LOOK_S: Final = 0.05
_STRANGER_BYTES: Final = 1 << 20  # before a hello
_ALL_STRANGERS_BYTES: Final = 64 << 20
_CLIENT_BYTES: Final = (MAX_PIECES + 4) * (
    messages.PIECE_BYTES + messages.MAX_MESSAGE_BYTES
)  # more than may be under way
_RECEIVED = struct.Struct("<Q")
_RECEIVED_OFFSET: Final = 128  # of tcpi_bytes_received in struct tcp_info


@dataclass
class _Connection:
    """An open connection.

    Attributes:
        own: a duplicate of its descriptor, so that the number cannot be reused for another connection.
        heard_bytes: the bytes received until the first look after the last message.
        is_heard: True if a message arrived since the last look.
    """

    own: socket.socket
    heard_bytes: int = 0
    is_heard: bool = False

    @property
    def received_bytes(self) -> int:
        info = self.own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size)
        return int(_RECEIVED.unpack_from(info, _RECEIVED_OFFSET)[0]) if len(info) > _RECEIVED_OFFSET else 0

    def unheard_bytes(self) -> int:
        """Return the bytes received since the last message."""
        received_bytes = self.received_bytes
        if self.is_heard:
            self.is_heard, self.heard_bytes = False, received_bytes
        return received_bytes - self.heard_bytes

    def cut(self) -> None:
        with suppress(OSError):  # it has already ended
            self.own.shutdown(socket.SHUT_RDWR)


class Watch:
    """The connections of a TCP socket. Belongs to the thread that decides.

    Args:
        port: the port of the socket.
        most: the most connections that may be open. Beyond that, the oldest one without a hello is cut off.
    """

    def __init__(self, port: int, most: int) -> None:
        self._port = port
        self._most = most
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[int, None] = {}  # those without a hello, the oldest first

    def __len__(self) -> int:
        return len(self._connections)

    def come(self, fd: int) -> None:
        """Add a connection that was accepted."""
        self.go(fd)
        own = _duplicate(fd, self._port)
        if own is None:
            return
        self._connections[fd] = _Connection(own)
        self._strangers[fd] = None
        if len(self._connections) > self._most:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # so that it is cut off only once
            self._connections[oldest].cut()

    def meet(self, fd: int) -> None:
        """Note that a client has said hello through a connection."""
        self._strangers.pop(fd, None)

    def go(self, fd: int) -> None:
        """Remove a connection that has ended."""
        self._strangers.pop(fd, None)
        connection = self._connections.pop(fd, None)
        if connection is not None:
            connection.own.close()

    def hear(self, fd: int) -> None:
        """Note that a message arrived through a connection."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.is_heard = True

    def look(self) -> int:
        """Cut off connections that send endless messages; return their number."""
        strangers: list[tuple[int, int]] = []
        guilty: list[int] = []
        for fd, connection in self._connections.items():
            try:
                unheard_bytes = connection.unheard_bytes()
            except OSError:
                continue
            if fd in self._strangers:
                strangers.append((unheard_bytes, fd))
            elif unheard_bytes > _CLIENT_BYTES:
                guilty.append(fd)
        all_bytes = sum(unheard_bytes for unheard_bytes, _ in strangers)
        for unheard_bytes, fd in sorted(strangers, reverse=True):
            if unheard_bytes <= _STRANGER_BYTES and all_bytes <= _ALL_STRANGERS_BYTES:
                break
            guilty.append(fd)
            all_bytes -= unheard_bytes
        for fd in guilty:
            self._connections[fd].cut()
        return len(guilty)

    def close(self) -> None:
        """Close all duplicates of descriptors."""
        for fd in list(self._connections):
            self.go(fd)


def _duplicate(fd: int, port: int) -> socket.socket | None:
    """Duplicate the descriptor of a connection to a port; return None if the number is reused by now."""
    own_fd = -1
    try:
        own_fd = os.dup(fd)
        own = socket.socket(fileno=own_fd)
    except OSError:
        if own_fd >= 0:
            os.close(own_fd)
        return None
    with suppress(OSError):
        name = own.getsockname()
        is_listener = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # bound again, under a reused number
        if own.family in {socket.AF_INET, socket.AF_INET6} and name[1] == port and not is_listener:
            return own
    own.close()
    return None
