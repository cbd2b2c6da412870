"""Client's hold on the memory of a server on the same host: a unix socket, and the memfd received through it.

The end of the socket is the only sign for either side that the other has ended. So a client closes it last, when it can
no longer touch the memory through the connection to which the hold belongs.

A client reads KV from this memory, and is killed if the memory shrinks while mapped. So folder and server must belong
to the client's user or to root, other users must not enter the folder, and the memfd must be sealed.

As long as a process has the memory of a server mapped, the system cannot give it to the next server. So a ``Watcher``
detects the end of the server of idle connections, without polling.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from kvstore.model.errors import TierError, TierSetupError
from kvstore.protocol.credentials import credentials_of, is_trusted
from kvstore.protocol.messages import TOKEN_BYTES

_POOL_SOCKET: Final = "pool"
# From linux/fcntl.h.
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 0x0002


class Hold:
    """Connection to a server's unix socket. Belongs to one thread at a time, except for ``is_over``.

    Attributes:
        token: names the connection in the hello.
        pool_fd: the server's memory; -1 once it is closed.
        pool_bytes: its size, which cannot shrink.

    Args:
        folder: of the server's sockets.
        timeout_s: longest wait for the server.

    Raises:
        TierSetupError: the server is not run by this user or by root, or its memory could shrink.
        TierError: it cannot be reached.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        try:
            with ExitStack() as opened:
                _check_folder(folder)
                self._socket = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self._socket.settimeout(timeout_s)
                self._socket.connect(str(folder / _POOL_SOCKET))
                _check_server(self._socket, folder)
                self.token, self.pool_fd = _receive_pool(self._socket)
                opened.callback(os.close, self.pool_fd)
                self.pool_bytes = _sealed_size(self.pool_fd, folder)
                self._socket.setblocking(False)
                opened.pop_all()
        except OSError as error:
            reason = error.strerror or error
            raise TierError(f"the cache server in {folder} cannot be reached: {reason}") from error

    @property
    def is_over(self) -> bool:
        """True if the other end was closed."""
        try:
            return not self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        """Return a descriptor that is readable when the server has ended, or wants this client to disconnect."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close both descriptors. Idempotent. A mapping of the memory stays."""
        self._socket.close()
        if self.pool_fd >= 0:
            os.close(self.pool_fd)
            self.pool_fd = -1


class Watcher:
    """Watcher of holds on servers' memory. Thread-safe. Its thread begins with the first hold, and ends at ``close``.

    Unmapping the memory may take seconds, so other threads also leave that to its thread.

    Args:
        ended: called on that thread after the other end of a hold was closed.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def watch(self, hold: Hold) -> None:
        """Watch a hold until this process closes it."""
        with self._lock:
            if self._is_closed:
                return
            if self._epoll is None:
                self._epoll = self._begin()
            self._epoll.register(hold, select.EPOLLRDHUP | select.EPOLLET)

    def do(self, job: Callable[[], None]) -> None:
        """Run a job on the thread, or on the caller's if there is none."""
        with self._lock:
            has_thread = self._thread is not None and not self._is_closed
            if has_thread:
                self._jobs.append(job)
                os.eventfd_write(self._wake, 1)
        if not has_thread:
            job()

    def close(self, timeout_s: float) -> None:
        """End the thread after the waiting jobs. One that unmaps memory for longer goes on. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _begin(self) -> select.epoll:
        """Start the thread, which closes its descriptors at its end.

        Raises:
            OSError: too many files are open.
        """
        with ExitStack() as opened:
            epoll = opened.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self._wake)
            epoll.register(self._wake, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(epoll,), name="kvstore-watch", daemon=True)
            thread.start()
            self._thread = thread
            opened.pop_all()
        return epoll

    def _run(self, epoll: select.epoll) -> None:
        while not self._is_closed:
            events = epoll.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if any(fd != self._wake for fd, _ in events):
                self._ended()
            self._work()
        self._work()
        with self._lock:  # close() may just be about to write to it
            epoll.close()
            os.close(self._wake)

    def _work(self) -> None:
        while self._jobs:
            self._jobs.popleft()()


def _check_folder(folder: Path) -> None:
    """Check that only this process's user or root can have put a socket into a folder.

    Raises:
        TierSetupError: another user can.
        OSError: there is no such folder.
    """
    status = folder.stat()
    if not is_trusted(status.st_uid) or stat.S_IMODE(status.st_mode) & 0o077:
        raise TierSetupError(
            f"the folder {folder} of the cache server has user {status.st_uid} and mode "
            f"{stat.S_IMODE(status.st_mode):04o}: it must belong to user {os.geteuid()} and be closed to others (0700)"
        )


def _check_server(unix_socket: socket.socket, folder: Path) -> None:
    """Check the user of the listening process.

    Raises:
        TierSetupError: it is neither this process's user nor root.
    """
    user = credentials_of(unix_socket).user
    if not is_trusted(user):
        raise TierSetupError(
            f"the cache server in {folder} runs as user {user}, and this process as {os.geteuid()}: run both as one"
        )


def _receive_pool(unix_socket: socket.socket) -> tuple[bytes, int]:
    """Receive the token and the memfd from the server.

    Raises:
        OSError: it does not send them.
    """
    token, fds, _, _ = socket.recv_fds(unix_socket, TOKEN_BYTES, 1)
    if len(token) != TOKEN_BYTES or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise OSError("it sent no memory")
    os.set_inheritable(fds[0], False)
    return token, fds[0]


def _sealed_size(fd: int, folder: Path) -> int:
    """Return the size of a memfd, in bytes.

    Raises:
        TierSetupError: it could shrink, and processes that have mapped it would then be killed by SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    if not seals & _F_SEAL_SHRINK:
        raise TierSetupError(f"the memory of the cache server in {folder} is not sealed: it may be another program")
    return os.fstat(fd).st_size
