"""What both systems can do, and how ours does it."""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.engine import CacheEngine
from kvstore.keys import Namespace
from kvstore.options import EngineOptions
from kvstore.paged.binding import bind_paged_kv
from kvstore.tools.dev.beside.prompts import BLOCK_TOKENS, Prompts

SETTLE_S = 60.0  # within which everything written behind must be where it belongs


class System(Protocol):
    """One of the two, over the same caches. Nothing it holds belongs to anybody else."""

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """Store all tokens; done when every chunk is where it belongs."""

    def lookup(self, tokens: list[int]) -> int:
        """How many leading tokens are known."""

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """Load all tokens; returns how many."""

    def clear(self, tokens: list[int]) -> None:
        """Begin again empty."""


class Kvstore:
    """Ours, through ``CacheEngine``."""

    def __init__(self, prompts: Prompts, options: EngineOptions) -> None:
        paged = bind_paged_kv(
            {f"layers.{layer}": cache for layer, cache in enumerate(prompts.caches)},
            num_blocks=prompts.num_blocks,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=prompts.chunk_tokens,
        )
        self._engine = CacheEngine(paged, Namespace({"model": "side by side"}), options)
        self.close = self._engine.close

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """See ``System``."""
        self._engine.store(tokens, slot_mapping=slots)
        if not (flushed := self._engine.flush(SETTLE_S)):
            raise SystemExit(f"kvstore: not everything was written: {flushed}")

    def lookup(self, tokens: list[int]) -> int:
        """See ``System``."""
        return self._engine.lookup(tokens)

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """See ``System``."""
        return int(self._engine.retrieve(tokens, slot_mapping=slots).sum())

    def clear(self, tokens: list[int]) -> None:
        """See ``System``."""
        self._engine.clear(tokens)
