"""Identity of clients, by their key or by the socket that they use, and never by their messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import zmq

from kvstore.protocol.keyfiles import EVERY_RIGHT, NO_RIGHT, USUAL_RIGHTS, ListedKey, Right

IPC: Final = 0  # the number of the socket for this host
TCP: Final = 1  # the number of the socket for the network
ANYBODY: Final = "*"  # in server_operators


@dataclass(frozen=True)
class Client:
    """All connections with the same key, or without a key through the same socket.

    Attributes:
        name: name of the key; empty without one.
        socket: the number of the socket.
        rights: the client's rights.
        tenant: its tenant, whose chunks it shares; empty for clients without one, which share theirs.
    """

    name: str
    socket: int
    rights: Right
    tenant: str = ""

    @property
    def runs_all(self) -> bool:
        """True if its orders reach the whole server, and not only its tenant."""
        return bool(self.rights & Right.OPERATE) and not self.tenant


OURSELVES: Final = Client("", IPC, EVERY_RIGHT)  # the server's own user, who could reach its memory anyway
_STRANGER: Final = Client("", TCP, NO_RIGHT)


class Clients:
    """Identifies the senders of messages. Belongs to the thread that decides.

    Args:
        listed: clients that may connect over the network; None without keys, if any client may.
        operators: names of the clients that also have the right to operate.
    """

    def __init__(self, listed: Mapping[bytes, ListedKey] | None, operators: frozenset[str]) -> None:
        def client(key: ListedKey) -> Client:
            is_operator = not operators.isdisjoint({key.name, ANYBODY})
            return Client(key.name, TCP, key.rights | (Right.OPERATE if is_operator else NO_RIGHT), key.tenant)

        self._by_name = {key.name: client(key) for key in (listed or {}).values()}
        # A client that may replace all chunks can do as much harm as one that clears them, and an engine's reset must
        # last.
        self._anybody = client(ListedKey("", USUAL_RIGHTS | Right.CLEAR)) if listed is None else None

    def sender(self, socket: int, frame: zmq.Frame) -> Client:
        """Find the sender of a frame, to which ZeroMQ attached the name of the key that decrypted it."""
        if socket == IPC:
            return OURSELVES
        if self._anybody is not None:
            return self._anybody
        try:
            return self._by_name.get(str(frame.get("User-Id")), _STRANGER)
        except zmq.ZMQError:
            return _STRANGER
