"""The connections of one tier to its cache server: made when they are needed, kept while they work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstore.chunks import ChunkRef
from kvstore.errors import ClosedError, TierError
from kvstore.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.tiers.server.link import Link, NoSessionError
from kvstore.tiers.server.url import ServerTarget

_CLOSE_WAIT_S = 2.0
Result = TypeVar("Result")


@dataclass
class Home:
    """A namespace, and what it takes at the server as far as is known."""

    namespace: Namespace
    usage: messages.Usage = messages.NO_USAGE

    def note(self, usage: messages.Usage) -> None:
        """Take in what the server said; what was true later counts."""
        if usage.stamp >= self.usage.stamp:
            self.usage = usage


class Hold:
    """A connection in use beyond a call. Belongs to one thread at a time.

    Args:
        link: the connection.
        give: takes it back.
        turn: that of the use.
    """

    def __init__(self, link: Link, give: Callable[[], None], turn: ExitStack) -> None:
        self._link = link
        self._give = give
        self._turn = turn

    def end(self, last_words: messages.Request) -> None:
        """End the use, and what is the connection's with it, be it that the server cannot be told any more."""
        with self._turn:
            if self._link.tell(last_words):
                self._give()
            else:
                self._link.close()


class Links:
    """Connections for one namespace. Thread-safe: each use has a connection of its own.

    Args:
        target: where the server is.
        namespace: what the connections are for, until ``move``.
        geometry: of its chunks.
        bound_bytes: what the namespace may hold; 0 leaves it to the server.
    """

    def __init__(
        self, target: ServerTarget, namespace: Namespace, geometry: messages.Geometry, bound_bytes: int
    ) -> None:
        self.home = Home(namespace)
        self._target = target
        self._geometry = geometry
        self._bound_bytes = bound_bytes
        self._context = open_context()
        self._changed = threading.Condition()
        self._idle: list[tuple[Home, Link]] = []
        self._in_use = 0
        self._is_closed = False

    def use(self, action: Callable[[Link, Home], Result]) -> Result:
        """Do something over a connection; once more, if the server was started anew and does not know it.

        Raises:
            ClosedError: after ``close``.
            TierError: the server cannot be reached, or all connections are in use for too long; or as the action.
        """
        with self._turn():
            home, link, result = self._act(action)
            self._give(home, link)
            return result

    def hold(self, action: Callable[[Link, Home], Result]) -> tuple[Result, Hold]:
        """As ``use``, but the connection stays the caller's until the hold ends, in whatever thread.

        Raises:
            ClosedError, TierError: as ``use``.
        """
        with ExitStack() as begun:
            begun.enter_context(self._turn())
            home, link, result = self._act(action)
            return result, Hold(link, partial(self._give, home, link), begun.pop_all())

    def require_open(self) -> None:
        """For calls that need no connection.

        Raises:
            ClosedError: after ``close``.
        """
        if self._is_closed:
            raise ClosedError("the server tier was closed")

    def move(self, namespace: Namespace, farewell: Callable[[Link, Home], object]) -> None:
        """Use connections for another namespace from now on; then do something at last over one for the former.

        Raises:
            ClosedError: after ``close``.
            TierError: the server cannot be reached, or all connections are in use for too long; or as ``farewell``.
        """
        self.require_open()
        with self._changed:
            former, self.home = self.home, Home(namespace)
        self._hang_up_idle()
        with self._turn():
            link = self._connect(former)
            try:
                farewell(link, former)
            finally:
                link.close()

    def close(self) -> None:
        """Let uses under way end for as long as the server may be silent, then hang up. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            is_quiet = self._changed.wait_for(lambda: not self._in_use, self._target.timeout_s + _CLOSE_WAIT_S)
        self._hang_up_idle()
        if is_quiet:  # or it would wait for sockets that are in use
            close_context(self._context)

    def _act(self, action: Callable[[Link, Home], Result]) -> tuple[Home, Link, Result]:
        try:
            return self._act_once(action)
        except NoSessionError:
            return self._act_once(action)

    def _act_once(self, action: Callable[[Link, Home], Result]) -> tuple[Home, Link, Result]:
        home, link = self._take()
        try:
            return home, link, action(link, home)
        except BaseException:
            link.close()
            self._hang_up_idle()  # the others are likely to be no better
            raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One of the connections that there may be at once. What fails because of ``close`` says so."""
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
            with self._changed:
                self._in_use -= 1
                self._changed.notify_all()

    def _take(self) -> tuple[Home, Link]:
        """A connection that is not in use, or a new one."""
        while True:
            with self._changed:
                home = self.home
                found = self._idle.pop() if self._idle else None
            if found is None:
                return home, self._connect(home)
            if found[0] is home and found[1].is_alive:
                return found
            found[1].close()

    def _connect(self, home: Home) -> Link:
        link = Link(self._context, self._target)
        try:
            welcome = link.hello(dict(home.namespace.fields), self._geometry, self._bound_bytes)
        except BaseException:
            link.close()
            raise
        home.note(welcome.usage)
        return link

    def _give(self, home: Home, link: Link) -> None:
        with self._changed:
            is_kept = home is self.home and not self._is_closed
            if is_kept:
                self._idle.append((home, link))
        if not is_kept:
            link.close()

    def _hang_up_idle(self) -> None:
        with self._changed:
            idle, self._idle = self._idle, []
        for _, link in idle:
            link.close()


def held(link: Link, home: Home, refs: Sequence[ChunkRef]) -> list[bool]:
    """For each chunk, whether the server has it: one round trip for thousands.

    Raises:
        TierError: the server failed.
    """
    found: list[bool] = []
    for begin in range(0, len(refs), messages.MAX_REFS):
        packed = messages.pack_refs(refs[begin : begin + messages.MAX_REFS])
        answer = link.ask(messages.Lookup(link.new_serial(), packed), messages.Held)
        home.note(answer.usage)
        found += [byte == 1 for byte in answer.found]
    if len(found) != len(refs):
        raise TierError("the cache server did not answer about every chunk")
    return found
