"""Clients: their identity, their rights, and the amounts that they may hold.

A client is identified by its key or by the socket that it uses, and never by its messages.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils import z85

from kvstore.model.throttle import Throttle
from kvstore.protocol.keyfiles import EVERY_RIGHT, NO_RIGHT, USUAL_RIGHTS, ListedKey, Right

logger = logging.getLogger(__name__)

IPC: Final = 0  # the number of the socket for this host
TCP: Final = 1  # the number of the socket for the network
ANYBODY: Final = "*"  # in server_operators
_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_REQUEST_FRAMES: Final = 7  # version, id, domain, address, identity, mechanism, the key


@dataclass(frozen=True)
class Client:
    """All connections with the same key, or without a key through the same socket.

    Attributes:
        name: name of the key; empty without one.
        socket: the number of the socket.
        rights: the client's rights.
        tenant: its tenant, whose chunks it shares; empty for clients without one, which share theirs.
        key: its public key in Z85; empty without one.
    """

    name: str
    socket: int
    rights: Right
    tenant: str = ""
    key: str = ""

    @property
    def sharer(self) -> str:
        """Its tenant or, without one, its key, of which all clients together have one share; empty without both."""
        return f"/{self.tenant}" if self.tenant else self.name  # no key file's name has a slash

    @property
    def runs_all(self) -> bool:
        """True if its orders reach the whole server, and not only its tenant."""
        return bool(self.rights & Right.OPERATE) and not self.tenant


OURSELVES: Final = Client("", IPC, EVERY_RIGHT)  # the server's own user, who could reach its memory anyway
STRANGER: Final = Client("", TCP, NO_RIGHT)  # its key was listed when it connected, and no longer is


class Clients:
    """Identifies the senders of messages. Belongs to the thread that decides.

    Args:
        listed: clients that may connect over the network; None without keys, if any client may.
        operators: names of the clients that also have the right to operate.
    """

    def __init__(self, listed: Mapping[bytes, ListedKey] | None, operators: frozenset[str]) -> None:
        self._has_keys = listed is not None
        self._anybody: Client | None = None
        self._by_key: dict[str, Client] = {}
        self.change(listed or {}, operators)

    def change(self, listed: Mapping[bytes, ListedKey], operators: frozenset[str]) -> None:
        """Replace the list; without keys any client may still connect."""

        def client(key: str, listed: ListedKey) -> Client:
            is_operator = not operators.isdisjoint({listed.name, ANYBODY})
            rights = listed.rights | (Right.OPERATE if is_operator else NO_RIGHT)
            return Client(listed.name, TCP, rights, listed.tenant, key)

        self._by_key = {key.decode(): client(key.decode(), of_key) for key, of_key in listed.items()}
        if not self._has_keys:
            # A client that may replace all chunks can do as much harm as one that clears them, and an engine's reset
            # must last.
            self._anybody = client("", ListedKey("", USUAL_RIGHTS | Right.CLEAR))

    @property
    def num_sharers(self) -> int:
        """Number of tenants and of keys without one."""
        return len({client.sharer for client in self._by_key.values()})

    def current(self, client: Client) -> Client:
        """Return a client from the network as the list describes it now."""
        return self._anybody or self._by_key.get(client.key, STRANGER)

    def sender(self, socket: int, frame: zmq.Frame) -> Client:
        """Find the sender of a frame, to which ZeroMQ attached the key that decrypted it."""
        if socket == IPC:
            return OURSELVES
        if self._anybody is not None:
            return self._anybody
        try:
            return self._by_key.get(str(frame.get("User-Id")), STRANGER)
        except zmq.ZMQError:
            return STRANGER


class ClientKeys:
    """Answers ZeroMQ's requests to authenticate a client. Belongs to the thread that decides.

    Args:
        context: the context of the sockets that clients connect to.
        listed: public keys of the clients, in Z85.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listed: Iterable[bytes]) -> None:
        self.refused = 0
        self.change(listed)
        self._throttle = Throttle(logger)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def change(self, listed: Iterable[bytes]) -> None:
        """Replace the list. Clients that have connected stay so."""
        self._keys = {z85.decode(key): key for key in listed}

    def answer(self) -> None:
        """Answer all requests that wait."""
        while self.socket.poll(0):
            self.socket.send_multipart(self._judge(self.socket.recv_multipart()))

    def close(self) -> None:
        """Stop answering, so that no client can connect any more."""
        self.socket.close()

    def _judge(self, question: Sequence[bytes]) -> list[bytes]:
        if len(question) < 2:
            return [_VERSION, b"", b"500", b"malformed", b"", b""]
        request_id = question[1]
        is_known = len(question) == _REQUEST_FRAMES and question[5] == b"CURVE" and question[6] in self._keys
        if is_known:
            return [_VERSION, request_id, b"200", b"OK", self._keys[question[6]], b""]
        self.refused += 1
        address = question[3].decode("ascii", "replace") if len(question) > 3 else "an unknown address"
        self._throttle.log(address, "refused a client from %s: its key is not in server_clients", address)
        return [_VERSION, request_id, b"400", b"not on the list", b"", b""]


class Shares:
    """Amounts that clients hold. Belongs to the thread that decides.

    Args:
        most: bound for all clients together.
        by_socket: bounds for the clients of a socket; ``most`` for sockets that are not named.
        by_sharer: bound for the clients of one tenant, or with one key; None for the bound of their socket.
    """

    def __init__(self, most: int, by_socket: Mapping[int, int] | None = None, by_sharer: int | None = None) -> None:
        self.held = 0
        self._most = most
        self._by_socket = by_socket or {}
        self._by_sharer = by_sharer
        self._of_socket = Counter[int]()
        self._of_sharer = Counter[str]()

    def bound_sharers(self, by_sharer: int | None) -> None:
        """Change the bound for one tenant or key. Clients keep what they hold beyond it."""
        self._by_sharer = by_sharer

    def has_room(self, client: Client, amount: int) -> bool:
        """Tell if a client may hold so much more."""
        if self.held + amount > self._most:
            return False
        if self._of_socket[client.socket] + amount > self._by_socket.get(client.socket, self._most):
            return False
        sharer = client.sharer
        return self._by_sharer is None or not sharer or self._of_sharer[sharer] + amount <= self._by_sharer

    def take(self, client: Client, amount: int) -> None:
        """Note that a client holds so much more."""
        self.held += amount
        self._of_socket[client.socket] += amount
        if client.sharer:
            self._of_sharer[client.sharer] += amount

    def give(self, client: Client, amount: int) -> None:
        """Note that a client holds so much less."""
        self.take(client, -amount)
