"""Connection to a cache server, which introduces itself, sends requests, and waits for answers within a deadline.

A connection that failed in any way is closed and never used again, because a late answer could be mistaken for another
one. On the same host there are two sockets: one carries messages, the other is this process's hold on the pool
(``hold.py``). The hold is closed last, when this process can no longer touch the pool through this connection.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import zmq

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ProtocolError, TierError, TierSetupError
from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.contexts import Context
from kvstore.protocol.loopback import buffer_bytes
from kvstore.protocol.messages import Refusal
from kvstore.protocol.monitors import Monitor
from kvstore.protocol.payload import Geometry, Placing
from kvstore.tiers.server.hold import Hold
from kvstore.tiers.server.url import ServerTarget

if TYPE_CHECKING:
    from typing_extensions import Buffer

SomeAnswer = TypeVar("SomeAnswer", bound=messages.Answer)

_CONNECT_TIMEOUT_S = 5.0  # longer than it takes to replace a server
_SEND_QUEUE = 64
_HANDSHAKE_MS = 1500  # after which a server that was just replaced is given up, and its successor tried
_RECONNECT_MS = (20, 200)  # the first and the longest pause; a server that is being replaced is soon back
# Versions of the protocol.
_SINCE = {
    **dict.fromkeys((messages.Sending, messages.Describe, messages.Nearest), 2),
    **dict.fromkeys((messages.Front, messages.Attach, messages.Offer), 3),
    **dict.fromkeys((messages.Expire, messages.Prolong), messages.ENDS_VERSION),
    messages.ReserveFor: 5,
    messages.Ask: 6,
}


def is_known(kind: type[messages.Request], version: int) -> bool:
    """Tell if a kind of request is part of a version of the protocol."""
    return version >= _SINCE.get(kind, messages.OLDEST_VERSION)


class NoSessionError(TierError):
    """The server was restarted or replaced, or has dropped this connection, so a new connection is needed."""


class NoRightError(TierError):
    """This client's key lacks the right to the request; the connection stays usable for other requests."""


class _VersionError(TierSetupError):
    """The server does not speak this version."""


class ServerConnection:
    """Connection to a server. Belongs to one thread at a time.

    Attributes:
        namespace: the argument of ``hello``.
        version: of the protocol that both sides speak.
        hold: on the server's memory; None over the network.
        token: of the hold; empty without one.
        memory: the server's pool, once it is mapped.

    Args:
        context: of all connections of a tier.
        target: the server.

    Raises:
        TierSetupError: on this host, it is not a server of this user.
        NoSessionError: it has ended meanwhile, perhaps because another one replaces it.
        TierError: it cannot be reached.
    """

    def __init__(self, context: Context, target: ServerTarget) -> None:
        self._target = target
        self._serials = itertools.count(1)
        self.namespace = Namespace({})
        self.version = messages.PROTOCOL_VERSION
        self.memory: ByteArray | None = None
        connect_s = min(_CONNECT_TIMEOUT_S, target.timeout_s)
        self.hold = None if target.folder is None else Hold(target.folder, connect_s)
        self.token = b"" if self.hold is None else self.hold.token
        self._socket = self._open_socket(context)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._losses: Monitor | None = None
        if self.hold is not None:
            self._poller.register(self.hold, zmq.POLLIN)
            _connections.add(self)
        try:
            self._wait_until_writable(connect_s, f"the cache server at {target.address} cannot be reached{self._why()}")
        except TierError:
            self.close()
            raise
        if self.hold is None:
            self._watch_losses(context)

    @property
    def is_alive(self) -> bool:
        """False if the server is known to have dropped this connection."""
        if self._losses is not None:
            return not self._losses.reader.poll(0)
        return self.hold is None or not self.hold.is_over

    def knows(self, kind: type[messages.Request]) -> bool:
        """Tell if the server understands a kind of request; an unknown one would end the connection."""
        return is_known(kind, self.version)

    def hello(self, namespace: Namespace, geometry: Geometry) -> messages.Welcome:
        """Introduce this client, and the namespace of its requests.

        Raises:
            TierSetupError: the server does not speak this protocol, has no room for more clients, or has sent memory
                of another size.
            TierError: it does not answer.
        """
        self.namespace = namespace
        fields = dict(namespace.fields)
        while True:
            message = messages.Hello(self.new_serial(), self.version, fields, geometry, 0, self.token)
            try:
                welcome = self.ask(message, messages.Welcome)
            except _VersionError:
                if self.version <= messages.OLDEST_VERSION:
                    raise
                self.version -= 1  # the server is older
            else:
                self._check_size(welcome.pool_bytes)
                return welcome

    def new_serial(self) -> int:
        """Return a number for a request."""
        return next(self._serials)

    def ask(self, request: messages.Request, kind: type[SomeAnswer], frames: Sequence[Buffer] = ()) -> SomeAnswer:
        """Send a request, and wait for its answer, which must be of ``kind``.

        Raises:
            NoSessionError: the server does not know this connection.
            NoRightError: this client lacks the right.
            TierError: it does not answer in time, or its answer is wrong.
        """
        self.send(request, frames)
        answer = self.receive()
        if not isinstance(answer, kind) or answer.serial != request.serial:
            raise TierError(f"the cache server answered {type(answer).__name__} to {type(request).__name__}")
        return answer

    def send(self, request: messages.Request, frames: Sequence[Buffer] = ()) -> None:
        """Send a request.

        Raises:
            TierError: the server does not accept it.
        """
        message = [messages.encode(request), *frames]
        failure = f"the cache server at {self._target.address} does not accept a request"
        while True:
            try:  # without waiting, because a server that ends just now would let this wait for ever
                self._socket.send_multipart(message, zmq.NOBLOCK, copy=not frames)
            except zmq.Again:
                self._wait_until_writable(self._target.timeout_s, failure)
            except zmq.ZMQError as error:
                raise TierError(f"the cache server at {self._target.address}: {error.strerror}") from error
            else:
                return

    def tell(self, request: messages.Request) -> bool:
        """Send a request that has no answer, without waiting; False if the server has ended or its queue is full."""
        if not self.is_alive or not int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        try:
            self._socket.send(messages.encode(request), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def check(self) -> None:
        """Check that the server has not reported this connection as unknown, while no answer is due.

        ZeroMQ reconnects by itself to a server that was restarted, or after an interruption of the network.

        Raises:
            NoSessionError, TierError: it has, or has sent another unexpected message.
        """
        if self._socket.poll(0, zmq.POLLIN):
            answer = self.receive()
            raise TierError(f"the cache server answered {answer.serial}, which is the serial of no request")

    def receive(self) -> messages.Answer:
        """Wait for the next answer.

        Raises:
            NoSessionError, TierError: see ``ask``.
        """
        return self.receive_into(lambda _: None)[0]

    def receive_into(self, place: Callable[[messages.Data], ByteArray | None]) -> tuple[messages.Answer, bool]:
        """Wait for the next answer, and receive its payload into ``place(answer)``.

        Returns:
            The answer, and True if it has a payload with the right checksum.

        Raises:
            NoSessionError, TierError: see ``ask``; or ``place`` returns None, or an array of another size.
        """
        timeout_s = self._target.timeout_s
        self._wait(timeout_s, f"no answer of the cache server at {self._target.address}{self._why()}")
        is_sound = False
        try:
            answer = messages.decode_answer(self._socket.recv())
            if isinstance(answer, messages.Refused):
                raise _refused(answer, self._target.address)
            if self._socket.rcvmore:
                if not isinstance(answer, messages.Data) or (target := place(answer)) is None:
                    raise TierError("the cache server sent payload that was not asked for")
                is_sound = self._fill(target) == answer.checksum
        except zmq.ZMQError as error:
            raise TierError(f"the cache server at {self._target.address}: {error.strerror}") from error
        except ProtocolError as error:
            raise TierError(str(error)) from error
        return answer, is_sound

    def close(self) -> None:
        """Disconnect. Idempotent. The pool must no longer be used for this connection."""
        if self._losses is not None:
            self._losses.close()
        self._socket.close()
        self.memory = None  # a traceback may keep this object alive
        self.drop()

    def drop(self) -> None:
        """Close descriptors only; for a forked child, which would otherwise keep the connection and its leases."""
        if self.hold is not None:
            self.hold.close()

    def _watch_losses(self, context: Context) -> None:
        """Notice from now on if the connection is lost: ZeroMQ connects again, but sends no request again."""
        try:
            self._losses = Monitor(context, self._socket, zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:  # too many files are open, for one
            self.close()
            raise TierError(f"the cache server at {self._target.address}: {error.strerror}") from error
        self._poller.register(self._losses.reader, zmq.POLLIN)

    def _check_size(self, pool_bytes: int) -> None:
        if self.hold is not None and self.hold.pool_bytes != pool_bytes:
            raise TierSetupError(
                f"the cache server at {self._target.address} announces {pool_bytes} bytes of memory, and has handed "
                f"out {self.hold.pool_bytes}: it may be another program"
            )

    def _wait_until_writable(self, timeout_s: float, failure: str) -> None:
        self._poller.modify(self._socket, zmq.POLLOUT)
        try:
            self._wait(timeout_s, failure)
        finally:
            self._poller.modify(self._socket, zmq.POLLIN)

    def _wait(self, timeout_s: float, failure: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            ready = self._poller.poll(max(0, int((deadline_s - time.monotonic()) * 1000) + 1))
            if any(source is self._socket for source, _ in ready):
                return
            if ready:
                raise NoSessionError(f"the cache server at {self._target.address} has ended")
            if time.monotonic() >= deadline_s:
                raise TierError(failure)

    def _fill(self, target: ByteArray) -> bytes:
        """Copy the received frames, which must fill ``target``; returns the checksum of the copied bytes."""
        placing = Placing()
        begin = 0
        while self._socket.rcvmore:
            arrived = self._socket.recv(copy=False).buffer
            end = begin + len(arrived)
            if end > len(target):
                raise TierError(f"the cache server sent more than the {len(target)} bytes that were asked for")
            placing.copy(arrived, target[begin:end])
            begin = end
        if begin != len(target):
            raise TierError(f"the cache server sent {begin} of the {len(target)} bytes that were asked for")
        return placing.checksum

    def _open_socket(self, context: Context) -> zmq.Socket[bytes]:
        target, made = self._target, None
        try:
            made = context.socket(zmq.DEALER)
            made.linger = 0
            made.immediate = True  # an unsent message is an error, and is not kept for the next server
            made.sndhwm = _SEND_QUEUE
            made.sndbuf = made.rcvbuf = buffer_bytes(target.address)
            made.ipv6 = "[" in target.address
            made.reconnect_ivl, made.reconnect_ivl_max = _RECONNECT_MS
            made.handshake_ivl = _HANDSHAKE_MS
            if self.hold is not None:
                made.reconnect_ivl = -1  # a later listener is not the server that was checked
            if target.keys is not None and target.server_key is not None:
                made.curve_publickey, made.curve_secretkey = target.keys
                made.curve_serverkey = target.server_key
            made.connect(target.address)
        except zmq.ZMQError as error:  # no more files may be open, for one
            if made is not None:
                made.close()
            self.drop()
            raise TierError(f"the cache server at {target.address} cannot be reached: {error.strerror}") from error
        return made

    def _why(self) -> str:
        return " (or does not know this client's key)" if self._target.keys is not None else ""


_connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()


def _drop_links_in_child() -> None:
    for connection in list(_connections):
        connection.memory = None
        connection.drop()


os.register_at_fork(after_in_child=_drop_links_in_child)


def _refused(answer: messages.Refused, address: str) -> TierError:
    message = f"the cache server at {address} refuses: {answer.message[:300]}"
    if answer.reason in {Refusal.NO_SESSION, Refusal.TOKEN}:
        return NoSessionError(message)
    if answer.reason == Refusal.NO_RIGHT:
        return NoRightError(message)
    if answer.reason == Refusal.VERSION:
        return _VersionError(message)
    if answer.reason in {Refusal.LIMIT, Refusal.FOREIGN}:
        return TierSetupError(message)
    return TierError(message)
