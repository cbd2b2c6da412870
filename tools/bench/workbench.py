"""Workbench of the bench: a paged KV cache, and the prompt to move.

Data is made and checked without the library's copies. Torch's indexing fills and compares blocks, so the measured paths
are not verified by their own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kvstore.paged.base import copy_threads
from kvstore.paged.binding import bind_paged_kv
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.limits import Memcpy, prefaulted
from kvstore.tools.bench.samples import require

_POISON = 0x5A5A
_HOST = torch.device("cpu")


class Workbench:
    """A paged KV cache of two batches, the data of the current batch, and memcpy of as many bytes.

    Args:
        geometry: geometry of the KV. Caches are logical ``[B, H, N, C]`` tensors in NHD order, as vLLM registers them,
            or ``[B, N, C]`` for a latent.
        num_chunks: whole chunks of a *batch*, which is one prompt.
        device: device of the caches.
        split: K and V are separate, as ``[2, B, N, H, C]``.
    """

    def __init__(
        self, geometry: Geometry, num_chunks: int, *, device: torch.device = _HOST, split: bool = False
    ) -> None:
        self._random = np.random.default_rng(0)
        self.geometry = geometry
        self._batch_blocks = num_chunks * geometry.blocks_per_chunk
        self.num_chunks = num_chunks
        self.num_tokens = num_chunks * geometry.chunk_tokens
        self.batch_bytes = num_chunks * geometry.chunk_bytes
        self.tokens: list[int] = []
        num_blocks, tokens = 2 * self._batch_blocks, geometry.block_tokens
        heads, elements = geometry.kv_heads, geometry.token_elements // geometry.kv_heads
        shape = (2, num_blocks, tokens, heads, elements // 2) if split else (num_blocks, tokens, heads, elements)
        self.caches = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(geometry.layers)]
        by_block = [cache.transpose(0, 1) if split else cache for cache in self.caches]
        self._caches = [cache.view(torch.int16) for cache in by_block]  # NaNs are not equal to themselves
        self.paged = bind_paged_kv(
            {f"layers.{layer}": _registered(cache, geometry) for layer, cache in enumerate(self.caches)},
            num_blocks=num_blocks,
            block_tokens=tokens,
            chunk_tokens=geometry.chunk_tokens,
            has_channels=not geometry.latent,
        )
        self.pool_bytes = num_chunks * self.paged.layout.slot_bytes  # bytes of a pool that holds one batch
        self._base = self._random.integers(1 << 63, size=self.batch_bytes // 8, dtype=np.uint64)
        self._data = prefaulted(self.batch_bytes)
        self._copy = prefaulted(self.batch_bytes)
        self._memcpy = Memcpy(copy_threads())
        self._expected = torch.from_numpy(self._data.view(np.int16)).view(
            geometry.layers, self._batch_blocks, *by_block[0].shape[1:]
        )

    def memcpy(self) -> None:
        """Copy the batch in contiguous pieces on as many threads as an engine does, as the limit of most paths."""
        self._memcpy.copy(self._copy, self._data)

    def memcpy_and_sum(self) -> None:
        """Copy the batch and hash the copy, as the limit of paths that verify checksums."""
        self._memcpy.copy_and_sum(self._copy, self._data)

    def new_batch(self) -> torch.Tensor:
        """Put a new prompt with random KV into random blocks, and return its slot mapping."""
        np.multiply(
            self._base, self._random.integers(1 << 63, dtype=np.uint64) | np.uint64(1), out=self._data.view("u8")
        )
        self.tokens = self._random.integers(32_000, size=self.num_tokens).tolist()
        block_ids = self._some_blocks()
        for cache, expected in zip(self._caches, self._expected, strict=True):
            cache[block_ids] = expected.to(cache.device)
        return self._slot_mapping(block_ids)

    def destination(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Overwrite the whole cache, and choose random blocks to load the batch into.

        Returns:
            The ids of the blocks, for ``check``, and their slot mapping.
        """
        for cache in self._caches:
            cache.fill_(_POISON)
        block_ids = self._some_blocks()
        return block_ids, self._slot_mapping(block_ids)

    def other_blocks(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Overwrite all blocks but these, and return the ids of the overwritten blocks in random order."""
        others = torch.ones(2 * self._batch_blocks, dtype=torch.bool)
        others[block_ids] = False
        for cache in self._caches:
            cache[others] = _POISON
        found = others.nonzero()[:, 0].numpy()
        return torch.from_numpy(self._random.permutation(found))

    def check(self, *holding: torch.Tensor) -> None:
        """Check every byte of the cache: each of these sets of blocks holds the batch, all other blocks hold poison.

        Raises:
            BenchError: something differs.
        """
        others = torch.ones(2 * self._batch_blocks, dtype=torch.bool)
        others[torch.cat(holding)] = False
        for layer, (cache, expected) in enumerate(zip(self._caches, self._expected, strict=True)):
            is_held = all(torch.equal(cache[block_ids].cpu(), expected) for block_ids in holding)
            require(is_held, f"layer {layer}: the bytes retrieved are not those stored")
            is_left_alone = bool((cache[others] == _POISON).all())
            require(is_left_alone, f"layer {layer}: blocks were overwritten that nobody asked for")

    def _some_blocks(self) -> torch.Tensor:
        return torch.from_numpy(self._random.permutation(2 * self._batch_blocks)[: self._batch_blocks])

    def _slot_mapping(self, block_ids: torch.Tensor) -> torch.Tensor:
        size = self.geometry.block_tokens
        return (block_ids[:, None] * size + torch.arange(size)).reshape(-1)


def _registered(cache: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return a view of a cache as vLLM registers it."""
    if geometry.latent:
        return cache[:, :, 0]
    return cache if cache.dim() == 5 else cache.permute(0, 2, 1, 3)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, as its OpenMP threads, idle after filling and checking, spin in the timed part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
