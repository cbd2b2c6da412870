"""A cache server on a thread of an engine's worker, through which other engines send chunks and read them."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvstore.memory.mapped import keep_freed
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.model.heads import Part
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.keyfiles import KeyPair, ListedKey
from kvstore.protocol.progress import Progress
from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.server.owner import Owner
from kvstore.server.unix_socket import POOL_SOCKET, is_alive

logger = logging.getLogger(__name__)

_POLICY: Final = "LRU"  # admits all chunks that are sent, if there is room next to the held ones
_END_WAIT_S: Final = 10.0
_KEPT_BYTES: Final = 64 << 20  # freed memory kept for the frames of some senders
_FOLDER_PREFIX: Final = "kvstore-server-"
_YOUNG_S: Final = 60.0  # a server with a younger folder may not listen there yet


@dataclass(frozen=True)
class EmbeddedOptions:
    """Options of an embedded server.

    Attributes:
        pool_bytes: size of the memory pool.
        host: the host that it listens on for other engines.
        port: the port that it listens on for other engines; 0 for any free one.
        keys: the server's keys; None for no encryption, which is allowed on loopback only.
        listed: the public keys of the clients that may connect, and their rights; all of one tenant.
        hold_s: longest time for which chunks from other engines are held until the owner has read them.
        parts: parts of the owner's chunks, which engines of other tensor-parallel sizes send here.
        channel: the channel through which senders' memory is read; None for none.
    """

    pool_bytes: int
    host: str
    port: int
    keys: KeyPair | None = None
    listed: Mapping[bytes, ListedKey] = field(default_factory=dict)
    hold_s: float = 0.0
    parts: tuple[Part, ...] = ()
    channel: str | None = None


class EmbeddedServer:
    """Serves one engine's chunks until ``close``. Has no disk, handles no signals and prints nothing.

    Admits only clients with the namespace and geometry of the owner or of its parts; see ``Owner``. Thread-safe.

    Args:
        namespace: the namespace of the owner's chunks.
        layout: the geometry of these chunks.
        options: memory, address and keys.

    Raises:
        ConfigError: the memory does not hold a chunk, the address cannot be listened on, other hosts can reach it
            and there are no keys, or these are of several tenants.
    """

    def __init__(self, namespace: Namespace, layout: KVLayout, options: EmbeddedOptions) -> None:
        if options.pool_bytes < layout.slot_bytes:
            raise ConfigError(
                f"pd_buffer_size of {options.pool_bytes} bytes does not hold one chunk of {layout.slot_bytes}: raise it"
            )
        keep_freed(_KEPT_BYTES)
        with ExitStack() as opened:
            _sweep()
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))  # of mode 0700
            opened.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._owner = Owner(namespace, layout, options.hold_s, options.parts)
            self._hub = Hub(_server_options(options, self._folder), self._owner)
            opened.callback(_end_unserved, self._hub)
            self._thread = threading.Thread(target=self._hub.run, name="kvstore-server", daemon=True)
            self._thread.start()
            opened.pop_all()
        logger.info("this worker listens for other engines on %s port %d", options.host, self.port)

    @property
    def url(self) -> str:
        """URL for processes of its owner."""
        return f"kvs+ipc://{self._folder}"

    @property
    def port(self) -> int:
        """TCP port for other engines."""
        port = self._hub.tcp_port
        assert port is not None
        return port

    @property
    def senders(self) -> Mapping[str, Progress]:
        """Hand-overs on their way to this server, by the senders' names. Each change makes a new object."""
        return self._owner.senders.view

    def stats(self, timeout_s: float) -> dict[str, Any]:
        """Return all counters, as ``kvstore stats`` shows them.

        Raises:
            TimeoutError: the server does not answer in time.
        """
        return self._hub.snapshot(timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Take nothing more from other engines, and refuse their questions, so that they look elsewhere.

        The owner's own processes go on reading and storing.

        Raises:
            TimeoutError: the server does not answer in time.
        """
        self._hub.drain(timeout_s)

    def enter(self, namespace: Namespace) -> None:
        """Drop the chunks of the owner's old weights, and refuse engines that have these, after a weight update."""
        self._hub.enter(namespace)

    def let_go(self, refs: Sequence[ChunkRef]) -> None:
        """Release the holds on chunks that the owner will not read."""
        self._hub.let_go(refs)

    def close(self) -> None:
        """Disconnect all clients and free the memory. Idempotent; waits for 10 seconds at most."""
        self._hub.stop()
        self._thread.join(_END_WAIT_S)
        if self._thread.is_alive():
            logger.warning("the server of this worker did not stop within %s s and is left running", _END_WAIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_unserved(hub: Hub) -> None:
    """Close a hub that no thread serves."""
    hub.stop()
    hub.run()


def _sweep() -> None:
    """Delete the folders of servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # another user's, or deleted meanwhile
            status = folder.stat()
            is_old = time.time() - status.st_mtime > _YOUNG_S
            if is_old and status.st_uid == os.geteuid() and not is_alive(folder / POOL_SOCKET):
                shutil.rmtree(folder)


def _server_options(options: EmbeddedOptions, folder: Path) -> ServerOptions:
    """Return the options of the server itself, after a check of the configured host name.

    Raises:
        ConfigError: the host has no address; other hosts can reach it without keys; the keys are of several tenants.
    """
    tenants = sorted({key.tenant for key in options.listed.values()})
    if len(tenants) > 1:
        names = ", ".join(tenant or "none" for tenant in tenants)
        raise ConfigError(
            f"server_clients lists keys of several tenants ({names}), and all that an engine receives belongs to one: "
            "name a folder with the keys of one tenant"
        )
    server = ServerOptions(
        options.pool_bytes,
        folder=folder,
        tcp=TcpAddress(options.host, options.port),
        keys=options.keys,
        listed={key: client._replace(tenant="") for key, client in options.listed.items()},  # the owner's
        policy=_POLICY,
        drain_s=0.0,
        channel=options.channel,
    )
    server.check()
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"pd_peer_host {options.host!r} has no address ({error.strerror}): name another") from error
    address = str(found[0][4][0])  # ZeroMQ listens on addresses only
    return replace(server, tcp=TcpAddress(address, options.port))
