"""The tier of several cache servers: each chunk is asked for, read and written in the server that owns it.

A server that fails costs its own chunks, which count as missing: each has its own deadline and circuit breaker, and one
that is bypassed is tried by a thread for it. A chunk's name does not tell which others share blocks with it, so
``nearest`` asks all servers at once.

No server gives a chunk again that was removed or cleared, even one that was away meanwhile:

- Removals and clears have numbers, and go to every server, as any may have owned a chunk while others were away.
- A member is *settled* up to the last one that it has carried out. Chunks removed later are neither read from it nor
  written to it, and none is before it has been cleared. A thread repeats what it owes.
- A member that comes again owes what it missed. It is cleared if that is no longer on record, or if its name is not: it
  may have been here before, as addresses change hands. Without the right to clear it is let in, as a single server is.
- After a reset the namespace is new, and a server that was away has nothing in it.

A chunk that moved to another owner and back has the same bytes, because its name covers all that determines them. A
time to live ends at each server by itself.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import Final, TypeVar

from kvstore.index.trails import Trails
from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import ClosedError, KVStoreError, TierError, TierSetupError, TierTimeoutError
from kvstore.model.keys import PREFIX_KEY_BYTES, Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime
from kvstore.model.throttle import Throttle
from kvstore.tiers.asking import Question, contains, look
from kvstore.tiers.base import MAX_NEAREST, Tier, TierCounters, TierSetup, Transfer, payload_view, start_closing
from kvstore.tiers.guards import CircuitBreaker
from kvstore.tiers.members.addresses import LOOK_INTERVAL_S, MAX_MEMBERS, Member, Members, parse_members
from kvstore.tiers.members.placement import owners, seed_of
from kvstore.tiers.server.connection import NoRightError
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = LOOK_INTERVAL_S
_FIRST_ANSWER_S: Final = 3.0
_END_S: Final = 2.0  # the system's resolver may take longer, and cannot be interrupted
_MAX_ASKING: Final = 64
_MAX_REMOVED: Final = 65_536  # chunks on record
_MAX_NAMES: Final = 4096  # of members that left, likewise
_MAX_REFS: Final = 1024  # removed in one call, which has a deadline
_ANY: Final = ChunkRef(bytes(PREFIX_KEY_BYTES), 1)  # to ask about, if only the answer counts
_CLOSED: Final = "the tier of several cache servers was closed"
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Member:
    """A server in use. ``settled`` is the number of the last removal or clear that it has carried out."""

    place: Member
    tier: Tier
    seed: int
    namespace: Namespace
    settled: int
    settling: threading.Lock = field(default_factory=threading.Lock)


class MembersTier(Tier):
    """Tier of chunks in several cache servers, for one namespace. Thread-safe.

    Args:
        members: the servers; asked for again every few seconds, on a separate thread.
        open_member: opens a server for a namespace, guarded, without connecting.
        namespace: that of the chunks.
        layout: their geometry.
    """

    name = "members"
    reads_fronts = True

    def __init__(
        self, members: Members, open_member: Callable[[Member, Namespace], Tier], namespace: Namespace, layout: KVLayout
    ) -> None:
        self.counters = TierCounters()
        self._source = members
        self._open_member = open_member
        self._layout = layout
        self._throttle = Throttle(logger)
        self._lock = threading.Lock()  # guards the fields below
        self._namespace = namespace
        self._members: tuple[_Member, ...] = ()  # replaced as a whole, and read without the lock
        self._removed: OrderedDict[ChunkRef, int] = OrderedDict()  # with the number of the removal
        self._number = self._dropped = self._cleared = 0  # last number; last that left the record; last clear
        self._settled: OrderedDict[str, int] = OrderedDict()  # of members that left, by name
        self._began = 0  # number of the last reset
        self._closing: list[threading.Thread] = []
        self._ended, self._has_looked = threading.Event(), threading.Event()
        self._askers = ThreadPoolExecutor(_MAX_ASKING, "kvstore-servers")
        self._watcher = threading.Thread(target=self._watch, name="kvstore-members", daemon=True)
        self._watcher.start()
        self._has_looked.wait(_FIRST_ANSWER_S)

    @classmethod
    def open(cls, setup: TierSetup) -> MembersTier:
        """Open the servers that the option ``url`` names; the registry's factory. Does not connect to them.

        Raises:
            ConfigError: the URL, the file that it names, or an option is wrong, or there is a capacity.
        """
        options = dict(setup.options)
        members = parse_members(options.pop("url", None))
        guard = setup.guard or partial(CircuitBreaker, failures=1, asks_storage=True)

        def open_member(member: Member, namespace: Namespace) -> Tier:
            url = f"{member.url}?{members.query}"
            tier = ServerTier.open(replace(setup, namespace=namespace, options={**options, "url": url}))
            tier.name = f"server-{member.name}"  # log lines must name it
            return guard(tier)

        setup.require_unbounded("set server_quotas at the servers")
        parse_server(f"kvs://host:1?{members.query}", options)
        with suppress(TierError):  # a file may come later
            _ = members.is_asked or members.find()
        return cls(members, open_member, setup.namespace, setup.layout)

    @property
    def parts(self) -> tuple[Tier, ...]:
        """The servers known now, each with its guards."""
        return tuple(member.tier for member in self._members)

    @property
    def answers(self) -> bool:
        """True if any server is in use."""
        return any(tier.answers for tier in self.parts)

    @property
    def keeps_lifetimes(self) -> bool:
        """True if all servers in use do."""
        return self.answers and all(tier.keeps_lifetimes for tier in self.parts if tier.answers)

    @property
    def keeps_trails(self) -> bool:
        """True if all servers in use do."""
        return self.answers and all(tier.keeps_trails for tier in self.parts if tier.answers)

    def check(self) -> None:
        """Check that a server can be used, and log why others cannot.

        Raises:
            TierSetupError: a server refuses what was configured.
            TierError: none can be used, or none is known.
        """
        told = self._ask_each(self._members, lambda member: _attempt(member.tier.check))
        failed = [error for error in told if error is not None]
        refused = next((error for error in failed if isinstance(error, TierSetupError)), None)
        if refused is not None or len(failed) == len(told):
            raise refused or next(iter(failed), TierError("no cache server is known yet"))
        for error in failed:
            logger.warning("one of several cache servers cannot be used now: %s", error)

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if its owner holds it; an owner that fails counts as empty."""
        return [presence or False for presence in self._ask_owners(refs, contains)]

    def look(self, refs: Sequence[ChunkRef]) -> list[Presence | None]:
        """Look up chunks for a prompt, but with None where the owner did not answer."""
        return self._ask_owners(refs, look)

    def _ask_owners(self, refs: Sequence[ChunkRef], question: Question) -> list[Presence | None]:
        """Ask all owners at once; None where one did not answer."""
        parts = {member: places for member, places in self._by_owner(refs).items() if member.tier.answers}
        told = self._ask_each(
            parts.items(), lambda part: _asked(partial(question, part[0].tier), [refs[place] for place in part[1]])
        )
        held: list[Presence | None] = [None] * len(refs)
        for places, answers in zip(parts.values(), told, strict=True):
            for place, answer in zip(places, answers, strict=True):
                held[place] = answer
        return held

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Return the trails that the servers name, those that share most first; one that fails counts as empty."""
        used = [member for member in self._members if trails and member.tier.answers and not self._must_clear(member)]
        told = self._ask_each(used, lambda member: _asked(member.tier.nearest, trails))
        return [_closest(trail, chain(*filter(None, near))) for trail, *near in zip(trails, *told, strict=True)]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, from one server after the other; of one that fails they are ``FAILED``.

        Raises:
            TierTimeoutError: a server did not answer in time, and may still use its chunks' buffers.
        """
        return self._move(transfers, lambda tier, some: tier.get(some), Outcome.MISS, reads_fronts=True)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, in one server after the other; at one that fails they are ``FAILED``.

        Raises:
            TierTimeoutError: a server did not answer in time, and may still use its chunks' buffers.
        """
        return self._move(transfers, lambda tier, some: tier.put(some), Outcome.FAILED)

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Change the times to live of chunks held; a server that fails does not affect the others."""
        parts = self._by_owner([one.ref for one in lifetimes])
        self._ask_each(
            parts.items(), lambda part: _attempt(lambda: part[0].tier.limit([lifetimes[place] for place in part[1]]))
        )

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks from every server, now or as soon as it answers; until then they are not read from it."""
        with self._lock:
            self._number += 1
            for ref in refs:
                self._removed[ref] = self._number
                self._removed.move_to_end(ref)
            while len(self._removed) > _MAX_REMOVED:
                first, self._dropped = next(iter(self._removed.items()))  # before it is gone, as readers take no lock
                del self._removed[first]
        self._ask_each(self._members, self._settle)

    def clear(self) -> None:
        """Remove every chunk of the namespace; nothing is read from a server that does not, until it does.

        Raises:
            TierError: a server did not.
        """
        self._sweep()

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk of the namespace, and move to another one.

        Raises:
            TierError: a server hangs; nothing is read from it before it has moved.
        """
        self._sweep(namespace)

    def close(self) -> None:
        """Disconnect from all servers; waits for the slowest of them, which is bounded."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        self._askers.shutdown(wait=False, cancel_futures=True)
        for closing in (*start_closing(self.parts), *self._closing):
            closing.join()
        self._watcher.join(_END_S)

    def _by_owner(self, refs: Sequence[ChunkRef]) -> dict[_Member, list[int]]:
        """Return the places of each member's chunks, without those that it must remove."""
        self._check_open()
        members, parts = self._members, dict[_Member, list[int]]()
        for place, owner in enumerate(owners(refs, [member.seed for member in members]) if members and refs else ()):
            if self._removed.get(refs[place], 0) <= members[owner].settled:
                parts.setdefault(members[owner], []).append(place)
        return {member: some for member, some in parts.items() if not self._must_clear(member)}

    def _move(
        self,
        transfers: Sequence[Transfer],
        move: Callable[[Tier, Sequence[Transfer]], list[Outcome]],
        removed: Outcome,
        *,
        reads_fronts: bool = False,
    ) -> list[Outcome]:
        sizes = [len(payload_view(self._layout, transfer, reads_fronts=reads_fronts)) for transfer in transfers]
        outcomes = [removed if self._members else Outcome.FAILED] * len(transfers)
        for member, places in self._by_owner([transfer.ref for transfer in transfers]).items():
            moved = [Outcome.FAILED] * len(places)
            try:
                if member.tier.answers:
                    moved = move(member.tier, [transfers[place] for place in places])
            except TierTimeoutError:
                raise
            except (TierError, ClosedError):  # the circuit breaker has logged it; or the member has just left
                pass
            for place, outcome in zip(places, moved, strict=True):
                outcomes[place] = outcome
        return [self.counters.count(outcome, size) for outcome, size in zip(outcomes, sizes, strict=True)]

    def _ask_each(self, items: Iterable[Item], ask: Callable[[Item], Result]) -> list[Result]:
        """Ask about several items at once, each on a thread; about a single one on the caller's."""
        self._check_open()
        wanted = list(items)
        if len(wanted) < 2:
            return [ask(item) for item in wanted]
        asked: list[Future[Result]] = []
        with suppress(RuntimeError):  # after close
            asked = [self._askers.submit(ask, item) for item in wanted]
        with suppress(CancelledError):
            if asked:
                return [answer.result() for answer in asked]
        raise ClosedError(_CLOSED)

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise ClosedError(_CLOSED)

    def _must_clear(self, member: _Member) -> bool:
        return member.settled < max(self._cleared, self._dropped)

    def _sweep(self, namespace: Namespace | None = None) -> None:
        with self._lock:
            self._check_open()
            self._number += 1
            self._cleared = self._number
            self._removed.clear()
            if namespace is not None:
                self._namespace, self._began = Namespace(dict(namespace.fields)), self._number
                self._settled.clear()
        for error in self._ask_each(self._members, self._settle):
            if error is not None:
                raise error

    def _settle(self, member: _Member) -> TierError | None:
        """Let a member carry out what it owes, and return the error if it does not."""
        with member.settling:
            with self._lock:
                upto, namespace, must_clear = self._number, self._namespace, self._must_clear(member)
                owed = takewhile(lambda item: item[1] > member.settled, reversed(self._removed.items()))
                refs = [ref for ref, _ in owed]
            error: TierError | None = None
            if member.namespace is not namespace:
                error = _attempt(lambda: member.tier.reset(namespace))
                member.namespace = member.namespace if error else namespace
            elif must_clear:
                error = _attempt(member.tier.clear)
            elif member.tier.answers:  # otherwise its breaker would only note them
                for first in range(0, len(refs), _MAX_REFS):
                    error = error or _attempt(partial(member.tier.remove, refs[first : first + _MAX_REFS]))
            if isinstance(error, NoRightError):
                self._throttle.log("right", "a cache server keeps chunks that were cleared or removed: %s", error)
            if isinstance(error, NoRightError) or (error is None and (must_clear or member.tier.answers)):
                with self._lock:
                    member.settled = max(member.settled, upto)
            return error

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                found = {place.name: place for place in self._source.find()}
                if not found and self._members:
                    self._throttle.log("none", "no cache server is named any more; the last known ones are kept")
                elif found:
                    self._change([found[name] for name in sorted(found)[:MAX_MEMBERS]])
                if len(found) > MAX_MEMBERS:
                    self._throttle.log("many", "only %d of %d cache servers are used", MAX_MEMBERS, len(found))
            except (KVStoreError, RuntimeError) as error:  # or no thread can be started
                self._throttle.log("find", "the last known cache servers are kept: %s", error)
            for member in self._members:
                with suppress(RuntimeError):  # after close
                    if member.settled < self._number and not member.settling.locked():
                        self._askers.submit(self._settle, member)
                    if not member.tier.answers:
                        self._askers.submit(_asked, member.tier.contains, [_ANY])
            self._has_looked.set()
            self._ended.wait(random.uniform(*_INTERVAL_S))  # noqa: S311 - not a secret

    def _change(self, places: Sequence[Member]) -> None:
        """Open the members that came, and close those that left."""
        with self._lock:
            if self._ended.is_set():
                return
            gone = [member for member in self._members if member.place not in places]
            if self._source.keeps_names:
                self._settled.update({member.place.name: member.settled for member in gone})
            self._members = tuple(member for member in self._members if member.place in places)
            self._closing = [one for one in self._closing if one.is_alive()] + start_closing(one.tier for one in gone)
            came = [place for place in places if place not in {member.place for member in self._members}]
            for place in came:
                tier, settled = self._open_member(place, self._namespace), self._settled.pop(place.name, self._began)
                self._members += (_Member(place, tier, seed_of(place.name), self._namespace, settled),)
            while len(self._settled) > _MAX_NAMES:
                self._settled.popitem(last=False)
        if came or gone:
            logger.info("%d cache servers: %d came, %d left", len(places), len(came), len(gone))


def _attempt(action: Callable[[], None]) -> TierError | None:
    """Let a member act; returns the error if it fails, which its circuit breaker has logged."""
    try:
        action()
    except ClosedError as error:  # it has just left
        return TierError(str(error))
    except TierError as error:
        return error
    return None


def _asked(ask: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]) -> Sequence[Result | None]:
    """Ask a member about chunks or trails; if it fails, every answer is None."""
    try:
        return ask(items)
    except (TierError, ClosedError):
        return [None] * len(items)


def _closest(trail: bytes, named: Iterable[bytes]) -> tuple[bytes, ...]:
    known = Trails()
    known.add_all({*named})
    return known.closest(trail, MAX_NEAREST)
