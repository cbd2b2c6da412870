"""Successor's part: claims the estate of the server that runs in its folder."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.server.succession.estate import FORMAT, OLDEST_FORMAT, Inheritance
from kvstore.server.succession.link import (
    MAX_FDS,
    SUCCESSOR_SOCKET,
    Bequest,
    Claim,
    Link,
    More,
    Reply,
    Settled,
    SuccessionError,
    close_all,
    connect,
    read_estate,
)
from kvstore.server.unix_socket import is_alive

if TYPE_CHECKING:
    from kvstore.server.options import ServerOptions

logger = logging.getLogger(__name__)


class Succession:
    """Claim of an estate. Belongs to one thread. Any failure leaves the predecessor serving.

    Args:
        link: to the predecessor.
        options: of this server.
    """

    def __init__(self, link: Link, options: ServerOptions) -> None:
        self._link = link
        self._options = options

    def receive(self) -> Inheritance:
        """Claim the estate, and receive it once the predecessor has paused.

        Raises:
            SuccessionError: the predecessor refuses, or fails.
        """
        disk = str(self._options.disk.folder.resolve()) if self._options.disk is not None else ""
        self._link.send(Claim((OLDEST_FORMAT, FORMAT), __version__, self._options.pool_bytes, disk))
        reply, _ = self._link.receive(Reply)
        if not reply.is_yes:
            raise SuccessionError(reply.why)
        logger.info("taking over from kvstore %s, process %d", reply.version, self._link.process)
        with ExitStack() as failed:
            bequest, fds = self._link.receive(Bequest, 4 if disk else 3)
            failed.callback(close_all, fds)
            pool_fd, listener_fd, estate_fd, *locks = fds
            estate = read_estate(estate_fd, bequest.estate_bytes)
            inherited = Inheritance(estate, pool_fd, listener_fd, locks[0] if locks else -1)
            failed.callback(close_all, inherited.connection_fds)
            while (missing := bequest.num_connections - len(inherited.connection_fds)) > 0:
                inherited.connection_fds += self._link.receive(More, min(missing, MAX_FDS))[1]
            failed.pop_all()
        os.close(estate_fd)
        return inherited

    def become_owner(self) -> None:
        """Tell the predecessor that the estate is settled, and wait until it has given up.

        Raises:
            SuccessionError: it has not, and serves again, or has ended with its chunks.
        """
        self._link.send(Settled())
        reply, _ = self._link.receive(Reply)
        if not reply.is_yes:
            raise SuccessionError(reply.why)

    def close(self) -> None:
        """End the conversation. Idempotent."""
        self._link.close()


def find_predecessor(options: ServerOptions) -> Succession | None:
    """Return the succession of the server in the folder of these options; None if none can be succeeded there.

    Raises:
        ConfigError: the options have no folder.
        SuccessionError: the server belongs to another user.
    """
    if options.folder is None:
        raise ConfigError("a server is succeeded through the folder of its kvs+ipc address: add one to server_listen")
    link = connect(options.folder)
    return None if link is None else Succession(link, options)


def can_be_replaced(options: ServerOptions) -> bool:
    """Tell if a server that can be replaced runs in the folder of these options."""
    return options.folder is not None and is_alive(options.folder / SUCCESSOR_SOCKET, socket.SOCK_SEQPACKET)
