"""The Redis lines of the bench: a server of its own, the redis tier, and a plain socket client as the limit.

The limit moves values of the same size, in the same number, over the same kind of connection, and does nothing else: no
transactions, no checksums, no names to make up. It uses none of the library's code.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.tiers.base import UNBOUNDED_BYTES, ChunkRef, Outcome, Transfer
from kvstore.tools.bench_work import BenchError, Pair, paired, prefaulted, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.layout import KVLayout
    from kvstore.tiers.base import ByteArray
    from kvstore.tiers.redis import RedisTier

# As docs/redis.md recommends: without it the server gives memory back to the system, and takes it again, page by page.
MALLOC_CONF = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"
_START_TIMEOUT_S = 10.0
_TIMEOUT_S = 60.0
_WINDOW = 3  # values asked for ahead, as the tier does
_LOOKUP_SLACK_S = 0.5e-3
_LOOKUP_PINGS = 3
_NAMESPACE = Namespace({"model": "bench"})


class RedisSamples(NamedTuple):
    """Pairs of each line."""

    stores: list[Pair]
    retrieves: list[Pair]
    lookups: list[Pair]


class RawRedis:
    """The limit: values of ``part_bytes`` under numbers, from and to prepared memory, one connection.

    Values are the payload cut in pieces, the last one shorter, as in the tier.
    """

    def __init__(self, port: int, payloads: ByteArray, part_bytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = self._socket.makefile("rb")
        self._views = [
            payload.data[begin : begin + part_bytes]
            for payload in payloads
            for begin in range(0, len(payload), part_bytes)
        ]

    def close(self) -> None:
        """Hang up."""
        self._replies.close()
        self._socket.close()

    def store(self) -> None:
        """SET all values in one pipeline."""
        end = b""
        for number, view in enumerate(self._views):
            name = b"raw:%d" % number
            self._socket.sendall(end + b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view)))
            self._socket.sendall(view)
            end = b"\r\n"
        self._socket.sendall(end)
        for _ in self._views:
            self._expect(b"+OK\r\n")

    def retrieve(self) -> None:
        """GET all values, a few asked for ahead."""
        ask = [b"*2\r\n$3\r\nGET\r\n$%d\r\nraw:%d\r\n" % (4 + len(str(n)), n) for n in range(len(self._views))]
        self._socket.sendall(b"".join(ask[:_WINDOW]))
        for number, view in enumerate(self._views):
            self._expect(b"$%d\r\n" % len(view))
            done = self._replies.readinto(view)  # reads large amounts straight into the memory
            while done < len(view):
                done += self._replies.readinto(view[done:])
            self._expect(b"\r\n")
            if number + _WINDOW < len(ask):
                self._socket.sendall(ask[number + _WINDOW])

    def remove(self) -> None:
        """Delete all values."""
        names = b"".join(b"$%d\r\nraw:%d\r\n" % (4 + len(str(n)), n) for n in range(len(self._views)))
        self._socket.sendall(b"*%d\r\n$6\r\nUNLINK\r\n" % (1 + len(self._views)) + names)
        self._expect(b":%d\r\n" % len(self._views))

    def ping(self) -> None:
        """One round trip."""
        self._socket.sendall(b"*1\r\n$4\r\nPING\r\n")
        self._expect(b"+PONG\r\n")

    def _expect(self, line: bytes) -> None:
        found = self._replies.readline()
        if found != line:
            raise BenchError(f"the Redis server answered {found[:60]!r} instead of {line!r}")


@contextmanager
def private_server(program: Path, folder: Path) -> Iterator[int]:
    """A Redis server on a port that nobody else has, without persistence; yields the port.

    Raises:
        ConfigError: it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--logfile", "redis.log"]
    process = subprocess.Popen(  # noqa: S603 - found on PATH
        [program, *options], stdout=subprocess.DEVNULL, env={**os.environ, "MALLOC_CONF": MALLOC_CONF}
    )
    try:
        _wait_for_port(process, port)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise ConfigError("redis-server does not start")


def measure_redis(
    program: Path, layout: KVLayout, num_chunks: int, *, rounds: int, lookup_rounds: int, tick: Callable[[], None]
) -> RedisSamples:
    """Store, retrieve and look up against their limits, in alternating order, in a server of this call's own.

    Raises:
        BenchError: the tier lost or changed a byte.
        ConfigError: there is no redis-py, or the server does not start.
    """
    try:
        from kvstore.tiers._redis_chunk import PART_BYTES  # noqa: PLC0415
        from kvstore.tiers._redis_url import parse_target  # noqa: PLC0415
        from kvstore.tiers.redis import RedisTier  # noqa: PLC0415 - an extra, not always there
    except ImportError as error:
        raise ConfigError(str(error)) from error
    payload_bytes = layout.payload_bytes(layout.blocks_per_chunk)
    slots = prefaulted(2 * num_chunks * layout.slot_bytes).reshape(2, num_chunks, layout.slot_bytes)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, private_server(program, Path(folder)) as port:
        target = parse_target(f"redis://127.0.0.1:{port}", {"timeout_s": _TIMEOUT_S})
        tier = RedisTier(target, _NAMESPACE, layout, UNBOUNDED_BYTES)
        raw = RawRedis(port, prefaulted(num_chunks * payload_bytes).reshape(num_chunks, -1), PART_BYTES)
        try:
            return _measure(tier, raw, slots, layout, rounds=rounds, lookup_rounds=lookup_rounds, tick=tick)
        finally:
            raw.close()
            tier.close()


def _measure(
    tier: RedisTier,
    raw: RawRedis,
    slots: ByteArray,
    layout: KVLayout,
    *,
    rounds: int,
    lookup_rounds: int,
    tick: Callable[[], None],
) -> RedisSamples:
    blocks = layout.blocks_per_chunk
    refs = [ChunkRef(number.to_bytes(16, "little"), blocks) for number in range(slots.shape[1])]
    there, back = ([Transfer(ref, slot) for ref, slot in zip(refs, half, strict=True)] for half in slots)
    samples = RedisSamples([], [], [])
    for number in range(rounds):
        tick()
        slots[0] += 1
        slots[1] = 0
        limit_first = number % 2 == 0
        pair, outcomes = paired(raw.store, lambda: tier.put(there), limit_first=limit_first)
        _require(set(outcomes) == {Outcome.STORED}, "the redis tier did not store everything")
        samples.stores.append(pair)
        pair, outcomes = paired(raw.retrieve, lambda: tier.get(back), limit_first=limit_first)
        _require(set(outcomes) == {Outcome.HIT}, "the redis tier did not find everything")
        _require(bool((slots[0] == slots[1]).all()), "the redis tier changed a byte")
        samples.retrieves.append(pair)
        raw.remove()  # or the next round would not store but replace
        tier.remove(refs)
    tier.put(there)
    asked = (refs * -(-128 // len(refs)))[:128]
    for _ in range(lookup_rounds):
        ping_s, _ = timed(raw.ping)
        path_s, found = timed(lambda: tier.contains(asked))
        _require(all(found), "the redis tier did not find everything")
        samples.lookups.append(Pair(_LOOKUP_PINGS * ping_s + _LOOKUP_SLACK_S, path_s))
    return samples


def _require(kept: bool, broken: str) -> None:
    if not kept:
        raise BenchError(broken)
