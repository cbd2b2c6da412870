"""Messages of clients, received and answered. A client that breaks the protocol loses its connection."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import zmq

from kvstore.model.errors import ProtocolError
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.server.clients import STRANGER, TCP, Client, Clients
from kvstore.server.connections import LOOK_S, Intake, Network
from kvstore.server.service import Service
from kvstore.server.sessions import Peer, Session, Sessions
from kvstore.server.unix_socket import UnixSocket

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvstore.server.pause import Pause

logger = logging.getLogger(__name__)

_TURN: Final = 64  # messages of one socket before the next socket is served
_LOOK_EACH_S: Final = 2e-4  # between two looks, for each connection: a look takes some microseconds
_MAX_KICKED: Final = 16_384  # connections that are remembered as kicked


class Reception:
    """Receives requests, and sends answers. Belongs to the thread that decides.

    Args:
        sockets: the sockets for requests, by number.
        clients: identifies the senders.

    Attributes:
        num_malformed: number of clients that were disconnected for what they sent.
    """

    def __init__(self, sockets: Mapping[int, zmq.Socket[bytes]], clients: Clients) -> None:
        self.num_malformed = 0
        self._sockets = sockets
        self._clients = clients
        self._throttle = Throttle(logger)
        self._at_hand: Sequence[zmq.Frame] = ()  # the message that is being handled
        self._kicked: OrderedDict[Peer, None] = OrderedDict()  # the longest ago first
        self._by_fd: dict[int, Session] = {}  # clients from the network, by their connections
        self._looked_s = 0.0

    def open(
        self, service: Service, sessions: Sessions, unix_socket: UnixSocket | None, network: Network | None
    ) -> None:
        """Begin with the sockets bound."""
        self._service = service
        self._sessions = sessions
        self._unix_socket = unix_socket
        self._network = network
        self._intakes = {number: Intake(router) for number, router in self._sockets.items()}

    def receive(self, ready: Collection[object]) -> None:
        """Handle messages of the sockets that are ready, and look after the connections."""
        network = self._network
        if network is not None and network.reports in ready:
            self._note_connections(_TURN)
        for number, router in self._sockets.items():
            if router in ready:
                self._receive(number, router)
        now_s = time.monotonic()
        if network is not None and now_s - self._looked_s > max(LOOK_S, _LOOK_EACH_S * len(network.watch)):
            self._looked_s = now_s
            self._cut_endless(network.watch.cut_endless())
            self._service.forget_silent()

    def refuse(self, ready: Collection[object], pause: Pause) -> None:
        """Refuse messages of the sockets that are ready, during a pause."""
        for number, intake in self._intakes.items():
            if self._sockets[number] in ready and (message := intake.take()) is not None:
                pause.refuse(Peer(number, message.name))

    def send(self, peer: Peer, answer: messages.Answer, payload: Sequence[Buffer]) -> None:
        """Send a client an answer, followed by frames of payload; its session ends if it does not take them."""
        frames = [peer.name, messages.encode(answer), *payload]
        try:
            self._sockets[peer.socket].send_multipart(frames, zmq.NOBLOCK, copy=not payload)
        except zmq.ZMQError:  # it has disconnected, or does not read its answers
            session = self._sessions.by_peer.get(peer)
            if session is not None and not session.token:
                self._service.end(session)

    def sender(self, peer: Peer) -> Client:
        """Return the client that sent the message being handled, which came from a peer."""
        frame = self._at_hand[0]
        client = self._clients.sender(peer.socket, frame)
        if client is STRANGER:
            self.cut(int(frame.get(zmq.SRCFD)))
        return client

    def cut(self, fd: int) -> None:
        """Disconnect a client from the network."""
        if self._network is not None:
            self._network.watch.cut(fd)

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
            if self._network is not None and number == TCP and message.frames:
                self._network.watch.note_message(self._fd_of(peer, message.frames[0]))
            if not message.is_whole:
                if peer not in self._kicked:
                    self._kick(peer, "a message with too many frames")
            elif peer not in self._kicked:
                self._handle(peer, message.frames)
            if not int(router.get(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than an exception
                return

    def _handle(self, peer: Peer, frames: Sequence[zmq.Frame]) -> None:
        self._at_hand = frames
        is_new = peer.socket == TCP and peer not in self._sessions.by_peer
        if is_new:  # the end of an earlier connection with the same number must not end this client
            self._note_connections()
        try:
            self._service.handle(peer, [frame.buffer for frame in frames])
            if is_new:
                self._note_client(peer, frames[0])
        except ProtocolError as error:
            self._kick(peer, str(error))
        finally:
            self._at_hand = ()

    def _fd_of(self, peer: Peer, frame: zmq.Frame) -> int:
        session = self._sessions.by_peer.get(peer)
        return session.fd if session is not None and session.fd >= 0 else int(frame.get(zmq.SRCFD))

    def _note_client(self, peer: Peer, frame: zmq.Frame) -> None:
        """Remember the connection of a client, to know when it ends."""
        session = self._sessions.by_peer.get(peer)
        if session is not None:
            session.fd = int(frame.get(zmq.SRCFD))
            self._by_fd[session.fd] = session
            assert self._network is not None
            self._network.watch.note_hello(session.fd)

    def _note_connections(self, at_most: int | None = None) -> None:
        """Note new connections, and end the clients of closed ones; handles ``at_most`` so many events."""
        assert self._network is not None
        for fd in self._network.ended(at_most):
            session = self._by_fd.pop(fd, None)
            if session is not None:
                self._service.end(session)

    def _kick(self, peer: Peer, why: str) -> None:
        """End a client that sent a malformed message, and ignore all later messages of its connection."""
        self.num_malformed += 1
        self._throttle.log("kick", "disconnected a client: %s", why[:200])
        self.send(peer, messages.Refused(0, messages.Refusal.MALFORMED, why[:200]), ())
        self._kicked[peer] = None
        if len(self._kicked) > _MAX_KICKED:
            self._kicked.popitem(last=False)
        session = self._sessions.by_peer.pop(peer, None)
        if session is not None and session.token and self._unix_socket is not None:
            self._unix_socket.ask_to_leave(session.token)  # the session ends when the client releases the pool
        elif session is not None:
            self._service.end(session)
