"""The cache server's lines of the bench: a server of its own, the server tier, and what it is held against.

On one host the limit is a memcpy of the same chunks, one after the other: that of all of them at once is faster where
it goes round the caches, which chunks are too short for. Over TCP it is plain pyzmq, which sends as many frames of the
same size to another process, or gets them from there, and leaves them in the memory that ZeroMQ has taken: no
checksums, and no copy to where they belong. A lookup is held against bare round trips of one small frame.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.errors import ConfigError, TierError
from kvstore.keys import Namespace
from kvstore.tiers.base import UNBOUNDED_BYTES, ChunkRef, Outcome, TierSetup, Transfer
from kvstore.tools.bench_work import BenchError, Pair, paired, prefaulted, timed

if TYPE_CHECKING:
    import zmq

    from kvstore.layout import KVLayout
    from kvstore.tiers.base import ByteArray
    from kvstore.tiers.server import ServerTier

LOOKUP_ROUND_TRIPS = 3
_START_TIMEOUT_S = 60.0
_TIMEOUT_S = 60.0
_NAMESPACE = Namespace({"model": "bench"})


class ServerSamples(NamedTuple):
    """Pairs of each line."""

    stores: list[Pair]
    retrieves: list[Pair]
    tcp_stores: list[Pair]
    tcp_retrieves: list[Pair]
    lookups: list[Pair]


class RawPeer:
    """The limits of the network: plain pyzmq to another process."""

    def __init__(self, folder: Path, chunk: ByteArray, piece_bytes: int) -> None:
        import zmq  # noqa: PLC0415 - an extra

        self._pieces = [chunk[begin : begin + piece_bytes].data for begin in range(0, len(chunk), piece_bytes)]
        ipc_address = f"ipc://{folder}/peer"
        command = [sys.executable, "-m", "kvstore.tools.bench_peer", ipc_address, str(len(chunk)), str(piece_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - ourselves
        assert self._process.stdout is not None
        with self._process.stdout as said:
            tcp_address = said.readline().decode().strip()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tcp, self._ipc = (self._connect(address, zmq.DEALER) for address in (tcp_address, ipc_address))

    def close(self) -> None:
        """End the other process."""
        self._process.kill()
        self._process.wait()
        self._context.destroy(linger=0)

    def store(self, num_chunks: int) -> None:
        """Send chunks."""
        for _ in range(num_chunks):
            self._tcp.send_multipart(self._pieces, copy=False)
        for _ in range(num_chunks):
            self._tcp.recv()

    def retrieve(self, num_chunks: int) -> None:
        """Get chunks."""
        for _ in range(num_chunks):
            self._tcp.send(b"get")
        for _ in range(num_chunks):
            self._tcp.recv_multipart(copy=False)

    def ping(self) -> None:
        """One round trip over ipc."""
        self._ipc.send(b"ping")
        self._ipc.recv()

    def _connect(self, address: str, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = int(_TIMEOUT_S * 1000)
        socket.connect(address)
        return socket


@contextmanager
def private_server(folder: Path, pool_bytes: int) -> Iterator[tuple[str, str]]:
    """A cache server that nobody else uses; yields its URLs on this host, and over TCP.

    Raises:
        ConfigError: it does not start.
    """
    import json  # noqa: PLC0415

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


def measure_server(
    layout: KVLayout, num_chunks: int, *, rounds: int, lookup_rounds: int, tick: Callable[[], None]
) -> ServerSamples:
    """Store, retrieve and look up against their limits, in alternating order, at a server of this call's own.

    Raises:
        BenchError: the tier lost or changed a byte.
        ConfigError: pyzmq or msgspec are not there, or the server does not start.
    """
    try:
        from kvstore.tiers.server import ServerTier  # noqa: PLC0415 - an extra
        from kvstore.wire import PIECE_BYTES  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(str(error)) from error
    slots = prefaulted(2 * num_chunks * layout.slot_bytes).reshape(2, num_chunks, layout.slot_bytes)
    pool_bytes = 4 * (num_chunks + 1) * layout.slot_bytes + (64 << 20)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvs-")))
        urls = opened.enter_context(private_server(folder, pool_bytes))
        peer = RawPeer(folder, prefaulted(layout.payload_bytes(layout.blocks_per_chunk)), PIECE_BYTES)
        opened.callback(peer.close)
        tiers = []
        for url in urls:
            options = {"url": url, "timeout_s": _TIMEOUT_S}
            tiers.append(ServerTier.open(TierSetup(_NAMESPACE, layout, UNBOUNDED_BYTES, options)))
            opened.callback(tiers[-1].close)
        _wait_for(tiers[0])
        return _measure(tiers, peer, slots, layout, rounds=rounds, lookup_rounds=lookup_rounds, tick=tick)


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


def _measure(
    tiers: list[ServerTier],
    peer: RawPeer,
    slots: ByteArray,
    layout: KVLayout,
    *,
    rounds: int,
    lookup_rounds: int,
    tick: Callable[[], None],
) -> ServerSamples:
    refs = [ChunkRef(number.to_bytes(16, "little"), layout.blocks_per_chunk) for number in range(slots.shape[1])]
    copy = prefaulted(slots[0].size).reshape(slots[0].shape)
    samples = ServerSamples([], [], [], [], [])

    def memcpy() -> None:
        for target, source in zip(copy, slots[0], strict=True):
            np.copyto(target, source)

    for number in range(rounds):
        tick()
        first = number % 2 == 0
        limits: list[tuple[Callable[[], None], Callable[[], None]]] = [
            (memcpy, memcpy),
            (lambda: peer.store(len(refs)), lambda: peer.retrieve(len(refs))),
        ]
        for tier, (store, retrieve), stores, retrieves in zip(
            tiers, limits, samples[:4:2], samples[1:4:2], strict=True
        ):
            slots[0] += 1
            slots[1] = 0
            stores.append(_put(tier, store, refs, slots[0], limit_first=first))
            retrieves.append(_get(tier, retrieve, refs, slots[1], limit_first=first))
            _require(bool((slots[0] == slots[1]).all()), "the server tier changed a byte")
            tier.remove(refs)  # or the next round would not store but replace
    tiers[0].put([Transfer(ref, slot) for ref, slot in zip(refs, slots[0], strict=True)])
    asked = (refs * -(-128 // len(refs)))[:128]
    for _ in range(lookup_rounds):
        ping_s, _ = timed(peer.ping)
        path_s, found = timed(lambda: tiers[0].contains(asked))
        _require(all(found), "the server tier did not find everything")
        samples.lookups.append(Pair(LOOKUP_ROUND_TRIPS * ping_s, path_s))
    return samples


def _put(
    tier: ServerTier, limit: Callable[[], None], refs: list[ChunkRef], slots: ByteArray, *, limit_first: bool
) -> Pair:
    transfers = [Transfer(ref, slot) for ref, slot in zip(refs, slots, strict=True)]
    pair, outcomes = paired(limit, lambda: tier.put(transfers), limit_first=limit_first)
    _require(set(outcomes) == {Outcome.STORED}, "the server tier did not store everything")
    return pair


def _get(
    tier: ServerTier, limit: Callable[[], None], refs: list[ChunkRef], slots: ByteArray, *, limit_first: bool
) -> Pair:
    transfers = [Transfer(ref, slot) for ref, slot in zip(refs, slots, strict=True)]
    pair, outcomes = paired(limit, lambda: tier.get(transfers), limit_first=limit_first)
    _require(set(outcomes) == {Outcome.HIT}, "the server tier did not find everything")
    return pair


def _require(kept: bool, broken: str) -> None:
    if not kept:
        raise BenchError(broken)
