"""Measurement of an index of millions of chunks: memory, lookups, evictions, and the start over as many files.

Each measurement runs in a process of its own. A conversation has forty chunks of sixteen blocks; a tenth of the chunks
has a slot in memory, and all are on disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.format.chunkfile import chunk_name, file_bytes
from kvstore.format.trailrecords import TRAILS_FILE, TrailRecords
from kvstore.index.index import ChunkIndex
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import PREFIX_KEY_BYTES, Namespace, PrefixHasher
from kvstore.model.layout import KVLayout
from kvstore.policies import POLICIES, Adaptive
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.dev.arguments import parser_of

BLOCKS, BLOCK_TOKENS, CHAIN = 16, 16, 40
CHUNK_TOKENS: Final = BLOCKS * BLOCK_TOKENS
_SLOTS_SHARE: Final = 10
_ASKED: Final = 1000
_KNOWN: Final = 50  # conversations looked up, as each takes hundreds of kilobytes
_LAYOUT: Final = KVLayout((16,), 1, BLOCK_TOKENS, CHUNK_TOKENS)
_NAMESPACE: Final = Namespace({"model": "scale"})
_EXAMPLES: Final = "Example: python -m kvstore.tools.dev.scale --chunks 1000000 --folder /tmp/scale --json"


def conversation(number: int) -> PrefixHasher:
    """Return the keys of one conversation."""
    hasher = PrefixHasher(CHUNK_TOKENS, BLOCK_TOKENS)
    hasher.update(np.random.default_rng(number).integers(0, 50_000, CHAIN * CHUNK_TOKENS).tolist())
    return hasher


def open_index(chunks: int, policy: str) -> ChunkIndex:
    """Return an empty index with room for so many chunks on disk."""
    slots = max(2 * CHAIN, chunks // _SLOTS_SHARE)
    return ChunkIndex(
        slots, disk_capacity_bytes=chunks, stored_bytes=lambda _: 1, max_writes=slots, cache_policy=policy
    )


def ask(index: ChunkIndex, hasher: PrefixHasher) -> int:
    """Load and store a conversation, as requests do, and return the tokens that were found."""
    match = index.lookup(hasher)
    loads = index.prepare_load(match.refs, hasher=hasher)
    index.complete_load(loads, set(), set())
    first = match.num_tokens // CHUNK_TOKENS
    keys = hasher.chunk_keys()
    steps = index.prepare_store([ChunkRef(key, BLOCKS) for key in keys[first:]], keys[:first], hasher=hasher)
    index.complete_store(steps, set())
    for step in steps:
        for target in step.targets:
            index.complete_write(step.ref.prefix_key, target, stored=True)
    index.take_removals()
    return match.num_tokens


def figures(before_bytes: int, chunks: int) -> dict[str, Any]:
    """Return memory, now and at its peak, of this process."""
    gc.collect()
    return {
        "chunks": chunks,
        "bytes_per_chunk": (resident_bytes() - before_bytes) / chunks,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def timed_us(call: Callable[[], object]) -> float:
    """Return the microseconds of a call on a processor, as others may use this machine."""
    begin_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin_ns) / 1000


class Watch:
    """Watch of wall and processor seconds since the last reading, as others may use this machine."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def read(self, name: str) -> dict[str, float]:
        """Return the seconds since the last reading, under two names."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = {f"{name}_s": wall_s - self._wall_s, f"{name}_cpu_s": cpu_s - self._cpu_s}
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return found


def spread(samples_us: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum of samples."""
    ordered = sorted(samples_us)
    return {
        "p50_us": ordered[len(ordered) // 2],
        "p99_us": ordered[len(ordered) * 99 // 100],
        "max_us": ordered[-1],
    }


def lookups(index: ChunkIndex, known: Sequence[PrefixHasher]) -> dict[str, Any]:
    """Return the times to look up whole conversations, and ones of which nothing is known."""
    strange = [conversation(-1 - number & 0xFFFFFFFF) for number in range(200)]
    hits = [timed_us(partial(index.lookup, hasher)) for hasher in known]
    misses = [timed_us(partial(index.lookup, hasher)) for hasher in strange]
    found = sum(index.lookup(hasher).num_tokens for hasher in known) / (len(known) * CHAIN * CHUNK_TOKENS)
    return {"lookup_of_40_chunks": spread(hits), "lookup_of_a_miss": spread(misses), "found": found}


def stores(index: ChunkIndex, new: Iterable[PrefixHasher]) -> dict[str, Any]:
    """Return the times to store new conversations into a full index, and the chunks evicted for them."""
    evicted, samples = index.counters.evicted_disk, []
    for hasher in new:
        ask(index, hasher)  # which a filter refuses
        samples.append(timed_us(partial(ask, index, hasher)))
    evicted = index.counters.evicted_disk - evicted
    return {"store_of_40_chunks_into_a_full_index": spread(samples), "evicted": evicted}


def measure_stored(chunks: int, policy: str) -> dict[str, Any]:
    """Fill an index by requests, look up, and store more than fits."""
    index, before_bytes, count = open_index(chunks, policy), resident_bytes(), chunks // CHAIN
    watch = Watch()
    for number in range(count):
        ask(index, conversation(number))
    found: dict[str, Any] = {**watch.read("fill"), **figures(before_bytes, len(index))}
    chosen = random.Random(1).sample(range(count), _KNOWN)  # noqa: S311 - no secret
    found |= lookups(index, list(map(conversation, chosen)))
    return found | stores(index, map(conversation, range(count, count + min(_ASKED, count))))


def survivors(chunks: int) -> Iterator[tuple[ChunkRef, bytes]]:
    """Yield chunks with trails, all of random keys, but for those of some conversations."""
    for hasher in map(conversation, range(_KNOWN)):
        trails = hasher.trails(hasher.chunk_keys(), b"")
        yield from ((ChunkRef(key, BLOCKS), trails[key]) for key in hasher.chunk_keys())
    for _ in range(chunks - _KNOWN * CHAIN):
        trail = os.urandom(BLOCKS * PREFIX_KEY_BYTES)
        yield ChunkRef(trail[-PREFIX_KEY_BYTES:], BLOCKS), trail


def measure_adopted(chunks: int, policy: str) -> dict[str, Any]:
    """Fill an index as a start does, look up, and store more than fits."""
    index, before_bytes = open_index(chunks, policy), resident_bytes()
    trails: dict[bytes, bytes] = {}
    found: list[tuple[ChunkRef, int]] = []
    for ref, trail in survivors(chunks):
        found.append((ref, 1))
        trails[ref.prefix_key] = trail
    watch = Watch()
    index.adopt(found, trails)
    index.settle()
    seconds = watch.read("adopt")
    del found, trails
    memory = figures(before_bytes, len(index))
    found_again = lookups(index, list(map(conversation, range(_KNOWN))))
    return {**seconds, **memory, **found_again, **stores(index, map(conversation, range(_KNOWN, _KNOWN + _ASKED)))}


def measure_folder(chunks: int, policy: str, folder: Path) -> dict[str, Any]:
    """Make a folder with so many files without content, and start over it."""
    size_bytes = file_bytes(_LAYOUT, BLOCKS)
    home, records = folder / _NAMESPACE.id.hex(), TrailRecords(BLOCKS)
    _open(folder, chunks).close()
    watch = Watch()
    with (home / TRAILS_FILE).open("wb") as trails_file:
        for ref, trail in survivors(chunks):
            path = home / chunk_name(ref)
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size_bytes)
            trails_file.write(records.record(trail))
    found: dict[str, Any] = watch.read("make")
    before_bytes = resident_bytes()
    tier = _open(folder, chunks)
    held = tier.scan()
    found |= watch.read("scan")
    trails = tier.trails()
    found |= watch.read("trails")
    index = open_index(chunks, policy)
    index.adopt([(ref, 1) for ref, _ in held], trails)
    index.settle()
    found |= watch.read("adopt") | {"trails": len(trails)}
    del held, trails
    tier.close()
    return found | figures(before_bytes, len(index))


def _open(folder: Path, chunks: int) -> DiskTier:
    capacity_bytes = (chunks + 1) * file_bytes(_LAYOUT, BLOCKS)
    return DiskTier(folder, _NAMESPACE, _LAYOUT, capacity_bytes, checks_room=False)


def main() -> int:
    """Measure, and print the figures."""
    parser = parser_of("scale", __doc__, _EXAMPLES)
    parser.add_argument("--chunks", type=int, default=100_000, help="chunks of the index")
    parser.add_argument("--policy", choices=list(POLICIES), default=Adaptive.name)
    parser.add_argument("--only", choices=["stored", "adopted", "folder"], action="append", help="by default all")
    parser.add_argument("--folder", type=Path, help="where to make the files; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.chunks < CHAIN * _KNOWN:
        parser.error(f"--chunks is {given.chunks}: it must be at least {CHAIN * _KNOWN}")
    stages = given.only or ["stored", "adopted", "folder"]
    if given.here:
        print(json.dumps(_measure(stages[0], given.chunks, given.policy, given.folder)))
        return 0
    found = {}
    for stage in stages:
        print(f"{stage}: {given.chunks:,} chunks", file=sys.stderr)
        found[stage] = _in_a_child(stage, given)
        if not given.json:
            print(stage, *(f"  {name}: {value}" for name, value in found[stage].items()), sep="\n")
    if given.json:
        print(json.dumps({"policy": given.policy, **found}))
    return 0


def _in_a_child(stage: str, given: argparse.Namespace) -> dict[str, Any]:
    words = ["--here", "--only", stage, "--chunks", str(given.chunks), "--policy", given.policy]
    words += ["--folder", str(given.folder)] if given.folder else []
    command = [sys.executable, "-m", "kvstore.tools.dev.scale", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(stage: str, chunks: int, policy: str, folder: Path | None) -> dict[str, Any]:
    if stage == "stored":
        return measure_stored(chunks, policy)
    if stage == "adopted":
        return measure_adopted(chunks, policy)
    with tempfile.TemporaryDirectory(prefix="kvstore-scale-", dir=folder) as made:
        return measure_folder(chunks, policy, Path(made))


if __name__ == "__main__":
    sys.exit(main())
