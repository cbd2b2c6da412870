"""Connections of one tier to its cache server, opened when a call needs one, and kept while they work.

Those on this host are closed as soon as their server has ended, even if idle, because they map the memory that the next
server needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.payload import Geometry
from kvstore.tiers.server.connection import NoSessionError, ServerConnection, is_known
from kvstore.tiers.server.hold import Hold, Watcher
from kvstore.tiers.server.url import ServerTarget

_CLOSE_WAIT_S = 2.0
_MORE_TRIES = 4  # on a busy host a server may be replaced again meanwhile
Result = TypeVar("Result")


class ServerConnections:
    """Connections for one namespace. Thread-safe; each use has a separate connection.

    Args:
        target: the server.
        namespace: that of the connections, until ``move``.
        geometry: of its chunks.
    """

    def __init__(self, target: ServerTarget, namespace: Namespace, geometry: Geometry) -> None:
        self.namespace = namespace
        self._target = target
        self._geometry = geometry
        self._context = open_context()
        self._watcher = Watcher(self._close_ended)
        self._changed = threading.Condition()
        self._idle: list[ServerConnection] = []
        self._in_use = 0
        self._is_closed = False
        self._version = 0

    def know(self, kind: type[messages.Request]) -> bool:
        """Tell if the last server that was reached understands a kind of request; False before the first."""
        return is_known(kind, self._version)

    def use(self, action: Callable[[ServerConnection], Result]) -> Result:
        """Run an action over a connection, and again if the server was replaced and does not know the connection.

        Raises:
            ClosedError: after ``close``.
            TierError: the server cannot be reached, all connections are in use for too long, or the action failed.
        """
        with self._turn():
            connection, result = self._act(action)
            self._give(connection)
            return result

    def hold(self, action: Callable[[ServerConnection], Result]) -> tuple[Result, Callable[[messages.Request], None]]:
        """Run an action like ``use``, and keep the connection until the returned function is called, on any thread.

        That function sends a last request. If it cannot be sent, the connection is closed with its leases, by another
        thread, as its memory may take seconds to unmap.

        Raises:
            ClosedError, TierError: see ``use``.
        """
        with ExitStack() as begun:
            begun.enter_context(self._turn())
            connection, result = self._act(action)
            turn = begun.pop_all()

        def end(last_request: messages.Request) -> None:
            with turn:
                if connection.tell(last_request):
                    self._give(connection)
                else:
                    self._watcher.do(connection.close)

        return result, end

    def require_open(self) -> None:
        """Check that ``close`` was not called, for calls that need no connection.

        Raises:
            ClosedError: after ``close``.
        """
        if self._is_closed:
            raise ClosedError("the server tier was closed")

    def move(self, namespace: Namespace, last_action: Callable[[ServerConnection], object]) -> None:
        """Use another namespace for new connections, then call ``last_action`` with one for the former namespace.

        Raises:
            ClosedError: after ``close``.
            TierError: the server cannot be reached, all connections are in use for too long, or ``last_action`` failed.
        """
        self.require_open()
        with self._changed:
            former = self.namespace
            # A copy, so that no earlier connection is home, even if equal.
            self.namespace = Namespace(dict(namespace.fields))
        self._hang_up_idle()
        with self._turn():
            _repeated(lambda: self._act_in(former, last_action))

    def _act_in(self, former: Namespace, action: Callable[[ServerConnection], object]) -> None:
        connection = self._connect(former)
        try:
            action(connection)
        finally:
            connection.close()

    def close(self) -> None:
        """Wait for uses under way for as long as the server may be silent, then disconnect. Idempotent.

        A use that lasts longer continues, and closes the context at its end.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._in_use += 1  # this call counts as one, so that no other ends the context before it
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._in_use == 1, self._target.timeout_s + _CLOSE_WAIT_S)
        self._watcher.close(_CLOSE_WAIT_S)
        self._hang_up_idle()
        self._end_use()

    def is_home(self, connection: ServerConnection) -> bool:
        """Tell if a connection belongs to the current namespace, since the last ``move``."""
        return connection.namespace is self.namespace

    def _act(self, action: Callable[[ServerConnection], Result]) -> tuple[ServerConnection, Result]:
        return _repeated(lambda: self._act_once(action))

    def _act_once(self, action: Callable[[ServerConnection], Result]) -> tuple[ServerConnection, Result]:
        connection = self._take()
        with ExitStack() as failed:
            failed.callback(self._hang_up_idle)  # the others have probably also failed
            failed.callback(connection.close)
            result = action(connection)
            failed.pop_all()
        return connection, result

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for a share of the connections. A call that fails because of ``close`` raises ``ClosedError``."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._is_closed or self._in_use < self._target.connections, self._target.timeout_s
            )
            self.require_open()
            if not is_free:
                raise TierError(f"all {self._target.connections} connections to the cache server are in use")
            self._in_use += 1
        try:
            yield
        except TierError as error:
            if self._is_closed:
                raise ClosedError("the server tier was closed during the call") from error
            raise
        finally:
            self._end_use()

    def _end_use(self) -> None:
        with self._changed:
            self._in_use -= 1
            is_last = self._is_closed and not self._in_use
            self._changed.notify_all()
        if is_last:  # all sockets are closed
            close_context(self._context)

    def _take(self) -> ServerConnection:
        """Return an idle connection, or a new one."""
        while True:
            with self._changed:
                namespace = self.namespace
                found = self._idle.pop() if self._idle else None
            if found is None:
                return self._connect(namespace)
            if found.namespace is namespace and found.is_alive:
                return found
            found.close()

    def _connect(self, namespace: Namespace) -> ServerConnection:
        connection = ServerConnection(self._context, self._target)
        with ExitStack() as failed:
            failed.callback(connection.close)
            connection.hello(namespace, self._geometry)
            if connection.hold is not None:
                self._watch(connection.hold)
            failed.pop_all()
        self._version = connection.version
        return connection

    def _watch(self, hold: Hold) -> None:
        try:
            self._watcher.watch(hold)
        except OSError as error:
            raise TierError(f"the cache server at {self._target.address} cannot be watched: {error}") from error

    def _give(self, connection: ServerConnection) -> None:
        with self._changed:
            is_kept = self.is_home(connection) and not self._is_closed and connection.is_alive
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def _close_ended(self) -> None:
        """Close idle connections whose server has ended. Those in use are closed at the end of their use."""
        with self._changed:
            ended = [connection for connection in self._idle if not connection.is_alive]
            self._idle = [connection for connection in self._idle if connection not in ended]
        for connection in ended:
            connection.close()

    def _hang_up_idle(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _repeated(call: Callable[[], Result]) -> Result:
    """Call something again if its connection's server was replaced."""
    for _ in range(_MORE_TRIES):
        with suppress(NoSessionError):
            return call()
    return call()
