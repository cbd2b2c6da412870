"""A cache server on a thread of an engine's worker: others send to it and read from it while the engine lives."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.protocol.keyfiles import KeyPair
from kvstore.server.doors import DOOR_NAME, is_alive
from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions, TcpDoor
from kvstore.server.owner import Owner

logger = logging.getLogger(__name__)

_POLICY: Final = "LRU"  # takes whatever is sent: what is handed over is read once, and soon
_END_WAIT_S: Final = 10.0
_FOLDER_PREFIX: Final = "kvstore-server-"
_YOUNG_S: Final = 60.0  # a server that has just made its folder may not listen there yet


@dataclass(frozen=True)
class EmbeddedOptions:
    """An embedded server.

    Attributes:
        pool_bytes: of memory.
        host: where others reach it.
        port: the same; 0 for any that is free.
        keys: the server's own; None for no encryption, which only loopback may have.
        listed: the keys of those who may come in, and their names.
    """

    pool_bytes: int
    host: str
    port: int
    keys: KeyPair | None = None
    listed: Mapping[bytes, str] = field(default_factory=dict)


class EmbeddedServer:
    """Serves one engine's chunks from the moment it is made until ``close``. No disk, no signals, nothing printed.

    Only clients whose namespace and geometry are the owner's are let in, see ``Owner``. Thread-safe.

    Args:
        namespace: of the owner's chunks.
        layout: their geometry.
        options: memory, address and keys.

    Raises:
        ConfigError: there is no such memory, the address cannot be listened on, or can be reached from other hosts and
            there are no keys.
    """

    def __init__(self, namespace: Namespace, layout: KVLayout, options: EmbeddedOptions) -> None:
        if options.pool_bytes < layout.slot_bytes:
            raise ConfigError(
                f"pd_buffer_size of {options.pool_bytes} bytes does not hold one chunk of {layout.slot_bytes}: raise it"
            )
        with ExitStack() as opened:
            _sweep()
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))  # of mode 0700
            opened.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._hub = Hub(_server_options(options, self._folder), Owner(namespace, layout))
            opened.callback(_end_unserved, self._hub)
            self._thread = threading.Thread(target=self._hub.run, name="kvstore-server", daemon=True)
            self._thread.start()
            opened.pop_all()
        logger.info("this worker listens for others on %s port %d", options.host, self.port)

    @property
    def url(self) -> str:
        """Where processes of its owner reach it."""
        return f"kvs+ipc://{self._folder}"

    @property
    def port(self) -> int:
        """Where others do."""
        port = self._hub.tcp_port
        assert port is not None
        return port

    def enter(self, namespace: Namespace) -> None:
        """The owner's weights were changed: let go of what others have sent, and let in only who has the new ones."""
        self._hub.enter(namespace)

    def close(self) -> None:
        """Hang up on everybody, and give up the memory. Idempotent; waits for 10 seconds at most."""
        self._hub.stop()
        self._thread.join(_END_WAIT_S)
        if self._thread.is_alive():
            logger.warning("the server of this worker does not end within %s s; it is left behind", _END_WAIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_unserved(hub: Hub) -> None:
    """Close a hub that no thread runs."""
    hub.stop()
    hub.run()


def _sweep() -> None:
    """Delete the folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone
            status = folder.stat()
            is_old = time.time() - status.st_mtime > _YOUNG_S
            if is_old and status.st_uid == os.geteuid() and not is_alive(folder / DOOR_NAME):
                shutil.rmtree(folder)


def _server_options(options: EmbeddedOptions, folder: Path) -> ServerOptions:
    """The options of the server behind it, checked under the name that the user has given.

    Raises:
        ConfigError: the host has no address, or others can reach it and there are no keys.
    """
    server = ServerOptions(
        options.pool_bytes,
        folder=folder,
        tcp=TcpDoor(options.host, options.port),
        keys=options.keys,
        listed=options.listed,
        policy=_POLICY,
        drain_s=0.0,
    )
    server.check()
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"pd_peer_host {options.host!r} has no address ({error.strerror}): name another") from error
    address = str(found[0][4][0])  # ZeroMQ listens on addresses only
    return replace(server, tcp=TcpDoor(address, options.port))
