"""The server's sockets, and the one thread that decides.

That thread never waits for a disk, a copy or a client. Other threads do the slow work, and report back to it. A client
that does not read its answers is cut off when its queue is full.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import zmq

from kvstore.channels import open_channel
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace
from kvstore.model.throttle import Throttle
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.payload import Run
from kvstore.server.clients import IPC, TCP, ClientKeys, Clients
from kvstore.server.connections import LOOK_S, Network, allowed_clients, bind_router, check_address
from kvstore.server.core import Core
from kvstore.server.disk import Disk
from kvstore.server.jobs import Jobs
from kvstore.server.operators import stats
from kvstore.server.options import ServerOptions
from kvstore.server.owner import Owner
from kvstore.server.passes import Passes
from kvstore.server.pause import Pause
from kvstore.server.pool import Pool
from kvstore.server.reception import Reception
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions
from kvstore.server.spaces import Chunk
from kvstore.server.stock import Stock
from kvstore.server.succession.estate import Inheritance, settle
from kvstore.server.unix_socket import CONTROL_NAME, UnixSocket

if TYPE_CHECKING:
    from kvstore.server.succession.taking import Succession

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.5
_LEAVE_S: Final = 5.0  # longest wait for an address that the predecessor leaves
_DEAD_S: Final = 30.0  # without a pass
_PAUSE_MS: Final = 2  # without a request, after which deferred work is done
_TURN: Final = 64  # messages of one socket before the next socket is served
_LOOK_EACH_S: Final = 2e-4  # between two looks, for each connection: a look takes some microseconds
_SPARE_PART: Final = 64  # one of so many connections is for clients without a hello, which query or send orders
_MAX_KICKED: Final = 16_384  # connections that are remembered as kicked


class Hub:
    """A cache server with its memory and disk open and its sockets bound; ``run`` serves until ``stop``.

    Args:
        options: addresses, sizes and policies.
        owner: the engine that it belongs to; None if it takes chunks of all engines.
        succession: of the server that it replaces; None if it begins empty, or with what its disk holds.

    Raises:
        ConfigError: something cannot be used as configured; nothing is left open.
        TierError: the disk cannot be read, or belongs to another process.
        SuccessionError: the other server cannot be replaced.
    """

    def __init__(
        self, options: ServerOptions, owner: Owner | None = None, succession: Succession | None = None
    ) -> None:
        options.check()
        self.options = options
        self._owner = owner
        self._succession = succession
        self._jobs = Jobs()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._throttle = Throttle(logger)
        self._passes = Passes()
        self._began_s = time.monotonic()
        self._expired_s = 0.0
        self._beat_s = self._began_s  # of the last pass
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self.network: Network | None = None
        self.pause: Pause | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(self._jobs.close)
            self._open(opened, succession.receive() if succession is not None else None)
            self._opened = opened.pop_all()

    @property
    def tcp_port(self) -> int | None:
        """TCP port that the server listens on; None without one."""
        return self.network.listener.port if self.network is not None else None

    @property
    def num_strangers(self) -> int:
        """Number of clients that could not prove a key, or expected another server."""
        return self.network.num_strangers if self.network is not None else 0

    def stop(self) -> None:
        """End after at most ``drain_s`` for writes to disk; at once if called again. From any thread."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._jobs.rouse()

    def snapshot(self, timeout_s: float) -> dict[str, Any]:
        """Return all counters. From any thread but the one that serves.

        Raises:
            TimeoutError: the server does not answer in time.
        """
        return self._jobs.ask(self._stats, timeout_s)

    @property
    def is_alive(self) -> bool:
        """True unless the thread that decides hangs. From any thread."""
        return time.monotonic() - self._beat_s < _DEAD_S

    def status(self, timeout_s: float) -> str:
        """Return ``ok``, or ``closing``. From any thread but the one that serves.

        Raises:
            TimeoutError: the server does not answer in time.
        """
        return self._jobs.ask(lambda: self.core.status, timeout_s)

    def drain(self, timeout_s: float) -> int:
        """Take no new clients and chunks from now on, and return the number of chunks that wait for the disk.

        Reads are answered until the server is told to end. From any thread but the one that serves.

        Raises:
            ConfigError: the server is being replaced.
            TimeoutError: the server does not answer in time.
        """
        return self._jobs.ask(self._begin_drain, timeout_s)

    def change(self, options: ServerOptions, timeout_s: float) -> int:
        """Apply other keys, rights, tenants, operators, quotas and bounds; the rest of the options does not change.

        Clients whose key is gone, or has another tenant, are disconnected; returns their number. All others notice
        nothing. What exceeds a quota is evicted soon after. From any thread but the one that serves.

        Raises:
            ConfigError: the options are not safe; nothing was changed.
            TimeoutError: the server does not answer in time.
        """
        options = replace(
            self.options,
            listed=options.listed,
            operators=options.operators,
            quotas=options.quotas,
            pin_max_s=options.pin_max_s,
            drain_s=options.drain_s,
        )
        options.check()
        return self._jobs.ask(lambda: self._change(options), timeout_s)

    def enter(self, namespace: Namespace) -> None:
        """Change the owner's namespace. From any thread; takes effect soon after."""
        self._jobs.report(lambda: self.service.enter(namespace))

    def let_go(self, refs: Sequence[ChunkRef]) -> None:
        """Release the holds on these chunks of the owner. From any thread; takes effect soon after."""
        self._jobs.report(lambda: self.service.let_go(refs))

    def ask(self, call: Callable[[], Result], timeout_s: float) -> Result:
        """Return the result of a call on the thread that serves. From any other thread.

        Raises:
            TimeoutError: it has not begun in time, and never will; or it has not ended.
        """
        return self._jobs.ask(call, timeout_s)

    def report(self, call: Callable[[], None]) -> None:
        """Have the thread that serves make a call soon. From any thread."""
        self._jobs.report(call)

    def run(self) -> bool:
        """Serve until ``stop``; return False if chunks were lost because they were not written to disk in time."""
        try:
            while not self._stopping.is_set():
                self._turn(_TICK_S)
            return self._drain()
        finally:
            self._opened.close()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, opened: contextlib.ExitStack, inherited: Inheritance | None) -> None:
        options = self.options
        self._most = allowed_clients(has_ipc=options.folder is not None, has_tcp=options.tcp is not None)
        self._clients = Clients(options.listed if options.keys else None, options.operators)
        self.reception = Reception(self._sockets, self._clients)
        fd, taken = (-1, []) if inherited is None else (inherited.pool_fd, inherited.runs)
        self.pool = Pool(options.pool_bytes, self._note_pages, fd=fd, taken=taken)
        opened.callback(self.pool.close)
        self._context = open_context(io_threads=2 if options.tcp else 1)
        opened.callback(close_context, self._context)
        self._client_keys = ClientKeys(self._context, options.listed) if options.keys else None
        self._unix_socket: UnixSocket | None = None
        if options.folder is not None:
            listener_fd = -1 if inherited is None else inherited.listener_fd
            self._unix_socket = UnixSocket(options.folder, self.pool.fd, self._most[IPC], listener_fd)
            opened.callback(self._unix_socket.close)
        self._open_core(opened, inherited)
        self._bind(opened, inherited)
        self.reception.open(self.service, self.sessions, self._unix_socket, self.network)
        if self._unix_socket is not None:
            self.pause = Pause(self.core, self.service, self._sockets, self._unix_socket, self.network)
        self._poller = zmq.Poller()
        keys = self._client_keys and self._client_keys.socket
        reports = self.network and self.network.reports
        for source in (*self._sockets.values(), self._jobs.fd, self._unix_socket, keys, reports):
            if source is not None:
                self._poller.register(source, zmq.POLLIN)

    def _bind(self, opened: contextlib.ExitStack, inherited: Inheritance | None) -> None:
        """Listen, last of all, because a client that is let in must be served."""
        options = self.options
        if self._succession is not None and self._unix_socket is not None:
            if options.tcp is not None:
                check_address(options.tcp.host, options.tcp.port, _LEAVE_S)
            self._succession.become_owner()
            self._unix_socket.owns_path = True
            self.service.writes.is_held = False
            self.core.slices.begin(self.service.writes.go_on())
            if any(quota.lacks(0) for quota in self.stock.spaces.quotas):  # the predecessor's were larger
                self.service.change(options.quotas, options.pin_max_s)
        if options.folder is not None:
            self._sockets[IPC] = bind_router(self._context, f"ipc://{options.folder / CONTROL_NAME}")
            (options.folder / CONTROL_NAME).chmod(0o600)
        if options.tcp is not None:
            self._sockets[TCP] = bind_router(self._context, str(options.tcp), options.keys)
            self.network = Network(self._context, self._sockets[TCP], self._jobs.fd, self._most[TCP])
            opened.callback(self.network.close)
        if inherited is not None:
            count, pause_ms = len(inherited.estate.chunks), (time.monotonic() - inherited.estate.paused_s) * 1000
            logger.info("took over %d chunks; clients waited for %.0f ms", count, pause_ms)

    def _change(self, options: ServerOptions) -> int:
        self._refuse_if_paused()
        former, self.options = self.options, options
        self._clients.change(options.listed, options.operators)
        if self._client_keys is not None:
            self._client_keys.change(options.listed)
        self.sessions.share_between(self._clients.num_sharers)
        self.service.change(options.quotas if options.quotas != former.quotas else None, options.pin_max_s)
        self.core.keep_denials({listed.name for listed in options.listed.values()})
        count = 0
        for session in [session for peer, session in self.sessions.by_peer.items() if peer.socket == TCP]:
            now = self._clients.current(session.client)
            if replace(now, rights=session.client.rights) == session.client:
                session.client = now
            else:
                self.service.end(session)
                self.reception.cut(session.fd)
                count += 1
        return count

    def _open_core(self, opened: contextlib.ExitStack, inherited: Inheritance | None) -> None:
        options, lock_fd = self.options, -1 if inherited is None else inherited.lock_fd
        disk = Disk(options.disk, self._jobs.report, lock_fd) if options.disk else None
        if disk is not None:
            opened.callback(disk.close, 5.0)
        self.stock = Stock(
            self.pool.num_bytes,
            self.pool.free,
            disk_bytes=disk.capacity_bytes if disk else 0,
            policy=options.policy,
            disk_policy=options.disk_policy,
            quotas=options.quotas,
            first_stamp=time.time_ns(),
        )
        most = {socket: count - count // _SPARE_PART for socket, count in self._most.items()}
        self.sessions = Sessions(self.stock, self.pool.num_bytes, most, self._clients.num_sharers)
        self.core = Core(
            self.pool,
            self.stock,
            self.sessions,
            disk,
            self.reception.send,
            self._jobs.report,
            self._is_open,
            self._stats,
            self.reception.sender,
            time.monotonic,
            is_owned=self._owner is not None,
        )
        self.service = Service(
            self.core,
            max_writes=options.max_writes,
            pin_max_s=options.pin_max_s,
            owner=self._owner,
            channel=open_channel(options.channel, self.pool.bytes),
        )
        opened.callback(self.service.close)
        if inherited is not None:
            self._settle(inherited)
        elif disk is not None:
            self._take_stock(disk)

    def _settle(self, inherited: Inheritance) -> None:
        assert self._unix_socket is not None
        for token, fd in zip(inherited.estate.tokens, inherited.connection_fds, strict=True):
            self._unix_socket.adopt(token, fd)
        self.service.writes.is_held = True  # until the files are ours
        for chunk in settle(inherited.estate, self.core):
            self.service.writes.begin(chunk)

    def _take_stock(self, disk: Disk) -> None:
        for former, chunks, trails, ends, owners in disk.open_all():
            space = self.stock.spaces.enter(former.namespace, former.layout, former.tenant)
            if space is None:  # no client could ever use its chunks
                disk.forget(former)
                continue
            for ref, size_bytes in chunks:
                owner = owners.get(ref.prefix_key, b"")
                chunk = Chunk(space, ref, disk_bytes=size_bytes, until_s=ends.get(ref), owner=owner)
                chunk.describe(trails.get(ref.prefix_key, b""))
                self.stock.adopt(chunk)
        for _ in self.stock.change_quotas(self.options.quotas):  # after a crash files of evicted chunks may be back
            pass

    # -- serving -----------------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float) -> None:
        if self._is_paused():
            self._rest()
            return
        network = self.network
        if network is not None:
            network.listener.look()
            timeout_s = min(timeout_s, LOOK_S)
        ready = dict(self._poller.poll(_PAUSE_MS if self.service.has_leisure_work else int(timeout_s * 1000)))
        began_s = self._beat_s = time.monotonic()
        if not ready or self.service.is_behind:
            self.service.do_leisure_work()
        self._jobs.carry_out(is_roused=self._jobs.fd in ready)
        if self._is_paused():  # since a moment ago
            return
        if self._unix_socket is not None and self._unix_socket.fileno() in ready:
            for token in self._unix_socket.look():
                self.service.hang_up(token)
        if self._client_keys is not None and self._client_keys.socket in ready:
            self._client_keys.answer()
        self.reception.receive(ready)
        now_s = time.monotonic()
        if now_s - self._expired_s > _TICK_S:
            self._expired_s = now_s
            self.service.expire()
        self._passes.note(time.monotonic() - began_s)

    def _is_paused(self) -> bool:
        return self.pause is not None and self.pause.is_on

    def _rest(self) -> None:
        """Do nothing but what other threads ask for, and refuse what clients do."""
        ready = dict(self._poller.poll(_PAUSE_MS))
        self._beat_s = time.monotonic()
        self._jobs.carry_out(is_roused=self._jobs.fd in ready)
        if self.pause is not None:
            self.reception.refuse(ready, self.pause)

    def _stats(self) -> dict[str, Any]:
        refused = self.num_strangers + (self._client_keys.refused if self._client_keys else 0)
        counted = stats(self.core, time.monotonic() - self._began_s, self.service.writes.num_unwritten)
        counted |= self.service.offers.stats()
        return {**counted, "malformed": self.reception.num_malformed, "refused": refused, "passes": self._passes.tree()}

    def _is_open(self, token: bytes) -> bool:
        return self._unix_socket is not None and self._unix_socket.is_open(token)

    def _note_pages(self, run: Run) -> None:
        """Add pages that were allocated. From any thread."""

        def add() -> None:
            self.pool.add(run)
            self.service.grants.go_on()

        self._jobs.report(add)

    def _refuse_if_paused(self) -> None:
        if self._is_paused():  # its files and clients may be another process's by now
            raise ConfigError("the server is being replaced: ask its successor")

    def _begin_drain(self) -> int:
        self._refuse_if_paused()
        self.core.is_closing = True
        return self.service.writes.num_unwritten

    def _drain(self) -> bool:
        """Wait for disk writes and deletions, while reads are still answered; return False if writes are left."""
        if self.pause is not None:
            if self.pause.is_final:  # another process has them
                return True
            self.pause.give_up()
        self._begin_drain()
        deadline_s = time.monotonic() + self.options.drain_s
        while self.service.writes.is_changing_files and time.monotonic() < deadline_s and not self._hurry.is_set():
            self._turn(0.1)
        left = self.service.writes.num_unwritten
        if left:
            logger.warning("%d chunks were not written to disk before the server stopped", left)
        return not left
