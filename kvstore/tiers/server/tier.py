"""The server tier: chunks in a cache server, shared by all engines of a namespace on this host, and on others.

It is kept correct as follows:

- The server grants pages to write to, and the chunk can be found only after all bytes are written. The pages are leased
  to the connection until it releases them or ends, and the number of a lease is never reused.
- Pages to read from do not change until they are released.
- Bytes in messages have a checksum, piece by piece.
- A connection after any error is closed, which ends all of its leases.

A missing right of this client's key is also a value: no chunk is found, or there is no room.

The server may be down when the tier is opened, or fail at any time: calls then raise ``TierError`` within their
deadline, and the next call opens new connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvstore.index.trails import TRAIL_SHARE, is_trail
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, Presence
from kvstore.model.errors import InvalidCallError, TierError
from kvstore.model.keys import PREFIX_KEY_BYTES, Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.outcomes import outcome_of
from kvstore.protocol.payload import Geometry
from kvstore.tiers.base import (
    MAX_LENT,
    Tier,
    TierCounters,
    TierSetup,
    Transfer,
    check_ref,
    payload_view,
)
from kvstore.tiers.loan import Loan
from kvstore.tiers.server import calls
from kvstore.tiers.server.connection import NoRightError, ServerConnection
from kvstore.tiers.server.connections import Result, ServerConnections
from kvstore.tiers.server.moves import Framed, Mapped
from kvstore.tiers.server.url import ServerTarget, parse_server

logger = logging.getLogger(__name__)


class ServerTier(Tier):
    """Tier of chunks in a cache server, for one namespace. Thread-safe; each call uses a separate connection.

    The server keeps its own bound, and evicts by its own rules.

    Args:
        target: the server.
        namespace: that of the chunks.
        layout: the geometry of the chunks.
    """

    name = "server"

    def __init__(self, target: ServerTarget, namespace: Namespace, layout: KVLayout) -> None:
        self.counters = TierCounters()
        self._throttle = Throttle(logger)
        self._target = target
        self._layout = layout
        self._mover: Framed | Mapped = Framed() if target.folder is None else Mapped()
        self._connections = ServerConnections(target, namespace, Geometry.of(layout))
        self._num_clears = 0

    @classmethod
    def open(cls, setup: TierSetup) -> ServerTier:
        """Open the server that the option ``url`` names; the registry's factory. Does not connect.

        The other options are in ``docs/server.md``.

        Raises:
            ConfigError: the URL or another option is wrong, or there is a capacity.
        """
        setup.require_unbounded("set server_quotas at the server")
        options = dict(setup.options)
        return cls(parse_server(options.pop("url", None), options), setup.namespace, setup.layout)

    def check(self) -> None:
        """Check at start that the server can be used.

        Raises:
            TierSetupError: it speaks another version, or has no room for more clients.
            TierError: it cannot be reached, or refuses the key.
        """
        self._connections.use(
            lambda connection: connection.ask(messages.Ping(connection.new_serial()), messages.Report)
        )

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if the server holds it, in memory or on disk, in one round trip for thousands.

        Raises:
            TierError: the server failed.
        """
        return self._held(refs, messages.Ask)

    def look(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Look up like ``contains``, for a prompt: the server's policies hear of the use.

        Raises:
            TierError: the server failed.
        """
        return self._held(refs, messages.Lookup)

    @property
    def keeps_lifetimes(self) -> bool:
        """See ``Tier``; True if the last server that was reached keeps times to live."""
        return self._connections.know(messages.Expire)

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Let chunks held stay for longer, or without end; a longer time that another engine has set stays.

        Raises:
            TierError: the server failed.
        """
        self._connections.require_open()
        if lifetimes:
            self._use(partial(calls.prolong, lifetimes=lifetimes), None)

    @property
    def keeps_trails(self) -> bool:
        """See ``Tier``; True if the server supports trails, and keeps them for chunks of this size."""
        blocks_per_chunk = self._layout.blocks_per_chunk
        trail_bytes = blocks_per_chunk * PREFIX_KEY_BYTES
        most_bytes = min(messages.MAX_TRAIL_BYTES, self._layout.payload_bytes(blocks_per_chunk) // TRAIL_SHARE)
        return trail_bytes <= most_bytes and self._connections.know(messages.Describe)

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return, for each trail, the trails of chunks that share blocks with it, the one that shares most first.

        Raises:
            TierError: the server failed.
        """
        self._connections.require_open()
        none: list[tuple[bytes, ...]] = [()] * len(trails)
        named = self._use(partial(calls.nearest, trails=trails), none) if trails else []
        blocks_per_chunk = self._layout.blocks_per_chunk
        return [tuple(trail for trail in near if is_trail(trail, blocks_per_chunk)) for near in named]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; call from several threads to overlap them."""
        return self._each(transfers, self._get, Outcome.MISS, reads_fronts=True)

    @property
    def reads_fronts(self) -> bool:
        """Always True, because any range of a chunk's pages can be copied, or requested in messages with checksums."""
        return True

    @property
    def lends(self) -> bool:
        """True if the server is on this host, and its memory can be mapped."""
        return self._target.folder is not None

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Lend chunks in the server's pages. Each loan has a separate connection until it ends."""
        if not self.lends or len(refs) > MAX_LENT:
            raise InvalidCallError(f"a server on this host lends at most {MAX_LENT} chunks, not {len(refs)}")
        for ref in refs:
            check_ref(self._layout, ref)
        self._connections.require_open()
        if not refs:
            return Loan([], [])
        (outcomes, payloads, leases), end = self._connections.hold(partial(self._lend, refs=refs))
        for outcome, ref in zip(outcomes, refs, strict=True):
            self.counters.count(outcome, self._layout.payload_bytes(ref.num_blocks))
        return Loan(outcomes, payloads, lambda: end(messages.Release(0, leases)))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, one after the other; call from several threads to overlap them."""
        began = self._connections.namespace, self._num_clears
        return self._each(transfers, partial(self._put, began), Outcome.FULL)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks. They stay if this client lacks the right to write.

        Raises:
            TierError: the server failed; some of the chunks may be left.
        """
        wanted = list(dict.fromkeys(refs))
        self._connections.require_open()
        if wanted:
            self._use(partial(calls.remove, refs=wanted), None)

    def clear(self) -> None:
        """Remove every chunk of the namespace, for all engines; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the server failed, and may have removed nothing; or this client's key lacks the right to clear.
        """
        self._num_clears += 1  # puts under way are not repeated from now on
        self._connections.use(calls.clear)

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk of the namespace, and move to another one.

        Chunks of the old namespace cannot be read here afterwards, even if the server does not answer.
        """
        try:  # moves first, so that a put under way that stores after the clear removes its chunks
            self._connections.move(namespace, calls.clear)
        except TierError as error:
            logger.warning("chunks of the old namespace stay at the cache server until they are evicted: %s", error)

    def close(self) -> None:
        """Wait for calls under way for as long as the server may be silent, then disconnect. Idempotent."""
        self._connections.close()
        self._mover.close()

    def _held(self, refs: Sequence[ChunkRef], kind: type[messages.Lookup | messages.Ask]) -> list[Presence]:
        self._connections.require_open()
        missing: list[Presence] = [False] * len(refs)
        return self._use(partial(calls.lookup, refs=refs, kind=kind), missing) if refs else []

    def _use(self, action: Callable[[ServerConnection], Result], denied: Result) -> Result:
        """Run an action over a connection; returns ``denied`` if this client lacks the right, which is logged.

        Raises:
            TierError: the server failed.
        """

        def attempt(connection: ServerConnection) -> Result:  # the connection stays open
            try:
                return action(connection)
            except NoRightError as error:
                self._throttle.log("right", "%s", error)
                return denied

        return self._connections.use(attempt)

    def _each(
        self,
        transfers: Sequence[Transfer],
        move: Callable[[ServerConnection, Transfer], Outcome],
        denied: Outcome,
        *,
        reads_fronts: bool = False,
    ) -> list[Outcome]:
        """Check all transfers, then move one after the other; those without the right get the outcome ``denied``."""

        def moved(transfer: Transfer) -> Outcome:
            outcome = self._use(lambda connection: move(connection, transfer), denied)
            return self.counters.count(outcome, len(transfer.buffer))

        views = [payload_view(self._layout, transfer, reads_fronts=reads_fronts) for transfer in transfers]
        checked = [transfer._replace(buffer=view) for transfer, view in zip(transfers, views, strict=True)]
        self._connections.require_open()
        return [moved(transfer) for transfer in checked]

    def _get(self, connection: ServerConnection, transfer: Transfer) -> Outcome:
        (grant,) = calls.grants(connection, messages.Acquire, [transfer.ref])
        outcome = outcome_of(grant.outcome)
        if grant.lease:
            is_whole = self._read(connection, transfer, grant)
            outcome = Outcome.HIT if is_whole else Outcome.FAILED
            connection.send(messages.Release(connection.new_serial(), [grant.lease]))
        return outcome

    def _read(self, connection: ServerConnection, transfer: Transfer, grant: messages.Grant) -> bool:
        if not transfer.front_blocks:
            return self._mover.read(connection, transfer.buffer, grant)
        ranges = self._layout.front_ranges(transfer.ref.num_blocks, transfer.front_blocks)
        return self._mover.read_front(connection, transfer.buffer, grant, transfer.front_blocks, ranges)

    def _put(self, began: tuple[Namespace, int], connection: ServerConnection, transfer: Transfer) -> Outcome:
        namespace, num_clears = began  # of the first attempt
        if namespace is not self._connections.namespace or num_clears != self._num_clears:
            return Outcome.FAILED
        if not transfer.belongs_to(connection.namespace.id):
            return Outcome.FAILED
        outcome = self._store(connection, transfer)
        # A reset that overtook it may have cleared before it was stored.
        if outcome is Outcome.STORED and not self._connections.is_home(connection):
            calls.remove(connection, [transfer.ref])
            return Outcome.FAILED
        return outcome

    def _store(self, connection: ServerConnection, transfer: Transfer) -> Outcome:
        (grant,) = calls.grants(connection, messages.Reserve, [transfer.ref], transfer.owner)
        outcome = outcome_of(grant.outcome)
        if grant.lease:
            is_whole = calls.expire(connection, grant.lease, transfer.until_s) and self._mover.write(
                connection, transfer.buffer, grant
            )
            calls.describe(connection, grant.lease, transfer.ref, transfer.trail)
            (outcome,) = calls.commit(connection, [grant.lease], is_whole=is_whole)
        return outcome

    def _lend(
        self, connection: ServerConnection, refs: Sequence[ChunkRef]
    ) -> tuple[list[Outcome], list[ByteArray | None], list[int]]:
        assert isinstance(self._mover, Mapped), "others do not lend"
        granted = calls.grants(connection, messages.Acquire, refs)
        outcomes = [outcome_of(grant.outcome) for grant in granted]
        payloads = [
            self._mover.lend(connection, grant, self._layout.payload_bytes(ref.num_blocks)) if grant.lease else None
            for grant, ref in zip(granted, refs, strict=True)
        ]
        return outcomes, payloads, [grant.lease for grant in granted if grant.lease]
