"""State shared by the parts of the server, and the callbacks with which they reach its disk and its clients."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.server.clients import IPC, Client
from kvstore.server.disk import Disk
from kvstore.server.pool import Pool
from kvstore.server.sessions import Peer, Sessions
from kvstore.server.spaces import Space
from kvstore.server.stock import Stock

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

SLICE_S: Final = 0.002
_FINDS: Final = (messages.Lookup, messages.Ask, messages.Nearest, messages.Acquire)


@dataclass
class Core:
    """Shared state of the server. Belongs to the thread that decides; only ``report`` may be called from others.

    Attributes:
        pool: the memory.
        stock: the chunks and their places.
        sessions: the clients and their leases.
        disk: None for a server without one.
        send: sends a client an answer, followed by frames of payload.
        report: queues a call for the thread that decides.
        is_open: tells if a token belongs to an open connection to the unix socket.
        stats: all counters, for a report.
        sender: returns the client that sent the message being handled, which came from a peer.
        now: the monotonic time in seconds.
        is_closing: the server is about to end: no new clients, no new chunks.
        is_owned: it belongs to an engine, whose own processes connect through its unix socket.
        slices: long work, done in slices so that other clients do not wait.
        denied: number of refused requests, by the name of the client's key and the right or room that it lacked.
    """

    pool: Pool
    stock: Stock
    sessions: Sessions
    disk: Disk | None
    send: Callable[[Peer, messages.Answer, Sequence[Buffer]], None]
    report: Callable[[Callable[[], None]], None]
    is_open: Callable[[bytes], bool]
    stats: Callable[[], dict[str, Any]]
    sender: Callable[[Peer], Client]
    now: Callable[[], float]
    is_closing: bool = False
    is_owned: bool = False
    slices: Slices = field(init=False)
    denied: Counter[tuple[str, str]] = field(default_factory=Counter)
    _throttle: Throttle = field(default_factory=lambda: Throttle(logger))

    def __post_init__(self) -> None:
        self.slices = Slices(self.report, self.now, self.sweep)

    @property
    def status(self) -> str:
        """``ok``, or ``closing``."""
        return "closing" if self.is_closing else "ok"

    def is_closed_to(self, client: Client) -> bool:
        """Tell if a client may begin nothing more and store nothing; an engine goes on using its own server."""
        return self.is_closing and not (self.is_owned and client.socket == IPC)

    def turns_away(self, client: Client, request: messages.Request) -> bool:
        """Tell if a client must look elsewhere: an engine that drains answers others no more, so that they stop asking.

        What they have begun to read they may finish. Other servers answer until they end.
        """
        return self.is_owned and self.is_closed_to(client) and isinstance(request, _FINDS)

    def usage(self, space: Space) -> messages.Usage:
        """Return the bytes that a namespace uses now, which every answer to a client carries."""
        return messages.Usage(self.stock.stamp, space.used_bytes)

    def deny(self, client: Client, lacked: str, why: str) -> None:
        """Count a refusal, and log it at a limited rate."""
        self.denied[client.name, lacked] += 1
        who = client.name or "a client without a key"
        self._throttle.log(f"{who} {lacked}", "refused %s: %s", who, why)

    def keep_denials(self, names: Collection[str]) -> None:
        """Forget the refusals of all other clients, which are no longer listed."""
        for name, lacked in list(self.denied):
            if name and name not in names:
                del self.denied[name, lacked]

    def sweep(self) -> None:
        """Start to delete the files of evicted and removed chunks."""
        removals, forgotten = self.stock.take_removals(), self.stock.spaces.take_forgotten()
        if self.disk is not None:
            self.disk.remove(removals)
            for space in forgotten:
                self.disk.forget(space)


class Slices:
    """Runs work in slices. Belongs to the thread that decides. Between two steps of some work anything may happen.

    Args:
        report: queues a call for the thread that decides, behind other calls and messages.
        now: the monotonic time in seconds.
        after_step: called after every step.
    """

    def __init__(
        self, report: Callable[[Callable[[], None]], None], now: Callable[[], float], after_step: Callable[[], None]
    ) -> None:
        self._report = report
        self._now = now
        self._after_step = after_step
        self._waiting: deque[Iterator[None]] = deque()  # work that gets a slice in turn
        self._is_due = False

    @property
    def is_busy(self) -> bool:
        """True if some work is not finished."""
        return bool(self._waiting)

    def begin(self, work: Iterator[None]) -> None:
        """Do a first slice of work whose steps each take far less than a slice. Raises the errors of this slice."""
        end_s = self._now() + SLICE_S
        for _ in work:
            self._after_step()
            if self._now() >= end_s:
                self._waiting.append(work)
                break
        else:
            self._after_step()
        if self._waiting and not self._is_due:
            self._is_due = True
            self._report(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        if self._waiting:
            self.begin(self._waiting.popleft())
