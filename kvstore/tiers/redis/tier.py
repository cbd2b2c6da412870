"""The redis tier: chunks in one server, under Sentinel, or in a cluster, shared by all engines of a namespace.

It is kept correct as follows:

- A chunk is stored whole or not at all, and every byte is checked when it is read (``chunk.py``).
- The names of all keys contain the namespace's *epoch*, which has a separate key and is read in every call. ``clear``
  replaces it: earlier chunks are unreachable at once, for every engine, and are deleted afterwards. At its end a
  ``put`` reads the epoch again, and removes the chunk if its epoch has ended.
- After a failure the tier continues without local state. The servers may be down when it is opened.

The tier has no bound and does not account for bytes: ``maxmemory`` bounds the server, which evicts by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

try:
    from redis.exceptions import OutOfMemoryError
except ImportError as error:
    raise ImportError("the redis tier needs redis-py: pip install 'vllm-kvstore[redis]'") from error

from collections.abc import Callable, Iterable, Sequence

from kvstore.format.codecs import open_codec
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, Presence
from kvstore.model.errors import ConfigError, TierError, TierSetupError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.lifetime import Lifetime, lasts
from kvstore.tiers.base import Tier, TierCounters, TierSetup, Transfer, payload_view
from kvstore.tiers.redis.calls import Calls, Question
from kvstore.tiers.redis.chunk import ChunkIO, CodedIO
from kvstore.tiers.redis.connection import RedisConnection, Reply, checked, pack
from kvstore.tiers.redis.names import NO_CHUNK, NO_END, Home, rest_command
from kvstore.tiers.redis.nodes import SlotMovingError, open_nodes
from kvstore.tiers.redis.trails import TrailSets
from kvstore.tiers.redis.url import Deployment, RedisTarget, parse_target
from kvstore.tiers.running import RunningCalls

logger = logging.getLogger(__name__)

_LOOKS = 8  # attempts at a chunk or an epoch that is replaced repeatedly while it is read
_BATCH_CHUNKS = 256
_CUT_WAIT_S = 2.0
Moved = tuple[Outcome, int]  # the outcome of a chunk, and the length of its values if it moved
_FAILED: Moved = (Outcome.FAILED, 0)
_MISS: Moved = (Outcome.MISS, 0)


class RedisTier(Tier):
    """Tier of chunks in Redis, for one namespace. Thread-safe; each call uses separate connections.

    Args:
        target: the servers.
        namespace: that of the chunks.
        layout: the geometry of the chunks.
        codec: name of the codec of the chunks, see ``kvstore.format.codecs``. Chunks of another codec are misses, and
            are removed; chunks without a codec are always readable.

    Raises:
        ConfigError: the codec cannot be used on this layout.
    """

    name = "redis"

    def __init__(self, target: RedisTarget, namespace: Namespace, layout: KVLayout, *, codec: str = "none") -> None:
        self.counters = TierCounters()
        self._target = target
        self._layout = layout
        self._io = ChunkIO(layout, target.ttl_s)
        if codec != "none":
            self._io = CodedIO(layout, target.ttl_s, open_codec(codec, layout), target.timeout_s)
        self._calls = Calls(target, open_nodes(target))
        self._trails = TrailSets(layout, target.ttl_s)
        self._home = Home(namespace.id)
        self._running = RunningCalls(self.name)
        self._entering = threading.Lock()  # guards _home

    @classmethod
    def open(cls, setup: TierSetup) -> RedisTier:
        """Open the servers that the option ``url`` names, without connecting; the registry's factory.

        The option ``codec`` is a name in ``CODEC_NAMES``; ``docs/redis.md`` lists the others.

        Raises:
            ConfigError: see the class; or the URL or another option is wrong, or there is a capacity.
        """
        setup.require_unbounded("set maxmemory and maxmemory-policy in the server")
        options = dict(setup.options)
        url, codec = options.pop("url", None), options.pop("codec", "none")
        if not isinstance(codec, str):
            raise ConfigError(f"the option 'codec' of the redis tier is a name, not {codec!r}")
        return cls(parse_target(url, options), setup.namespace, setup.layout, codec=codec)

    def check(self) -> None:
        """Check at start that the servers can be used.

        Raises:
            TierSetupError: they refuse the login, the certificate, the database or a command, or the URL names a
                cluster that is none or the reverse.
            TierError: they cannot be reached, are still loading, or do not accept writes.
        """
        with self._running.call():
            for node in self._calls.nodes.masters():
                with node.connection() as connection:
                    connection.call("PING")
                    (answer,) = connection.ask([pack("CLUSTER", "INFO")])
                if isinstance(answer, bytes) and self._target.kind is not Deployment.CLUSTER:
                    raise TierSetupError(f"Redis at {node.place} is part of a cluster: use redis-cluster:// in the URL")
            self._current_home()
            self._calls.at(self._home.epoch_tag, partial(_probe, key=self._home.epoch_key + b":probe"))

    def contains(self, refs: Sequence[ChunkRef]) -> list[Presence]:
        """Tell for each chunk if its commit exists, in one round trip to every server that may have some.

        Raises:
            TierError: no server answers. If only some do, the chunks of the others count as missing.
        """
        with self._running.call():
            for _ in range(_LOOKS if refs else 0):
                home, now_s = self._known_home(), time.time()  # the earliest moment of the answers
                answers = self._rests_ms(home, refs)
                if answers is not None:
                    missing = (ref for ref, rest in zip(refs, answers, strict=True) if rest == NO_CHUNK)
                    self._trails.note_missing(home, missing)
                    return [self._presence(rest, now_s) for rest in answers]
            if refs:
                raise self._unstable_epoch()
            return []

    def _rests_ms(self, home: Home, refs: Sequence[ChunkRef]) -> list[Reply | TierError] | None:
        """Ask for the rest of the chunks' times to live, like ``_ask_in``."""
        tags = [home.tag(ref) for ref in refs]
        return self._ask_in(home, [(tag, [rest_command(tag)]) for tag in tags])

    def _presence(self, rest: Reply | TierError, now_s: float) -> Presence:
        """Return a chunk's presence by the rest of its time to live; one given to all chunks is no end of this one."""
        if not isinstance(rest, int) or rest == NO_CHUNK:
            return False
        return rest == NO_END or not self.keeps_lifetimes or now_s + rest / 1000

    @property
    def keeps_lifetimes(self) -> bool:
        """True unless ``ttl_s`` sets that of all chunks."""
        return self._target.ttl_s is None

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Let chunks held stay for longer, or without end; a longer time that another engine has set stays.

        Raises:
            TierError: no server answers.
        """
        if not self.keeps_lifetimes or not lifetimes:
            return
        with self._running.call():
            home, now_s = self._current_home(), time.time()
            rests = self._rests_ms(home, [one.ref for one in lifetimes])
            questions = [
                (home.tag(one.ref), self._io.limit_commands(home, one))
                for one, rest in zip(lifetimes, rests or (), strict=False)
                if isinstance(rest, int) and rest >= 0 and not lasts(now_s + rest / 1000, one.until_s)
            ]
            if questions:
                self._calls.ask_all(questions)

    @property
    def keeps_trails(self) -> bool:
        """See ``Tier``; False if the servers have recently refused to keep some."""
        return self._trails.are_kept

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """See ``Tier``; one round trip to every server with trails. Those of servers that fail are left out."""
        with self._running.call():
            for _ in range(_LOOKS):
                home = self._known_home()
                exchange, near = self._trails.look(home, trails)
                answers = self._ask_in(home, exchange.questions) if exchange.questions else []
                if answers is not None:
                    exchange.take(answers)
                    return self._trails.name(home, trails, near)
            raise self._unstable_epoch()

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read chunks into their buffers, one after the other; call from several threads to overlap them.

        No buffer is written to after the call has ended, even by an error.
        """
        return self._each(transfers, self._get)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store chunks from their buffers, one after the other; call from several threads to overlap them."""
        return self._each(transfers, self._put)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Remove chunks, in one round trip to every server for 256 of them.

        Raises:
            TierError: a server failed; some of the chunks may be left.
        """
        wanted = list(dict.fromkeys(refs))
        with self._running.call():
            if wanted:
                self._remove(self._current_home(), wanted)

    def clear(self) -> None:
        """Remove every chunk of the namespace, for all engines; a ``put`` under way answers ``FAILED``.

        Raises:
            TierError: a server failed. The chunks may be unreachable while their bytes still exist; the next ``clear``
                deletes them.
        """
        with self._running.call():
            self._calls.sweep(self._renew(self._home))

    def reset(self, namespace: Namespace) -> None:
        """Remove every chunk of the namespace, and keep later ones under another namespace.

        The old chunks are unreachable at once, and deleted on the servers that answer.
        """
        with self._running.call():
            old = self._enter(Home(namespace.id))
            try:
                self._calls.sweep(self._renew(old))
            except TierError as error:
                logger.warning("chunks of the old namespace stay in Redis until they expire or are evicted: %s", error)

    def close(self) -> None:
        """Wait for calls under way as long as a server may be silent, then close their connections."""
        self._running.close()
        self._running.wait(self._target.timeout_s)
        self._calls.nodes.close()
        self._running.wait(_CUT_WAIT_S)

    def _ask_in(self, home: Home, questions: Sequence[Question]) -> list[Reply | TierError] | None:
        """Ask in an epoch, in one round trip to each server; None if it has ended, and the tier entered the next one.

        Raises:
            TierError: the epoch cannot be read.
        """
        epoch, *answers = self._calls.ask_all([(home.epoch_tag, [pack("GET", home.epoch_key)]), *questions])
        if isinstance(epoch, TierError):
            raise epoch
        if epoch == home.epoch:
            return answers
        self._current_home()
        return None

    def _known_home(self) -> Home:
        """Return the home with the last epoch seen."""
        return self._home if self._home.epoch else self._current_home()

    def _current_home(self) -> Home:
        """Return the home with the current epoch."""
        for _ in range(_LOOKS):
            known = self._home
            epoch = self._calls.epoch(known)
            if epoch == known.epoch:
                return known
            self._enter(Home(known.namespace_id, epoch), instead_of=known)
        raise self._unstable_epoch()

    def _unstable_epoch(self) -> TierError:
        return TierError(f"Redis at {self._target} returned another epoch in each of {_LOOKS} reads")

    def _renew(self, home: Home) -> Home:
        """Begin a new epoch of a namespace, and enter it if this tier is in the old one."""
        new = self._calls.renew(home)
        # Ask again, because the later epoch is valid if two threads clear.
        return self._current_home() if self._home.namespace_id == new.namespace_id else new

    def _enter(self, home: Home, instead_of: Home | None = None) -> Home:
        """Move to a home, if the tier is still in ``instead_of``. Returns the home that it left."""
        with self._entering:
            left = self._home
            if instead_of is None or left is instead_of:
                self._home = home
        return left

    def _each(self, transfers: Sequence[Transfer], move: Callable[[Home, Transfer, ByteArray], Moved]) -> list[Outcome]:
        """Check all transfers, then move one after the other; FAILED while a slot is migrating to another node."""
        payloads = [payload_view(self._layout, transfer) for transfer in transfers]
        outcomes = []
        with self._running.call():
            for transfer, payload in zip(transfers, payloads, strict=True):
                home = self._current_home()
                try:
                    moved = move(home, transfer, payload)
                except SlotMovingError:
                    moved = _FAILED
                outcomes.append(self.counters.count(*moved))
        return outcomes

    def _get(self, home: Home, transfer: Transfer, payload: ByteArray) -> Moved:
        ref = transfer.ref
        tag = home.tag(ref)
        with self._io.incoming(ref, payload) as chunk:
            for _ in range(_LOOKS):
                found = self._calls.at(tag, lambda connection: self._io.fetch(connection, home, chunk))
                commit = found.commit
                if self._io.is_sound(home, chunk, found):
                    return Outcome.HIT, found.size_bytes
                if commit is None and not found.has_parts:
                    return _MISS
                # It was replaced or removed meanwhile, or is damaged, or encoded with another codec, or partly evicted.
                if self._calls.at(tag, partial(self._io.discard, home=home, ref=ref, commit=commit)):
                    is_miss = commit is None or found.is_evicted or self._io.is_foreign(commit)
                    return _MISS if is_miss else (Outcome.CORRUPT, 0)
        return _MISS

    def _put(self, home: Home, transfer: Transfer, payload: ByteArray) -> Moved:
        ref = transfer.ref
        if not transfer.belongs_to(home.namespace_id):
            return _FAILED
        until_s = transfer.until_s if self.keeps_lifetimes else None
        with self._io.outgoing(home, ref, payload) as whole:
            chunk = whole._replace(until_s=until_s)
            stored = self._calls.at(home.tag(ref), lambda connection: self._io.store(connection, home, chunk))
        if not isinstance(stored, int):
            return (Outcome.FULL, 0) if isinstance(stored, OutOfMemoryError) else _FAILED
        exchange = self._trails.tell(home, ref, transfer.trail)
        answers = self._ask_in(home, exchange.questions)
        if answers is None or self._home != home:
            self._remove(home, [ref])
            self._calls.ask_all(self._trails.taken_back(home, ref, transfer.trail).questions)
            return _FAILED
        exchange.take(answers)
        return Outcome.STORED, stored

    def _remove(self, home: Home, refs: Sequence[ChunkRef]) -> None:
        failure: TierError | None = None
        for begin in range(0, len(refs), _BATCH_CHUNKS):
            batch = refs[begin : begin + _BATCH_CHUNKS]
            answers = self._calls.ask_all([(home.tag(ref), [self._io.remove_command(home, ref)]) for ref in batch])
            failure = next((answer for answer in answers if isinstance(answer, TierError)), failure)
        if failure is not None:
            raise failure


def _probe(connection: RedisConnection, key: bytes) -> None:
    """Try the commands that a store and a lookup need; a full server does not prevent the start."""
    times = [pack("PTTL", key), pack("PEXPIRE", key, 1)]
    for reply in connection.ask([pack("SET", key, 1, "PX", 1), *times]):
        if not isinstance(reply, OutOfMemoryError):
            checked(reply)
