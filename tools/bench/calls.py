"""Lines of calls that move no bytes: the index, the eviction policy, and the start of an engine.

The limit of a lookup is a walk through a dict with the same keys; that of the others is a target.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import chunk_refs
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixHasher, PrefixKey
from kvstore.policies import Adaptive, open_policy
from kvstore.policies.simulation import SimulatedStore
from kvstore.tools.bench.geometry import GEOMETRIES, TINY
from kvstore.tools.bench.lines import Target, race, target
from kvstore.tools.bench.samples import LOOKUP_CHUNKS, LOOKUP_ROUNDS, NAMESPACE, Limit, Pair, Pairing, require, timed
from kvstore.tools.bench.workbench import Workbench

INDEX_CHUNKS = 100_000
POLICY_CHUNKS = 100_000
POLICY_REQUESTS = 2_000
POOL_BYTES = 4 << 30
_CHAIN_CHUNKS = 16
_SHARED_BLOCKS = 6  # blocks shared with the chunk behind the last one that is found
_TOKENS = list(range(LOOKUP_CHUNKS * TINY.chunk_tokens))
_IMPORT_TIMEOUT_S = 120.0
_IMPORT = """
import time, torch
begin_s = time.perf_counter()
import kvstore.engine.engine, kvstore.paged.binding
print(time.perf_counter() - begin_s)
"""


@race("lookup, 128 known keys", "dict walk", "the index, with keys as they are known for a running request")
def _index_lookups() -> Iterator[Pair]:
    index, known = _index(), _hasher(_TOKENS)
    yield from _lookups(_walk(list(known.chunk_keys())), lambda: index.lookup(known).num_tokens, len(_TOKENS))


@race(
    "probe behind the last chunk",
    "dict walk",
    "the same index: a stored chunk shares six of sixteen blocks, whose keys are known",
)
def _probes() -> Iterator[Pair]:
    index, shared = _index(), _TOKENS[: _SHARED_BLOCKS * TINY.block_tokens]
    parting = _hasher([*_TOKENS, *shared, *_TOKENS[: TINY.chunk_tokens]])
    walk = _walk(parting.block_keys(LOOKUP_CHUNKS)[: _SHARED_BLOCKS + 1])
    yield from _lookups(walk, lambda: index.lookup(parting, len(_TOKENS)).num_tokens, len(_TOKENS) + len(shared))


def _walk(keys: Sequence[PrefixKey]) -> Limit:
    """Return a call that finds each of these keys in a dict."""
    table = dict.fromkeys(keys, 0)

    def walk() -> None:
        for key in keys:
            if key not in table:
                break

    return walk


def _index() -> ChunkIndex:
    """Return an index of the chunks that are looked up, and of one behind them."""
    index = ChunkIndex(LOOKUP_CHUNKS + 1)
    _store(index, _hasher([*_TOKENS, *_TOKENS[: TINY.chunk_tokens]]))
    return index


@race("lookup, list of 32,768 tokens", "sha256, dict walk", "keys of the token list, index")
def _engine_lookups() -> Iterator[Pair]:
    workbench = Workbench(TINY, LOOKUP_CHUNKS)
    slots = workbench.new_batch()
    walk = _walk(list(_hasher(workbench.tokens).chunk_keys()))

    def limit() -> None:
        hashlib.sha256(array("I", workbench.tokens)).digest()
        walk()

    with CacheEngine(workbench.paged, NAMESPACE, EngineOptions(workbench.pool_bytes)) as engine:
        engine.store(workbench.tokens, slot_mapping=slots)
        yield from _lookups(limit, lambda: engine.lookup(workbench.tokens), workbench.num_tokens)


def _lookups(limit: Limit, call: Callable[[], int], num_tokens: int) -> Iterator[Pair]:
    for number in range(LOOKUP_ROUNDS):
        pair, found_tokens = Pairing(number % 2 == 0)(limit, call)
        require(found_tokens == num_tokens, f"a lookup found {found_tokens} of {num_tokens} tokens")
        yield pair


@target(
    1024,
    "index, a chunk of 16 blocks",
    "1 KiB",
    "what Python allocates for 100,000 chunks stored, policy included",
    unit="bytes",
)
def index_bytes() -> Iterator[float]:
    """Yield the bytes of the index per chunk, for chunks that are in memory and indexed by every block end."""
    index, tokens = ChunkIndex(INDEX_CHUNKS), list(range(256)) * _CHAIN_CHUNKS
    chains = INDEX_CHUNKS // _CHAIN_CHUNKS
    tracemalloc.start()
    try:
        before_bytes = tracemalloc.get_traced_memory()[0]
        for number in range(chains):
            tokens[:2] = divmod(number, 256)  # small integers, which Python does not allocate
            _store(index, _hasher(tokens))
        taken_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    finally:
        tracemalloc.stop()
    require(len(index) == chains * _CHAIN_CHUNKS, f"index: {len(index)} of {INDEX_CHUNKS} were stored")
    yield taken_bytes / len(index)


@target(20e-6, "adaptive policy, a chunk touched", "20 us", "lookup, noting the use, and for half of them room made")
def _touches() -> Iterator[float]:
    """Yield the processor time of a request per chunk: lookup, recording the use, eviction, and adding new chunks.

    The tier is full of chains of 16 chunks; half of the requests are new, and half repeat an earlier one.
    """
    store, chooser = SimulatedStore([open_policy(Adaptive.name, POLICY_CHUNKS)]), random.Random(1)  # noqa: S311 - not a secret
    chains = POLICY_CHUNKS // _CHAIN_CHUNKS + 1
    for number in range(chains):
        store.request(_chain(number), [1] * _CHAIN_CHUNKS)
    for number in range(chains, chains + POLICY_REQUESTS):
        chain = _chain(number if chooser.random() < 0.5 else chooser.randrange(number - chains, number))
        begin_s = time.thread_time()
        store.request(chain, [1] * _CHAIN_CHUNKS)
        yield (time.thread_time() - begin_s) / _CHAIN_CHUNKS


def _hasher(tokens: list[int]) -> PrefixHasher:
    hasher = PrefixHasher(TINY.chunk_tokens, TINY.block_tokens)
    hasher.update(tokens)
    return hasher


def _store(index: ChunkIndex, hasher: PrefixHasher) -> None:
    index.complete_store(index.prepare_store(chunk_refs(hasher, with_tail=False), hasher=hasher), set())


def _chain(number: int) -> list[PrefixKey]:
    return [(number * _CHAIN_CHUNKS + place).to_bytes(PREFIX_KEY_BYTES, "little") for place in range(_CHAIN_CHUNKS)]


CALLS = (_index_lookups, _probes, _engine_lookups, index_bytes, _touches)


def start(rounds: int) -> tuple[Target, Target]:
    """Return the rows of an import of the library, and of opening an engine over a large pool."""

    @target(0.5, "import kvstore", "0.5 s", "engine and binding, in a new process that has torch")
    def imports() -> Iterator[float]:
        command = [sys.executable, "-c", _IMPORT]
        for _ in range(rounds):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)  # noqa: S603 - this interpreter
            require(done.returncode == 0, f"kvstore cannot be imported: {done.stderr[-1000:]}")
            yield float(done.stdout)

    @target(1.0, "engine start, pool of 4 GiB", "1 s", "CacheEngine; the pool is populated behind")
    def starts() -> Iterator[float]:
        workbench = Workbench(GEOMETRIES["qwen-0.5b"], 1)
        for _ in range(rounds):
            seconds, engine = timed(lambda: CacheEngine(workbench.paged, NAMESPACE, EngineOptions(POOL_BYTES)))
            engine.close()
            yield seconds

    return imports, starts
