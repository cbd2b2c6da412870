"""The Redis tier's lines: a server of the bench's own, and a plain socket client as the limit."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ConfigError
from kvstore.tiers.base import Transfer
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.raw_redis import RawRedis
from kvstore.tools.bench.samples import (
    LOOKUP_CHUNKS,
    LOOKUP_ROUNDS,
    NAMESPACE,
    WARM_UP_ROUNDS,
    Pair,
    Tick,
    paired,
    require,
    timed,
)
from kvstore.tools.bench.workbench import transfer_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.chunks import ByteArray
    from kvstore.tiers.redis.tier import RedisTier
    from kvstore.tools.bench.workbench import Workbench

# As docs/redis.md recommends: without it the server gives memory back to the system, and takes it again, page by page.
# Debian's redis-server reads one of the names, Redis built with its own allocator the other.
MALLOC_CONF = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"
MALLOC_NAMES = ("MALLOC_CONF", "JE_MALLOC_CONF")
_START_TIMEOUT_S = 10.0
_TIMEOUT_S = 60.0
_LOOKUP_SLACK_S = 0.5e-3
_LOOKUP_PINGS = 3
STORE = Subject("redis store", "plain socket SET", "the tier's put: xxh3, parts of 1 MiB, transaction")
RETRIEVE = Subject("redis retrieve", "plain socket GET", "the tier's get: parts, xxh3 verified")
LOOKUP = Subject("redis lookup, 128 known keys", "3 round trips", "the tier's contains; the limit has 0.5 ms more")


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
        [program, *options], stdout=subprocess.DEVNULL, env={**os.environ, **dict.fromkeys(MALLOC_NAMES, MALLOC_CONF)}
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


def measure_redis(workbench: Workbench, program: Path, rounds: int, tick: Tick) -> list[Line]:
    """Store, retrieve and look up against their limits, in alternating order, in a server of this call's own.

    Raises:
        BenchError: the tier lost or changed a byte.
        ConfigError: there is no redis-py, or the server does not start.
    """
    try:
        from kvstore.tiers.redis.chunk import PART_BYTES  # noqa: PLC0415
        from kvstore.tiers.redis.tier import RedisTier  # noqa: PLC0415 - an extra, not always there
        from kvstore.tiers.redis.url import parse_target  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(str(error)) from error
    layout, num_chunks = workbench.paged.layout, workbench.num_chunks
    slots = transfer_slots(layout, num_chunks)
    refs = [ChunkRef(number.to_bytes(16, "little"), layout.blocks_per_chunk) for number in range(num_chunks)]
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, private_server(program, Path(folder)) as port:
        target = parse_target(f"redis://127.0.0.1:{port}", {"timeout_s": _TIMEOUT_S})
        tier = RedisTier(target, NAMESPACE, layout)
        raw = RawRedis(port, prefaulted(workbench.batch_bytes).reshape(num_chunks, -1), PART_BYTES)
        try:
            samples = _measure_moves(tier, raw, refs, slots, rounds=rounds, tick=tick)
            lookups = _measure_lookups(tier, raw, refs, slots[0])
        finally:
            raw.close()
            tier.close()
    return [*move_lines(samples, workbench), LOOKUP.line(workbench.geometry, lookups)]


def _measure_moves(
    tier: RedisTier, raw: RawRedis, refs: list[ChunkRef], slots: ByteArray, *, rounds: int, tick: Tick
) -> dict[Subject, list[Pair]]:
    samples: dict[Subject, list[Pair]] = {STORE: [], RETRIEVE: []}
    there, back = ([Transfer(ref, slot) for ref, slot in zip(refs, half, strict=True)] for half in slots)
    for number in range(WARM_UP_ROUNDS + rounds):
        tick("redis")
        slots[0] += 1
        slots[1] = 0
        limit_first = number % 2 == 0
        pair, outcomes = paired(raw.store, lambda: tier.put(there), limit_first=limit_first)
        require(set(outcomes) == {Outcome.STORED}, "the redis tier did not store everything")
        samples[STORE].append(pair)
        pair, outcomes = paired(raw.retrieve, lambda: tier.get(back), limit_first=limit_first)
        require(set(outcomes) == {Outcome.HIT}, "the redis tier did not find everything")
        require(bool((slots[0] == slots[1]).all()), "the redis tier changed a byte")
        samples[RETRIEVE].append(pair)
        raw.remove()  # or the next round would not store but replace
        tier.remove(refs)
    return samples


def _measure_lookups(tier: RedisTier, raw: RawRedis, refs: list[ChunkRef], slots: ByteArray) -> list[Pair]:
    tier.put([Transfer(ref, slot) for ref, slot in zip(refs, slots, strict=True)])
    asked = (refs * -(-LOOKUP_CHUNKS // len(refs)))[:LOOKUP_CHUNKS]
    pairs = []
    for _ in range(LOOKUP_ROUNDS):
        ping_s, _ = timed(raw.ping)
        path_s, found = timed(lambda: tier.contains(asked))
        require(all(found), "the redis tier did not find everything")
        pairs.append(Pair(_LOOKUP_PINGS * ping_s + _LOOKUP_SLACK_S, path_s))
    return pairs
