"""Hand-over in which the receiver reads the bytes itself, from memory registered with a channel.

The messages are those of TCP, except for payload: an offer has the position of a part of it, and its checksum. A
receiver that does not read through this channel gets payload in messages, which is logged in one line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvstore.channels.base import Channel
from kvstore.handover.tcp import TcpTransport
from kvstore.handover.transport import Parcel
from kvstore.model.chunks import ByteArray, Outcome
from kvstore.model.errors import ChannelError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.outcomes import number_of
from kvstore.protocol.payload import checksum
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.moves import PieceSender
from kvstore.tiers.server.url import ServerTarget, parse_server

logger = logging.getLogger(__name__)

_LEAST_BYTES: Final = 1 << 20  # layers are offered together until they reach this size
_MOST_BYTES: Final = messages.OFFER_BYTES  # so that one is verified while the next is read
_WINDOW: Final = 12  # offers under way at once; a server accepts 16 pieces of a client
_throttle = Throttle(logger)


class Exposed:
    """Memory that peers read through a channel. Thread-safe.

    Attributes:
        channel: the channel that the memory is registered with.
        memory: uint8 ``[num_bytes]``.
        read_bytes: bytes that receivers have read. Read without a lock.
    """

    def __init__(self, channel: Channel, memory: ByteArray) -> None:
        self.channel = channel
        self.memory = memory
        self.read_bytes = 0
        self._lock = threading.Lock()

    def count(self, num_bytes: int) -> None:
        """Count bytes that a receiver has read."""
        with self._lock:
            self.read_bytes += num_bytes

    def offset_of(self, payload: ByteArray) -> int | None:
        """Return the offset of a payload in this memory; None if it is elsewhere."""
        offset_bytes: int = payload.ctypes.data - self.memory.ctypes.data
        return offset_bytes if 0 <= offset_bytes <= self.memory.nbytes - payload.nbytes else None


class OfferingTransport(TcpTransport):
    """Connection to one server, which reads from exposed memory if it can. For other arguments see the base class."""

    def __init__(self, target: ServerTarget, namespace: Namespace, layout: KVLayout, exposed: Exposed) -> None:
        super().__init__(target, namespace, layout)
        self._exposed = exposed
        # True if that connection's server reads through the channel.
        self._attached: tuple[ServerConnection, bool] | None = None

    def _send(self, connection: ServerConnection, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        with self._exposed.channel.serving():
            return super()._send(connection, parcels, ready)

    def _sender(self, connection: ServerConnection) -> PieceSender:
        if self._attached is None or self._attached[0] is not connection:
            self._attached = (connection, self._attach(connection))
        return (
            OfferSender(connection, self._exposed, self._give_up) if self._attached[1] else super()._sender(connection)
        )

    def _attach(self, connection: ServerConnection) -> bool:
        """Offer the channel to the server; return True if it reads through it."""
        name = self._exposed.channel.name
        if not connection.knows(messages.Attach):
            self._log_fallback("its version of kvstore has no channels")
            return False
        try:
            description = self._exposed.channel.describe()
        except ChannelError as error:
            self._log_fallback(str(error))
            return False
        answer = connection.ask(messages.Attach(connection.new_serial(), name, description), messages.Done)
        if answer.outcomes != bytes([number_of(Outcome.STORED)]):
            self._log_fallback("it does not use this channel: set transfer_channel there, too, and check its log")
            return False
        return True

    def _give_up(self, connection: ServerConnection) -> None:
        """Stop offering over a connection, because an offer failed."""
        self._attached = (connection, False)
        self._log_fallback("a read has failed, or returned damaged bytes")

    def _log_fallback(self, why: str) -> None:
        name = self._exposed.channel.name
        _throttle.log(f"{name} {why}", "KV is sent to a receiver over TCP and not through %s: %s", name, why)


class OfferSender(PieceSender):
    """Sender of offers, of which several are under way at once.

    Args:
        connection: connection to the reading server.
        exposed: the memory.
        give_up: called with the connection when an offer has failed.
    """

    def __init__(
        self, connection: ServerConnection, exposed: Exposed, give_up: Callable[[ServerConnection], None]
    ) -> None:
        super().__init__(connection, _WINDOW)
        self._exposed = exposed
        self._give_up = give_up
        self._offered_bytes = 0
        self._joined: dict[int, tuple[int, ByteArray, range]] = {}  # parts not offered yet, by payload number

    def send(self, number: int, lease: int, payload: ByteArray, part: range) -> None:
        """See ``PieceSender``. A part that is too small for an offer waits for the next one."""
        if self._exposed.offset_of(payload) is None:
            super().send(number, lease, payload, part)
            return
        _, _, before = self._joined.pop(number, (0, payload, range(part.start, part.start)))
        assert before.stop == part.start, "layers come in order"
        joined = range(before.start, part.stop)
        if len(joined) < _LEAST_BYTES:
            self._joined[number] = (lease, payload, joined)
        else:
            self._offer(number, lease, payload, joined)

    def finish(self) -> set[int]:
        """See ``PieceSender``."""
        joined, self._joined = self._joined, {}
        for number, (lease, payload, part) in joined.items():
            self._offer(number, lease, payload, part)
        failed = super().finish()
        if failed:
            self._give_up(self._connection)
        else:
            self._exposed.count(self._offered_bytes)
        return failed

    def _offer(self, number: int, lease: int, payload: ByteArray, part: range) -> None:
        begin = self._exposed.offset_of(payload)
        assert begin is not None
        for offset in range(part.start, part.stop, _MOST_BYTES):
            piece = payload[offset : min(offset + _MOST_BYTES, part.stop)]
            added_up = checksum([piece.data])
            serial = self._begin(number)
            self._offered_bytes += len(piece)
            self._connection.send(messages.Offer(serial, lease, offset, len(piece), begin + offset, added_up))


def open_offering(
    url: str, namespace: Namespace, layout: KVLayout, settings: Mapping[str, object], exposed: Exposed
) -> OfferingTransport:
    """Return a transport to a server that may read from exposed memory; see ``open_transport``.

    Raises:
        ConfigError: the URL or a setting is wrong.
    """
    return OfferingTransport(parse_server(url, settings), namespace, layout, exposed)
