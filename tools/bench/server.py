"""The cache server's lines of the bench: a server of its own, the server tier, and what it is held against.

On one host the limit is a memcpy of the same chunks, one after the other: that of all of them at once is faster where
it goes round the caches, which chunks are too short for. Over TCP it is plain pyzmq, which sends as many frames of the
same size to another process, or gets them from there, and leaves them in the memory that ZeroMQ has taken: no
checksums, and no copy to where they belong. A lookup is held against bare round trips of one small frame.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ConfigError, TierError
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.raw_peer import RawPeer
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
    from kvstore.chunks import ByteArray
    from kvstore.tiers.server.tier import ServerTier
    from kvstore.tools.bench.workbench import Workbench

LOOKUP_ROUND_TRIPS = 3
_START_TIMEOUT_S = 60.0
_TIMEOUT_S = 60.0
STORE = Subject("server store", "memcpy", "the tier's put: asking for pages, copy, commit")
RETRIEVE = Subject("server retrieve", "memcpy", "the tier's get: asking for pages, copy, release")
TCP_STORE = Subject("server store over TCP", "plain pyzmq", "the tier's put: checksums made and compared, copies")
TCP_RETRIEVE = Subject("server retrieve over TCP", "plain pyzmq", "the tier's get: checksums made and compared, copies")
LOOKUP = Subject("server lookup, 128 known keys", "3 round trips", "the tier's contains, over ipc")

Samples = dict[Subject, list[Pair]]


@contextmanager
def private_server(folder: Path, pool_bytes: int) -> Iterator[tuple[str, str]]:
    """A cache server that nobody else uses; yields its URLs on this host, and over TCP.

    Raises:
        ConfigError: it does not start.
    """
    config = folder / "cache.yaml"
    url = f"kvs+ipc://{folder / 'run'}"
    config.write_text(f"max_local_cpu_size: {pool_bytes / 2**30}\nserver_listen: '{url}, kvs://127.0.0.1:0'\n")
    command = [sys.executable, "-m", "kvstore.tools.cli", "serve", "--config", str(config), "--json"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: S603 - ourselves
    try:
        assert process.stdout is not None
        with process.stdout as said:
            line = said.readline()
            if not line:
                reason = (folder / "server.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                raise ConfigError(f"the cache server does not start: {' '.join(reason)}")
        yield url, f"kvs://127.0.0.1:{json.loads(line)['tcp_port']}"
    finally:
        process.kill()
        process.wait()


def measure_server(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Store, retrieve and look up against their limits, in alternating order, at a server of this call's own.

    Raises:
        BenchError: the tier lost or changed a byte.
        ConfigError: pyzmq or msgspec are not there, or the server does not start.
    """
    try:
        from kvstore.protocol.messages import PIECE_BYTES  # noqa: PLC0415
        from kvstore.tiers.server.tier import ServerTier  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(str(error)) from error
    layout, num_chunks = workbench.paged.layout, workbench.num_chunks
    slots = transfer_slots(layout, num_chunks)
    pool_bytes = 4 * (num_chunks + 1) * layout.slot_bytes + (64 << 20)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvs-")))
        urls = opened.enter_context(private_server(folder, pool_bytes))
        peer = RawPeer(folder, slots[0, :, : layout.payload_bytes(layout.blocks_per_chunk)], PIECE_BYTES)
        opened.callback(peer.close)
        tiers = []
        for url in urls:
            options = {"url": url, "timeout_s": _TIMEOUT_S}
            tiers.append(ServerTier.open(TierSetup(NAMESPACE, layout, UNBOUNDED_BYTES, options)))
            opened.callback(tiers[-1].close)
        _wait_for(tiers[0])
        refs = [ChunkRef(number.to_bytes(16, "little"), layout.blocks_per_chunk) for number in range(num_chunks)]
        samples = _measure_moves(tiers, peer, refs, slots, rounds=rounds, tick=tick)
        lookups = _measure_lookups(tiers[0], peer, refs, slots[0])
    return [*move_lines(samples, workbench), LOOKUP.line(workbench.geometry, lookups)]


def _wait_for(tier: ServerTier) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            tier.check()
        except TierError as error:
            if time.monotonic() > deadline_s:
                raise ConfigError(f"the cache server does not start: {error}") from error
            time.sleep(0.05)
        else:
            return


def _measure_moves(
    tiers: list[ServerTier], peer: RawPeer, refs: list[ChunkRef], slots: ByteArray, *, rounds: int, tick: Tick
) -> Samples:
    copy = prefaulted(slots[0].size).reshape(slots[0].shape)

    def memcpy() -> None:
        for target, source in zip(copy, slots[0], strict=True):
            np.copyto(target, source)

    limits: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (memcpy, memcpy),
        (peer.store, peer.retrieve),
    ]
    samples: Samples = {STORE: [], RETRIEVE: [], TCP_STORE: [], TCP_RETRIEVE: []}
    there, back = ([Transfer(ref, slot) for ref, slot in zip(refs, half, strict=True)] for half in slots)
    for number in range(WARM_UP_ROUNDS + rounds):
        tick("server")
        first = number % 2 == 0
        for tier, (put_limit, get_limit), (put_subject, get_subject) in zip(
            tiers, limits, ((STORE, RETRIEVE), (TCP_STORE, TCP_RETRIEVE)), strict=True
        ):
            slots[0] += 1
            slots[1] = 0
            samples[put_subject].append(_put(tier, there, put_limit, limit_first=first))
            samples[get_subject].append(_get(tier, back, get_limit, limit_first=first))
            require(bool((slots[0] == slots[1]).all()), "the server tier changed a byte")
            tier.remove(refs)  # or the next round would not store but replace
    return samples


def _measure_lookups(tier: ServerTier, peer: RawPeer, refs: list[ChunkRef], slots: ByteArray) -> list[Pair]:
    tier.put([Transfer(ref, slot) for ref, slot in zip(refs, slots, strict=True)])
    asked = (refs * -(-LOOKUP_CHUNKS // len(refs)))[:LOOKUP_CHUNKS]
    pairs = []
    for _ in range(LOOKUP_ROUNDS):
        ping_s, _ = timed(peer.ping)
        path_s, found = timed(lambda: tier.contains(asked))
        require(all(found), "the server tier did not find everything")
        pairs.append(Pair(LOOKUP_ROUND_TRIPS * ping_s, path_s))
    return pairs


def _put(tier: ServerTier, transfers: list[Transfer], limit: Callable[[], None], *, limit_first: bool) -> Pair:
    pair, outcomes = paired(limit, lambda: tier.put(transfers), limit_first=limit_first)
    require(set(outcomes) == {Outcome.STORED}, "the server tier did not store everything")
    return pair


def _get(tier: ServerTier, transfers: list[Transfer], limit: Callable[[], None], *, limit_first: bool) -> Pair:
    pair, outcomes = paired(limit, lambda: tier.get(transfers), limit_first=limit_first)
    require(set(outcomes) == {Outcome.HIT}, "the server tier did not find everything")
    return pair
