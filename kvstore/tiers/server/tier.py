"""The server tier: chunks in a cache server, shared by all engines of a namespace on this host, and on others.

What keeps it right:

- The server gives a place to write to, and only after all bytes are there does it let the chunk be found. A place
  belongs to the connection until that gives it back or ends, and its lease has a number that is never used again.
- A place to read from stays what it is until it was given back.
- Bytes that travel in messages carry a checksum, piece by piece.
- A connection on which anything went wrong is closed, and with it ends all that was its.

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
from kvstore.tiers.server.link import Link
from kvstore.tiers.server.links import Home, Links, held
from kvstore.tiers.server.moves import Framed, Mapped, Move, Mover, commit
from kvstore.tiers.server.url import OPTIONS, ServerTarget, parse_server

logger = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20  # of payload under one question; a client may hold but a part of the pool
_UNTOUCHED = {Outcome.FULL, Outcome.FAILED}


class Body(NamedTuple):
    """A chunk to move: ``belongs_to`` tells in which namespaces."""

    ref: ChunkRef
    payload: ByteArray
    belongs_to: Callable[[bytes | None], bool]


_Way = Callable[[Link, Home, Sequence[Body]], list[Outcome]]


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
        """Find out whether the server can be used, for those who want to know at start.

        Raises:
            TierSetupError: it speaks another version, or has no room for more clients.
            TierError: it cannot be reached, or refuses the key.
        """
        self._links.use(lambda link, _: link.ask(messages.Ping(link.new_serial()), messages.Report))

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, the longest untouched first.

        Raises:
            TierError: the server failed.
        """

        def ask(link: Link, home: Home) -> list[ChunkRef]:
            refs: dict[ChunkRef, None] = {}
            first = 0
            while True:
                listing = link.ask(messages.Scan(link.new_serial(), first), messages.Listing)
                home.note(listing.usage)
                refs.update(dict.fromkeys(messages.unpack_refs(listing.refs)))
                first += len(listing.refs) // messages.REF_BYTES
                if first >= listing.total or not listing.refs:
                    return list(refs)

        return [(ref, self.stored_bytes(ref.num_blocks)) for ref in self._links.use(ask)]

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether the server holds it, in memory or on disk: one round trip for thousands.

        Raises:
            TierError: the server failed.
        """
        self._links.require_open()
        return self._links.use(partial(held, refs=refs)) if refs else []

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers; call from several threads to overlap them."""
        return self._move(transfers, self._get)

    @property
    def lends(self) -> bool:
        """Whether the server's memory is mapped here."""
        return self._mover.lends

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Lend chunks in the server's own pages. Each loan has a connection of its own until it ends."""
        if not self.lends or len(refs) > MAX_LENT:
            raise InvalidCallError(f"at most {MAX_LENT} chunks are lent, and only on this host, not {len(refs)}")
        for ref in refs:
            check_ref(self._layout, ref)
        self._links.require_open()
        if not refs:
            return Loan([], [])
        (outcomes, payloads, leases), hold = self._links.hold(partial(self._lend, refs=refs))
        with self._lock:
            for outcome, ref in zip(outcomes, refs, strict=True):
                self.counters.count(outcome, self._layout.payload_bytes(ref.num_blocks))
        return Loan(outcomes, payloads, lambda: hold.end(messages.Release(0, leases)))

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
            self._links.use(partial(_remove, refs=wanted))

    def clear(self) -> None:
        """Forget every chunk of the namespace, for all engines; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: the server failed, and may have forgotten nothing.
        """
        self._links.use(_clear)

    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk of the namespace, and keep those to come under another one.

        The old ones cannot be got here from then on, whether or not the server answers.
        """
        try:  # it moves first: what a put under way stores after the clear, that takes back itself
            self._links.move(namespace, _clear)
        except TierError as error:
            logger.warning("chunks of the old namespace stay at the cache server until it needs the room: %s", error)

    def stored_bytes(self, num_blocks: int) -> int:
        """The bytes of the server's pages that a chunk of ``num_blocks`` blocks takes."""
        return round_up(self._layout.payload_bytes(num_blocks), PAGE_BYTES)

    @property
    def used_bytes(self) -> int:
        """What the namespace took at the server when that was heard of last. Readable after ``close``."""
        return self._links.home.usage.used_bytes

    def close(self) -> None:
        """Let calls under way finish for as long as the server may be silent, then hang up. Idempotent."""
        self._links.close()
        self._mover.close()

    # -- moving ------------------------------------------------------------------------------------------------------

    def _move(self, transfers: Sequence[Transfer], move: _Way) -> list[Outcome]:
        """Move chunks, as many together as may be."""
        bodies = [Body(item.ref, payload_view(self._layout, item), item.belongs_to) for item in transfers]
        if not bodies:
            self._links.require_open()
            return []
        outcomes: list[Outcome] = []
        for batch in _batches(bodies):
            outcomes += self._links.use(partial(_move_batch, batch=batch, move=move))
        with self._lock:
            for outcome, body in zip(outcomes, bodies, strict=True):
                self.counters.count(outcome, len(body.payload))
        return outcomes

    def _get(self, link: Link, home: Home, batch: Sequence[Body]) -> list[Outcome]:
        packed = messages.pack_refs(body.ref for body in batch)
        granted = link.ask(messages.Acquire(link.new_serial(), packed), messages.Granted)
        outcomes, moves = _granted(batch, granted)
        if moves:
            arrived = self._mover.read(link, [move for _, move in moves])
            for (number, _), is_here in zip(moves, arrived, strict=True):
                outcomes[number] = Outcome.HIT if is_here else Outcome.FAILED
            link.send(messages.Release(link.new_serial(), [move.grant.lease for _, move in moves]))
        home.note(granted.usage)
        return outcomes

    def _lend(
        self, link: Link, home: Home, refs: Sequence[ChunkRef]
    ) -> tuple[list[Outcome], list[ByteArray | None], list[int]]:
        granted = link.ask(messages.Acquire(link.new_serial(), messages.pack_refs(refs)), messages.Granted)
        if len(granted.grants) != len(refs):
            raise TierError("the cache server did not answer about every chunk")
        home.note(granted.usage)
        outcomes = [messages.outcome_of(grant.outcome) for grant in granted.grants]
        payloads = [
            self._mover.lend(link, grant, self._layout.payload_bytes(ref.num_blocks)) if grant.lease else None
            for grant, ref in zip(granted.grants, refs, strict=True)
        ]
        return outcomes, payloads, [grant.lease for grant in granted.grants if grant.lease]

    def _put(self, link: Link, home: Home, batch: Sequence[Body]) -> list[Outcome]:
        namespace_id = home.namespace.id
        mine = [body.belongs_to(namespace_id) for body in batch]
        bodies = [body for body, is_mine in zip(batch, mine, strict=True) if is_mine]
        outcomes = self._put_all(link, home, bodies)
        if Outcome.STORED in outcomes and self._links.home is not home:  # a reset came first, and may have cleared
            _remove(link, home, [body.ref for body in bodies])
            outcomes = [Outcome.FAILED if outcome is Outcome.STORED else outcome for outcome in outcomes]
        answers = iter(outcomes)
        return [next(answers) if is_mine else Outcome.FAILED for is_mine in mine]

    def _put_all(self, link: Link, home: Home, batch: Sequence[Body]) -> list[Outcome]:
        if not batch:
            return []
        packed = messages.pack_refs(body.ref for body in batch)
        granted = link.ask(messages.Reserve(link.new_serial(), packed), messages.Granted)
        outcomes, moves = _granted(batch, granted)
        home.note(granted.usage)
        if moves:
            arrived = self._mover.write(link, [move for _, move in moves])
            for is_whole in (True, False):
                ended = [item for item, is_there in zip(moves, arrived, strict=True) if is_there is is_whole]
                committed = commit(link, home, [move.grant.lease for _, move in ended], is_whole=is_whole)
                for (number, _), outcome in zip(ended, committed, strict=True):
                    outcomes[number] = outcome
        return outcomes


def _move_batch(link: Link, home: Home, batch: Sequence[Body], move: _Way) -> list[Outcome]:
    """A batch at once; what found no room beside the others, again by itself."""
    outcomes = move(link, home, batch)
    if len(batch) > 1 and not _UNTOUCHED.isdisjoint(outcomes) and not _UNTOUCHED.issuperset(outcomes):
        for number, outcome in enumerate(outcomes):
            if outcome in _UNTOUCHED:
                (outcomes[number],) = move(link, home, [batch[number]])
    return outcomes


def _remove(link: Link, home: Home, refs: Sequence[ChunkRef]) -> None:
    for begin in range(0, len(refs), messages.MAX_REFS):
        packed = messages.pack_refs(refs[begin : begin + messages.MAX_REFS])
        home.note(link.ask(messages.Remove(link.new_serial(), packed), messages.Done).usage)


def _clear(link: Link, home: Home) -> None:
    home.note(link.ask(messages.Clear(link.new_serial()), messages.Done).usage)


def _batches(bodies: Sequence[Body]) -> Iterator[list[Body]]:
    """Bodies in rows that are not too long."""
    batch: list[Body] = []
    num_bytes = 0
    for body in bodies:
        if batch and (num_bytes + len(body.payload) > _BATCH_BYTES or len(batch) >= messages.MAX_MOVES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(body)
        num_bytes += len(body.payload)
    yield batch


def _granted(batch: Sequence[Body], granted: messages.Granted) -> tuple[list[Outcome], list[tuple[int, Move]]]:
    """What became of each chunk so far, and the moves to be made with their numbers in the batch."""
    if len(granted.grants) != len(batch):
        raise TierError("the cache server did not answer about every chunk")
    outcomes = [messages.outcome_of(grant.outcome) for grant in granted.grants]
    moves = [
        (number, Move(body.payload, grant))
        for number, (body, grant) in enumerate(zip(batch, granted.grants, strict=True))
        if grant.lease
    ]
    return outcomes, moves
