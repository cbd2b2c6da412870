"""Common interface of both systems, and kvstore's implementation."""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.engine import CacheEngine
from kvstore.options import EngineOptions
from kvstore.tools.bench.samples import NAMESPACE, require
from kvstore.tools.bench.workbench import Workbench

SETTLE_S = 60.0  # for everything written behind to reach its tier


class System(Protocol):
    """One of the two systems, over the caches of a workbench, with private storage."""

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """Store all tokens, and wait until every chunk is in its tier."""

    def lookup(self, tokens: list[int]) -> int:
        """Return the leading tokens that can be loaded."""

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """Load all tokens, and return the number of loaded tokens."""

    def clear(self, tokens: list[int]) -> None:
        """Forget everything."""


class Kvstore:
    """kvstore, used through ``CacheEngine``."""

    def __init__(self, workbench: Workbench, options: EngineOptions) -> None:
        self._engine = CacheEngine(workbench.paged, NAMESPACE, options)
        self.close = self._engine.close

    def store(self, tokens: list[int], slots: torch.Tensor) -> None:
        """See ``System``."""
        self._engine.store(tokens, slot_mapping=slots)
        flushed = self._engine.flush(SETTLE_S)
        require(bool(flushed), f"kvstore: not everything was written: {flushed}")

    def lookup(self, tokens: list[int]) -> int:
        """See ``System``."""
        return self._engine.lookup(tokens)

    def retrieve(self, tokens: list[int], slots: torch.Tensor) -> int:
        """See ``System``."""
        return int(self._engine.retrieve(tokens, slot_mapping=slots).sum())

    def clear(self, tokens: list[int]) -> None:
        """See ``System``."""
        self._engine.clear(tokens)
