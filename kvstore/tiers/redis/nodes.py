"""Servers of a Redis: the server of each chunk, and connections to each. Errors of redis-py are translated here.

No server is contacted before the first call, and after a failure all state is read again. So a tier can be opened while
its servers are down, and finds them again by itself, even in other roles and at other addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from kvstore.model.errors import ClosedError, TierError, TierSetupError
from kvstore.tiers.redis.connection import RedisConnection
from kvstore.tiers.redis.url import Address, Deployment, RedisTarget

_TLS_SIGNS = ("ssl", "certificate", "wrong_version_number")
_CLUSTER_OFF = "cluster support disabled"


class SlotMovedError(TierError):
    """Another node of the cluster has the chunk, so its node must be looked up again."""


class SlotMovingError(TierError):
    """The chunk's slot is being migrated to another node, so this chunk is not available now, but others are."""


def translated(error: Exception, place: str) -> TierError:
    """Translate an exception of redis-py or of the system to a tier's error, which never contains a password."""
    text = str(error) or type(error).__name__
    if isinstance(error, MovedError):
        return SlotMovedError(f"Redis at {place} is part of a cluster, and another node now has the chunk's slot")
    if isinstance(error, AskError | TryAgainError):
        return SlotMovingError(f"Redis at {place} is migrating the chunk's slot to another node")
    if isinstance(error, OutOfMemoryError):
        return TierError(f"Redis at {place} has reached its maxmemory and evicts nothing: see docs/redis.md")
    if isinstance(error, AuthenticationError):
        return TierSetupError(f"Redis at {place} refuses the login: check user and password ({text})")
    if isinstance(error, NoPermissionError):
        return TierSetupError(f"Redis at {place} refuses a command: give the user the rights in docs/redis.md ({text})")
    if any(sign in text.lower() for sign in _TLS_SIGNS):
        return TierSetupError(f"Redis at {place}: TLS fails: check scheme, port and certificates ({text})")
    if "DB index" in text:
        return TierSetupError(f"Redis at {place} has no such database: lower the number in the URL ({text})")
    if _CLUSTER_OFF in text:
        return TierSetupError(f"Redis at {place} is not a cluster: use redis:// in the URL")
    if isinstance(error, ReadOnlyError):
        return TierError(f"Redis at {place} is a read-only replica: name its master, or use redis-sentinel://")
    if "Timeout connecting" in text:
        return TierError(
            f"Redis at {place} does not answer: is it there, and with or without TLS as the URL says? ({text})"
        )
    return TierError(f"Redis at {place} failed: {text}")


class Node:
    """Server with a bounded number of connections, opened when needed and kept for the next call."""

    def __init__(self, target: RedisTarget, address: Address) -> None:
        self.address = address
        self.place = str(address)
        self._new_connection = partial(RedisConnection, partial(target.connect_to, address))
        self._connections = target.connections
        self._timeout_s = target.timeout_s
        self._room = threading.BoundedSemaphore(target.connections)
        self._lock = threading.Lock()
        self._free: list[RedisConnection] = []
        self._lent: set[RedisConnection] = set()
        self._is_closed = False

    @contextmanager
    def connection(self) -> Iterator[RedisConnection]:
        """Yield a connection for one thread. After any exception it is closed, as half a reply may be waiting in it.

        Raises:
            TierError: the server cannot be reached, refuses, or all connections are in use for too long.
        """
        if not self._room.acquire(timeout=self._timeout_s):
            raise TierError(
                f"all {self._connections} connections to Redis at {self.place} are in use: raise their number"
            )
        try:
            connection, is_sound = self._take(), False
            try:
                connection.connect()
                yield connection
                is_sound = True
            finally:
                self._put_back(connection, is_sound=is_sound)
        except (RedisError, OSError) as error:
            raise translated(error, self.place) from error
        finally:
            self._room.release()

    def close(self) -> None:
        """Close free connections, and end the calls under way with an error."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
            for connection in self._lent:
                connection.reader.shut()
        for connection in free:
            connection.close()

    def _take(self) -> RedisConnection:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the redis tier was closed")
            connection = self._free.pop() if self._free else self._new_connection()
            self._lent.add(connection)
            return connection

    def _put_back(self, connection: RedisConnection, *, is_sound: bool) -> None:
        with self._lock:
            self._lent.discard(connection)
            is_kept = is_sound and not self._is_closed
            if is_kept:
                self._free.append(connection)
        if not is_kept:
            connection.close()


class Nodes:
    """Map of keys to servers. Thread-safe; every method may ask the servers, and raise ``TierError``.

    This base class is for one server, at a fixed address.
    """

    def __init__(self, target: RedisTarget) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._known: dict[Address, Node] = {}
        self._is_closed = False

    def node_of(self, tag: bytes) -> Node:  # noqa: ARG002 - it has everything
        """Return the server that has the keys with this hash tag."""
        return self._node(self._target.addresses[0])

    def masters(self) -> list[Node]:
        """Return all servers that have keys."""
        return [self.node_of(b"")]

    def forget(self, failed: Node | None = None) -> None:
        """Look up the servers again next time, because one failed, or did not have the expected keys."""

    def close(self) -> None:
        """Close all connections; calls under way fail."""
        with self._lock:
            self._is_closed = True
            nodes = list(self._known.values())
        for node in nodes:
            node.close()

    def _node(self, address: Address) -> Node:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the redis tier was closed")
            node = self._known.get(address)
            if node is None:
                node = self._known[address] = Node(self._target, address)
            return node


class SentinelNodes(Nodes):
    """Server that the Sentinels name as master."""

    def __init__(self, target: RedisTarget) -> None:
        super().__init__(target)
        self._sentinel = target.sentinel()
        self._asking = threading.Lock()
        self._master: Node | None = None

    def node_of(self, tag: bytes) -> Node:  # noqa: ARG002 - the master has everything
        """Return the master."""
        master = self._master
        return master if master is not None else self._find_master()

    def forget(self, failed: Node | None = None) -> None:  # noqa: ARG002 - the Sentinels know
        """Ask the Sentinels again next time."""
        self._master = None

    def close(self) -> None:
        """Close all connections; calls under way fail."""
        super().close()
        for client in self._sentinel.sentinels:
            client.close()

    def _find_master(self) -> Node:
        with self._asking:  # the client of the Sentinels reorders its list
            if self._master is None:
                try:
                    host, port = self._sentinel.discover_master(self._target.service)
                except (RedisError, OSError) as error:
                    raise translated(error, f"{self._target}, asked for the master,") from error
                self._master = self._node(Address(str(host), int(port)))
            return self._master


class ClusterNodes(Nodes):
    """Masters of a cluster, each with its share of the 16,384 slots."""

    def __init__(self, target: RedisTarget) -> None:
        super().__init__(target)
        self._slots: list[Address | None] | None = None
        self._failed: Node | None = None

    def node_of(self, tag: bytes) -> Node:
        """Return the master that has the tag's slot."""
        address = self._map()[key_slot(tag)]
        if address is None:
            raise TierError(f"the Redis cluster at {self._target} has no node for some of its slots")
        return self._node(address)

    def masters(self) -> list[Node]:
        """Return all masters that have slots."""
        return [self._node(address) for address in dict.fromkeys(self._map()) if address is not None]

    def forget(self, failed: Node | None = None) -> None:
        """Ask for the slot map again next time, the failed node last."""
        self._slots, self._failed = None, failed

    def _map(self) -> list[Address | None]:
        slots = self._slots
        if slots is None:
            slots = self._slots = self._ask_for_map()
        return slots

    def _ask_for_map(self) -> list[Address | None]:
        with self._lock:
            seen = list(self._known)
        failed = self._failed.address if self._failed else None
        failure: TierError | None = None
        for address in sorted(dict.fromkeys([*seen, *self._target.addresses]), key=lambda address: address == failed):
            node = self._node(address)
            try:
                with node.connection() as connection:
                    return _slot_map(connection.call("CLUSTER", "SLOTS"), address)
            except TierError as error:
                failure = error
        assert failure is not None, "a cluster's URL names at least one node"
        raise failure


def _slot_map(ranges: object, asked: Address) -> list[Address | None]:
    """Map slots to masters, from an answer to CLUSTER SLOTS: [first, last, [host, port, ...], replicas...]."""
    slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    try:
        for first, last, (host, port, *_), *_ in ranges:  # type: ignore[attr-defined]
            # A node that does not know its own address sends none, and is the one that was asked.
            address = Address(host.decode() if host else asked.host, port)
            slots[first : last + 1] = [address] * _num_slots(first, last)
    except (TypeError, ValueError, AttributeError) as error:
        raise ResponseError(f"a malformed answer to CLUSTER SLOTS: {error}") from error
    return slots


def _num_slots(first: int, last: int) -> int:
    if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
        raise ValueError(f"it has no slots {first} to {last}")
    return last + 1 - first


def open_nodes(target: RedisTarget) -> Nodes:
    """Return the servers of a target. Asks none of them."""
    kinds: dict[Deployment, type[Nodes]] = {
        Deployment.SINGLE: Nodes,
        Deployment.SENTINEL: SentinelNodes,
        Deployment.CLUSTER: ClusterNodes,
    }
    return kinds[target.kind](target)
