"""What both systems move: KV of Llama-8B on the CPU, as ``[2, blocks, tokens, heads, head size]`` tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
TOKEN_BYTES = LAYERS * HEADS * HEAD_SIZE * 2 * 2


class Prompts:
    """Caches of two prompts' blocks, a prompt in some of them, and the copy it is compared with."""

    def __init__(self, num_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.num_tokens = num_tokens
        self.chunk_tokens = chunk_tokens
        self.num_chunks = num_tokens // chunk_tokens
        self.num_bytes = num_tokens * TOKEN_BYTES
        self.num_blocks = 2 * num_tokens // BLOCK_TOKENS
        self.tokens: list[int] = []
        shape = (2, self.num_blocks, BLOCK_TOKENS, HEADS, HEAD_SIZE)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self._random = np.random.default_rng(0)
        self._words = [cache.view(torch.int64) for cache in self.caches]
        base = self._random.integers(1 << 62, size=(self.num_blocks // 2, *self._words[0].shape[2:]), dtype=np.int64)
        self._base = torch.from_numpy(base)
        self._salt = 1
        self._free = np.empty(0, np.int64)

    def new(self) -> torch.Tensor:
        """A prompt that nobody has seen, in random blocks; returns its slots."""
        blocks = self._random.permutation(self.num_blocks)
        here, self._free = np.split(blocks, 2)
        self._salt = int(self._random.integers(1 << 62)) | 1
        self.tokens = self._random.integers(32_000, size=self.num_tokens).tolist()
        for layer, words in enumerate(self._words):
            for plane in range(2):
                words[plane, torch.from_numpy(here)] = self._of(layer, plane)
        return self._slots(here)

    def destination(self) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
        """Other blocks, overwritten: their ids and slots."""
        for words in self._words:
            words[:, torch.from_numpy(self._free)] = -1
        return self._free, self._slots(self._free)

    def check(self, blocks: np.ndarray[Any, Any]) -> None:
        """Compare every byte."""
        for layer, words in enumerate(self._words):
            for plane in range(2):
                if not torch.equal(words[plane, torch.from_numpy(blocks)], self._of(layer, plane)):
                    raise SystemExit(f"layer {layer}: the bytes retrieved are not those stored")

    def _of(self, layer: int, plane: int) -> torch.Tensor:
        return self._base * (self._salt + 2 * (2 * layer + plane))

    def _slots(self, blocks: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy((blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1))
