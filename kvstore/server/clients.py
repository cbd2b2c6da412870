"""Clients by the key that they have, or by the socket that they come through, and never by what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import zmq

from kvstore.protocol.keyfiles import ListedKey
from kvstore.protocol.rights import EVERY_RIGHT, NO_RIGHT, USUAL_RIGHTS, Right

IPC: Final = 0  # the number of the socket for this host
TCP: Final = 1  # and of that for the network
ANYBODY: Final = "*"  # in server_operators


@dataclass(frozen=True)
class Client:
    """Everybody who has the same key, or comes without one through the same socket.

    Attributes:
        name: of the key; empty without one.
        socket: the number of the socket.
        rights: what it may do.
        tenant: whose chunks it shares; empty for those of all clients without a tenant.
    """

    name: str
    socket: int
    rights: Right
    tenant: str = ""

    @property
    def runs_all(self) -> bool:
        """Tell if its orders reach the whole server, and not only its tenant."""
        return bool(self.rights & Right.OPERATE) and not self.tenant


OURSELVES: Final = Client("", IPC, EVERY_RIGHT)  # the server's own user, who could reach its memory anyway
_STRANGER: Final = Client("", TCP, NO_RIGHT)


class Clients:
    """Tells who sent a message. Belongs to the thread that decides.

    Args:
        listed: those who may come over the network; None if that is anybody, as there are no keys.
        operators: names of those who also have the right to operate.
    """

    def __init__(self, listed: Mapping[bytes, ListedKey] | None, operators: frozenset[str]) -> None:
        def client(key: ListedKey) -> Client:
            is_operator = not operators.isdisjoint({key.name, ANYBODY})
            return Client(key.name, TCP, key.rights | (Right.OPERATE if is_operator else NO_RIGHT), key.tenant)

        self._by_name = {key.name: client(key) for key in (listed or {}).values()}
        # Whoever may replace chunks of all can do as much harm as by clearing, and an engine's reset must be for good.
        self._anybody = client(ListedKey("", USUAL_RIGHTS | Right.CLEAR)) if listed is None else None

    def sender(self, socket: int, frame: zmq.Frame) -> Client:
        """Find the sender of a frame: ZeroMQ has noted the name of the key with which it was decrypted."""
        if socket == IPC:
            return OURSELVES
        if self._anybody is not None:
            return self._anybody
        try:
            return self._by_name.get(str(frame.get("User-Id")), _STRANGER)
        except zmq.ZMQError:
            return _STRANGER
