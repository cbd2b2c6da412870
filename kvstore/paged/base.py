"""Contract of a paged KV cache, from which whole blocks are copied to payloads and back, and the one in host memory.

One thread rarely reaches a machine's memory bandwidth, so on the host ``Copiers`` share the copies between the caller
and a few helpers: two threads copied 1.9 times as much. Each takes the next copy as soon as its last one is done, and
the caller does not wait for a helper that has not started, so a thread that the system does not schedule delays only
its current copy.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import InvalidCallError
from kvstore.model.layout import KVLayout
from kvstore.model.threads import start
from kvstore.paged.copies import Run, host_copies
from kvstore.paged.planes import PlaneRows
from kvstore.paged.streams import DeviceEvent, Streams

Item = TypeVar("Item")
BlockIds = npt.NDArray[np.int64]
_MAX_THREADS = 4  # of one engine, to leave bandwidth for others


class ChunkBlocks(NamedTuple):
    """Some blocks of a chunk: from ``first_block`` on in its payload, and ``block_ids`` in the paged cache.

    Created by ``PagedKV.chunk``, which checks the ids. ``pages`` holds every plane's page in order, in host memory.
    """

    block_ids: BlockIds
    payload: ByteArray
    chunk_blocks: int
    first_block: int
    pages: Sequence[tuple[Any, ...]] = ()


class PagedKV(ABC):
    """Paged KV cache of one worker, addressed by block ids.

    ``payload`` below is a row of ``layout.payload_bytes(n)`` uint8 in the order of ``layout``, in host memory or on the
    cache's ``device``; ``block_ids`` are int64 in ordinary host memory, each in ``[0, num_blocks)`` and none reserved
    by the serving engine. Not thread-safe against a running model: call between forward passes.
    """

    layout: KVLayout
    num_blocks: int
    device: torch.device
    streams: Streams  # of the device
    moves_layers = True  # False if only whole chunks can be moved

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use in addition to the cache; each ``for_thread`` takes as many again."""
        return 0

    @abstractmethod
    def for_thread(self) -> PagedKV:
        """Return the same cache for one other thread, which may move blocks that no kernel uses, while the model runs.

        On a device it has a separate current stream, which only ``streams.hold`` and ``fence`` order with the model's.
        """

    def beside(self, other: PagedKV) -> PagedKV:  # noqa: ARG002 - there is nothing to share
        """Return the same cache for the thread of ``other`` on the same device; both share streams and buffers."""
        return self.for_thread()

    def has_planes_of(self, other: PagedKV) -> bool:  # noqa: ARG002 - without launches it does not matter
        """Tell if both have the same planes at the same addresses, so that one launch can move blocks of both."""
        return False

    def with_help(self, copiers: Copiers) -> PagedKV:  # noqa: ARG002 - a device copies by itself
        """Return the same cache, whose blocks several threads copy if the CPU does the copying."""
        return self

    def bytes_of(self, block_ids: BlockIds) -> int:
        """Return the bytes of these blocks in all layers."""
        return self.layout.payload_bytes(len(block_ids))

    def fence(self) -> None:  # noqa: B027 - work that is done when its call returns needs no order
        """Order later work of the current stream after all gathers so far, including those of any ``for_thread()``.

        For blocks that are overwritten before their gather has been waited for. The host does not wait.
        """

    def gather(self, block_ids: BlockIds, payload: ByteArray) -> DeviceEvent:
        """Copy ``n = len(block_ids)`` blocks of every layer into ``payload``, which is valid once ``reach`` returns."""
        return self.gather_chunks([ChunkBlocks(block_ids, payload, len(block_ids), 0)])[0]

    def scatter(self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int, first_block: int) -> DeviceEvent:
        """Copy blocks ``first_block ... first_block + len(block_ids)`` of a payload of ``chunk_blocks`` blocks.

        Kernels launched after the call see the blocks. The payload must not change before the returned event.
        """
        return self.scatter_chunks([ChunkBlocks(block_ids, payload, chunk_blocks, first_block)])[0]

    @abstractmethod
    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """Gather several whole chunks, in fewer launches. Returns an event for each; ``pages`` are not used.

        Raises:
            InvalidCallError: names the first id that is outside the cache. Then no block has been copied.
        """

    @abstractmethod
    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """Scatter several chunks, in fewer launches. Returns an event for each; ``pages`` are not used.

        Raises:
            InvalidCallError: see ``gather_chunks``.
        """

    @abstractmethod
    def blank(self, parts: Sequence[ByteArray]) -> DeviceEvent:
        """Zero parts of payloads, ordered with gathers because the device may still read the former bytes."""

    @abstractmethod
    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """Describe blocks to move by layer. ``chunk_blocks`` are in the payload, by default ``len(block_ids)``.

        Raises:
            InvalidCallError: names the first id that is outside the cache.
        """

    def layers_with(self, layer: int) -> range:
        """Return the layers that are moved together with this one, because alone they are too small for fast copies."""
        return range(layer, layer + 1)

    @abstractmethod
    def gather_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """Copy layers of several chunks' blocks into their payloads, which are valid once ``reach`` returns.

        The returned event also covers all layers gathered before.
        """

    @abstractmethod
    def scatter_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """Copy layers of several chunks into their blocks, where kernels launched later see them.

        The payloads must not change before the returned event, which also covers all layers before.
        """

    def settle(self) -> None:  # noqa: B027 - host memory has no buffers
        """Let the host wait until the device no longer uses the buffers, so that they can be freed.

        Covers all streams that used them, of which the device's allocator knows only the first.
        """

    def restore(self) -> None:  # noqa: B027 - host memory keeps its content
        """Restore tables after the device's memory was discarded and mapped again at the same addresses, when idle."""

    @abstractmethod
    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """Copy ``n = len(block_ids)`` blocks of every layer into a payload on the cache's own device.

        Runs in the order of the current stream, like a kernel. Launches and does not wait.
        """

    @abstractmethod
    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """Scatter from a payload on the cache's own device, in the order of the current stream."""


class Copiers:
    """Calling thread and its helpers, which end at ``close``. One call at a time.

    Args:
        threads: number of copying threads, including the caller.
    """

    def __init__(self, threads: int) -> None:
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "kvstore-copy")  # has no thread before it is used

    def each(self, items: Iterable[Item], copy: Callable[[Item], None]) -> None:
        """Copy all items, in any order. If a copy raises, this raises after all copies under way have ended."""
        if not self._helpers:
            for item in items:
                copy(item)
            return
        waiting = deque(items)

        def work() -> None:
            while True:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                copy(item)

        helping = [start(self._pool, work, lambda: None) for _ in range(min(self._helpers, len(waiting) - 1))]
        try:
            work()
        finally:
            waiting.clear()
            under_way = [helper for helper in helping if not helper.cancel()]
            wait(under_way)  # all of them, before any raises
        for helper in under_way:
            helper.result()

    def close(self) -> None:
        """End the helpers."""
        self._pool.shutdown(wait=True, cancel_futures=True)


ALONE = Copiers(1)
"""Copies without helpers. It has no thread to end, so it can be shared."""


def copy_threads() -> int:
    """Return the number of the calling thread's cores, at most 4: one where vLLM has bound it to a single core."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def check_block_ids(block_ids: BlockIds, allowed: range) -> None:
    """Refuse ids outside the cache, and reserved ones; numpy would wrap negative ones and clip the rest.

    Raises:
        InvalidCallError: names the first bad id.
    """
    bad = (block_ids - allowed.start).view(np.uint64) >= len(allowed)  # a negative id is a huge unsigned one
    if bad.any():
        raise InvalidCallError(f"block id {int(block_ids[bad.argmax()])} is not in {allowed.start}..{allowed.stop - 1}")


def check_chunks(chunks: Sequence[ChunkBlocks], allowed: range) -> None:
    """Refuse ids as ``check_block_ids`` does, in all chunks at once.

    Raises:
        InvalidCallError: names the first bad id.
    """
    if chunks:
        check_block_ids(np.concatenate([chunk.block_ids for chunk in chunks]), allowed)


class HostPagedKV(PagedKV):
    """A paged KV cache in host memory."""

    def __init__(
        self, layers: Sequence[Sequence[PlaneRows]], layout: KVLayout, num_blocks: int, reserved_blocks: int = 0
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._allowed = range(reserved_blocks, num_blocks)
        self.device = torch.device("cpu")
        self.streams = Streams(self.device)
        self._copiers = ALONE
        planes = [plane.rows.numpy() for layer in layers for plane in layer]
        self._planes_per_layer = len(layers[0])
        self._runs = []
        for (word, words), alike in groupby(planes, lambda rows: (rows.dtype, rows.shape[1])):
            run = list(alike)
            self._runs.append(Run(run, word, words, len(run) * words * word.itemsize))
        self._copies = host_copies(self._runs, num_blocks)

    def for_thread(self) -> PagedKV:
        """See ``PagedKV``. It copies without helpers, because the other cores belong to the model."""
        return self.with_help(ALONE)

    def with_help(self, copiers: Copiers) -> PagedKV:
        """See ``PagedKV``."""
        same = copy(self)
        same._copiers = copiers  # noqa: SLF001 - its own
        return same

    def gather_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        self._copiers.each(self._pages_of_all(chunks), self._copies.gather)
        return [None] * len(chunks)

    def scatter_chunks(self, chunks: Sequence[ChunkBlocks]) -> list[DeviceEvent]:
        """See ``PagedKV``."""
        self._copiers.each(self._pages_of_all(chunks), self._copies.scatter)
        return [None] * len(chunks)

    def blank(self, parts: Sequence[ByteArray]) -> DeviceEvent:
        """See ``PagedKV``."""
        for part in parts:
            part[:] = 0
        return None

    def chunk(
        self, block_ids: BlockIds, payload: ByteArray, chunk_blocks: int | None = None, first_block: int = 0
    ) -> ChunkBlocks:
        """See ``PagedKV``."""
        check_block_ids(block_ids, self._allowed)
        whole = ChunkBlocks(block_ids, payload, chunk_blocks or len(block_ids), first_block)
        return whole._replace(pages=list(self._pages_of(whole, alone=True)))

    def gather_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        self._copiers.each(self._pages_in(layers, chunks), self._copies.gather)
        return None

    def scatter_layers(self, layers: range, chunks: Sequence[ChunkBlocks]) -> DeviceEvent:
        """See ``PagedKV``."""
        self._copiers.each(self._pages_in(layers, chunks), self._copies.scatter)
        return None

    def gather_on_device(self, block_ids: BlockIds, payload: torch.Tensor) -> None:
        """See ``PagedKV``."""
        self.gather(block_ids, payload.numpy())

    def scatter_on_device(
        self, block_ids: BlockIds, payload: torch.Tensor, chunk_blocks: int, first_block: int
    ) -> None:
        """See ``PagedKV``."""
        self.scatter(block_ids, payload.numpy(), chunk_blocks, first_block)

    def _pages_in(self, layers: range, chunks: Sequence[ChunkBlocks]) -> Iterator[tuple[Any, ...]]:
        planes = slice(layers.start * self._planes_per_layer, layers.stop * self._planes_per_layer)
        return (page for chunk in chunks for page in chunk.pages[planes])

    def _pages_of_all(self, chunks: Sequence[ChunkBlocks]) -> Iterator[tuple[Any, ...]]:
        check_chunks(chunks, self._allowed)  # before any copy
        return (page for chunk in chunks for page in self._pages_of(chunk, alone=False))

    def _pages_of(self, chunk: ChunkBlocks, *, alone: bool) -> Iterator[tuple[Any, ...]]:
        """Yield the pages of a chunk, each plane ``alone`` or several together."""
        begin, wanted = 0, slice(chunk.first_block, chunk.first_block + len(chunk.block_ids))
        for number, run in enumerate(self._runs):
            end = begin + chunk.chunk_blocks * run.block_bytes
            parts = chunk.payload[begin:end].view(run.word).reshape(len(run.rows), chunk.chunk_blocks, run.words)
            yield from self._copies.pages(number, chunk.block_ids, parts[:, wanted], alone=alone)
            begin = end
