"""Kernels that move blocks between the planes of a paged cache and a dense buffer on the same device.

In the buffer each chunk is laid out as in a payload, ``[plane][block][page bytes]``, one chunk after the other. With
Triton, a single launch moves all planes of several chunks, because the number of launches, not of bytes, limits models
with small pages. Triton is a dependency of vLLM for GPUs; without it PyTorch moves one plane of one chunk at a time,
which is also the reference in tests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from kvstore.paged.footprint import NUMBERS
from kvstore.paged.places import Part
from kvstore.paged.streams import Streams

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

logger = logging.getLogger(__name__)


_MAX_WORDS = 2048  # that one program moves
_VECTOR_BYTES = 16  # the maximum that a thread loads at once


class Launch(NamedTuple):
    """Planes to move, and the places of the blocks to move."""

    planes: range
    part: Part


class Kernels(Protocol):
    """Mover of blocks. To be called in ``Streams.run``; ``staged`` begins with the first chunk's part."""

    device_bytes: int

    def gather(self, launch: Launch, staged: torch.Tensor) -> None:
        """Copy blocks from the cache into the buffer."""

    def scatter(self, launch: Launch, staged: torch.Tensor) -> None:
        """Copy blocks from the buffer into the cache."""

    def restore(self, streams: Streams) -> None:
        """Write tables on the device again, after its memory was discarded."""


class TorchKernels:
    """Kernels of PyTorch, with one launch for each plane of each chunk.

    Args:
        rows: for each plane ``[num_blocks, words]``, all of one type.
    """

    device_bytes = 0

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = rows

    def gather(self, launch: Launch, staged: torch.Tensor) -> None:
        """See ``Kernels``."""
        for rows, ids, part in self._parts(launch, staged):
            torch.index_select(rows, 0, ids, out=part)

    def scatter(self, launch: Launch, staged: torch.Tensor) -> None:
        """See ``Kernels``."""
        for rows, ids, part in self._parts(launch, staged):
            rows.index_copy_(0, ids, part)

    def restore(self, streams: Streams) -> None:
        """See ``Kernels``: there are no tables."""

    def _parts(self, launch: Launch, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield a plane's rows, the block ids of a chunk, and their rows in the buffer."""
        words = staged.view(self._rows[0].dtype)
        done = begin = 0
        for block_ids, chunk_blocks, first_block in launch.part.pieces:
            ids = launch.part.on_device[0, done : done + len(block_ids)]
            for plane in launch.planes:
                rows = self._rows[plane]
                end = begin + chunk_blocks * rows.shape[1]
                part = words[begin:end].view(chunk_blocks, rows.shape[1])
                yield rows, ids, part[first_block : first_block + len(block_ids)]
                begin = end
            done += len(block_ids)


class TritonKernels:
    """Kernel of Triton, with one launch for all planes of several chunks.

    A table on the device has four numbers for each plane: its address, and, in words, the distance between its blocks,
    their size, and the size of one block in all planes before. It ends with rows of planes without bytes.

    Args:
        rows: for each plane ``[num_blocks, words]``, all of one type.
        streams: the device.
    """

    def __init__(self, rows: Sequence[torch.Tensor], streams: Streams) -> None:
        sizes = [plane.shape[1] for plane in rows]
        before = list(accumulate(sizes, initial=0))
        table = [(r.data_ptr(), r.stride(0), size, start) for r, size, start in zip(rows, sizes, before, strict=False)]
        table += [(rows[0].data_ptr(), 0, 0, before[-1])] * 2  # the empty plane that ``warm_up`` moves, and the end
        numbers = torch.tensor(table, dtype=torch.int64)
        self._word = rows[0].dtype
        item_bytes = self._word.itemsize
        self._vector = _VECTOR_BYTES // item_bytes
        if any(plane.data_ptr() % _VECTOR_BYTES for plane in rows) or (numbers[:, 1:] % self._vector).any():
            self._vector = 1
        self._words = min(_MAX_WORDS, triton.next_power_of_2(max(sizes)))
        self._splits = triton.cdiv(max(sizes), self._words)
        self._end_plane = len(rows)
        self.device_bytes = numbers.nbytes
        self._numbers = numbers
        self._table = streams.allocate(numbers.nbytes, torch.int64).view(numbers.shape)
        streams.keep(self._table)
        self.restore(streams)

    def gather(self, launch: Launch, staged: torch.Tensor) -> None:
        """See ``Kernels``."""
        self._launch(launch.planes, launch.part.on_device, staged, is_gather=True)

    def scatter(self, launch: Launch, staged: torch.Tensor) -> None:
        """See ``Kernels``."""
        self._launch(launch.planes, launch.part.on_device, staged, is_gather=False)

    def restore(self, streams: Streams) -> None:
        """See ``Kernels``. With garbage in the table, kernels could read and write anywhere."""
        streams.run(lambda: self._table.copy_(self._numbers))
        streams.reach(streams.now())  # other streams also read it

    def warm_up(self, staged: torch.Tensor) -> None:
        """Move the empty plane both ways, so that compiling and loading take their time and device memory now."""
        for is_gather in (True, False):
            anywhere = self._table.view(-1)[:NUMBERS].view(NUMBERS, 1)
            self._launch(
                range(self._end_plane, self._end_plane + 1), anywhere, staged[:_VECTOR_BYTES], is_gather=is_gather
            )

    def _launch(self, planes: range, places: torch.Tensor, staged: torch.Tensor, *, is_gather: bool) -> None:
        num_blocks = places.shape[1]
        if not num_blocks:
            return
        _move[(num_blocks, len(planes), self._splits)](
            self._table,
            places,
            staged.view(self._word),
            places.stride(0),
            planes.start,
            is_gather=is_gather,
            vector=1 if staged.data_ptr() % _VECTOR_BYTES else self._vector,
            words=self._words,
        )


if triton is not None:
    # One variant of each direction, because compiling another one while a model runs would delay it.
    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=["row_words", "first_plane"],
        do_not_specialize_on_alignment=["table", "places", "staged"],
    )
    def _move(  # noqa: PLR0917 - Triton knows no others
        table: tl.tensor,
        places: tl.tensor,
        staged: tl.tensor,
        row_words: tl.tensor,
        first_plane: tl.tensor,
        is_gather: tl.constexpr,
        vector: tl.constexpr,
        words: tl.constexpr,
    ) -> None:
        """Move a part of one block in one plane. The grid is blocks, planes, parts of the longest page."""
        place = tl.program_id(0)
        plane = first_plane + tl.program_id(1)
        first, last = table + 4 * first_plane, table + 4 * (first_plane + tl.num_programs(1))
        row = table + 4 * plane
        size = tl.multiple_of(tl.load(row + 2), vector)
        start = tl.load(first + 3)
        span = tl.load(last + 3) - start  # of one block in all planes of this launch
        block = tl.load(places + place)
        chunks_before = tl.load(places + row_words + place)
        chunk_blocks = tl.load(places + 2 * row_words + place)
        blocks_before = tl.load(places + 3 * row_words + place)
        at = chunks_before * span + chunk_blocks * (tl.load(row + 3) - start) + blocks_before * size
        in_cache = tl.load(row).to(staged.dtype) + block * tl.load(row + 1)
        in_buffer = staged + at
        if vector > 1:  # lets a thread move that many words at once
            in_cache = tl.multiple_of(in_cache, 16)
            in_buffer = tl.multiple_of(in_buffer, 16)
        word = tl.program_id(2) * words + tl.arange(0, words)
        if is_gather:
            tl.store(in_buffer + word, tl.load(in_cache + word, mask=word < size), mask=word < size)
        else:
            tl.store(in_cache + word, tl.load(in_buffer + word, mask=word < size), mask=word < size)


def kernels_for(rows: Sequence[torch.Tensor], streams: Streams, staged: torch.Tensor) -> Kernels:
    """Return the fastest available kernels: Triton on a GPU if it is installed and can compile, else PyTorch."""
    if triton is None or streams.device.type != "cuda":
        return TorchKernels(rows)
    kernels = TritonKernels(rows, streams)
    try:
        streams.run(lambda: kernels.warm_up(staged))
    except torch.AcceleratorError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton's own, which have no common parent: all of them mean without it
        logger.warning("blocks are moved by PyTorch, one launch for each layer, as Triton cannot compile: %s", error)
        return TorchKernels(rows)
    return kernels
