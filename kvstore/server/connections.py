"""Connections of clients, and limits on their number and on their messages, so that no client keeps out the others.

Clients get only a part of the files that this process may open, because libzmq accepts connections faster than they can
be counted here. A flood of them would take the last file, and libzmq aborts the process when a client of the unix
socket connects after that.

ZeroMQ bounds the length of a frame but not the number of frames, and delivers only complete messages. So a message that
never ends would fill the memory unseen. The kernel counts the bytes that a connection has received. If they grow while
no message arrives, the connection is cut off, and ZeroMQ frees the partial message.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvstore.model.errors import ConfigError
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.keyfiles import KeyPair
from kvstore.protocol.loopback import buffer_bytes
from kvstore.protocol.monitors import Monitor
from kvstore.server.clients import IPC, TCP
from kvstore.server.sessions import MAX_PIECES

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.05
_WANTED_FILES: Final = 65_536
_KEPT_FILES: Final = 512
_RETRY_S: Final = 0.002
_OWN_FILES: Final = 32  # files that the server itself opens later, for its disk and its pages
_FILES_PER_CLIENT: Final = 2  # two sockets for a client of this host; a socket and its duplicate for one of the network
_FEWEST_CLIENTS: Final = 128
_MOST_CLIENTS: Final = {IPC: 2048, TCP: 16_384}
_OPEN_BELOW: Final = 0.8  # of the number of files at which the listener is unbound
_MOST_FRAMES: Final = 2  # a request and its payload, after the name of the sender
_SKIPPED_AT_ONCE: Final = 4096  # frames; a few milliseconds
_STRANGER_BYTES: Final = 1 << 20  # before a hello
_ALL_STRANGERS_BYTES: Final = 64 << 20
# More than a client may have under way.
_CLIENT_BYTES: Final = (MAX_PIECES + 4) * (messages.PIECE_BYTES + messages.MAX_MESSAGE_BYTES)
_RECEIVE_QUEUE: Final = 16  # messages of one client
_SEND_QUEUE: Final = 64  # answers to one client, which never has so many requests open
_HEARTBEAT_MS: Final = 5000
_SILENCE_MS: Final = 30_000
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: end the connection with a reset
_RECEIVED = struct.Struct("<Q")
_RECEIVED_OFFSET: Final = 128  # of tcpi_bytes_received in struct tcp_info
_FAILURES: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def allowed_clients(*, has_ipc: bool, has_tcp: bool) -> dict[int, int]:
    """Raise the limit as far as needed; return the number of clients that may be connected to each socket at once.

    Raises:
        ConfigError: the limit allows too few.
    """
    _raise_limit()
    limit = limit_of_files()
    used = sum(1 for _ in Path("/proc/self/fd").iterdir()) + _OWN_FILES
    clients = (room_for_clients(limit) - used) // _FILES_PER_CLIENT
    if clients < _FEWEST_CLIENTS:
        raise ConfigError(
            f"this process may open {limit} files and needs {used} itself, which leaves too few for clients: raise "
            "the limit (ulimit -n, or LimitNOFILE of systemd) to 65536"
        )
    if not has_tcp:
        return {IPC: min(clients, _MOST_CLIENTS[IPC])}
    if not has_ipc:
        return {TCP: min(clients, _MOST_CLIENTS[TCP])}
    near = min(max(clients // 8, _FEWEST_CLIENTS // 2), _MOST_CLIENTS[IPC])
    return {IPC: near, TCP: min(clients - near, _MOST_CLIENTS[TCP])}


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: KeyPair | None = None
) -> zmq.Socket[bytes]:
    """Return a socket that listens on an address, with encryption if there are keys.

    Raises:
        ConfigError: it cannot listen there.
    """
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.router_mandatory = True
    router.maxmsgsize = messages.MAX_FRAME_BYTES
    router.rcvhwm, router.sndhwm = _RECEIVE_QUEUE, _SEND_QUEUE
    router.sndbuf = router.rcvbuf = buffer_bytes(address)
    router.handshake_ivl = 5000
    router.ipv6 = "[" in address
    if address.startswith("tcp"):
        router.heartbeat_ivl, router.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        router.heartbeat_ttl = _SILENCE_MS
    if keys is not None:
        router.curve_server = True
        router.curve_secretkey = keys.secret
        router.zap_domain = b"kvstore"
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"the cache server cannot listen on {address}: {error.strerror}; name another") from error
    return router


def check_address(host: str, port: int, patience_s: float) -> None:
    """Check that an address can be listened on, once another process has left it.

    Raises:
        ConfigError: it cannot.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                raise ConfigError(f"the cache server cannot listen on {host} port {port}: {error.strerror}") from error
            time.sleep(_RETRY_S)


def room_for_clients(limit: int) -> int:
    """Return the number of files for clients and server; the rest of the limit is kept for a flood of connections."""
    return limit - max(limit // 4, _KEPT_FILES)


def limit_of_files() -> int:
    """Read the number of files that this process may have open; at most as many as are useful."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED_FILES if soft == resource.RLIM_INFINITY else min(soft, _WANTED_FILES)


def _raise_limit() -> None:
    """Raise the limit to what many clients need, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Listener:
    """Address of a socket, unbound while few more files can be opened. Belongs to the thread that decides.

    Args:
        router: a socket that is bound to one address.
        probe_fd: any open file, which is duplicated to find the lowest free number.
    """

    def __init__(self, router: zmq.Socket[bytes], probe_fd: int) -> None:
        self._router = router
        self._probe_fd = probe_fd
        endpoint = router.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._endpoint = endpoint.rstrip(b"\0").decode()
        self._limit = limit_of_files()
        self._room = room_for_clients(self._limit)
        self._throttle = Throttle(logger)
        self.is_open = True

    @property
    def port(self) -> int:
        """Port of the address."""
        return int(self._endpoint.rsplit(":", 1)[1])

    def shut(self) -> None:
        """Unbind the socket until the next ``look``."""
        if self.is_open:
            self._router.unbind(self._endpoint)
            self.is_open = False

    def look(self) -> None:
        """Unbind the socket or bind it again, by the number of open files. Takes microseconds."""
        used = self._used()
        try:
            if self.is_open and used >= self._room:
                self._router.unbind(self._endpoint)
                self.is_open = False
                said = "%d of %d allowed files are open: no new clients over the network until some are closed"
                self._throttle.log("shut", said, used, self._limit)
            elif not self.is_open and used < _OPEN_BELOW * self._room:
                self._router.bind(self._endpoint)
                self.is_open = True
        except zmq.ZMQError as error:  # the address is not released yet, and the next call tries again
            self._throttle.log("listener", "%s: %s", self._endpoint, error.strerror)

    def _used(self) -> int:
        """Count the open files, as reported by Linux 6.2 and later, or at least those below the lowest free number."""
        try:
            free_fd = os.dup(self._probe_fd)
        except OSError:
            return self._limit
        os.close(free_fd)
        return max(free_fd, Path("/proc/self/fd").stat().st_size)


class Message(NamedTuple):
    """A message that was received.

    Attributes:
        name: the socket's name for the sender.
        frames: its first frames.
        is_whole: True if it has no other frames.
    """

    name: bytes
    frames: Sequence[zmq.Frame]
    is_whole: bool


class Intake:
    """Receives from a ROUTER socket. Belongs to the thread that decides."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._is_skipping = False

    def take(self) -> Message | None:
        """Return the next message; None if there is none, or if others are due after many skipped frames."""
        try:
            if self._is_skipping and not self._skip():
                return None
            name = self._router.recv(zmq.NOBLOCK, copy=False)
            frames: list[zmq.Frame] = []
            more = name.more
            while more and len(frames) < _MOST_FRAMES:
                frames.append(self._router.recv(zmq.NOBLOCK, copy=False))
                more = frames[-1].more
        except zmq.Again:
            return None
        self._is_skipping = bool(more)
        return Message(name.bytes, frames, not more)

    def _skip(self) -> bool:
        """Discard the rest of a message; return True at its end, False after a limited number of frames."""
        for _ in range(_SKIPPED_AT_ONCE):
            if not self._router.recv(zmq.NOBLOCK, copy=False).more:
                self._is_skipping = False
                return True
        return False


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
            # Or a peer that has filled the window would hear of the end a minute later, if ever.
            self.own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
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

    def add(self, fd: int) -> None:
        """Add a connection that was accepted."""
        self.remove(fd)
        own = _duplicate(fd, self._port)
        if own is None:
            return
        self._connections[fd] = _Connection(own)
        self._strangers[fd] = None
        if len(self._connections) > self._most:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # so that it is cut off only once
            self._connections[oldest].cut()

    def note_hello(self, fd: int) -> None:
        """Note that a client has said hello through a connection."""
        self._strangers.pop(fd, None)

    def remove(self, fd: int) -> None:
        """Remove a connection that has ended."""
        self._strangers.pop(fd, None)
        connection = self._connections.pop(fd, None)
        if connection is not None:
            connection.own.close()

    def note_message(self, fd: int) -> None:
        """Note that a message arrived through a connection."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.is_heard = True

    def cut(self, fd: int) -> None:
        """Cut off a connection, if it is still open."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.cut()

    def cut_endless(self) -> int:
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
            self.remove(fd)


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


class Network:
    """Network's socket and its connections. Belongs to the thread that decides.

    Args:
        context: context of the socket.
        router: the socket, bound to one address.
        probe_fd: any open file; see ``Listener``.
        most: the most connections that may be open.

    Attributes:
        num_strangers: number of clients that could not prove a key, or expected another server.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], probe_fd: int, most: int
    ) -> None:
        self.listener = Listener(router, probe_fd)
        self.watch = Watch(self.listener.port, most)
        self.num_strangers = 0
        self._throttle = Throttle(logger)
        self._monitor = Monitor(context, router, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILURES)

    @property
    def reports(self) -> zmq.Socket[bytes]:
        """Socket that is readable when connections have begun or ended."""
        return self._monitor.reader

    def ended(self, at_most: int | None = None) -> Iterator[int]:
        """Note new connections, and yield the descriptors of ended ones: ZeroMQ reports an end before it closes one.

        Handles ``at_most`` so many events, so that a flood of connections does not delay other clients.
        """
        for _ in itertools.count() if at_most is None else range(at_most):
            self.listener.look()
            if not self.reports.poll(0):
                return
            event = parse_monitor_message(self.reports.recv_multipart())
            if event["event"] & _FAILURES:
                self.num_strangers += 1
                self._throttle.log("stranger", "refused a client that has no keys or expects another server's key")
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self.watch.add(event["value"])
            else:
                self.watch.remove(event["value"])
                yield event["value"]

    def close(self) -> None:
        """Watch no connection any more; before the socket is closed."""
        self._monitor.close()
        self.watch.close()
