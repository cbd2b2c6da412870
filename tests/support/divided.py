"""Engines of several tensor-parallel sizes over one simulated model, whose KV is divided among workers by heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.model.heads import Division, Part, heads_of, shards_with
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.planes import HeadedPages, find_heads

HEADS, BLOCKS, BLOCK, CHUNK_BLOCKS, WORDS, LAYERS = 4, 16, 4, 4, 6, 2
CHUNK = BLOCK * CHUNK_BLOCKS
SLOTS = 8


def shard_name(shard: int, size: int) -> str:
    return f"pp 0/1 tp {shard}/{size}"


def folder_of(folder: Path, shard: int, size: int) -> Path:
    return folder / f"rank-{shard}-of-{size}" if size > 1 else folder


class Worker:
    """One worker of an engine, with tensors ``[blocks, heads, tokens, words]``, whose tokens are outermost in memory.

    Attributes:
        caches: of the model, by layer.
        heads: held by this worker.
    """

    def __init__(self, shard: int, size: int) -> None:
        self.shard, self.size = shard, size
        self.heads = heads_of(shard, size, HEADS)
        shape = (BLOCKS, BLOCK, len(self.heads), WORDS)
        self.caches = {f"layer.{number}": torch.zeros(shape).transpose(1, 2) for number in range(LAYERS)}
        geometry: Any = {"num_blocks": BLOCKS, "block_tokens": BLOCK, "chunk_tokens": CHUNK}
        self.paged = bind_paged_kv(self.caches, **geometry)
        self.pages: HeadedPages = find_heads(self.caches, len(self.heads), **geometry)
        fields = {"model": "divided", "shard": shard_name(shard, size), "layout": self.paged.layout.fingerprint}
        self.namespace = Namespace(fields)

    def division(self, size: int, folder: Path | None = None) -> Division:
        """Return the division of this worker's KV by an engine of that size."""
        parts = [
            Part(
                shard,
                shard_name(shard, size),
                self.pages.layout(len(heads_of(shard, size, HEADS))),
                heads_of(shard, size, HEADS),
                (folder_of(folder, shard, size),) if folder else (),
                shard * self.size // size,
            )
            for shard in shards_with(self.heads, size, HEADS)
        ]
        return Division(size, tuple(parts), self.paged.layout, self.heads, self.pages.rows)

    def open(self, *sizes: int, url: str | None = None, folder: Path | None = None, **options: Any) -> CacheEngine:
        """Open an engine over its caches that also reads what engines of other sizes have stored."""
        slot_bytes = self.paged.layout.slot_bytes
        divisions = tuple(self.division(size, folder) for size in sizes)
        servers = tuple(options.pop("servers", ()))
        remote = RemoteOptions(
            url, hold_s=0.0, rank=self.shard, divisions=divisions, is_own=bool(servers), servers=servers
        )
        if folder is not None:
            own = folder_of(folder, self.shard, self.size)
            options |= {"local_disk": own, "max_local_disk_bytes": 64 * (slot_bytes + 8192)}
        return CacheEngine(
            self.paged,
            self.namespace,
            EngineOptions(SLOTS * slot_bytes, remote=remote if url or sizes else None, **options),
        )

    def fill(self, seed: int) -> None:
        """Fill all blocks with the KV that a model computes; a head's is the same on every worker."""
        for number, cache in enumerate(self.caches.values()):
            cache.copy_(_computed(seed, number)[:, self.heads.start : self.heads.stop])

    def check(self, seed: int, blocks: Sequence[int]) -> None:
        """Assert that these blocks hold what a model computes, and that all others are empty."""
        others = [block for block in range(BLOCKS) if block not in blocks]
        for number, cache in enumerate(self.caches.values()):
            expected = _computed(seed, number)[:, self.heads.start : self.heads.stop]
            assert torch.equal(cache[list(blocks)], expected[list(blocks)])
            assert not cache[others].any()

    def clear(self) -> None:
        for cache in self.caches.values():
            cache.zero_()


def _computed(seed: int, layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    return torch.randn((BLOCKS, HEADS, BLOCK, WORDS), generator=generator)


def slots_of(blocks: Sequence[int]) -> list[int]:
    return [block * BLOCK + token for block in blocks for token in range(BLOCK)]


def store_part(tokens: Sequence[int], blocks: Sequence[int], shard: int, size: int, **where: Any) -> None:
    """Let one worker of an engine of that size store a sequence, computed with seed 1, and close it."""
    worker = Worker(shard, size)
    worker.fill(1)
    with worker.open(**where) as engine:
        assert engine.store(tokens, slot_mapping=slots_of(blocks)) == len(tokens)
        assert engine.flush()


def store_all(tokens: Sequence[int], blocks: Sequence[int], size: int, **where: Any) -> None:
    """Let all workers of an engine of that size store a sequence."""
    for shard in range(size):
        store_part(tokens, blocks, shard, size, **where)
