"""Copies between pages in host memory: by a compiled kernel, or by numpy, where that is missing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.model.compiling import Kernel
from kvstore.model.errors import InvalidCallError
from kvstore.paged.streaming import page_mover

Words = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

COPY_BYTES: Final = 1 << 20  # of one copy, at least a plane: shorter ones cost calls, and longer ones let threads wait
_PLANE_BYTES: Final = 16  # in a table of planes


class Run(NamedTuple):
    """Consecutive planes whose blocks are equally long: one view of a payload serves them all."""

    rows: Sequence[Words]  # each [num_blocks, words]
    word: np.dtype[Any]
    words: int
    block_bytes: int  # of one block in all these planes


class HostCopies(ABC):
    """Copies of blocks. A *page* is what one call copies: blocks of some planes, and their part of a payload."""

    @abstractmethod
    def pages(self, number: int, block_ids: _Ids, parts: Words, *, alone: bool) -> Iterator[tuple[Any, ...]]:
        """Pair the planes of a run with their ``parts[plane, block, word]`` of a payload, each plane ``alone`` or not.

        Iterating over one view of a run takes 0.14 us a plane. Slicing, viewing and reshaping for each plane took
        1.1 us: for the 24 layers of a small model 26 us a chunk instead of 3.
        """

    @abstractmethod
    def gather(self, page: tuple[Any, ...]) -> None:
        """Copy blocks to a payload."""

    @abstractmethod
    def scatter(self, page: tuple[Any, ...]) -> None:
        """Copy a payload to blocks."""


class NumpyCopies(HostCopies):
    """Copies without allocations: ``take`` reached 0.86 and fancy assignment 1.0 of memcpy's bandwidth."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._dense = all(rows.flags.c_contiguous for run in runs for rows in run.rows)

    def pages(self, number: int, block_ids: _Ids, parts: Words, *, alone: bool) -> Iterator[tuple[Any, ...]]:  # noqa: ARG002
        """See ``HostCopies``; each plane is alone."""
        return zip(self._runs[number].rows, repeat(block_ids), parts, strict=False)

    def gather(self, page: tuple[Any, ...]) -> None:
        """See ``HostCopies``."""
        rows, block_ids, target = page
        if self._dense:
            rows.take(block_ids, axis=0, out=target, mode="clip")
        else:  # take() would first copy the whole cache if its blocks are not adjacent
            for number, block in enumerate(block_ids):
                target[number] = rows[block]

    def scatter(self, page: tuple[Any, ...]) -> None:
        """See ``HostCopies``."""
        rows, block_ids, source = page
        rows[block_ids] = source


class StreamedCopies(HostCopies):
    """Copies by a kernel that ``page_mover`` compiled. It gets addresses, so all sizes are checked here."""

    def __init__(self, kernel: Kernel, runs: Sequence[Run], num_blocks: int) -> None:
        self._kernel = kernel
        self._num_blocks = num_blocks
        self._runs = runs  # whose memory the tables name
        self._tables = [np.array([(_address(rows), rows.strides[0]) for rows in run.rows], np.int64) for run in runs]

    def pages(self, number: int, block_ids: _Ids, parts: Words, *, alone: bool) -> Iterator[tuple[Any, ...]]:
        """See ``HostCopies``."""
        run, table, count = self._runs[number], _address(self._tables[number]), len(block_ids)
        page_bytes, planes = run.words * run.word.itemsize, len(run.rows)
        if parts.shape != (planes, count, run.words) or not parts[0].flags.c_contiguous:
            raise InvalidCallError(f"{count} blocks cannot be copied to or from an array {parts.shape}")
        most = 1 if alone else max(1, COPY_BYTES // max(1, count * page_bytes))
        ids, begin, step = np.ascontiguousarray(block_ids, np.int64), _address(parts), parts.strides[0]
        sizes = (repeat(size) for size in (page_bytes, self._num_blocks, _address(ids), count))
        return zip(
            range(table, table + _PLANE_BYTES * planes, _PLANE_BYTES * most),
            (min(most, planes - first) for first in range(0, planes, most)),
            *sizes,
            range(begin, begin + step * planes, step * most),
            repeat(step),
            repeat((ids, parts)),  # held as long as their addresses are used
            strict=False,
        )

    def gather(self, page: tuple[Any, ...]) -> None:
        """See ``HostCopies``."""
        if not page[-1][1].flags.writeable:
            raise InvalidCallError("blocks cannot be copied to memory that is read-only")
        self._move(page, 1)

    def scatter(self, page: tuple[Any, ...]) -> None:
        """See ``HostCopies``."""
        self._move(page, 0)

    def _move(self, page: tuple[Any, ...], gathers: int) -> None:
        if self._kernel(*page[:-1], gathers) != page[1]:
            raise InvalidCallError(f"block ids changed, and are not all in 0..{self._num_blocks - 1}")


def host_copies(runs: Sequence[Run], num_blocks: int) -> HostCopies:
    """Choose the fastest copies that work here, for planes of ``num_blocks`` blocks."""
    kernel = page_mover()
    return NumpyCopies(runs) if kernel is None else StreamedCopies(kernel, runs, num_blocks)


def _address(array: Words) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
