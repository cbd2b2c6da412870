"""Lines of the tiers on other hosts: chunks moved through a tier without an engine, on a private server.

The limit of the Redis tier is a plain socket client. That of the object tier is a plain HTTP client which signs its
requests, on the same server in memory; both are compared in processor time of this process, too. The limit of the cache
server on one host is a memcpy of the same chunks, one after the other. (A memcpy of all chunks at once can be faster by
bypassing the processor's caches; a chunk is too short for that.) Over TCP the limit is plain pyzmq, which sends as many
frames of the same size to another process, or receives them, and leaves them in ZeroMQ's memory, without checksums and
without a copy to their destination. The limit of a lookup is bare round trips of one small frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tools.bench.bare_s3 import ACCESS_KEY, SECRET_KEY, PlainClient
from kvstore.tools.bench.limits import prefaulted
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.raw_peers import RawPeer, RawRedis
from kvstore.tools.bench.samples import (
    LOOKUP_CHUNKS,
    LOOKUP_ROUNDS,
    NAMESPACE,
    Limit,
    Pair,
    Pairing,
    Tick,
    alternating,
    require,
    timed,
)
from kvstore.tools.bench.servers import child, private_redis, private_seaweed, private_server
from kvstore.tools.bench.workbench import Workbench
from kvstore.transfer.batches import chunks_per_batch

LOOKUP_ROUND_TRIPS = 3
_BUCKET = "bench"
REDIS = (
    Subject("redis store", "plain socket SET", "the tier's put, a chunk a call: xxh3, parts of 1 MiB, transaction"),
    Subject("redis retrieve", "plain socket GET", "the tier's get, a chunk a call: parts, xxh3 verified"),
    Subject("redis: a chunk for its quarter", "its leading quarter", "GET, no tier, against GETRANGE of a part"),
)
_SEAWEED_BYTES = 64 << 20  # a round, because every round takes more of its disk
OBJECTS = (
    Subject("object store", "plain HTTP PUT", "the tier's put, a chunk a call: xxh3, signature, manifest"),
    Subject("object retrieve", "plain HTTP GET", "the tier's get, a chunk a call: signature, xxh3 verified"),
    Subject("object store: processor time", "plain HTTP PUT", "as above, of this process"),
    Subject("object retrieve: processor time", "plain HTTP GET", "as above, of this process"),
)
SEAWEED = (
    Subject("SeaweedFS store", "plain HTTP PUT", "as for the object store, on a real server that writes to a disk"),
    Subject("SeaweedFS retrieve", "plain HTTP GET", "the same"),
)
REDIS_LOOKUP = Subject("redis lookup, 128 known keys", "3 round trips", "the tier's look; the limit has 0.5 ms more")
_TCP_INCLUDES = "a chunk a call: checksums made and compared, copies"
SERVER = (
    Subject("server store", "memcpy", "the tier's put, a chunk a call: asking for pages, copy, commit"),
    Subject("server retrieve", "memcpy", "the tier's get, a chunk a call: asking for pages, copy, release"),
    Subject("server store over TCP", "plain pyzmq", f"the tier's put, {_TCP_INCLUDES}"),
    Subject("server retrieve over TCP", "plain pyzmq", f"the tier's get, {_TCP_INCLUDES}"),
    Subject("server: a chunk for its quarter", "its leading quarter", "the tier's get of each"),
    Subject("server: a chunk for its quarter, TCP", "its leading quarter", "the tier's get of each"),
)
SERVER_LOOKUP = Subject("server lookup, 128 known keys", "3 round trips", "the tier's look, over ipc")
_REDIS_LOOKUP_SLACK_S = 0.5e-3
_TIMEOUT_S = 60.0


class Chunks:
    """Chunks in prefaulted slots, and as many slots to load them into.

    Attributes:
        refs: references of the chunks.
        stored: uint8 ``[num_chunks, slot_bytes]``, the stored bytes.
    """

    def __init__(self, layout: KVLayout, num_chunks: int) -> None:
        self._layout = layout
        slots = prefaulted(2 * num_chunks * layout.slot_bytes).reshape(2, num_chunks, layout.slot_bytes)
        self.stored, self._loaded = slots
        random = np.random.default_rng(0)
        self.stored[:] = random.integers(256, size=self.stored.shape, dtype=np.uint8)
        self.refs = [ChunkRef(number.to_bytes(16, "little"), layout.blocks_per_chunk) for number in range(num_chunks)]
        self._puts, self._gets = ([Transfer(*pair) for pair in zip(self.refs, half, strict=True)] for half in slots)
        before_bytes = PREFIX_KEY_BYTES * (layout.blocks_per_chunk - 1)
        self._puts = [put._replace(trail=random.bytes(before_bytes) + put.ref.prefix_key) for put in self._puts]

    def tier(self, name: str, url: str) -> Tier:
        """Open a tier for these chunks."""
        options = {"url": url, "timeout_s": _TIMEOUT_S}
        return open_tier(name, TierSetup(NAMESPACE, self._layout, UNBOUNDED_BYTES, options))

    def move(
        self, tier: Tier, put_limit: Limit, get_limit: Limit, pair: Pairing, threads: ThreadPoolExecutor | None = None
    ) -> tuple[Pair, Pair]:
        """Store all chunks with new bytes, load them, and remove them; return the times of the store and the load.

        Each call moves one chunk, and calls do not overlap. With ``threads`` it is done as an engine does it: they
        overlap on these, and a put has several small chunks.
        """
        together = chunks_per_batch(self._layout.slot_bytes) if threads else 1
        self.stored += 1
        self._loaded[:] = 0
        stored, outcomes = pair(put_limit, partial(_call, tier.put, self._puts, together, threads))
        require(set(outcomes) == {Outcome.STORED}, f"the {tier.name} tier did not store everything")
        loaded, outcomes = pair(get_limit, partial(_call, tier.get, self._gets, 1, threads))
        require(set(outcomes) == {Outcome.HIT}, f"the {tier.name} tier did not find everything")
        require(bool((self.stored == self._loaded).all()), f"the {tier.name} tier changed a byte")
        tier.remove(self.refs)  # otherwise the next round would replace chunks
        return stored, loaded

    def quarter(self, tier: Tier, pair: Pairing) -> Pair:
        """Store all chunks, and time loads of whole chunks with loads of their leading quarters as the limit."""
        front_blocks = max(1, self._layout.blocks_per_chunk // 4)
        fronts = [get._replace(front_blocks=front_blocks) for get in self._gets]
        tier.put(self._puts)
        part = partial(_call, tier.get, fronts)
        sample, outcomes = pair(part, partial(_call, tier.get, self._gets))
        require(set(outcomes) == {Outcome.HIT}, f"the {tier.name} tier did not find everything")
        tier.remove(self.refs)
        return sample

    def look_up(self, tier: Tier, ping: Limit, slack_s: float = 0.0) -> list[Pair]:
        """Store all chunks and look them up; the limit is three round trips plus ``slack_s``."""
        tier.put(self._puts)
        asked = (self.refs * -(-LOOKUP_CHUNKS // len(self.refs)))[:LOOKUP_CHUNKS]
        pairs = []
        for _ in range(LOOKUP_ROUNDS):
            ping_s, _ = timed(ping)
            path_s, found = timed(lambda: tier.look(asked))
            require(all(found), f"the {tier.name} tier did not find everything")
            pairs.append(Pair(LOOKUP_ROUND_TRIPS * ping_s + slack_s, path_s))
        return pairs


def _call(
    call: Callable[[Sequence[Transfer]], Sequence[Outcome]],
    transfers: list[Transfer],
    together: int = 1,
    threads: ThreadPoolExecutor | None = None,
) -> list[Outcome]:
    parts = [transfers[at : at + together] for at in range(0, len(transfers), together)]
    return list(chain.from_iterable((threads.map if threads else map)(call, parts)))


def measure_redis(workbench: Workbench, rounds: int, tick: Tick, *, program: Path | None) -> list[Line]:
    """Store, retrieve and look up on a private Redis server, in alternation with the limits."""
    layout, found = workbench.paged.layout, []
    chunks = Chunks(layout, workbench.num_chunks)
    quarter = layout.front_ranges(layout.blocks_per_chunk, max(1, layout.blocks_per_chunk // 4))
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        port = opened.enter_context(private_redis(program, folder))
        tier = opened.enter_context(closing(chunks.tier("redis", f"redis://127.0.0.1:{port}")))
        from kvstore.tiers.redis.chunk import PART_BYTES  # noqa: PLC0415 - of an extra, which the tier needs, too

        payloads = prefaulted(workbench.batch_bytes).reshape(workbench.num_chunks, -1)
        raw = opened.enter_context(closing(RawRedis(port, payloads, PART_BYTES)))
        for pair in alternating(rounds, tick):
            moved = chunks.move(tier, raw.store, raw.retrieve, pair)
            part, _ = pair(partial(raw.retrieve_ranges, quarter), raw.retrieve)
            found.append((*moved, part))
            raw.remove()  # otherwise the next round would replace values
        lookups = chunks.look_up(tier, raw.ping, _REDIS_LOOKUP_SLACK_S)
    return [*move_lines(REDIS, found, workbench), REDIS_LOOKUP.line(lookups)]


def measure_objects(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Store and retrieve on an S3 server in memory, in alternation with a plain client."""
    with ExitStack() as opened:
        port = int(opened.enter_context(child("kvstore.tools.bench.bare_s3")).said())
        move = opened.enter_context(_moves_of_objects(workbench, workbench.num_chunks, port))
        found = [(*move(pair), *move(pair._replace(clock=time.process_time))) for pair in alternating(rounds, tick)]
    return move_lines(OBJECTS, found, workbench)


def measure_seaweed(workbench: Workbench, rounds: int, tick: Tick, folder: Path, *, program: Path) -> list[Line]:
    """Store and retrieve on a private SeaweedFS, in alternation with a plain client."""
    num_chunks = max(1, min(workbench.num_chunks, _SEAWEED_BYTES // workbench.paged.layout.slot_bytes))
    with private_seaweed(program, folder, _BUCKET) as port, _moves_of_objects(workbench, num_chunks, port) as move:
        found = [move(pair) for pair in alternating(rounds, tick)]
    return move_lines(SEAWEED, found, workbench, num_chunks)


@contextmanager
def _moves_of_objects(
    workbench: Workbench, num_chunks: int, port: int
) -> Iterator[Callable[[Pairing], tuple[Pair, Pair]]]:
    """Yield a function that stores and loads chunks on an S3 server, in alternation with a plain client."""
    chunks = Chunks(workbench.paged.layout, num_chunks)
    with ExitStack() as opened:
        keys = Path(opened.enter_context(TemporaryDirectory(prefix="kvstore-bench-"))) / "credentials"
        keys.write_text(f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
        url = f"s3://{_BUCKET}/kv?endpoint=http://127.0.0.1:{port}&credentials_file={keys}"
        tier = opened.enter_context(closing(chunks.tier("object", url)))
        payloads = prefaulted(num_chunks * workbench.geometry.chunk_bytes).reshape(num_chunks, -1)
        plain = opened.enter_context(closing(PlainClient(port, _BUCKET, payloads, (ACCESS_KEY, SECRET_KEY))))
        yield lambda pair: chunks.move(tier, plain.store, plain.retrieve, pair)


def measure_server(workbench: Workbench, rounds: int, tick: Tick) -> list[Line]:
    """Store, retrieve and look up on a private cache server, in alternation with the limits."""
    layout = workbench.paged.layout
    chunks = Chunks(layout, workbench.num_chunks)
    copy = prefaulted(chunks.stored.size).reshape(chunks.stored.shape)

    def memcpy() -> None:
        for target, source in zip(copy, chunks.stored, strict=True):
            np.copyto(target, source)

    pool_bytes = 4 * (workbench.num_chunks + 1) * layout.slot_bytes + (64 << 20)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="kvs-")))
        urls = opened.enter_context(private_server(folder, pool_bytes))
        near, far = (opened.enter_context(closing(chunks.tier("server", url))) for url in urls)
        from kvstore.protocol.messages import PIECE_BYTES  # noqa: PLC0415 - of an extra, which the tier needs, too

        payloads = chunks.stored[:, : layout.payload_bytes(layout.blocks_per_chunk)]
        peer = opened.enter_context(closing(RawPeer(folder, payloads, PIECE_BYTES)))
        found = [
            (
                *chunks.move(near, memcpy, memcpy, pair),
                *chunks.move(far, peer.store, peer.retrieve, pair),
                *(chunks.quarter(tier, pair) for tier in (near, far)),
            )
            for pair in alternating(rounds, tick)
        ]
        lookups = chunks.look_up(near, peer.ping)
    return [*move_lines(SERVER, found, workbench), SERVER_LOOKUP.line(lookups)]
