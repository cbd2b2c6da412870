"""Gain of hits that end at any block, for ``kvstore simulate --block-tokens``.

An id of the trace is a block here, and several ids are a chunk. The requests are replayed on the index twice: as it is,
and with hits on whole chunks and tails only. A trace does not show the position inside an id at which two prompts part.
Real blocks are smaller, so real hits are up to an id longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place
from kvstore.model.errors import ConfigError
from kvstore.model.keys import PrefixHasher
from kvstore.policies.traces import read_trace
from kvstore.tools.replay import Replay
from kvstore.tools.simulate.beside import Tick
from kvstore.tools.simulate.cells import Cell, Scale

DEFAULT_CHUNK_TOKENS = 256
_TICK = 100  # requests between two progress reports


class Chunking(NamedTuple):
    """Tokens of a block, which is an id of the trace, and of a chunk."""

    block_tokens: int
    chunk_tokens: int

    @property
    def blocks_per_chunk(self) -> int:
        """Ids in a chunk."""
        return self.chunk_tokens // self.block_tokens


class BlockTrace(NamedTuple):
    """Trace in memory: the ids of each request, renumbered, and its tokens."""

    name: str
    chunking: Chunking
    chains: list[list[int]]
    tokens: list[int]
    answers: list[int | None]

    def without_answers(self) -> Self:
        """Return the same requests, whose answers are not known."""
        return self._replace(answers=[None] * len(self.answers))

    def distinct_size(self, scale: Scale) -> int:
        """Return the slots of all distinct chunks and tails, in chunks or bytes."""
        size = self.chunking.blocks_per_chunk
        ends = {end for chain in self.chains for end in (*chain[size - 1 :: size], chain[-1])}
        return len(ends) * _slot_size(scale, self.chunking)


def parse_chunking(block_tokens: int | None, chunk_tokens: int | None) -> Chunking | None:
    """Return the chunking of the two options; None without ``--block-tokens``.

    Raises:
        ConfigError: a chunk is not a whole number of blocks, at least two.
    """
    if block_tokens is None:
        if chunk_tokens is not None:
            raise ConfigError("--chunk-tokens needs --block-tokens: how many tokens an id of the traces stands for")
        return None
    chunk_tokens = DEFAULT_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    if chunk_tokens % block_tokens or chunk_tokens == block_tokens:
        raise ConfigError(
            f"--block-tokens is {block_tokens}: a chunk of {chunk_tokens} tokens is not two or more such blocks: use "
            f"--chunk-tokens {8 * block_tokens}, say"
        )
    return Chunking(block_tokens, chunk_tokens)


def load_blocks(path: Path, chunking: Chunking) -> BlockTrace:
    """Read a trace.

    Raises:
        ConfigError: the file cannot be read, has no requests, or its ids stand for another number of tokens.
    """
    numbers: dict[bytes, int] = {}
    trace = BlockTrace(str(path), chunking, [], [], [])
    for request in read_trace(path, chunking.block_tokens):
        trace.chains.append([numbers.setdefault(key, len(numbers)) for key in request.keys])
        trace.tokens.append(request.num_tokens)
        trace.answers.append(request.answer_tokens)
    if not trace.chains:
        raise ConfigError(f"{path} has no requests with at least one id")
    return trace


def replay_blocks(
    trace: BlockTrace, policy: str, size: float, *, disk: float | None, scale: Scale, tick: Tick, block_ends: bool
) -> Cell:
    """Replay all requests of a trace on an index of one size.

    Raises:
        ConfigError: the size is less than a chunk.
    """
    chunking = trace.chunking
    replay = Replay(_index(policy, size, disk, scale, chunking), block_ends=block_ends)
    found: Counter[Place] = Counter()
    chunks: Counter[Place] = Counter()
    requests = zip(trace.chains, trace.tokens, trace.answers, strict=True)
    for number, (chain, num_tokens, answer_tokens) in enumerate(requests, start=1):
        left_tokens = num_tokens
        for place, blocks in replay.ask(_named(chain, chunking), answer_tokens).parts:
            used_tokens = min(blocks * chunking.block_tokens, left_tokens)  # the last id may stand for fewer
            left_tokens -= used_tokens
            found[place] += used_tokens
            chunks[place] += 1
        if number % _TICK == 0:
            tick(_TICK)
    tick(len(trace.chains) % _TICK)
    hit_tokens, asked_tokens = found.total(), sum(trace.tokens)
    tiers = _tiers(replay.index, found, chunks, has_disk=disk is not None)
    return Cell(
        trace.name,
        policy,
        size,
        disk,
        hit_tokens / asked_tokens,
        None if scale.bytes_per_token is None else hit_tokens * scale.bytes_per_token,
        None if scale.bytes_per_token is None else asked_tokens * scale.bytes_per_token,
        tiers[0]["written_chunks"] / max(1, tiers[0]["offered_chunks"]),
        tiers,
        "blocks" if block_ends else "chunks",
        hit_tokens,
        asked_tokens,
    )


def _index(policy: str, size: float, disk: float | None, scale: Scale, chunking: Chunking) -> ChunkIndex:
    """Return an index whose chunks take a slot each in memory, and on disk the bytes of their blocks."""
    slots = scale.capacity(size) // _slot_size(scale, chunking)
    if not slots:
        raise ConfigError(
            f"--size {size:g} does not hold a chunk of {_slot_size(scale, chunking):,} bytes: make it larger"
        )

    def stored_bytes(num_blocks: int) -> int:
        per_token = scale.bytes_per_token
        return 1 if per_token is None else num_blocks * chunking.block_tokens * per_token

    return ChunkIndex(
        slots,
        disk_capacity_bytes=0 if disk is None else scale.capacity(disk),
        stored_bytes=None if disk is None else stored_bytes,
        max_writes=slots,  # as many as a request can have in memory
        cache_policy=policy,
    )


def _slot_size(scale: Scale, chunking: Chunking) -> int:
    """Return the memory of a chunk or tail, in chunks or bytes."""
    return 1 if scale.bytes_per_token is None else chunking.chunk_tokens * scale.bytes_per_token


def _named(chain: Sequence[int], chunking: Chunking) -> PrefixHasher:
    """Return the keys of a chain, whose ids are hashed as if they were tokens."""
    hasher = PrefixHasher(chunking.blocks_per_chunk, 1)
    hasher.update(chain)
    return hasher


def _tiers(
    index: ChunkIndex, tokens: Counter[Place], chunks: Counter[Place], *, has_disk: bool
) -> tuple[dict[str, int], ...]:
    """Return the counts of memory, and of the disk if there is one, with the names of ``TierCounts``."""
    counts = index.counters
    memory = {
        "hit_chunks": chunks[Place.MEMORY],
        "hit_tokens": tokens[Place.MEMORY],
        "offered_chunks": counts.stored + counts.refused,
        "written_chunks": counts.stored,
        "evicted_chunks": counts.evicted_memory,
    }
    disk = {
        "hit_chunks": chunks[Place.DISK],
        "hit_tokens": tokens[Place.DISK],
        "offered_chunks": counts.writes_done + counts.writes_dropped,
        "written_chunks": counts.writes_done,
        "evicted_chunks": counts.evicted_disk,
    }
    return (memory, disk) if has_disk else (memory,)
