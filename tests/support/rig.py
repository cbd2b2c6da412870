"""A small paged KV cache whose content follows from the tokens, engines over it, and a tier that can be broken."""

from __future__ import annotations

import random
import zlib
from array import array
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.engine import opening
from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome, Presence
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv
from kvstore.tiers.base import MAX_NEAREST, BoundedTier, Tier, TierCounters, Transfer
from support.index import shared_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pytest

BLOCK = 4
CHUNK = 16
BLOCKS_PER_CHUNK = CHUNK // BLOCK
SLOT_BYTES = 4096
FILE_BYTES = 8192  # of a full chunk: header and payload
NAMESPACE = Namespace({"model": "rig"})
POISON = 0xA5


def tokens_of(seed: int, count: int) -> list[int]:
    """Return ``count`` tokens; a longer sequence of the same seed begins with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


class Rig:
    """Layers of uint8 ``[num_blocks, 2, BLOCK, 8]``. The content of a block follows from all tokens up to its end.

    ``version`` is anything else that decides it, such as the weights or a mistake that was fixed.
    """

    def __init__(self, num_blocks: int = 64, num_layers: int = 2) -> None:
        self.num_blocks = num_blocks
        self.version = 0
        shape = (num_blocks, 2, BLOCK, 8)
        self.caches = {f"layer.{n}": torch.zeros(shape, dtype=torch.uint8) for n in range(num_layers)}
        self.paged = bind_paged_kv(self.caches, num_blocks=num_blocks, block_tokens=BLOCK, chunk_tokens=CHUNK)
        self.layout = self.paged.layout
        self.poison()

    def open(self, *, slots: int = 8, **options: Any) -> CacheEngine:
        """Open an engine with a pool of ``slots``; a disk has room for 64 chunks, its queue for all writes."""
        options.setdefault("max_write_queue", max(slots, 8))
        options.setdefault("max_local_disk_bytes", 64 * FILE_BYTES if "local_disk" in options else 0)
        return CacheEngine(self.paged, NAMESPACE, EngineOptions(max_local_cpu_bytes=slots * SLOT_BYTES, **options))

    def poison(self) -> None:
        for cache in self.caches.values():
            cache.fill_(POISON)

    def blocks(self, num_tokens: int, seed: int = 0, among: Sequence[int] | None = None) -> list[int]:
        """Return shuffled block ids for that many tokens."""
        ids = list(range(self.num_blocks) if among is None else among)
        random.Random(seed).shuffle(ids)
        return ids[: -(-num_tokens // BLOCK)]

    def slot_mapping(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        return [block_ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(num_tokens)]

    def expected(self, tokens: Sequence[int], block: int) -> ByteArray:
        """Return the bytes that block number ``block`` of a sequence must hold, over all layers."""
        seed = zlib.crc32(array("Q", tokens[: (block + 1) * BLOCK]).tobytes(), self.version)
        return np.random.default_rng(seed).integers(0, 256, self.layout.block_bytes, dtype=np.uint8)

    def held(self, block_id: int) -> ByteArray:
        parts = [cache[block_id].contiguous().reshape(-1).numpy() for cache in self.caches.values()]
        return np.concatenate(parts)

    def layer(self, layer: int, block_id: int) -> ByteArray:
        """Return the bytes of a block in one layer."""
        held: ByteArray = self.caches[f"layer.{layer}"][block_id].contiguous().reshape(-1).numpy()
        return held

    def compute(self, tokens: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Fill the whole blocks of a sequence as a model would; returns the slot mapping."""
        for block in range(len(tokens) // BLOCK):
            parts = np.split(self.expected(tokens, block), len(self.caches))
            for cache, part in zip(self.caches.values(), parts, strict=True):
                cache[block_ids[block]] = torch.from_numpy(part).view(cache.shape[1:])
        return self.slot_mapping(block_ids, len(tokens))

    def store(self, engine: CacheEngine, tokens: Sequence[int], **keywords: Any) -> int:
        """Compute a sequence in some blocks, store it, and poison the cache."""
        mapping = self.compute(tokens, self.blocks(len(tokens), seed=len(tokens)))
        stored = engine.store(tokens, slot_mapping=mapping, **keywords)
        self.poison()
        return stored

    def retrieve(self, engine: CacheEngine, tokens: Sequence[int], skip: int = 0, **keywords: Any) -> int:
        """Retrieve into other blocks; all that was loaded must be right, and blocks that were not asked for untouched.

        Returns the number of tokens loaded, which lie between ``skip`` and the end of the known prefix.
        """
        self.poison()
        block_ids = self.blocks(len(tokens), seed=len(tokens) + 1)
        mask = [position >= skip for position in range(len(tokens))] if skip else None
        loaded = engine.retrieve(tokens, mask, slot_mapping=self.slot_mapping(block_ids, len(tokens)), **keywords)
        assert loaded.dtype is torch.bool
        assert loaded.shape == (len(tokens),)
        count = int(loaded.sum())
        assert bool(loaded[skip : skip + count].all())
        self.check(tokens, block_ids, skip, skip + count)
        touched = {block_ids[n] for n in range(skip // BLOCK, len(tokens) // BLOCK)}
        assert all((self.held(b) == POISON).all() for b in range(self.num_blocks) if b not in touched)
        return count

    def check(self, tokens: Sequence[int], block_ids: Sequence[int], begin: int, end: int) -> None:
        assert end % BLOCK == 0
        for block in range(begin // BLOCK, end // BLOCK):
            assert np.array_equal(self.held(block_ids[block]), self.expected(tokens, block)), f"block {block} is wrong"


class FakeTier(BoundedTier):
    """A tier in a dictionary. ``before_get`` and ``before_put`` may raise, or block."""

    name = "fake"

    def __init__(self, capacity_bytes: int = 64 * FILE_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.counters = TierCounters()
        self.chunks: dict[ChunkRef, bytes] = {}
        self.before_get: Callable[[], object] = lambda: None
        self.before_put: Callable[[], object] = lambda: None
        self.put_outcome = Outcome.STORED
        self.namespaces: list[Namespace] = []  # set by ``reset``
        self.namespace_id: bytes | None = None
        self.is_closed = False
        self.told_trails: dict[ChunkRef, bytes] = {}
        self._lock = Lock()

    def scan(self) -> list[tuple[ChunkRef, int]]:
        return [(ref, self.stored_bytes(ref.num_blocks)) for ref in self.chunks]

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        return [ref in self.chunks for ref in refs]

    @property
    def keeps_trails(self) -> bool:
        return True

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        found = [sorted(self.told_trails.values(), key=lambda told: -shared_blocks(told, trail)) for trail in trails]
        pairs = zip(trails, found, strict=True)
        return [tuple(near for near in told if shared_blocks(near, trail))[:MAX_NEAREST] for trail, told in pairs]

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.before_get()
        outcomes = []
        for ref, buffer, *_ in transfers:
            payload = self.chunks.get(ref)
            outcomes.append(Outcome.MISS if payload is None else Outcome.HIT)
            if payload is not None:
                buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
        return outcomes

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.before_put()
        with self._lock:
            mine = [transfer.belongs_to(self.namespace_id) for transfer in transfers]
            if self.put_outcome is Outcome.STORED:
                pairs = zip(transfers, mine, strict=True)
                for item, is_mine in pairs:
                    if is_mine:
                        self.chunks[item.ref] = item.buffer.tobytes()
                        self.told_trails.update({item.ref: item.trail} if item.trail else {})
                assert self.used_bytes <= self.capacity_bytes, "the index let more in than fits"
        return [self.put_outcome if is_mine else Outcome.FAILED for is_mine in mine]

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        with self._lock:
            for ref in refs:
                self.chunks.pop(ref, None)

    def clear(self) -> None:
        with self._lock:
            self.chunks.clear()

    def reset(self, namespace: Namespace) -> None:
        with self._lock:
            self.namespaces.append(namespace)
            self.namespace_id = namespace.id
            self.chunks.clear()

    def stored_bytes(self, num_blocks: int) -> int:
        return FILE_BYTES if num_blocks == BLOCKS_PER_CHUNK else FILE_BYTES - 1

    @property
    def used_bytes(self) -> int:
        return sum(self.stored_bytes(ref.num_blocks) for ref in self.chunks)

    def close(self) -> None:
        self.is_closed = True


def install(monkeypatch: pytest.MonkeyPatch, tier: Tier) -> None:
    """Let engines opened from now on use ``tier`` as their disk."""
    monkeypatch.setattr(opening, "open_folders", lambda *_args, wrap, **_keywords: wrap(tier))
