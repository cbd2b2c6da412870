"""Hand-over over TCP, to the cache server that a receiver embeds, or to one that several engines share.

The receiver's server grants pages for each chunk, receives the layers in pieces, each with its checksum, and publishes
the chunk at commit, once all layers are right. Chunks that a connection has not completed are dropped at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from kvstore.handover.transport import Parcel, Transport
from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.payload import Geometry
from kvstore.protocol.progress import BEAT_S, Progress
from kvstore.tiers.server import calls
from kvstore.tiers.server.connection import NoSessionError, ServerConnection
from kvstore.tiers.server.connections import ServerConnections
from kvstore.tiers.server.moves import PieceSender
from kvstore.tiers.server.url import ServerTarget, parse_server


class TcpTransport(Transport):
    """Connection to one server.

    Args:
        target: its address, and the keys to log in.
        namespace: that of the chunks.
        layout: their geometry.
    """

    def __init__(self, target: ServerTarget, namespace: Namespace, layout: KVLayout) -> None:
        self._layout = layout
        self._connections = ServerConnections(target, namespace, Geometry.of(layout))
        self._connection: ServerConnection | None = None  # in the middle of a delivery
        self._progress: Progress | None = None
        self._told: tuple[ServerConnection, Progress] | None = None
        self._told_s = 0.0

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        """See ``Transport``."""
        return self._connections.use(partial(self._deliver, parcels=parcels, ready=ready))

    def tell(self, progress: Progress) -> None:
        """See ``Transport``."""
        self._progress = progress
        if self._connection is not None:
            self._say(self._connection)
        else:
            self._connections.use(self._say_idle)

    def close(self) -> None:
        """See ``Transport``."""
        self._connections.close()

    def _say_idle(self, connection: ServerConnection) -> None:
        """Report progress outside a delivery, over a new connection if the server has closed this one."""
        connection.check()
        self._say(connection)

    def _say(self, connection: ServerConnection) -> None:
        """Report progress if it is new, or was last reported ``BEAT_S`` ago, and if the server understands it."""
        progress = self._progress
        if progress is None or not progress.sender or not connection.knows(messages.Sending):
            return
        if (connection, progress) == self._told and time.monotonic() < self._told_s + BEAT_S:
            return
        open_, lost = list(progress.open.items()), list(progress.lost.items())
        beat_ms = int(BEAT_S * 1000)
        if connection.tell(
            messages.Sending(connection.new_serial(), progress.sender, progress.following, open_, lost, beat_ms)
        ):
            self._told, self._told_s = (connection, progress), time.monotonic()

    def _deliver(
        self, connection: ServerConnection, parcels: Sequence[Parcel], ready: Iterator[range]
    ) -> list[Outcome]:
        """Deliver over a connection, after reporting the progress, which a new connection has not got yet."""
        self._connection = connection
        self._say(connection)
        try:
            return self._send(connection, parcels, ready)
        finally:
            self._connection = None

    def _send(self, connection: ServerConnection, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        """Send layers as they are ready; then, one by one, the chunks that had no room with the others."""
        is_there = calls.lookup(connection, [parcel.ref for parcel in parcels], messages.Ask)
        outcomes = [Outcome.STORED if here else Outcome.FAILED for here in is_there]
        missing = [number for number, here in enumerate(is_there) if not here]
        leases = _reserve(connection, parcels, missing)
        try:
            is_whole = self._send_layers(connection, parcels, leases, ready)
            committed = calls.commit(connection, list(leases.values()), is_whole=is_whole)
            if is_whole:
                for number, outcome in zip(leases, committed, strict=True):
                    outcomes[number] = outcome
                for number in missing:
                    if number not in leases:  # after the first without room the others are of no use
                        is_full = Outcome.FULL in outcomes
                        outcomes[number] = Outcome.FULL if is_full else self._send_whole(connection, parcels, number)
        except NoSessionError as error:  # a retry would need all layers again, and ``ready`` yields them only once
            raise TierError(str(error)) from error
        return outcomes

    def _send_layers(
        self, connection: ServerConnection, parcels: Sequence[Parcel], leases: dict[int, int], ready: Iterator[range]
    ) -> bool:
        """Send layers; return True if ``ready`` yielded all. At commit, the server checks that pieces are intact."""
        sender = self._sender(connection)
        done_layers = 0
        for layers in ready:
            for number, lease in leases.items():
                ref, payload = parcels[number].ref, parcels[number].payload
                begin = self._layout.layer_range(layers.start, ref.num_blocks)[0]
                end = self._layout.layer_range(layers.stop - 1, ref.num_blocks)[1]
                sender.send(number, lease, payload, range(begin, end))
            done_layers = layers.stop
        sender.finish()
        return done_layers == self._layout.num_layers

    def _sender(self, connection: ServerConnection) -> PieceSender:
        """Return the sender of payloads over a connection."""
        return PieceSender(connection)

    def _send_whole(self, connection: ServerConnection, parcels: Sequence[Parcel], number: int) -> Outcome:
        leases = _reserve(connection, parcels, [number])
        if not leases:
            return Outcome.FULL
        self._send_layers(connection, parcels, leases, iter([range(self._layout.num_layers)]))
        (outcome,) = calls.commit(connection, list(leases.values()), is_whole=True)
        return outcome


def _reserve(connection: ServerConnection, parcels: Sequence[Parcel], numbers: Sequence[int]) -> dict[int, int]:
    """Reserve room; returns leases by the numbers of the parcels that got one, whose trails and ends are sent.

    A receiver that would keep a chunk beyond its time to live gets no such chunk.
    """
    keeps_ends = connection.knows(messages.Expire)
    numbers = [number for number in numbers if keeps_ends or parcels[number].until_s is None]
    granted = calls.grants(connection, messages.Reserve, [parcels[number].ref for number in numbers])
    leases = {number: grant.lease for number, grant in zip(numbers, granted, strict=True) if grant.lease}
    for number, lease in leases.items():
        calls.describe(connection, lease, parcels[number].ref, parcels[number].trail)
        calls.expire(connection, lease, parcels[number].until_s)
    return leases


def open_transport(url: str, namespace: Namespace, layout: KVLayout, settings: Mapping[str, object]) -> TcpTransport:
    """Return a transport to ``kvs://host:port``, not connected yet. The settings are those of the server tier.

    Raises:
        ConfigError: the URL or a setting is wrong.
    """
    return TcpTransport(parse_server(url, settings), namespace, layout)
