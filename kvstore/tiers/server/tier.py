"""The server tier: chunks in a cache server, shared by all engines of a namespace on this host, and on others.

What keeps it right:

- The server grants pages to write to, and the chunk can be found only after all bytes are there. The pages are leased
  to the connection until it gives them back or ends, and the number of a lease is never used again.
- Pages to read from do not change until they are given back.
- Bytes that travel in messages carry a checksum, piece by piece.
- A connection on which anything went wrong is closed, which ends all of its leases.

The server may be down when the tier is opened, or go down at any time: calls then raise ``TierError`` within their
deadline, and the next call makes new connections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ConfigError, InvalidCallError, TierError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout, round_up
from kvstore.protocol import messages
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.tiers.base import (
    MAX_LENT,
    UNBOUNDED_BYTES,
    BoundedTier,
    Loan,
    TierCounters,
    TierSetup,
    Transfer,
    check_ref,
    payload_view,
)
from kvstore.tiers.server import calls
from kvstore.tiers.server.link import Link
from kvstore.tiers.server.links import Links
from kvstore.tiers.server.moves import Framed, Mapped, Move, Mover
from kvstore.tiers.server.url import OPTIONS, ServerTarget, parse_server

logger = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20  # of payload in one request for grants: a client may lease only a part of the pool
_UNTOUCHED = {Outcome.FULL, Outcome.FAILED}


class Body(NamedTuple):
    """A chunk to move; ``belongs_to`` tells whether to a namespace."""

    ref: ChunkRef
    payload: ByteArray
    belongs_to: Callable[[bytes | None], bool]


_Way = Callable[[Link, Sequence[Body]], list[Outcome]]


class ServerTier(BoundedTier):
    """Chunks in a cache server, for one namespace. Thread-safe: each call uses a connection of its own.

    Args:
        target: where the server is.
        namespace: whose chunks these are.
        layout: the geometry of the chunks.
        capacity_bytes: of the namespace, beyond which ``put`` answers ``FULL``; with ``UNBOUNDED_BYTES`` the server
            makes room by its own rules.

    Raises:
        ConfigError: the capacity does not hold a single chunk.
    """

    name = "server"

    def __init__(self, target: ServerTarget, namespace: Namespace, layout: KVLayout, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = TierCounters()
        self._target = target
        self._layout = layout
        if capacity_bytes < self.stored_bytes(layout.blocks_per_chunk):
            raise ConfigError(
                f"{capacity_bytes} bytes of a cache server do not hold one chunk of "
                f"{self.stored_bytes(layout.blocks_per_chunk)}: raise them"
            )
        self._mover: Mover = Framed() if target.folder is None else Mapped()
        bound_bytes = 0 if capacity_bytes == UNBOUNDED_BYTES else capacity_bytes
        self._links = Links(target, namespace, messages.Geometry.of(layout), bound_bytes)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, setup: TierSetup) -> ServerTier:
        """Open the server that the option ``url`` names; the registry's factory. Does not connect.

        The other options are in ``docs/server.md``.

        Raises:
            ConfigError: see the class; or the URL or another option is wrong.
        """
        setup.require_known_options("url", *OPTIONS)
        options = {name: value for name, value in setup.options.items() if name in OPTIONS}
        target = parse_server(setup.options.get("url"), options)
        return cls(target, setup.namespace, setup.layout, setup.capacity_bytes)

    def check(self) -> None:
        """Find out at start whether the server can be used.

        Raises:
            TierSetupError: it speaks another version, or has no room for more clients.
            TierError: it cannot be reached, or refuses the key.
        """
        self._links.use(lambda link: link.ask(messages.Ping(link.new_serial()), messages.Report))

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, the least recently used first.

        Raises:
            TierError: the server failed.
        """
        return [(ref, self.stored_bytes(ref.num_blocks)) for ref in self._links.use(calls.scan)]

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether the server holds it, in memory or on disk: one round trip for thousands.

        Raises:
            TierError: the server failed.
        """
        self._links.require_open()
        return self._links.use(partial(calls.lookup, refs=refs)) if refs else []

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers; call from several threads to overlap them."""
        return self._move(transfers, self._get)

    @property
    def lends(self) -> bool:
        """Whether the server's memory is mapped here."""
        return self._target.folder is not None

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Lend chunks in the server's own pages. Each loan has a connection of its own until it ends."""
        if not self.lends or len(refs) > MAX_LENT:
            raise InvalidCallError(f"a server on this host lends at most {MAX_LENT} chunks, not {len(refs)}")
        for ref in refs:
            check_ref(self._layout, ref)
        self._links.require_open()
        if not refs:
            return Loan([], [])
        (outcomes, payloads, leases), end = self._links.hold(partial(self._lend, refs=refs))
        self._count(outcomes, [self._layout.payload_bytes(ref.num_blocks) for ref in refs])
        return Loan(outcomes, payloads, lambda: end(messages.Release(0, leases)))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers; call from several threads to overlap them."""
        return self._move(transfers, self._put)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks.

        Raises:
            TierError: the server failed; some of the chunks may be left.
        """
        wanted = list(dict.fromkeys(refs))
        self._links.require_open()
        if wanted:
            self._links.use(partial(calls.remove, refs=wanted))

    def clear(self) -> None:
        """Forget every chunk of the namespace, for all engines; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the server failed, and may have forgotten nothing.
        """
        self._links.use(calls.clear)

    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk of the namespace, and move to another one.

        Chunks of the old namespace cannot be read here from then on, whether or not the server answers.
        """
        try:  # moves first: a put under way that stores after the clear then removes its own chunks
            self._links.move(namespace, calls.clear)
        except TierError as error:
            logger.warning("chunks of the old namespace stay at the cache server until they are evicted: %s", error)

    def stored_bytes(self, num_blocks: int) -> int:
        """The bytes of the server's pages that a chunk of ``num_blocks`` blocks takes."""
        return round_up(self._layout.payload_bytes(num_blocks), PAGE_BYTES)

    @property
    def used_bytes(self) -> int:
        """What the namespace takes at the server. Asks it."""
        return self._links.use(calls.used_bytes)

    def close(self) -> None:
        """Let calls under way finish for as long as the server may be silent, then hang up. Idempotent."""
        self._links.close()
        self._mover.close()

    # -- moving ------------------------------------------------------------------------------------------------------

    def _move(self, transfers: Sequence[Transfer], move: _Way) -> list[Outcome]:
        """Move chunks in batches that are as long as possible."""
        bodies = [Body(item.ref, payload_view(self._layout, item), item.belongs_to) for item in transfers]
        if not bodies:
            self._links.require_open()
            return []
        outcomes: list[Outcome] = []
        for batch in _batches(bodies):
            outcomes += self._links.use(partial(_move_batch, batch=batch, move=move))
        self._count(outcomes, [len(body.payload) for body in bodies])
        return outcomes

    def _count(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> None:
        with self._lock:
            for outcome, num_bytes in zip(outcomes, sizes, strict=True):
                self.counters.count(outcome, num_bytes)

    def _get(self, link: Link, batch: Sequence[Body]) -> list[Outcome]:
        outcomes, moves = _begin_moves(link, messages.Acquire, batch)
        if moves:
            arrived = self._mover.read(link, [move for _, move in moves])
            for (number, _), is_here in zip(moves, arrived, strict=True):
                outcomes[number] = Outcome.HIT if is_here else Outcome.FAILED
            link.send(messages.Release(link.new_serial(), [move.grant.lease for _, move in moves]))
        return outcomes

    def _lend(self, link: Link, refs: Sequence[ChunkRef]) -> tuple[list[Outcome], list[ByteArray | None], list[int]]:
        granted = calls.grants(link, messages.Acquire, refs)
        outcomes = [messages.outcome_of(grant.outcome) for grant in granted]
        payloads = [
            self._mover.lend(link, grant, self._layout.payload_bytes(ref.num_blocks)) if grant.lease else None
            for grant, ref in zip(granted, refs, strict=True)
        ]
        return outcomes, payloads, [grant.lease for grant in granted if grant.lease]

    def _put(self, link: Link, batch: Sequence[Body]) -> list[Outcome]:
        mine = [body.belongs_to(link.namespace.id) for body in batch]
        bodies = [body for body, is_mine in zip(batch, mine, strict=True) if is_mine]
        outcomes = self._put_all(link, bodies)
        if Outcome.STORED in outcomes and not self._links.is_home(link):  # a reset came first, and may have cleared
            calls.remove(link, [body.ref for body in bodies])
            outcomes = [Outcome.FAILED if outcome is Outcome.STORED else outcome for outcome in outcomes]
        answers = iter(outcomes)
        return [next(answers) if is_mine else Outcome.FAILED for is_mine in mine]

    def _put_all(self, link: Link, batch: Sequence[Body]) -> list[Outcome]:
        outcomes, moves = _begin_moves(link, messages.Reserve, batch)
        if moves:
            arrived = self._mover.write(link, [move for _, move in moves])
            for is_whole in (True, False):
                ended = [item for item, is_there in zip(moves, arrived, strict=True) if is_there is is_whole]
                committed = calls.commit(link, [move.grant.lease for _, move in ended], is_whole=is_whole)
                for (number, _), outcome in zip(ended, committed, strict=True):
                    outcomes[number] = outcome
        return outcomes


def _move_batch(link: Link, batch: Sequence[Body], move: _Way) -> list[Outcome]:
    """Move a batch at once, then one by one what found no room beside the others."""
    outcomes = move(link, batch)
    if len(batch) > 1 and not _UNTOUCHED.isdisjoint(outcomes) and not _UNTOUCHED.issuperset(outcomes):
        for number, outcome in enumerate(outcomes):
            if outcome in _UNTOUCHED:
                (outcomes[number],) = move(link, [batch[number]])
    return outcomes


def _batches(bodies: Sequence[Body]) -> Iterator[list[Body]]:
    """Split into batches of at most ``MAX_MOVES`` chunks and ``_BATCH_BYTES``."""
    batch: list[Body] = []
    num_bytes = 0
    for body in bodies:
        if batch and (num_bytes + len(body.payload) > _BATCH_BYTES or len(batch) >= messages.MAX_MOVES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(body)
        num_bytes += len(body.payload)
    yield batch


def _begin_moves(
    link: Link, kind: type[messages.Reserve | messages.Acquire], batch: Sequence[Body]
) -> tuple[list[Outcome], list[tuple[int, Move]]]:
    """What became of each chunk so far, and the moves to be made, with their numbers in the batch."""
    granted = calls.grants(link, kind, [body.ref for body in batch])
    outcomes = [messages.outcome_of(grant.outcome) for grant in granted]
    bodies = enumerate(zip(batch, granted, strict=True))
    return outcomes, [(number, Move(body.payload, grant)) for number, (body, grant) in bodies if grant.lease]
