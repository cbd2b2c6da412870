"""The server's sockets, and the one thread that decides.

That thread never waits for a disk, a copy or a client. Other threads do the slow work, and report back to it. A client
that does not read its answers is cut off when its queue is full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import zmq

from kvstore.channels import open_channel
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError, ProtocolError
from kvstore.model.keys import Namespace
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.loopback import buffer_bytes
from kvstore.protocol.payload import Run
from kvstore.server.clients import IPC, TCP, Client, ClientKeys, Clients
from kvstore.server.connections import LOOK_S, Intake, Network, allowed_clients
from kvstore.server.core import Core
from kvstore.server.disk import Disk
from kvstore.server.operators import stats
from kvstore.server.options import ServerOptions
from kvstore.server.owner import Owner
from kvstore.server.pool import Pool
from kvstore.server.service import Service
from kvstore.server.sessions import Peer, Session, Sessions
from kvstore.server.stock import Stock
from kvstore.server.unix_socket import UnixSocket

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

CONTROL_NAME: Final = "control"
_TICK_S: Final = 0.5
_PAUSE_MS: Final = 2  # without a request, after which deferred work is done
_TURN: Final = 64  # messages of one socket before the next socket is served
_RECEIVE_QUEUE: Final = 16  # messages of one client
_SEND_QUEUE: Final = 64  # answers to one client, which never has so many requests open
_LOOK_EACH_S: Final = 2e-4  # between two looks, for each connection: a look takes some microseconds
_SPARE_PART: Final = 64  # one of so many connections is for clients without a hello, which query or send orders
_MAX_KICKED: Final = 16_384  # connections that are remembered as kicked
_HEARTBEAT_MS: Final = 5000
_SILENCE_MS: Final = 30_000


class Hub:
    """A cache server with its memory and disk open and its sockets bound; ``run`` serves until ``stop``.

    Args:
        options: addresses, sizes and policies.
        owner: the engine that it belongs to; None if it takes chunks of all engines.

    Raises:
        ConfigError: something cannot be used as configured; nothing is left open.
        TierError: the disk cannot be read, or belongs to another process.
    """

    def __init__(self, options: ServerOptions, owner: Owner | None = None) -> None:
        options.check()
        self.options = options
        self._owner = owner
        self.num_malformed = 0
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._throttle = Throttle(logger)
        self._began_s = time.monotonic()
        self._expired_s = 0.0
        self._at_hand: Sequence[zmq.Frame] = ()  # the message that is being handled
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._kicked: OrderedDict[Peer, None] = OrderedDict()  # the longest ago first
        self.network: Network | None = None
        self._looked_s = 0.0
        self._by_fd: dict[int, Session] = {}  # clients from the network, by their connections
        with contextlib.ExitStack() as opened:
            opened.callback(self._close_wake)
            self._open(opened)
            self._opened = opened.pop_all()

    @property
    def tcp_port(self) -> int | None:
        """TCP port that the server listens on; None without one."""
        return self.network.listener.port if self.network is not None else None

    @property
    def num_strangers(self) -> int:
        """Number of clients that could not prove a key, or expected another server."""
        return self.network.num_strangers if self.network is not None else 0

    def stop(self) -> None:
        """End after at most ``drain_s`` for writes to disk; at once if called again. From any thread."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._rouse()

    def snapshot(self, timeout_s: float) -> dict[str, Any]:
        """Return all counters. From any thread but the one that serves.

        Raises:
            TimeoutError: the server does not answer in time.
        """
        asked: Future[dict[str, Any]] = Future()
        self._report(lambda: asked.set_result(self._stats()))
        return asked.result(timeout_s)

    def enter(self, namespace: Namespace) -> None:
        """Change the owner's namespace. From any thread; takes effect soon after."""
        self._report(lambda: self.service.enter(namespace))

    def let_go(self, refs: Sequence[ChunkRef]) -> None:
        """Release the holds on these chunks of the owner. From any thread; takes effect soon after."""
        self._report(lambda: self.service.let_go(refs))

    def run(self) -> bool:
        """Serve until ``stop``; return False if chunks were lost because they were not written to disk in time."""
        try:
            while not self._stopping.is_set():
                self._turn(_TICK_S)
            return self._drain()
        finally:
            self._opened.close()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, opened: contextlib.ExitStack) -> None:
        options = self.options
        self._most = allowed_clients(has_ipc=options.folder is not None, has_tcp=options.tcp is not None)
        self._clients = Clients(options.listed if options.keys else None, options.operators)
        self.pool = Pool(options.pool_bytes, self._note_pages)
        opened.callback(self.pool.close)
        self._context = open_context(io_threads=2 if options.tcp else 1)
        opened.callback(close_context, self._context)
        self._client_keys = ClientKeys(self._context, options.listed) if options.keys else None
        self._unix_socket: UnixSocket | None = None
        if options.folder is not None:
            self._unix_socket = UnixSocket(options.folder, self.pool.fd, self._most[IPC])
            opened.callback(self._unix_socket.close)
            self._sockets[IPC] = self._bind(f"ipc://{options.folder / CONTROL_NAME}")
            (options.folder / CONTROL_NAME).chmod(0o600)
        self._open_core(opened)
        if options.tcp is not None:  # last, because a client that is let in must be served
            self._sockets[TCP] = self._bind(str(options.tcp))
            self.network = Network(self._context, self._sockets[TCP], self._wake, self._most[TCP])
            opened.callback(self.network.watch.close)
        self._intakes = {number: Intake(router) for number, router in self._sockets.items()}
        self._poller = zmq.Poller()
        keys = self._client_keys and self._client_keys.socket
        monitor = self.network and self.network.monitor
        for source in (*self._sockets.values(), self._wake, self._unix_socket, keys, monitor):
            if source is not None:
                self._poller.register(source, zmq.POLLIN)

    def _open_core(self, opened: contextlib.ExitStack) -> None:
        options = self.options
        disk = Disk(options.disk, self._report) if options.disk else None
        if disk is not None:
            opened.callback(disk.close, 5.0)
        self.stock = Stock(
            self.pool.num_bytes,
            self.pool.free,
            disk_bytes=disk.capacity_bytes if disk else 0,
            policy=options.policy,
            disk_policy=options.disk_policy,
            quotas=options.quotas,
            first_stamp=time.time_ns(),
        )
        most = {socket: count - count // _SPARE_PART for socket, count in self._most.items()}
        self.sessions = Sessions(self.stock, self.pool.num_bytes, most, len(options.listed))
        self.core = Core(
            self.pool,
            self.stock,
            self.sessions,
            disk,
            self._send,
            self._report,
            self._is_open,
            self._stats,
            self._sender,
            time.monotonic,
        )
        self.service = Service(
            self.core,
            max_writes=options.max_writes,
            pin_max_s=options.pin_max_s,
            owner=self._owner,
            channel=open_channel(options.channel, self.pool.bytes),
        )
        opened.callback(self.service.close)
        if disk is not None:
            self._take_stock(disk)

    def _take_stock(self, disk: Disk) -> None:
        for former, chunks, trails, ends in disk.open_all():
            space = self.stock.spaces.enter(former.namespace, former.layout, former.tenant)
            if space is None:  # no client could ever use its chunks
                disk.forget(former)
                continue
            for ref, size_bytes in chunks:
                self.stock.found_on_disk(space, ref, size_bytes, trails.get(ref.prefix_key, b""), ends.get(ref))

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
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
            if self.options.keys is not None:
                router.curve_server = True
                router.curve_secretkey = self.options.keys.secret
                router.zap_domain = b"kvstore"
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"the cache server cannot listen on {address}: {error.strerror}; name another") from error
        return router

    # -- serving -----------------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float) -> None:
        network = self.network
        if network is not None:
            network.listener.look()
            timeout_s = min(timeout_s, LOOK_S)
        ready = dict(self._poller.poll(_PAUSE_MS if self.service.has_leisure_work else int(timeout_s * 1000)))
        if not ready or self.service.is_behind:
            self.service.do_leisure_work()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        for _ in range(len(self._jobs)):  # jobs added by these run after the next messages
            self._jobs.popleft()()
        if self._unix_socket is not None and self._unix_socket.fileno() in ready:
            for token in self._unix_socket.look():
                self.service.hang_up(token)
        if self._client_keys is not None and self._client_keys.socket in ready:
            self._client_keys.answer()
        if network is not None and network.monitor in ready:
            self._note_connections(_TURN)
        for number, router in self._sockets.items():
            if router in ready:
                self._receive(number, router)
        now_s = time.monotonic()
        if network is not None and now_s - self._looked_s > max(LOOK_S, _LOOK_EACH_S * len(network.watch)):
            self._looked_s = now_s
            self._cut_endless(network.watch.cut_endless())
            self.service.forget_silent()
        if now_s - self._expired_s > _TICK_S:
            self._expired_s = now_s
            self.service.expire()

    def _cut_endless(self, count: int) -> None:
        self.num_malformed += count
        if count:
            self._throttle.log("endless", "disconnected %d clients that sent a message without end", count)

    def _receive(self, number: int, router: zmq.Socket[bytes]) -> None:
        for _ in range(_TURN):
            message = self._intakes[number].take()
            if message is None:
                return
            peer = Peer(number, message.name)
            if self.network is not None and number == TCP and message.frames:
                self.network.watch.note_message(self._fd_of(peer, message.frames[0]))
            if not message.is_whole:
                if peer not in self._kicked:
                    self._kick(peer, "a message with too many frames")
            elif peer not in self._kicked:
                self._handle(peer, message.frames)
            if not int(router.get(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than an exception
                return

    def _handle(self, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        self._at_hand = frames
        is_new = peer.socket == TCP and peer not in self.sessions.by_peer
        if is_new:  # the end of an earlier connection with the same number must not end this client
            self._note_connections()
        try:
            self.service.handle(peer, [frame.buffer for frame in frames])
            if is_new:
                self._note_client(peer, frames[0])
        except ProtocolError as error:
            self._kick(peer, str(error))
        finally:
            self._at_hand = ()

    def _fd_of(self, peer: Peer, frame: zmq.Frame) -> int:
        session = self.sessions.by_peer.get(peer)
        return session.fd if session is not None and session.fd >= 0 else int(frame.get(zmq.SRCFD))

    def _note_client(self, peer: Peer, frame: zmq.Frame) -> None:
        """Remember the connection of a client, to know when it ends."""
        session = self.sessions.by_peer.get(peer)
        if session is not None:
            session.fd = int(frame.get(zmq.SRCFD))
            self._by_fd[session.fd] = session
            assert self.network is not None
            self.network.watch.note_hello(session.fd)

    def _note_connections(self, at_most: int | None = None) -> None:
        """Note new connections, and end the clients of closed ones; handles ``at_most`` so many events."""
        assert self.network is not None
        for fd in self.network.ended(at_most):
            session = self._by_fd.pop(fd, None)
            if session is not None:
                self.service.end(session)

    def _kick(self, peer: Peer, why: str) -> None:
        """End a client that sent a malformed message, and ignore all later messages of its connection."""
        self.num_malformed += 1
        self._throttle.log("kick", "disconnected a client: %s", why[:200])
        self._send(peer, messages.Refused(0, messages.Refusal.MALFORMED, why[:200]), ())
        self._kicked[peer] = None
        if len(self._kicked) > _MAX_KICKED:
            self._kicked.popitem(last=False)
        session = self.sessions.by_peer.pop(peer, None)
        if session is not None and session.token and self._unix_socket is not None:
            self._unix_socket.ask_to_leave(session.token)  # the session ends when the client releases the pool
        elif session is not None:
            self.service.end(session)

    def _send(self, peer: Peer, answer: messages.Answer, payload: Sequence[Buffer]) -> None:
        frames = [peer.name, messages.encode(answer), *payload]
        try:
            self._sockets[peer.socket].send_multipart(frames, zmq.NOBLOCK, copy=not payload)
        except zmq.ZMQError:  # it has disconnected, or does not read its answers
            session = self.sessions.by_peer.get(peer)
            if session is not None and not session.token:
                self.service.end(session)

    def _stats(self) -> dict[str, Any]:
        refused = self.num_strangers + (self._client_keys.refused if self._client_keys else 0)
        counted = stats(self.core, time.monotonic() - self._began_s, self.service.writes.num_unwritten)
        counted |= self.service.offers.stats()
        return {**counted, "malformed": self.num_malformed, "refused": refused}

    def _sender(self, peer: Peer) -> Client:
        return self._clients.sender(peer.socket, self._at_hand[0])

    def _is_open(self, token: bytes) -> bool:
        return self._unix_socket is not None and self._unix_socket.is_open(token)

    def _note_pages(self, run: Run) -> None:
        """Add pages that were allocated. From any thread."""

        def add() -> None:
            self.pool.add(run)
            self.service.grants.go_on()

        self._report(add)

    def _report(self, job: Callable[[], None]) -> None:
        """Queue a call for the thread that decides. From any thread."""
        self._jobs.append(job)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        wake, self._wake = self._wake, -1  # a disk call that hung may return later, and report
        os.close(wake)

    def _drain(self) -> bool:
        """Wait for disk writes and deletions, while reads are still answered; return False if writes are left."""
        self.core.is_closing = True
        deadline_s = time.monotonic() + self.options.drain_s
        while self.service.writes.is_changing_files and time.monotonic() < deadline_s and not self._hurry.is_set():
            self._turn(0.1)
        left = self.service.writes.num_unwritten
        if left:
            logger.warning("%d chunks were not written to disk before the server stopped", left)
        return not left
