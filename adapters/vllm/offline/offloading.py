"""Copies by vLLM's own OffloadingConnector as a baseline: its worker, without its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker


class OffloadingCopies:
    """vLLM's worker for copies between caches on a GPU and host memory, which it allocates and pins itself.

    Args:
        caches: one tensor a layer, blocks in front, each block dense.
        blocks_per_chunk: GPU blocks in one chunk of the host.
        num_chunks: chunks of the host.
    """

    def __init__(self, caches: Sequence[torch.Tensor], blocks_per_chunk: int, num_chunks: int) -> None:
        blocks = [cache.view(torch.int8).flatten(1) for cache in caches]
        tensors = [CanonicalKVCacheTensor(block, block.shape[1]) for block in blocks]
        refs = [CanonicalKVCacheRef(number, block.shape[1]) for number, block in enumerate(blocks)]
        self._worker = CPUOffloadingWorker(CanonicalKVCaches(tensors, [refs]), blocks_per_chunk, num_chunks)
        self._chunks = CPULoadStoreSpec(list(range(num_chunks)))
        self._jobs = count(1)

    def store(self, block_ids: Sequence[int]) -> None:
        """Copy blocks to the host, as many as all chunks hold, and wait."""
        job = next(self._jobs)
        self._worker.submit_store(job, _on_device(block_ids), self._chunks)
        self._wait(job)

    def load(self, block_ids: Sequence[int]) -> None:
        """Copy all chunks back into these blocks, and wait."""
        job = next(self._jobs)
        self._worker.submit_load(job, self._chunks, _on_device(block_ids))
        self._wait(job)

    def close(self) -> None:
        """Release the resources of the transfers."""
        self._worker.shutdown()

    def _wait(self, job: int) -> None:
        self._worker.wait({job})
        self._worker.get_finished()  # returns its streams and events


def _on_device(block_ids: Sequence[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(block_ids), group_sizes=(len(block_ids),), block_indices=(0,))
