"""The sockets of the server, and the one thread that decides.

It never waits for a disk, a copy or a client: what takes time runs on other threads, which hand back what is then to be
decided. A client that does not read its answers is cut off when its queue is full.
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
from zmq.utils.monitor import parse_monitor_message

from kvstore.errors import ConfigError, ProtocolError
from kvstore.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.loopback import buffer_bytes
from kvstore.server.doors import Doors
from kvstore.server.freight import Ways
from kvstore.server.intake import Intake
from kvstore.server.locks import Locks
from kvstore.server.options import ANYBODY, ServerOptions
from kvstore.server.owner import Owner
from kvstore.server.pool import Pool
from kvstore.server.reports import Reporter
from kvstore.server.service import Service
from kvstore.server.sessions import Peer, Session, Sessions
from kvstore.server.shelves import Shelves
from kvstore.server.spaces import Space
from kvstore.server.stock import Stock, StockOptions
from kvstore.server.watch import LOOK_S, Watch
from kvstore.throttle import Throttle

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

CONTROL_NAME: Final = "control"
_IPC, _TCP = 0, 1
_FAILURES: Final = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_TICK_S: Final = 0.5
_PAUSE_MS: Final = 2  # without a question, until what can wait is done
_TURN: Final = 64  # messages of one socket before the others have their turn
_RECEIVE_QUEUE: Final = 16  # messages of one client
_SEND_QUEUE: Final = 64  # answers to one client, who never waits for so many
_LOOK_EACH_S: Final = 2e-4  # between two looks, for each connection: a look takes some microseconds
_MAX_KICKED: Final = 16_384  # connections that are remembered for what came through them
_HEARTBEAT_MS: Final = 5000
_SILENCE_MS: Final = 30_000


class Hub:
    """A cache server: memory and disk opened, sockets bound; ``run`` serves until ``stop``.

    Args:
        options: addresses, sizes and policies.
        owner: the engine that it belongs to; None if it takes everybody's chunks.

    Raises:
        ConfigError: something cannot be used as configured; nothing is left open.
        TierError: the disk cannot be read, or belongs to another process.
    """

    def __init__(self, options: ServerOptions, owner: Owner | None = None) -> None:
        options.check()
        self.options = options
        self._owner = owner
        self.num_malformed = 0
        self.num_strangers = 0
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._throttle = Throttle(logger)
        self._expired_s = 0.0
        self._at_hand: Sequence[zmq.Frame] = ()  # the message that is being handled
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._kicked: OrderedDict[Peer, None] = OrderedDict()  # the longest ago first
        self._farewells: zmq.Socket[bytes] | None = None
        self._watch: Watch | None = None
        self._looked_s = 0.0
        self._by_fd: dict[int, Session] = {}  # clients from the network, by their connections
        with contextlib.ExitStack() as opened:
            opened.callback(self._close_wake)
            self._open(opened)
            self._opened = opened.pop_all()

    @property
    def tcp_port(self) -> int | None:
        """The port that is listened on."""
        door = self._sockets.get(_TCP)
        if door is None:
            return None
        endpoint = door.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])

    def stop(self) -> None:
        """Come to an end: writes to disk have ``drain_s`` for theirs. Called again: at once. From any thread."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._rouse()

    def snapshot(self, timeout_s: float) -> dict[str, Any]:
        """Everything counted. From any thread but the one that serves.

        Raises:
            TimeoutError: the server does not get round to it.
        """
        asked: Future[dict[str, Any]] = Future()

        def answer() -> None:
            asked.set_result(self._stats())

        self._report(answer)
        return asked.result(timeout_s)

    def enter(self, namespace: Namespace) -> None:
        """The owner keeps its chunks under another namespace from now on. From any thread; is done soon."""
        self._report(lambda: self.service.enter(namespace))

    def run(self) -> bool:
        """Serve until ``stop``; False if chunks on their way to disk were given up."""
        try:
            while not self._stopping.is_set():
                self._turn(_TICK_S)
            return self._drain()
        finally:
            self._opened.close()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, opened: contextlib.ExitStack) -> None:
        options = self.options
        self.pool = Pool(options.pool_bytes)
        opened.callback(self.pool.close)
        self._context = open_context(io_threads=2 if options.tcp else 1)
        opened.callback(close_context, self._context)
        self._locks = Locks(self._context, options.listed) if options.keys else None
        self._doors: Doors | None = None
        if options.folder is not None:
            self._doors = Doors(options.folder, self.pool.fd)
            opened.callback(self._doors.close)
            self._sockets[_IPC] = self._bind(f"ipc://{options.folder / CONTROL_NAME}")
            (options.folder / CONTROL_NAME).chmod(0o600)
        shelves = Shelves(options.disk, self._report) if options.disk else None
        if shelves is not None:
            opened.callback(shelves.close, 5.0)
        self.stock = Stock(
            StockOptions(
                self.pool.num_bytes,
                options.disk.capacity_bytes if options.disk else 0,
                options.policy,
                options.disk_policy,
                options.quotas,
                time.time_ns(),
            ),
            self.pool.free,
        )
        self.sessions = Sessions(self.stock, self.pool.num_bytes)
        ways = Ways(self._send, self._report, self._is_open, self._stats, self._may_order, time.monotonic)
        self.service = Service(
            self.pool,
            self.stock,
            self.sessions,
            shelves,
            ways,
            max_writes=options.max_writes,
            pin_max_s=options.pin_max_s,
            owner=self._owner,
        )
        opened.callback(self.service.close)
        self._reporter = Reporter(self.pool, self.stock, self.sessions, shelves, self.service)
        if shelves is not None:
            self._take_stock(shelves)
        if options.tcp is not None:  # last: who is let in here must be served
            self._sockets[_TCP] = self._bind(str(options.tcp))
            assert self.tcp_port is not None
            self._watch = Watch(self.tcp_port)
            opened.callback(self._watch.close)
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILURES
            self._farewells = self._sockets[_TCP].get_monitor_socket(events)
        self._intakes = {number: Intake(door) for number, door in self._sockets.items()}
        self._poller = zmq.Poller()
        for door in self._sockets.values():
            self._poller.register(door, zmq.POLLIN)
        for other in (self._wake, self._doors, self._locks and self._locks.socket, self._farewells):
            if other is not None:
                self._poller.register(other, zmq.POLLIN)

    def _take_stock(self, shelves: Shelves) -> None:
        for namespace, layout, chunks in shelves.open_all():
            space = self.stock.enter(namespace, layout)
            if space is None:  # nobody could ever use them
                shelves.forget(Space(namespace, layout))
                continue
            for ref, size_bytes in chunks:
                self.stock.found_on_disk(space, ref, size_bytes)

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        door = self._context.socket(zmq.ROUTER)
        door.linger = 0
        door.router_mandatory = True
        door.maxmsgsize = messages.MAX_FRAME_BYTES
        door.rcvhwm, door.sndhwm = _RECEIVE_QUEUE, _SEND_QUEUE
        door.sndbuf = door.rcvbuf = buffer_bytes(address)
        door.handshake_ivl = 5000
        door.ipv6 = "[" in address
        if address.startswith("tcp"):
            door.heartbeat_ivl, door.heartbeat_timeout, door.heartbeat_ttl = _HEARTBEAT_MS, _SILENCE_MS, _SILENCE_MS
            if self.options.keys is not None:
                door.curve_server = True
                door.curve_secretkey = self.options.keys.secret
                door.zap_domain = b"kvstore"
        try:
            door.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"the cache server cannot listen on {address}: {error.strerror}; name another") from error
        return door

    # -- serving -----------------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float) -> None:
        if self._watch:
            timeout_s = min(timeout_s, LOOK_S)
        ready = dict(self._poller.poll(_PAUSE_MS if self.service.has_leisure_work else int(timeout_s * 1000)))
        if not ready or self.service.is_behind:
            self.service.do_leisure_work()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        for _ in range(len(self._jobs)):  # what they leave to be done later comes after the next messages
            self._jobs.popleft()()
        if self._doors is not None and self._doors.fileno() in ready:
            for token in self._doors.look():
                self.service.hang_up(token)
        if self._locks is not None and self._locks.socket in ready:
            self._locks.answer()
        if self._farewells is not None and self._farewells in ready:
            self._take_leave(self._farewells)
        for number, door in self._sockets.items():
            if door in ready:
                self._receive(number, door)
        now_s = time.monotonic()
        if self._watch and now_s - self._looked_s > max(LOOK_S, _LOOK_EACH_S * len(self._watch)):
            self._looked_s = now_s
            self._cut_endless(self._watch.look(self._by_fd))
        if now_s - self._expired_s > _TICK_S:
            self._expired_s = now_s
            self.service.expire()

    def _cut_endless(self, count: int) -> None:
        self.num_malformed += count
        if count:
            said = "%d clients were cut off: they sent, and no message of theirs came to its end"
            self._throttle.log("endless", said, count)

    def _receive(self, number: int, door: zmq.Socket[bytes]) -> None:
        for _ in range(_TURN):
            message = self._intakes[number].take()
            if message is None:
                return
            peer = Peer(number, message.name)
            if self._watch is not None and number == _TCP and message.frames:
                self._watch.hear(self._fd_of(peer, message.frames[0]))
            if not message.is_whole:
                if peer not in self._kicked:
                    self._kick(peer, "a message of too many frames")
            elif peer not in self._kicked:
                self._handle(peer, message.frames)
            if not int(door.get(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than to be told by an exception
                return

    def _handle(self, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        self._at_hand = frames
        try:
            self.service.handle(peer, [frame.buffer for frame in frames])
            if peer.door == _TCP:
                self._note_connection(peer, frames[0])
        except ProtocolError as error:
            self._kick(peer, str(error))
        finally:
            self._at_hand = ()

    def _fd_of(self, peer: Peer, frame: zmq.Frame) -> int:
        session = self.sessions.by_peer.get(peer)
        return session.fd if session is not None and session.fd >= 0 else int(frame.get(zmq.SRCFD))

    def _note_connection(self, peer: Peer, frame: zmq.Frame) -> None:
        """Remember through which connection a client came, to know when it ends."""
        session = self.sessions.by_peer.get(peer)
        if session is not None and session.fd < 0:
            if self._farewells is not None:
                self._take_leave(self._farewells)  # whoever had the number before must not take this client along
            session.fd = int(frame.get(zmq.SRCFD))
            self._by_fd[session.fd] = session

    def _take_leave(self, farewells: zmq.Socket[bytes]) -> None:
        """Note who has come, and end the clients whose connections have ended: ZeroMQ tells so before it closes one."""
        while farewells.poll(0):
            event = parse_monitor_message(farewells.recv_multipart())
            if event["event"] & _FAILURES:
                self._note_failure()
                continue
            assert self._watch is not None
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._watch.come(event["value"])
                continue
            self._watch.go(event["value"])
            session = self._by_fd.pop(event["value"], None)
            if session is not None:
                self.service.end(session)

    def _note_failure(self) -> None:
        """Somebody did not get as far as to show a key."""
        self.num_strangers += 1
        self._throttle.log("stranger", "refused a client that has no keys, or not the key of this server")

    def _kick(self, peer: Peer, why: str) -> None:
        """End the client that sent a malformed message, and look at nothing more that comes through its connection."""
        self.num_malformed += 1
        self._throttle.log("kick", "a client was cut off: %s", why[:200])
        self._send(peer, messages.Refused(0, messages.Refusal.MALFORMED, why[:200]), ())
        self._kicked[peer] = None
        if len(self._kicked) > _MAX_KICKED:
            self._kicked.popitem(last=False)
        session = self.sessions.by_peer.pop(peer, None)
        if session is not None and session.token and self._doors is not None:
            self._doors.turn_out(session.token)  # it ends when the client lets go of the pool
        elif session is not None:
            self.service.end(session)

    def _send(self, peer: Peer, answer: messages.Answer, payload: Sequence[Buffer]) -> None:
        door = self._sockets[peer.door]
        try:
            more = zmq.SNDMORE if payload else 0
            door.send(peer.name, zmq.SNDMORE | zmq.NOBLOCK)
            door.send(messages.encode(answer), more | zmq.NOBLOCK)
            for number, part in enumerate(payload, start=1):
                door.send(part, (zmq.SNDMORE if number < len(payload) else 0) | zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # it has gone, or does not read its answers
            session = self.sessions.by_peer.get(peer)
            if session is not None and not session.token:
                self.service.end(session)

    def _stats(self) -> dict[str, Any]:
        refused = self.num_strangers + (self._locks.refused if self._locks else 0)
        return {**self._reporter.tree(), "malformed": self.num_malformed, "refused": refused}

    def _may_order(self, peer: Peer) -> bool:
        """Whether who sent the message at hand may give orders: on this host our own user, elsewhere who is named."""
        if peer.door == _IPC or ANYBODY in self.options.operators:
            return True
        try:
            return self.options.keys is not None and self._at_hand[0].get("User-Id") in self.options.operators
        except zmq.ZMQError:  # it came without a key
            return False

    def _is_open(self, token: bytes) -> bool:
        return self._doors is not None and self._doors.is_open(token)

    def _report(self, job: Callable[[], None]) -> None:
        """Let something be done by the thread that decides. From any thread."""
        self._jobs.append(job)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        wake, self._wake = self._wake, -1  # a call to a disk that hung may come back later, and report
        os.close(wake)

    def _drain(self) -> bool:
        """Let writes to disk and deletions end, while lookups and reads are still answered."""
        self.service.is_closing = True
        deadline_s = time.monotonic() + self.options.drain_s
        while self.service.is_changing_files and time.monotonic() < deadline_s and not self._hurry.is_set():
            self._turn(0.1)
        left = self.service.num_unwritten
        if left:
            logger.warning("%d chunks on their way to disk were given up", left)
        return not left
