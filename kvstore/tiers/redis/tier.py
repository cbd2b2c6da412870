"""The redis tier: chunks in one server, behind Sentinel, or in a cluster, shared by all engines of a namespace.

What keeps it right:

- A chunk is there whole or not at all, and every byte is checked when it is read: ``_redis_chunk.py``.
- The names of all keys hold the namespace's *epoch*, which stands in a key of its own and is asked for in every call.
  ``clear`` replaces it: what was there before is unreachable at once, for every engine, and is deleted afterwards. A
  ``put`` under way looks once more at its end, and takes back what it has stored under an epoch that is over.
- No state here is needed to go on after a failure. The servers may be down when the tier is opened.

Capacity and ``used_bytes`` are about what this tier has stored or found: in a Redis that several engines share, and
that evicts by itself, leave the capacity at ``UNBOUNDED_BYTES`` and set ``maxmemory`` in the server.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

try:
    from redis.exceptions import OutOfMemoryError, ResponseError
except ImportError as error:
    raise ImportError("the redis tier needs redis-py: pip install 'vllm-kvstore[redis]'") from error

from kvstore.chunks import ByteArray, ChunkRef, Outcome
from kvstore.errors import ClosedError, ConfigError, TierError, TierSetupError
from kvstore.format.codecs import open_codec
from kvstore.tiers.base import Tier, TierCounters, TierSetup, Transfer, payload_view
from kvstore.tiers.redis.calls import Calls, replaced
from kvstore.tiers.redis.chunk import ChunkIO, Home, Outgoing, ended_by, exists_command
from kvstore.tiers.redis.coded import CodedIO
from kvstore.tiers.redis.ledger import Ledger, WriteId
from kvstore.tiers.redis.nodes import Node, NoMemoryError, SlotMovingError, open_nodes
from kvstore.tiers.redis.sweep import Sweeper
from kvstore.tiers.redis.url import OPTIONS, Kind, RedisTarget, parse_target
from kvstore.tiers.redis.wire import Link, Reply, checked, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.keys import Namespace
    from kvstore.layout import KVLayout

logger = logging.getLogger(__name__)

_LOOKS = 8  # at a chunk that is replaced again and again while it is read
_BATCH_CHUNKS = 256
_CUT_WAIT_S = 2.0
Moved = tuple[Outcome, int]  # what became of a chunk, and the length of its values if it moved
_FAILED: Moved = (Outcome.FAILED, 0)
_MISS: Moved = (Outcome.MISS, 0)


class RedisTier(Tier):
    """Chunks in Redis, for one namespace. Thread-safe: each call uses connections of its own.

    The key of the epoch is not counted in ``used_bytes``, nor are the servers' own overheads.

    Args:
        target: where the servers are.
        namespace: whose chunks these are.
        layout: the geometry of the chunks.
        capacity_bytes: never exceeded; ``UNBOUNDED_BYTES`` leaves the bound to the server.
        codec: what chunks are encoded with, see ``kvstore.format.codecs``. Those that another codec has encoded are
            misses, and are removed; those without any are read whatever the codec.

    Raises:
        ConfigError: the capacity does not hold a single chunk, or the codec cannot be used on this layout.
    """

    name = "redis"

    def __init__(
        self, target: RedisTarget, namespace: Namespace, layout: KVLayout, capacity_bytes: int, *, codec: str = "none"
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = TierCounters()
        self._target = target
        self._layout = layout
        self._io = _open_io(target, layout, codec)
        self._sizes = [0, *(self._io.stored_bytes(blocks + 1) for blocks in range(layout.blocks_per_chunk))]
        if capacity_bytes < self._sizes[-1]:
            raise ConfigError(f"{capacity_bytes} bytes of Redis do not hold one chunk of {self._sizes[-1]}: raise them")
        self._calls = Calls(target, open_nodes(target))
        self._sweeper = Sweeper(self._calls, self._io, layout)
        self._home = Home(namespace.id)
        self._ledger = Ledger(capacity_bytes)
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False

    @classmethod
    def open(cls, setup: TierSetup) -> RedisTier:
        """Open the servers that the option ``url`` names; the registry's factory. Connects to none of them.

        The option ``codec`` is a name in ``CODEC_NAMES``; the others are in ``docs/redis.md``.

        Raises:
            ConfigError: see the class; or the URL or another option is wrong.
        """
        setup.require_known_options("url", "codec", *OPTIONS)
        options = {name: value for name, value in setup.options.items() if name in OPTIONS}
        target = parse_target(setup.options.get("url"), options)
        codec = setup.options.get("codec", "none")
        if not isinstance(codec, str):
            raise ConfigError(f"the option 'codec' of the redis tier is a name, not {codec!r}")
        return cls(target, setup.namespace, setup.layout, setup.capacity_bytes, codec=codec)

    def check(self) -> None:
        """Find out whether the servers can be used, for those who want to know at start.

        Raises:
            TierSetupError: they refuse the login, the certificate, the database or a command, or are (no) cluster.
            TierError: they cannot be reached, are still loading, or do not accept writes.
        """
        with self._operation():
            for node in self._calls.nodes.masters():
                with node.link() as link:
                    link.call("PING")
                    (answer,) = link.ask([pack("CLUSTER", "INFO")])
                if isinstance(answer, bytes) and self._target.kind is not Kind.CLUSTER:
                    raise TierSetupError(f"Redis at {node.place} is part of a cluster: use redis-cluster:// in the URL")
            self._current_home()
            probe = self._home.epoch_key + b":probe"
            self._calls.at(
                self._home.epoch_tag, lambda link: _unless_full(link.ask([pack("SET", probe, 1, "PX", 1)])[0])
            )

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Every chunk held, the longest untouched first, as far as the server tells (not with an LFU policy).

        Walks through all keys of the servers in steps, deletes leftovers of killed writers and of cleared epochs, and
        if this tier's capacity is exceeded, the chunks that were not touched for longest.

        Raises:
            TierError: a server failed.
        """
        with self._operation():
            while True:
                home = self._current_home()
                before = self._ledger.begin_scan()
                try:
                    sizes, swept = self._sweeper.walk(home)
                except BaseException:
                    self._ledger.break_scan()
                    raise
                with self._changed:
                    self.counters.swept += swept
                if self._ledger.end_scan(before, home.epoch, sizes, lambda home=home: self._home is home):  # type: ignore[misc]
                    return self._trimmed(home, sizes)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """For each chunk, whether its commit is there: one round trip to every server that may have some.

        Raises:
            TierError: no server answers. Chunks of one that does not, among others that do, are not there.
        """
        with self._operation():
            while refs:
                home = self._home if self._home.epoch else self._current_home()
                questions = [(home.epoch_tag, [pack("GET", home.epoch_key)])]
                tags = [home.tag(ref) for ref in refs]
                questions += [(tag, [exists_command(tag)]) for tag in tags]
                epoch, *answers = self._calls.ask_all(questions)
                if isinstance(epoch, TierError):
                    raise epoch
                if epoch == home.epoch:
                    return [answer == 1 for answer in answers]
                self._current_home()
            return []

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; call from several threads to overlap them.

        Nothing writes to a buffer after the call has ended, also if it ended in an error.
        """
        bodies = [(transfer.ref, payload_view(self._layout, transfer)) for transfer in transfers]
        with self._operation():
            if not bodies:
                return []
            home = self._current_home()
            return self._count(self._each(home, bodies, self._get))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, one after the other; call from several threads to overlap them."""
        bodies = [(transfer.ref, payload_view(self._layout, transfer)) for transfer in transfers]
        with self._operation():
            if not bodies:
                return []
            home = self._current_home()
            mine = [transfer.belongs_to(home.namespace_id) for transfer in transfers]
            bodies = [body for body, is_mine in zip(bodies, mine, strict=True) if is_mine]
            moved = self._each(home, bodies, self._put)
            if any(outcome is Outcome.STORED for outcome, _ in moved) and self._current_home() != home:
                self._remove(home, [ref for ref, _ in bodies])
                moved = [_FAILED if outcome is Outcome.STORED else (outcome, size) for outcome, size in moved]
            answers = iter(moved)
            return self._count([next(answers) if is_mine else _FAILED for is_mine in mine])

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forget chunks: one round trip to every server for 256 of them.

        Raises:
            TierError: a server failed; some of the chunks may be left.
        """
        wanted = list(dict.fromkeys(refs))
        with self._operation():
            if wanted:
                self._remove(self._current_home(), wanted)

    def clear(self) -> None:
        """Forget every chunk of the namespace, for all engines; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: a server failed. The chunks may be forgotten already, and their bytes still there: the next
                ``clear`` or ``scan`` deletes them.
        """
        with self._operation():
            self._sweeper.sweep(self._renew(self._home))

    def reset(self, namespace: Namespace) -> None:
        """Forget every chunk of the namespace, and keep those to come under another one.

        The old ones are unreachable at once, and deleted as far as the servers answer.
        """
        with self._operation():
            old = self._move(lambda: True, Home(namespace.id))
            try:
                self._sweeper.sweep(self._renew(old))
            except TierError as error:
                logger.warning("chunks of the old namespace stay in Redis until they expire or are evicted: %s", error)

    def stored_bytes(self, num_blocks: int) -> int:
        """The length of all values of a chunk of ``num_blocks`` blocks, the commit's included.

        With a codec, the most that it can be.
        """
        return self._sizes[num_blocks]

    def size_of(self, ref: ChunkRef) -> int:
        """The length of all values of a chunk that this tier has stored or found. Readable after ``close``."""
        return self._ledger.size_of(self._home.epoch, ref) or self._sizes[ref.num_blocks]

    @property
    def used_bytes(self) -> int:
        """The length of all values of the chunks that this tier has stored or found. Readable after ``close``."""
        return self._ledger.used_bytes

    def close(self) -> None:
        """Let calls under way finish for as long as a server may be silent, then cut their connections."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._running, self._target.timeout_s)
        self._calls.nodes.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._running, _CUT_WAIT_S)

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Counts the calls under way. What fails because of ``close`` says so."""
        with self._changed:
            if self._is_closed:
                raise ClosedError("the redis tier was closed")
            self._running += 1
        try:
            yield
        except TierError as error:
            if self._is_closed:
                raise ClosedError("the redis tier was closed during the call") from error
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    # Where the chunks are

    def _current_home(self) -> Home:
        """The home with the epoch that holds now; everything booked under another one has ended."""
        while True:
            known = self._home
            epoch = self._sweeper.epoch(known)
            if epoch == known.epoch:
                return known
            self._move(lambda known=known: self._home is known, Home(known.namespace_id, epoch))  # type: ignore[misc]

    def _renew(self, home: Home) -> Home:
        """Begin a new epoch of a namespace, and go there if this tier is in the old one."""
        new = self._sweeper.renew(home)
        # Asked for again: of two threads that clear, the later epoch holds.
        return self._current_home() if self._home.namespace_id == new.namespace_id else new

    def _move(self, may_move: Callable[[], bool], home: Home) -> Home:
        """Go there, if it may, and forget what is booked. Returns the former: of two that move, each leaves another."""
        left = self._home

        def change() -> bool:
            nonlocal left
            left = self._home
            if moves := may_move():
                self._home = home
            return moves

        self._ledger.strike_all(change)
        return left

    # Chunks one by one

    def _each(
        self,
        home: Home,
        bodies: Sequence[tuple[ChunkRef, ByteArray]],
        move: Callable[[Home, ChunkRef, ByteArray], Moved],
    ) -> list[Moved]:
        """Move chunks in order. Those of a server that failed are not tried again.

        Raises:
            TierError: no chunk could be moved because servers failed.
        """
        moved = []
        broken: dict[Node, TierError] = {}
        for ref, payload in bodies:
            node = self._calls.nodes.node_of(home.tag(ref))
            result = _FAILED
            if node not in broken:
                try:
                    result = move(home, ref, payload)
                except SlotMovingError:
                    result = _FAILED
                except TierError as error:
                    broken[node] = error
            moved.append(result)
        if broken and all(result == _FAILED for result in moved):
            raise next(iter(broken.values()))
        return moved

    def _get(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Moved:
        tag = home.tag(ref)
        with self._io.incoming(ref, payload) as chunk:
            for _ in range(_LOOKS):
                known = self._ledger.settled(home.epoch, ref)
                found = self._calls.at(tag, lambda link: self._io.fetch(link, home, chunk))
                commit = found.commit
                if self._io.is_sound(home, chunk, found):
                    return Outcome.HIT, found.size_bytes
                if commit is None and not known:
                    return _MISS
                # Either it was replaced or removed meanwhile, or it is damaged or encoded by another codec, or the
                # server has evicted some of it.
                if self._calls.at(tag, lambda link, commit=commit: self._io.discard(link, home, ref, commit)):  # type: ignore[misc]
                    self._ledger.strike(known)
                    is_miss = commit is None or found.is_evicted or self._io.is_foreign(commit)
                    return _MISS if is_miss else (Outcome.CORRUPT, 0)
        return _MISS

    def _put(self, home: Home, ref: ChunkRef, payload: ByteArray) -> Moved:
        with self._io.outgoing(home, ref, payload) as chunk:
            return self._store(home, chunk), chunk.size_bytes

    def _store(self, home: Home, chunk: Outgoing) -> Outcome:
        ref, size_bytes = chunk.ref, chunk.size_bytes
        write_id = self._ledger.book(home.epoch, ref, size_bytes)
        if write_id is None and self._ledger.settled(home.epoch, ref):
            self._remove(home, [ref])  # without room for two of them, the new one takes the place of the old
            write_id = self._ledger.book(home.epoch, ref, size_bytes)
        if write_id is None:
            return Outcome.FULL
        known = self._ledger.settled(home.epoch, ref)
        is_committing = False

        def write(link: Link) -> set[WriteId] | ResponseError:
            nonlocal is_committing
            is_committing = False
            value = self._io.upload(link, home, write_id, chunk)
            if isinstance(value, ResponseError):
                return value
            is_committing = True
            return self._io.commit(link, home, write_id, chunk, value)

        try:
            ended = self._calls.at(home.tag(ref), write)
        except (TierError, ClosedError):
            if is_committing:
                self._ledger.settle(write_id)  # it may be there: it counts until somebody has looked
            else:
                self._ledger.strike([write_id])
            raise
        if isinstance(ended, ResponseError):
            self._ledger.strike([write_id])
            return Outcome.FULL if isinstance(ended, OutOfMemoryError) else Outcome.FAILED
        self._ledger.settle(write_id)
        self._ledger.strike(known | ended)
        return Outcome.STORED

    def _count(self, moved: Sequence[Moved]) -> list[Outcome]:
        with self._changed:
            for outcome, size_bytes in moved:
                self.counters.count(outcome, size_bytes)
        return [outcome for outcome, _ in moved]

    # Many chunks

    def _remove(self, home: Home, refs: Sequence[ChunkRef]) -> None:
        failure: TierError | None = None
        for begin in range(0, len(refs), _BATCH_CHUNKS):
            batch = refs[begin : begin + _BATCH_CHUNKS]
            known = [self._ledger.settled(home.epoch, ref) for ref in batch]
            answers = self._calls.ask_all([(home.tag(ref), self._io.remove_commands(home, ref)) for ref in batch])
            full = [number for number, answer in enumerate(answers) if isinstance(answer, NoMemoryError)]
            forced = [(home.tag(batch[n]), self._io.forced_remove_commands(home, batch[n])) for n in full]
            answers = replaced(answers, dict(zip(full, self._calls.ask_all(forced), strict=True)))
            for before, answer in zip(known, answers, strict=True):
                if isinstance(answer, TierError):
                    failure = answer
                else:
                    self._ledger.strike(before | ended_by(answer))
        if failure is not None:
            raise failure

    def _trimmed(self, home: Home, sizes: dict[ChunkRef, int]) -> list[tuple[ChunkRef, int]]:
        """The chunks of a scan, without the first of them as far as they do not fit."""
        excess_bytes = self._ledger.used_bytes - self.capacity_bytes
        victims = []
        for ref, size_bytes in sizes.items():
            if excess_bytes <= 0:
                break
            excess_bytes -= size_bytes
            victims.append(ref)
        if victims:
            self._remove(home, victims)
        return [(ref, size_bytes) for ref, size_bytes in sizes.items() if ref not in set(victims)]


def _open_io(target: RedisTarget, layout: KVLayout, codec: str) -> ChunkIO:
    """What moves the chunks.

    Raises:
        ConfigError: see ``open_codec``.
    """
    if codec == "none":
        return ChunkIO(layout, target.ttl_s)
    return CodedIO(layout, target.ttl_s, open_codec(codec, layout), target.timeout_s)


def _unless_full(reply: Reply) -> None:
    """A server without room is no reason not to start.

    Raises:
        ResponseError: any other error.
    """
    if not isinstance(reply, OutOfMemoryError):
        checked(reply)
