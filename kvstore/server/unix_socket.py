"""Unix socket for clients on the same host, which hands out the pool and detects when a client is gone.

A client that connects receives the memfd and a token, with which it says hello through the ZeroMQ socket. After that
nothing is sent here. The connection stands for the client's access to the pool. Only the client closes it, or the
kernel after the client's death, so its end is the only sign that the client cannot write to its pages any more.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.model.errors import ConfigError
from kvstore.model.throttle import Throttle
from kvstore.protocol.credentials import credentials_of
from kvstore.protocol.messages import TOKEN_BYTES

logger = logging.getLogger(__name__)

POOL_SOCKET = "pool"
CONTROL_NAME = "control"  # of the socket for requests
FOLDER_MODE = 0o700
_SOCKET_MODE = 0o600
_BACKLOG = 128


class UnixSocket:
    """A unix socket in a folder of mode 0700. Belongs to the thread that decides.

    Args:
        folder: its folder; made if missing.
        pool_fd: the memfd to hand out.
        most: the most connections that may be open.
        listener_fd: a descriptor that listens there already, from another process, which this object then owns.

    Attributes:
        folder: its folder.
        owns_path: the name is deleted at the end.

    Raises:
        ConfigError: the folder belongs to another user or is open to others, or another server runs in it.
    """

    def __init__(self, folder: Path, pool_fd: int, most: int, listener_fd: int = -1) -> None:
        self.folder = folder
        self._path = folder / POOL_SOCKET
        self._pool_fd = pool_fd
        self._most = most
        self._tokens: dict[int, bytes] = {}  # by the connection's file descriptor
        self._connections: dict[bytes, socket.socket] = {}
        self._throttle = Throttle(logger)
        make_private(folder)
        self.owns_path = listener_fd < 0
        self._listener = _listen(self._path) if listener_fd < 0 else socket.socket(fileno=listener_fd)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a client connects or disconnects."""
        return self._epoll.fileno()

    @property
    def listener_fd(self) -> int:
        """Descriptor that listens."""
        return self._listener.fileno()

    def connections(self) -> list[tuple[bytes, int]]:
        """Return token and descriptor of each connection."""
        return [(token, fd) for fd, token in self._tokens.items()]

    def adopt(self, token: bytes, fd: int) -> None:
        """Add a connection that another process has accepted."""
        connection = socket.socket(fileno=fd)
        connection.setblocking(False)
        self._enter(token, connection)

    def is_open(self, token: bytes) -> bool:
        """Tell if the connection with this token is open."""
        return token in self._connections

    def ask_to_leave(self, token: bytes) -> None:
        """Ask a client to close its end; it is gone once it does."""
        connection = self._connections.get(token)
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def ask_all_to_leave(self) -> None:
        """Ask all clients to close their ends."""
        for token in self._connections:
            self.ask_to_leave(token)

    def look(self) -> list[bytes]:
        """Accept new clients; return the tokens of those that are gone."""
        gone = []
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._let_in()
            elif self._has_gone(fd, events):
                gone.append(self._close(fd))
        return gone

    def close(self) -> None:
        """Close the socket and all connections, and delete its name, unless another process has it now."""
        for fd in list(self._tokens):
            self._close(fd)
        self._epoll.close()
        self._listener.close()
        if self.owns_path:
            self._path.unlink(missing_ok=True)

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                self._throttle.log("accept", "cannot accept a client: %s", os.strerror(error.errno or 0))
            return
        connection.setblocking(False)
        client = credentials_of(connection)
        if not client.are_trusted or len(self._tokens) >= self._most:
            said = "refused a client of user %d: %d are connected"
            self._throttle.log("turned away", said, client.user, len(self._tokens))
            connection.close()
            return
        token = secrets.token_bytes(TOKEN_BYTES)
        try:
            socket.send_fds(connection, [token], [self._pool_fd])
        except OSError:  # gone already
            connection.close()
            return
        self._enter(token, connection)

    def _enter(self, token: bytes, connection: socket.socket) -> None:
        self._tokens[connection.fileno()] = token
        self._connections[token] = connection
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)

    def _has_gone(self, fd: int, events: int) -> bool:
        """Tell if a connection ended. Bytes received through it mean nothing, and are discarded."""
        if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
            return True
        connection = self._connections[self._tokens[fd]]
        try:
            return not connection.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _close(self, fd: int) -> bytes:
        token = self._tokens.pop(fd)
        self._epoll.unregister(fd)
        self._connections.pop(token).close()
        return token


def make_private(folder: Path) -> None:
    """Make a folder that only our user can enter, or check that it is one.

    Raises:
        ConfigError: it is not private, or cannot be made.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"the folder {folder} of the cache server cannot be used: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the folder {folder} of the cache server must belong to its user and be closed to others: chmod 700 it, "
            "or name another"
        )


def _listen(path: Path) -> socket.socket:
    """Listen on a path, replacing a dead server's socket.

    Raises:
        ConfigError: a server runs there, or the path cannot be used.
    """
    if is_alive(path):
        raise ConfigError(
            f"another cache server runs in {path.parent}, which cannot be replaced while it runs: stop it, or name "
            "another folder"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(_SOCKET_MODE)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the cache server cannot listen on {path}: {error.strerror or error}") from error
    return listener


def is_alive(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> bool:
    """Tell if a process listens on a unix socket."""
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
