"""Connections of one tier to its cache server, opened when a call needs one, and kept while they work.

Those on this host are closed as soon as their server has ended, even if idle, because they map the memory that the next
server needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from kvstore.errors import ClosedError, TierError
from kvstore.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.geometry import Geometry
from kvstore.tiers.server.link import Link, NoSessionError, is_known
from kvstore.tiers.server.url import ServerTarget
from kvstore.tiers.server.watcher import Watcher

_CLOSE_WAIT_S = 2.0
Result = TypeVar("Result")


class Links:
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
        self._idle: list[Link] = []
        self._in_use = 0
        self._is_closed = False
        self._version = 0

    def know(self, kind: type[messages.Request]) -> bool:
        """Tell if the last server that was reached understands a kind of request; False before the first."""
        return is_known(kind, self._version)

    def use(self, action: Callable[[Link], Result]) -> Result:
        """Run an action over a connection, and again if the server was restarted and does not know the connection.

        Raises:
            ClosedError: after ``close``.
            TierError: the server cannot be reached, all connections are in use for too long, or the action failed.
        """
        with self._turn():
            link, result = self._act(action)
            self._give(link)
            return result

    def hold(self, action: Callable[[Link], Result]) -> tuple[Result, Callable[[messages.Request], None]]:
        """Run an action like ``use``, and keep the connection until the returned function is called, on any thread.

        That function sends a last request. If it cannot be sent, the connection is closed with its leases, by another
        thread, as its memory may take seconds to unmap.

        Raises:
            ClosedError, TierError: see ``use``.
        """
        with ExitStack() as begun:
            begun.enter_context(self._turn())
            link, result = self._act(action)
            turn = begun.pop_all()

        def end(last_request: messages.Request) -> None:
            with turn:
                if link.tell(last_request):
                    self._give(link)
                else:
                    self._watcher.do(link.close)

        return result, end

    def require_open(self) -> None:
        """Check that ``close`` was not called, for calls that need no connection.

        Raises:
            ClosedError: after ``close``.
        """
        if self._is_closed:
            raise ClosedError("the server tier was closed")

    def move(self, namespace: Namespace, farewell: Callable[[Link], object]) -> None:
        """Use another namespace for new connections, then call ``farewell`` with one for the former namespace.

        Raises:
            ClosedError: after ``close``.
            TierError: the server cannot be reached, all connections are in use for too long, or ``farewell`` failed.
        """
        self.require_open()
        with self._changed:
            former = self.namespace
            self.namespace = Namespace(dict(namespace.fields))  # a copy, so that no earlier link is home, even if equal
        self._hang_up_idle()
        with self._turn():
            link = self._connect(former)
            try:
                farewell(link)
            finally:
                link.close()

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

    def is_home(self, link: Link) -> bool:
        """Tell if a connection belongs to the current namespace, since the last ``move``."""
        return link.namespace is self.namespace

    def _act(self, action: Callable[[Link], Result]) -> tuple[Link, Result]:
        try:
            return self._act_once(action)
        except NoSessionError:
            return self._act_once(action)

    def _act_once(self, action: Callable[[Link], Result]) -> tuple[Link, Result]:
        link = self._take()
        try:
            return link, action(link)
        except BaseException:
            link.close()
            self._hang_up_idle()  # the others have probably also failed
            raise

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

    def _take(self) -> Link:
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

    def _connect(self, namespace: Namespace) -> Link:
        link = Link(self._context, self._target)
        try:
            link.hello(namespace, self._geometry)
            if link.hold is not None:
                self._watcher.watch(link.hold)
        except OSError as error:
            link.close()
            raise TierError(f"the cache server at {self._target.address} cannot be watched: {error}") from error
        except BaseException:
            link.close()
            raise
        self._version = link.version
        return link

    def _give(self, link: Link) -> None:
        with self._changed:
            is_kept = self.is_home(link) and not self._is_closed and link.is_alive
            if is_kept:
                self._idle.append(link)
        if not is_kept:
            link.close()

    def _close_ended(self) -> None:
        """Close idle connections whose server has ended. Those in use are closed at the end of their use."""
        with self._changed:
            ended = [link for link in self._idle if not link.is_alive]
            self._idle = [link for link in self._idle if link not in ended]
        for link in ended:
            link.close()

    def _hang_up_idle(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
