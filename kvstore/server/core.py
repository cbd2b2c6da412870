"""What the parts of the server share: its state, and the ways to its disk and its clients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.protocol import messages
from kvstore.server.clients import Client
from kvstore.server.disk import Disk
from kvstore.server.pool import Pool
from kvstore.server.sessions import Peer, Sessions
from kvstore.server.slices import Slices
from kvstore.server.spaces import Space
from kvstore.server.stock import Stock
from kvstore.throttle import Throttle

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)


@dataclass
class Core:
    """Belongs to the thread that decides; only ``report`` may be called from others.

    Attributes:
        pool: the memory.
        stock: which chunks are where.
        sessions: the clients and their leases.
        disk: None for a server without one.
        send: sends an answer to a client, and frames of payload behind it.
        report: lets the thread that decides call something.
        is_open: whether a token belongs to an open connection to the unix socket.
        stats: all counters, for a report.
        sender: who sent the message at hand, which came from a peer.
        now: the monotonic time in seconds.
        is_closing: the server is about to end: no new clients, no new chunks.
        slices: what takes longer than others should wait.
        denied: requests that were not carried out, by the name of the client's key, and the right or room it lacked.
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
    slices: Slices = field(init=False)
    denied: Counter[tuple[str, str]] = field(default_factory=Counter)
    _throttle: Throttle = field(default_factory=lambda: Throttle(logger))

    def __post_init__(self) -> None:
        self.slices = Slices(self.report, self.now, self.sweep)

    @property
    def status(self) -> str:
        """``ok``, or ``closing``."""
        return "closing" if self.is_closing else "ok"

    def usage(self, space: Space) -> messages.Usage:
        """What a namespace takes now, as clients are told with every answer."""
        return messages.Usage(self.stock.stamp, space.used_bytes)

    def deny(self, client: Client, lacked: str, why: str) -> None:
        """Count what a client was refused, and log it now and then."""
        self.denied[client.name, lacked] += 1
        who = client.name or "a client without a key"
        self._throttle.log(f"{who} {lacked}", "refused %s: %s", who, why)

    def sweep(self) -> None:
        """Start to delete the files of evicted and removed chunks."""
        removals, forgotten = self.stock.take_removals(), self.stock.take_forgotten()
        if self.disk is not None:
            self.disk.remove(removals)
            for space in forgotten:
                self.disk.forget(space)
