"""The server's memory: pages in a memfd, which clients on the same host map, and a list of the free pages.

A memfd belongs to no filesystem: a container's small ``/dev/shm`` does not bound it, and it is freed with the last
process that has it open. A page is charged to the container of the process that touches it first, so the server touches
each page before it hands it out. Chunks of all sizes share the pool. A chunk lies in one run of pages if one is long
enough, otherwise in several. So only the end of its last page is wasted, and all free pages can be used.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvstore.memory.mapped import map_bytes
from kvstore.memory.preparing import Pace, Preparation
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import ConfigError, ProtocolError
from kvstore.protocol.payload import PAGE_BYTES, Run, extents

# From linux/fcntl.h; only Python 3.12 and later have them. They keep clients from truncating the pool of the others.
_F_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing
_PIECE_BYTES: Final = 16 << 20
_PACE: Final = Pace(threads=min(4, len(os.sched_getaffinity(0))), piece_bytes=_PIECE_BYTES)


def pages_of(num_bytes: int) -> int:
    """Return the number of pages that hold so many bytes."""
    return -(-num_bytes // PAGE_BYTES)


def gaps(runs: Iterable[Run], num_pages: int) -> Iterator[Run]:
    """Yield the pages that are in none of these runs.

    Raises:
        ProtocolError: some of them overlap, or are not among ``num_pages``.
    """
    end = 0
    for first, length in sorted(runs):
        if first < end or length < 1:
            raise ProtocolError(f"page {first} is taken twice")
        if first > end:
            yield end, first - end
        end = first + length
    if end > num_pages:
        raise ProtocolError(f"page {end - 1} is taken, and there are {num_pages}")
    if end < num_pages:
        yield end, num_pages - end


class FreePages:
    """The free pages of a pool. Belongs to one thread. A call visits few of the free runs."""

    def __init__(self, num_pages: int) -> None:
        self.num_free = 0
        self._lengths: dict[int, int] = {}  # of free runs, by their first page
        self._firsts: dict[int, int] = {}  # of free runs, by the page behind them
        self._by_length: dict[int, dict[int, None]] = {}  # their first pages
        self._known: list[int] = []  # all lengths of free runs, in order
        if num_pages:
            self.give([(0, num_pages)])

    def take(self, num_pages: int) -> tuple[Run, ...] | None:
        """Take the shortest free run that is long enough, or else the longest runs; None if too few pages are free."""
        if num_pages > self.num_free:
            return None
        runs: list[Run] = []
        while num_pages:
            place = bisect_left(self._known, num_pages)
            length = self._known[place] if place < len(self._known) else self._known[-1]
            runs.append(self._cut(next(iter(self._by_length[length])), min(length, num_pages)))
            num_pages -= runs[-1][1]
        return tuple(runs)

    def give(self, runs: Sequence[Run]) -> None:
        """Free pages."""
        for first, length in runs:
            self.num_free += length
            self._join(first, length)

    def _cut(self, first: int, num_pages: int) -> Run:
        length = self._remove(first)
        self.num_free -= num_pages
        if length > num_pages:
            self._add(first + num_pages, length - num_pages)
        return first, num_pages

    def _join(self, first: int, length: int) -> None:
        """Add a run, joined with its free neighbours."""
        before = self._firsts.get(first)
        if before is not None:
            length += self._remove(before)
            first = before
        if first + length in self._lengths:
            length += self._remove(first + length)
        self._add(first, length)

    def _add(self, first: int, length: int) -> None:
        self._lengths[first] = length
        self._firsts[first + length] = first
        same = self._by_length.get(length)
        if same is None:
            same = self._by_length[length] = {}
            insort(self._known, length)
        same[first] = None

    def _remove(self, first: int) -> int:
        """Forget a run; return its length."""
        length = self._lengths.pop(first)
        del self._firsts[first + length]
        same = self._by_length[length]
        del same[first]
        if not same:
            del self._by_length[length]
            del self._known[bisect_left(self._known, length)]
        return length


class Pool:
    """Memory of ``num_bytes``, rounded down to pages, allocated in the background.

    Any thread may read and write bytes of pages that were taken; ``free`` belongs to the thread that decides.

    Args:
        num_bytes: bytes of all pages.
        allocated: called on other threads with each run of pages that was allocated; it must have the thread that
            decides call ``add``.
        fd: a memfd of this size from another process, with all pages allocated, which this object then owns.
        taken: pages that are in use there.

    Raises:
        ConfigError: the system cannot make a memfd of that size.
        ProtocolError: ``taken`` contradicts itself.
    """

    def __init__(
        self, num_bytes: int, allocated: Callable[[Run], None], *, fd: int = -1, taken: Iterable[Run] = ()
    ) -> None:
        num_pages = num_bytes // PAGE_BYTES
        if num_pages < 1:
            raise ConfigError(f"a pool of {num_bytes} bytes has no page of {PAGE_BYTES}: raise max_local_cpu_size")
        self.num_bytes = num_pages * PAGE_BYTES
        self.free = FreePages(0)
        self._left_pages = num_pages if fd < 0 else 0
        self._allocated = allocated
        try:
            self.fd = _make(self.num_bytes) if fd < 0 else fd
            self.bytes = map_bytes(self.num_bytes, self.fd)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"cannot make a pool of {self.num_bytes / 2**30:.1f} GiB ({error}): lower max_local_cpu_size"
            ) from error
        if fd >= 0:
            self.free.give(list(gaps(taken, num_pages)))
        begins = range(0, self.num_bytes if fd < 0 else 0, _PIECE_BYTES)
        pieces = [(begin, min(begin + _PIECE_BYTES, self.num_bytes)) for begin in begins]
        self._preparation = Preparation(self.bytes, pieces, None, _PACE, self._touch)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that are taken."""
        return self.num_bytes - (self._left_pages + self.free.num_free) * PAGE_BYTES

    @property
    def is_growing(self) -> bool:
        """True until ``add`` has added all pages."""
        return self._left_pages > 0

    def add(self, run: Run) -> None:
        """Add pages that were allocated to the free ones."""
        self._left_pages -= run[1]
        self.free.give([run])

    def wait_allocated(self, timeout_s: float) -> bool:
        """Wait until ``allocated`` was called for all pages; return False after a timeout. For tests."""
        return self._preparation.wait(timeout_s)

    def parts(self, runs: Sequence[Run], offset_bytes: int, num_bytes: int) -> list[ByteArray]:
        """Return views of ``num_bytes`` from an offset on in the concatenated runs.

        Raises:
            ProtocolError: the runs are shorter.
        """
        return [self.bytes[begin : begin + size] for begin, size in extents(runs, offset_bytes, num_bytes)]

    def close(self) -> None:
        """Stop allocating, and close the memfd; the memory lives until its last user is gone."""
        self._preparation.close()
        self.bytes = self.bytes[:0].copy()  # what refers to this object may live until a collection of cycles
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _touch(self, begin: int, end: int) -> None:
        self.bytes[begin : end : mmap.PAGESIZE] = 0  # on Linux before 5.14 nothing else has allocated them
        self._allocated((begin // PAGE_BYTES, (end - begin) // PAGE_BYTES))


def _make(num_bytes: int) -> int:
    """Return a sealed memfd.

    Raises:
        OSError: the system cannot make it.
    """
    fd = os.memfd_create("kvstore-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
