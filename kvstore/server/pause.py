"""Pause of a server, in which its state rests, so that it can be handed to another process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import zmq

from kvstore.protocol import messages
from kvstore.protocol.messages import Refusal
from kvstore.server.clients import IPC, TCP
from kvstore.server.connections import Network
from kvstore.server.core import Core
from kvstore.server.service import Service
from kvstore.server.sessions import Peer
from kvstore.server.succession.link import SuccessionError
from kvstore.server.unix_socket import CONTROL_NAME, UnixSocket, is_alive

logger = logging.getLogger(__name__)

_LINGER_MS: Final = 1000
_WHY: Final = "the server is being replaced: connect again"


class Pause:
    """Shuts the sockets to new clients, lets the present ones go, and opens the sockets again.

    Clients of this host keep their leases until they have closed their connection to the unix socket, which is not
    looked at meanwhile; those of others end at once. Belongs to the thread that decides.

    Args:
        core: the state of the server.
        service: its requests and its threads.
        sockets: its sockets for requests, by number.
        unix_socket: the socket that hands out the memory.
        network: the socket for other hosts; None without one.

    Attributes:
        is_on: True while no request is answered.
        is_final: another process has the memory and the clients, and this one must change nothing any more.
    """

    def __init__(
        self,
        core: Core,
        service: Service,
        sockets: Mapping[int, zmq.Socket[bytes]],
        unix_socket: UnixSocket,
        network: Network | None,
    ) -> None:
        self.is_on = False
        self.is_final = False
        self._is_over = False
        self._core = core
        self._service = service
        self._sockets = sockets
        self._control = unix_socket.folder / CONTROL_NAME
        self._unix_socket = unix_socket
        self._network = network

    def hold_writes(self) -> bool:
        """Begin no more writes to disk; return True once all have ended."""
        self._check()
        writes, disk = self._service.writes, self._core.disk
        writes.is_held = True
        return not writes.num_changing and (disk is None or (not disk.is_busy and disk.can_rest))

    def begin(self) -> None:
        """Answer no more requests, and ask all clients to leave."""
        self._check()
        self.is_on = True
        self._unix_socket.ask_all_to_leave()
        for session in list(self._core.sessions.by_peer.values()):
            if not session.token:
                self.refuse(session.peer)
                self._service.end(session)
        self._sockets[IPC].unbind(f"ipc://{self._control}")
        if self._network is not None:  # which also ends its connections, once they have sent what waits
            self._sockets[TCP].linger = _LINGER_MS
            self._network.listener.shut()

    def refuse(self, peer: Peer) -> None:
        """Tell a client to connect again."""
        self._core.send(peer, messages.Refused(0, Refusal.NO_SESSION, _WHY), ())

    def is_quiet(self) -> bool:
        """Finish what can be finished now; return True once no thread uses memory, files or the sockets' names."""
        while self._service.has_leisure_work:
            self._service.do_leisure_work()
        threads = self._service.payload.num_under_way + self._service.grants.num_reading
        if threads or self._core.slices.is_busy or not self.hold_writes() or is_alive(self._control):
            return False
        return self._core.disk is None or self._core.disk.rest()

    def end(self) -> None:
        """Serve again."""
        if self.is_on:
            try:
                self._sockets[IPC].bind(f"ipc://{self._control}")
                self._control.chmod(0o600)
            except (zmq.ZMQError, OSError) as error:
                logger.error("clients of this host are not served any more: %s", error)  # noqa: TRY400 - it says all
        self.is_on = self.is_final = False
        self._unix_socket.owns_path = True
        writes = self._service.writes
        writes.is_held = False
        self._core.slices.begin(writes.go_on())

    def give_up(self) -> None:
        """Serve again, and pause no more, because this process ends with what it has."""
        self.end()
        self._is_over = True

    def _check(self) -> None:
        """Check that nothing has ended the pause for good.

        Raises:
            SuccessionError: it has.
        """
        if self._is_over:
            raise SuccessionError("this server ends, and keeps its chunks")

    def make_final(self) -> None:
        """Leave everything to the other process.

        Raises:
            SuccessionError: the server ends with what it has, and serves again until then.
        """
        self._check()
        self.is_final = True
        self._unix_socket.owns_path = False

    def descriptors(self) -> tuple[list[int], Sequence[tuple[bytes, int]]]:
        """Return those of memory, listener and, with a disk, its lock, and token and descriptor of each connection."""
        disk = self._core.disk
        own = [self._core.pool.fd, self._unix_socket.listener_fd, *([disk.lock_fd] if disk is not None else [])]
        return own, self._unix_socket.connections()
