"""``store_layer`` and ``retrieve_layer`` over a rig, every layer of which is checked as soon as it is announced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.model.chunks import Outcome
from support.checks import check_idle
from support.rig import BLOCK, POISON, FakeTier, Rig, tokens_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.engine import CacheEngine
    from kvstore.model.chunks import ChunkRef
    from kvstore.model.layout import KVLayout
    from kvstore.tiers.base import Transfer

LAYERS = 6
TOKENS = tokens_of(1, 58)  # three chunks, a tail of two blocks, and two tokens more
WHOLE = 56
HANG_GUARD_S = 30.0


def store_layers(rig: Rig, engine: CacheEngine, tokens: Sequence[int], **keywords: Any) -> int:
    """Compute a sequence layer by layer, each just before its ``next()``, and poison the cache at the end."""
    block_ids = rig.blocks(len(tokens), seed=len(tokens))
    mapping = rig.compute(tokens, block_ids)
    computed = [cache.clone() for cache in rig.caches.values()]
    rig.poison()
    storing = engine.store_layer(tokens, slot_mapping=mapping, **keywords)
    for cache, layer in zip(rig.caches.values(), computed, strict=True):
        cache.copy_(layer)
        assert next(storing) is None
        cache.fill_(POISON)
    (stored,) = storing
    assert stored is not None
    return stored


class Load:
    """A ``retrieve_layer`` into separate blocks."""

    def __init__(self, rig: Rig, engine: CacheEngine, tokens: Sequence[int], skip: int = 0) -> None:
        self.rig, self.tokens, self.skip = rig, tokens, skip
        self.block_ids = rig.blocks(len(tokens), seed=len(tokens) + 1)
        mask = [position >= skip for position in range(len(tokens))] if skip else None
        mapping = rig.slot_mapping(self.block_ids, len(tokens))
        self.loading = engine.retrieve_layer(tokens, mask, slot_mapping=mapping)

    def layer_is_right(self, layer: int, block: int) -> bool:
        part = np.split(self.rig.expected(self.tokens, block), LAYERS)[layer]
        return np.array_equal(self.rig.layer(layer, self.block_ids[block]), part)

    def right_tokens(self, layer: int) -> int:
        """Count the tokens behind the skipped ones whose KV is right in one layer."""
        blocks = range(self.skip // BLOCK, len(self.tokens) // BLOCK)
        return sum(self.layer_is_right(layer, block) for block in blocks) * BLOCK

    def run_rest(self) -> int:
        """Run the layers that are left. Returns the tokens loaded."""
        *_, loaded = self.loading
        assert loaded is not None
        self.rig.check(self.tokens, self.block_ids, self.skip, self.skip + int(loaded.sum()))
        return int(loaded.sum())

    def run(self) -> int:
        """Run all layers, each of which must be right as soon as it is announced. Returns the tokens loaded."""
        right = []
        for layer in range(LAYERS):
            assert next(self.loading) is None
            right.append(self.right_tokens(layer))
        (loaded,) = self.loading
        assert loaded is not None
        assert (loaded.dtype, loaded.shape, loaded.device.type) == (torch.bool, (len(self.tokens),), "cpu")
        count = int(loaded.sum())
        assert bool(loaded[self.skip : self.skip + count].all())
        assert min(right) >= count
        if count:
            self.rig.check(self.tokens, self.block_ids, self.skip, self.skip + count)
        return count


def load_layers(rig: Rig, engine: CacheEngine, tokens: Sequence[int], skip: int = 0) -> int:
    """Retrieve into a poisoned cache; blocks that were skipped or not asked for must be untouched."""
    rig.poison()
    load = Load(rig, engine, tokens, skip)
    count = load.run()
    touched = {load.block_ids[block] for block in range(skip // BLOCK, len(tokens) // BLOCK)}
    assert all((rig.held(b) == POISON).all() for b in range(rig.num_blocks) if b not in touched)
    return count


def end_abandoned(engine: CacheEngine) -> None:
    """Make a call that moves KV, which ends all that was abandoned before."""
    engine.prefetch([])
    check_idle(engine)


class PartTier(FakeTier):
    """A tier in memory that can read layers, and records which."""

    @property
    def reads_layers(self) -> bool:
        return True

    def __init__(self, layout: KVLayout) -> None:
        super().__init__()
        self.layout = layout
        self.asked: list[tuple[ChunkRef, int]] = []

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        self.before_get()
        for ref, buffer, *_ in transfers:
            begin = self.layout.layer_range(layers.start, ref.num_blocks)[0]
            end = self.layout.layer_range(layers[-1], ref.num_blocks)[1]
            buffer[begin:end] = np.frombuffer(self.chunks[ref], np.uint8)[begin:end]
            self.asked += [(ref, layer) for layer in layers]
        return [Outcome.HIT] * len(transfers)
