"""Bench lines of the index and the eviction policy, which move no bytes. Their limits are targets."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

from kvstore.catalog.index import ChunkIndex
from kvstore.catalog.plans import chunk_refs
from kvstore.engine import CacheEngine
from kvstore.keys import PREFIX_KEY_BYTES, PrefixHasher, PrefixKey
from kvstore.options import EngineOptions
from kvstore.policies import Adaptive, open_policy
from kvstore.policies.simulation import SimulatedStore
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import LOOKUP_CHUNKS, LOOKUP_ROUNDS, NAMESPACE, Pair, require, timed
from kvstore.tools.bench.workbench import Workbench

INDEX_CHUNKS = 100_000
POLICY_CHUNKS = 100_000
POLICY_REQUESTS = 2_000
_CHAIN_CHUNKS = 16
_SHARED_BLOCKS = 6  # blocks shared with the chunk behind the last one that is found
_TINY = Geometry("tiny", layers=1, kv_heads=1, head_size=8)  # the size of a chunk does not affect a lookup
INDEX = Subject("lookup, 128 known keys", "60 us", "the index, with keys as they are known for a running request")
PROBE = Subject(
    "probe behind the last chunk",
    "10 us",
    "the same index: a stored chunk shares six of sixteen blocks, whose keys are known",
)
INDEX_BYTES = Subject(
    "index, a chunk of 16 blocks",
    "1 KiB",
    "what Python allocates for 100,000 chunks stored, policy included",
    unit="bytes",
)
ENGINE = Subject("lookup, list of 32,768 tokens", "1 ms", "keys of the token list, index")
POLICY = Subject("adaptive policy, a chunk touched", "20 us", "lookup, noting the use, and for half of them room made")


def measure_lookups() -> list[Line]:
    """Look up 128 stored chunks, by their keys and by the tokens of a Python list, and the chunk behind them.

    Raises:
        BenchError: a lookup did not find the expected tokens.
    """
    workbench = Workbench(_TINY, LOOKUP_CHUNKS)
    slots = workbench.new_batch()
    num_tokens, tokens = workbench.num_tokens, list(workbench.tokens)
    found_tokens = num_tokens + _SHARED_BLOCKS * _TINY.block_tokens
    index = ChunkIndex(LOOKUP_CHUNKS + 1)
    _store(index, _hasher([*tokens, *tokens[: _TINY.chunk_tokens]]))
    known = _hasher(tokens)
    parting = _hasher([*tokens, *tokens[: found_tokens - num_tokens], *tokens[: _TINY.chunk_tokens]])
    with CacheEngine(workbench.paged, NAMESPACE, EngineOptions(workbench.pool_bytes)) as engine:
        engine.store(workbench.tokens, slot_mapping=slots)
        return [
            _line(INDEX, 60e-6, lambda: index.lookup(known).num_tokens, num_tokens),
            _line(PROBE, 10e-6, lambda: index.lookup(parting, num_tokens).num_tokens, found_tokens),
            _line(ENGINE, 1e-3, lambda: engine.lookup(workbench.tokens), num_tokens),
        ]


def measure_index() -> Line:
    """Count the bytes of the index per chunk, for chunks that are in memory and indexed by every block end."""
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
    require(len(index) == chains * _CHAIN_CHUNKS, f"{INDEX_BYTES.name}: {len(index)} of {INDEX_CHUNKS} were stored")
    return INDEX_BYTES.line(_TINY, [Pair(1024, taken_bytes / len(index))])


def measure_touches() -> Line:
    """Measure the default policy per chunk touched: lookup, recording the use, eviction, and adding new chunks.

    The tier is full of chains of 16 chunks; half of the requests are new, and half repeat an earlier one.
    """
    store, chooser = SimulatedStore([open_policy(Adaptive.name, POLICY_CHUNKS)]), random.Random(1)  # noqa: S311 - not a secret
    chains = POLICY_CHUNKS // _CHAIN_CHUNKS + 1
    for number in range(chains):
        store.request(_chain(number), [1] * _CHAIN_CHUNKS)
    pairs = []
    for number in range(chains, chains + POLICY_REQUESTS):
        chain = _chain(number if chooser.random() < 0.5 else chooser.randrange(number - chains, number))
        begin_s = time.thread_time()
        store.request(chain, [1] * _CHAIN_CHUNKS)
        pairs.append(Pair(20e-6, (time.thread_time() - begin_s) / _CHAIN_CHUNKS))
    return POLICY.line(_TINY, pairs)


def _hasher(tokens: list[int]) -> PrefixHasher:
    hasher = PrefixHasher(_TINY.chunk_tokens, _TINY.block_tokens)
    hasher.update(tokens)
    return hasher


def _store(index: ChunkIndex, hasher: PrefixHasher) -> None:
    index.complete_store(index.prepare_store(chunk_refs(hasher, with_tail=False), hasher=hasher), set())


def _chain(number: int) -> list[PrefixKey]:
    return [(number * _CHAIN_CHUNKS + place).to_bytes(PREFIX_KEY_BYTES, "little") for place in range(_CHAIN_CHUNKS)]


def _line(subject: Subject, target_s: float, call: Callable[[], int], num_tokens: int) -> Line:
    pairs = []
    for _ in range(LOOKUP_ROUNDS):
        seconds, known_tokens = timed(call)
        require(known_tokens == num_tokens, f"{subject.name} found {known_tokens} of {num_tokens} tokens")
        pairs.append(Pair(target_s, seconds))
    return subject.line(_TINY, pairs)
