"""Peers: other engines, whose chunks are read in addition to those of the own tier.

A chunk is read from the own tier if that has it, otherwise from any peer that does. No chunk is sent to a peer or
removed there. All peers are asked at once, each within the deadline of its guard, until one has the chunk. A peer that
fails counts as empty.

*Sources* are engines that a request may name; the configuration lists all of them. A source is asked and read only for
requests that name it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.model.chunks import ChunkRef, Outcome, Presence, in_any
from kvstore.model.errors import ClosedError, ConfigError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.threads import start
from kvstore.model.throttle import Throttle
from kvstore.tiers.asking import Question, contains, look
from kvstore.tiers.base import Tier, TierCounters, Transfer, payload_view, start_closing
from kvstore.tiers.loan import Loan

if TYPE_CHECKING:
    from kvstore.tiers.peer_watch import PeerWatch

logger = logging.getLogger(__name__)

_MAX_ROUTES: Final = 65_536  # chunks still to be read from a source
_MAX_ASKING: Final = 64  # questions to peers at once, of all callers
_MAX_REMOVED: Final = 65_536  # chunks on record
Item = TypeVar("Item")
Result = TypeVar("Result")
_Held = list[Presence | None]  # of each chunk; None if no tier could answer


class PeersTier(Tier):
    """Own tier, which is read and written, with peers, which are only read. Thread-safe.

    A batch is read one chunk after the other. The first chunk that times out ends its batch, and ``pending`` has the
    outcome of that chunk alone.

    ``remove`` and ``clear`` do not touch the chunks of peers. A removed chunk is no longer read from them, as its bytes
    may be wrong; a cleared one may be.

    Args:
        own: guarded. Without one, ``put`` answers ``FAILED``. ``close`` closes it.
        peers: addresses to read from as long as the tier is open.
        open_peer: opens an address for a namespace, guarded, without connecting; raises ``ConfigError`` if it is wrong.
        namespace: that of the chunks.
        layout: their geometry.
        sources: addresses of the engines that requests may name; opened when a request first names them.
        watch: finds further peers, which come and go; started here, and closed with the tier.
        places_at: returns the addresses to open for a peer that it found.
        found_read_fronts: every tier at such a peer ``reads_fronts``.

    Raises:
        ConfigError: a peer's address is wrong.
    """

    name = "peers"

    def __init__(
        self,
        own: Tier | None,
        peers: Sequence[str],
        open_peer: Callable[[str, Namespace], Tier],
        namespace: Namespace,
        layout: KVLayout,
        *,
        sources: Iterable[str] = (),
        watch: PeerWatch | None = None,
        places_at: Callable[[str], Iterable[str]] = lambda url: (url,),
        found_read_fronts: bool = True,
    ) -> None:
        self.own = own
        self.counters = TierCounters()
        self._open_peer = open_peer
        self._namespace = namespace
        self._layout = layout
        self._lock = threading.Lock()  # guards the fields below; never held during I/O
        self._fixed = _open_all(peers, open_peer, namespace)
        self._found: dict[str, Tier] = {}  # those that the watch has found
        self._closing: list[threading.Thread] = []
        self._listed = frozenset(sources) - self._fixed.keys()
        self._sources: dict[str, Tier] = {}  # the open ones of ``_listed``
        self._routes: OrderedDict[ChunkRef, tuple[str, int]] = OrderedDict()  # source, and number of reads left
        self._removed: OrderedDict[ChunkRef, None] = OrderedDict()
        self._removed_tails: OrderedDict[ChunkRef, None] = OrderedDict()  # separate, as they are many
        self._is_closed = False
        self._askers = ThreadPoolExecutor(_MAX_ASKING, "kvstore-peers")
        self._throttle = Throttle(logger)
        self._watch = watch
        self._places_at = places_at
        self._found_read_fronts = found_read_fronts
        if watch is not None:
            watch.start(self._change)

    @property
    def parts(self) -> tuple[Tier, ...]:
        """Own tier, peers, and open sources, each with its guards."""
        with self._lock:
            others = [*self._fixed.values(), *self._found.values(), *self._sources.values()]
        return (*((self.own,) if self.own else ()), *others)

    @property
    def answers(self) -> bool:
        """Always True, because only a lookup can find out that peers, which are never written to, work again."""
        return True

    def names(self, host: str, port: int | None = None) -> bool:
        """Tell if a peer that was found, and is in use now, has this host and port. Never waits."""
        return self._watch is not None and self._watch.names(host, port)

    def read_from(self, source: str, refs: Iterable[ChunkRef]) -> None:
        """Also read each of these chunks from a source, the next time it is read.

        Does nothing if the source is not listed; a peer is read in any case.
        """
        if source in self._listed:
            with self._lock:
                for ref in refs:
                    known, times = self._routes.get(ref, (source, 0))
                    self._routes[ref] = (source, times + 1 if known == source else 1)
                    self._routes.move_to_end(ref)
                while len(self._routes) > _MAX_ROUTES:
                    self._routes.popitem(last=False)

    def check(self) -> None:
        """Check that the own tier can be used; peers may be down."""
        if self.own:
            self.own.check()

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if the own tier or a peer holds it; a tier that fails counts as empty."""
        return [presence or False for presence in self._held(refs, contains)]

    def look(self, refs: Sequence[ChunkRef]) -> _Held:
        """Look up chunks for a prompt, but with None where a failed tier might hold the chunk."""
        return self._held(refs, look)

    def _held(self, refs: Sequence[ChunkRef], question: Question) -> _Held:
        self._check_open()
        wanted = list(refs)
        held: _Held = [False] * len(wanted)
        if not wanted:
            return held
        asked = [self._submit(self._ask, peer, wanted, question) for peer in self._peers().values()]
        if self.own:
            asked.append(self._submit(_asked, partial(question, self.own), wanted))
        for answer in as_completed(asked):
            self._check_open()
            held = [_either(so_far, here) for so_far, here in zip(held, answer.result(), strict=True)]
            if all(held):
                break
        return held

    def look_at(self, source: str, refs: Sequence[ChunkRef]) -> _Held:
        """Look up like ``look`` at a source; None if the source is not listed, or fails."""
        self._check_open()
        peer = self._source(source)
        return self._ask(peer, refs, look) if peer is not None else [None] * len(refs)

    @property
    def keeps_lifetimes(self) -> bool:
        """True if the own tier keeps times to live."""
        return self.own is not None and self.own.keeps_lifetimes

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Change times to live in the own tier.

        Raises:
            TierError: see the own tier.
        """
        if self.own:
            self.own.limit(lifetimes)

    @property
    def keeps_trails(self) -> bool:
        """True if the own tier keeps trails."""
        return self.own is not None and self.own.keeps_trails

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return the trails of the own tier, then those of the peers; a tier that fails counts as empty."""
        return [near or () for near in self.look_near(trails)]

    def look_near(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...] | None]:
        """Look up like ``nearest``, but with None where no chunk was named and a tier failed.

        Waits for all tiers, because the first answer may not be the best.
        """
        self._check_open()
        answers = [self._submit(_asked, tier.nearest, trails) for tier in self._always_read()] if trails else []
        try:
            found = zip(*[answer.result() for answer in answers], strict=True)
        except CancelledError as error:
            raise ClosedError("the peers tier was closed") from error
        return [_named(near) for near in found] if answers else [()] * len(trails)

    def nearest_at(self, source: str, trails: Sequence[bytes]) -> list[tuple[bytes, ...] | None]:
        """Look up like ``nearest`` at a source; None if the source is not listed, or fails."""
        self._check_open()
        peer = self._source(source)
        return _asked(peer.nearest, trails) if peer is not None else [None] * len(trails)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other, from the own tier or else from a peer.

        Raises:
            TierTimeoutError: one of them did not answer in time, and may still use its chunk's buffer.
        """
        fronts = self.reads_fronts
        sizes = [len(payload_view(self._layout, transfer, reads_fronts=fronts)) for transfer in transfers]
        self._check_open()
        return [self.counters.count(self._get(item), size) for item, size in zip(transfers, sizes, strict=True)]

    @property
    def reads_fronts(self) -> bool:
        """True if the own tier and all peers do, also those that may yet be found, because callers plan by it at start.

        Leading blocks are a miss at a source that does not.
        """
        always = (*((self.own,) if self.own else ()), *self._fixed.values())
        return (self._watch is None or self._found_read_fronts) and all(tier.reads_fronts for tier in always)

    @property
    def lends(self) -> bool:
        """True if the own tier does, and there is no peer or source, whose chunks would have to be copied."""
        others = self._fixed or self._listed or self._watch
        return self.own is not None and self.own.lends and not others

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Lend chunks of the own tier; no other tier is asked."""
        self._check_open()
        if self.own is None or not self.lends:
            return super().borrow(refs)
        loan = self.own.borrow(refs)
        for outcome, ref in zip(loan.outcomes, refs, strict=True):
            self.counters.count(outcome, self._layout.payload_bytes(ref.num_blocks))
        return loan

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks in the own tier.

        Raises:
            TierError: see the own tier.
        """
        sizes = [len(payload_view(self._layout, transfer)) for transfer in transfers]
        self._check_open()
        outcomes = self.own.put(transfers) if self.own else [Outcome.FAILED] * len(transfers)
        return [self.counters.count(outcome, size) for outcome, size in zip(outcomes, sizes, strict=True)]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks from the own tier, and no longer read them from peers.

        Raises:
            TierError: see the own tier.
        """
        fixed = tuple(refs)
        with self._lock:
            self._check_open()
            for ref in fixed:
                is_tail = ref.num_blocks < self._layout.blocks_per_chunk
                (self._removed_tails if is_tail else self._removed)[ref] = None
            for removed in (self._removed, self._removed_tails):
                while len(removed) > _MAX_REMOVED:
                    removed.popitem(last=False)
        if self.own:
            self.own.remove(fixed)

    def clear(self) -> None:
        """Remove every chunk of the own tier.

        Raises:
            TierError: see the own tier.
        """
        self._check_open()
        if self.own:
            self.own.clear()

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk of the own tier, and move to another namespace, also at peers and sources.

        Raises:
            TierError: see the own tier.
        """
        with self._lock:
            self._check_open()
            gone = [*self._fixed.values(), *self._found.values(), *self._sources.values()]
            self._namespace = namespace
            self._fixed = {url: self._open_peer(url, namespace) for url in self._fixed}
            self._found = {url: self._open_peer(url, namespace) for url in self._found}
            for known in (self._sources, self._routes, self._removed, self._removed_tails):
                known.clear()
        try:
            if self.own:
                self.own.reset(namespace)
        finally:  # afterwards, as there may be no threads for it
            start_closing(gone)

    def close(self) -> None:
        """Close the own tier, and disconnect from peers; waits for the slowest of them, which is bounded."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._askers.shutdown(wait=False, cancel_futures=True)
        for closing in (*start_closing(self.parts), *self._closing):
            closing.join()
        if self._watch is not None:
            self._watch.close()

    def _change(self, urls: Sequence[str]) -> None:
        """Open the peers that came, and close those that left; called by the watch."""
        wanted = dict.fromkeys(place for url in urls for place in self._places_at(url) if place not in self._fixed)
        with self._lock:
            if self._is_closed:
                return
            gone = [self._found.pop(place) for place in [*self._found] if place not in wanted]
            self._closing = [one for one in self._closing if one.is_alive()] + start_closing(gone)
            for place in wanted:
                try:
                    if place not in self._found:
                        self._found[place] = self._open_peer(place, self._namespace)
                except ConfigError as error:
                    self._throttle.log("open", "a peer that was found is not used: %s", error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the peers tier was closed")

    def _peers(self) -> dict[str, Tier]:
        with self._lock:
            return self._fixed | self._found

    def _always_read(self) -> list[Tier]:
        """Return the own tier, and the peers."""
        return [*((self.own,) if self.own else ()), *self._peers().values()]

    def _source(self, url: str) -> Tier | None:
        """Return a source, opened at its first use; None if it is not listed."""
        with self._lock:
            self._check_open()
            if url in self._listed and url not in self._sources:
                self._sources[url] = self._open_peer(url, self._namespace)
            return self._sources.get(url)

    def _submit(self, ask: Callable[..., Result], *arguments: object) -> Future[Result]:
        self._check_open()
        ask_now = partial(ask, *arguments)
        return start(self._askers, ask_now, ask_now)

    def _ask(self, peer: Tier, refs: Sequence[ChunkRef], question: Question) -> _Held:
        held = _asked(partial(question, peer), refs)
        if self._removed or self._removed_tails:
            held = [
                False if here and (ref in self._removed or ref in self._removed_tails) else here
                for ref, here in zip(refs, held, strict=True)
            ]
        return held

    def _get(self, transfer: Transfer) -> Outcome:
        """Read a chunk from the own tier, or else from the first peer that reports it as held."""
        try:
            outcome = _read(self.own, transfer) if self.own else Outcome.MISS
            if outcome is not Outcome.HIT:
                peers = self._peers_for(transfer.ref)
                asked = {self._submit(self._ask, peer, [transfer.ref], contains): peer for peer in peers}
                for answer in as_completed(asked):
                    self._check_open()
                    if any(answer.result()):
                        outcome = _read(asked[answer], transfer)
                    if outcome is Outcome.HIT:
                        break
        except TierTimeoutError:
            self.counters.count(Outcome.FAILED, 0)
            raise
        return outcome

    def _peers_for(self, ref: ChunkRef) -> list[Tier]:
        """Return the tiers to ask for a chunk: the peers, and the source that was named for it."""
        with self._lock:
            url, times = self._routes.pop(ref, (None, 0))
            if url is not None and times > 1:
                self._routes[ref] = (url, times - 1)
        source = self._source(url) if url is not None else None
        return [*self._peers().values(), *((source,) if source is not None else ())]


def _read(tier: Tier, transfer: Transfer) -> Outcome:
    """Read a chunk from one tier; FAILED if it is broken, and MISS if it cannot read the leading blocks alone.

    Raises:
        TierTimeoutError: it did not answer in time, and may still use the buffer.
    """
    if transfer.front_blocks and not tier.reads_fronts:
        return Outcome.MISS
    try:
        (outcome,) = tier.get([transfer])
    except TierTimeoutError:
        raise
    except (TierError, ClosedError):  # the circuit breaker has logged it; or the peer was just closed
        return Outcome.FAILED
    return outcome


def _asked(ask: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]) -> list[Result | None]:
    """Ask a tier about chunks or trails; if it fails, every answer is None."""
    try:
        return list(ask(items))
    except (TierError, ClosedError):  # the circuit breaker has logged it; or the peer was just closed
        return [None] * len(items)


def _named(answers: Iterable[tuple[bytes, ...] | None]) -> tuple[bytes, ...] | None:
    """Merge the answers of several tiers to ``nearest``; None if one failed and no chunk was named."""
    answers = list(answers)
    named = tuple(dict.fromkeys(chain(*filter(None, answers))))
    return None if None in answers and not named else named


def _either(one: Presence | None, other: Presence | None) -> Presence | None:
    """Combine two answers about a chunk: where either has it, else None if either is unknown."""
    if one or other:
        return in_any((one or False, other or False))
    return None if one is None or other is None else False


def _open_all(
    urls: Iterable[str], open_peer: Callable[[str, Namespace], Tier], namespace: Namespace
) -> dict[str, Tier]:
    """Open all peers, by address; if one cannot be opened, none stays open."""
    with ExitStack() as opened:
        peers: dict[str, Tier] = {}
        for url in urls:
            peers[url] = open_peer(url, namespace)
            opened.callback(peers[url].close)
        opened.pop_all()
    return peers
