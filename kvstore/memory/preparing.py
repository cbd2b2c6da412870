"""Population of a mapping's pages before they are needed, and pinning if a GPU copies to and from them.

Fresh pages cost about ten times a copy. Without a GPU, threads touch them in the background, while the engine starts.
Pinning holds locks of the driver and collides with the capture of CUDA graphs, so it is finished at start; a pinner
that is safe during captures can pin in the background, by small pieces with pauses. Threads work in ascending order, as
the index assigns slots: most stores find their slot ready, and the others are only slower.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstore.memory.mapped import populate
from kvstore.memory.pinning import Pinner, Refusal
from kvstore.model.chunks import ByteArray

logger = logging.getLogger(__name__)

_GIB: Final = 2**30
_MAX_THREADS: Final = 8  # zero pages faster than the driver pins them
_CLOSE_S: Final = 30.0


@dataclass(frozen=True)
class Pace:
    """Parameters of preparing memory.

    Attributes:
        threads: number of threads.
        piece_bytes: approximate size that a thread touches, and pins, at once.
        waits: the start waits until all memory is pinned.
        pause_s: pause between two pieces of a thread, so that others can use the driver.
        retry_s: pause after a temporary refusal.
        tries: attempts for a piece, after which no more memory is pinned.
        stall_s: longest wait of the start for the next piece.
        logged_after_s: time after which progress is logged.
    """

    threads: int
    piece_bytes: int
    waits: bool = False
    pause_s: float = 0.0
    retry_s: float = 0.25
    tries: int = 120
    stall_s: float = 60.0
    logged_after_s: float = 5.0


UNPINNED: Final = Pace(threads=2, piece_bytes=256 << 20)  # more would take bandwidth from the starting engine
IN_BACKGROUND: Final = Pace(threads=2, piece_bytes=32 << 20, pause_s=0.005)  # about as long as the driver takes
AT_START: Final = Pace(threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))), piece_bytes=256 << 20, waits=True)


def pace_for(pinner: Pinner | None, *, in_background: bool) -> Pace:
    """Return the pace for memory that ``pinner`` pins, or that stays unpinned.

    Args:
        pinner: None for memory that is not pinned.
        in_background: pin in the background, if that is safe.
    """
    if pinner is None:
        return UNPINNED
    if in_background and not pinner.is_safe_during_captures:
        logger.warning("the CPU pool is pinned at start: the CUDA runtime was not found, so it cannot be done later")
        return AT_START
    return IN_BACKGROUND if in_background else AT_START


class Preparation:
    """Threads that prepare one mapping.

    Args:
        memory: the mapping.
        pieces: begin and end of each, in bytes.
        pinner: None pins nothing.
        pace: number of threads, sizes and times.
        ready: called on these threads with begin and end of each piece that was touched.
    """

    def __init__(
        self,
        memory: ByteArray,
        pieces: Sequence[tuple[int, int]],
        pinner: Pinner | None,
        pace: Pace,
        ready: Callable[[int, int], None] | None = None,
    ) -> None:
        self._memory = memory
        self._pieces = pieces
        self._ready = ready
        self._pinner = pinner
        self._pace = pace
        self._total_bytes = sum(end - begin for begin, end in pieces)
        self._changed = threading.Condition()
        self._pinned: list[int] = []  # addresses of pieces
        self._pinned_bytes = 0
        self._pins = pinner is not None
        self._is_logged = False
        self._begin_s = time.monotonic()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"kvstore-populate-{number}", daemon=True)
            for number in range(min(pace.threads, len(pieces)))
        ]
        for thread in self._threads:
            thread.start()
        if pace.waits:
            self._wait_pinned()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the threads have ended; False if time ran out first."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End the threads, and unpin. No copy may be under way. Idempotent."""
        self._closing.set()
        if not self.wait(_CLOSE_S):
            logger.warning("memory stays pinned: the driver has not answered for %.0f s", _CLOSE_S)
            return
        with self._changed:
            pinned, self._pinned = self._pinned, []
        for address in pinned:
            assert self._pinner is not None
            self._pinner.unpin(address)
        self._memory = self._memory[:0].copy()  # others decide how long it lives

    def _wait_pinned(self) -> None:
        """Wait until all memory is pinned, or pinning has been given up. No driver call begins after that."""
        with self._changed:
            while self._pins and self._pinned_bytes < self._total_bytes:
                if not self._changed.wait_for(partial(self._has_advanced, self._pinned_bytes), self._pace.stall_s):
                    break
            is_whole = self._pinned_bytes == self._total_bytes
            hangs = self._pins and not is_whole
        if hangs:
            self._give_up(f"nothing was pinned for {self._pace.stall_s:g} s")
        elif is_whole:
            self.wait(self._pace.stall_s)  # the threads have nothing left to do

    def _has_advanced(self, before_bytes: int) -> bool:
        return self._pinned_bytes > before_bytes or not self._pins

    def _work(self, first_piece: int) -> None:
        """Prepare every n-th piece from ``first_piece`` on, for n threads, which together work in ascending order."""
        for begin, end in self._pieces[first_piece :: len(self._threads)]:
            if not populate(self._memory, begin, end, self._closing.is_set):
                return
            if self._ready is not None:
                self._ready(begin, end)
            if self._pins:
                self._pin(self._memory.ctypes.data + begin, end - begin)
                self._closing.wait(self._pace.pause_s)

    def _pin(self, address: int, num_bytes: int) -> None:
        """Pin one piece; after the first permanent failure, no more pieces are pinned."""
        assert self._pinner is not None
        refusal: Refusal | None = None
        for _ in range(self._pace.tries):
            if not self._pins or self._closing.is_set():
                return
            refusal = self._pinner.pin(address, num_bytes)
            if refusal is None:
                self._note_pinned(address, num_bytes)
                return
            if not refusal.may_pass:
                break
            self._closing.wait(self._pace.retry_s)
        if refusal is not None:
            self._give_up(refusal.reason)

    def _note_pinned(self, address: int, num_bytes: int) -> None:
        with self._changed:
            self._pinned.append(address)
            self._pinned_bytes += num_bytes
            done_bytes, took_s = self._pinned_bytes, time.monotonic() - self._begin_s
            is_whole = done_bytes == self._total_bytes
            logs = is_whole or (took_s >= self._pace.logged_after_s and not self._is_logged)
            self._is_logged |= logs
            self._changed.notify_all()
        if is_whole:
            logger.info("pinned %.2f GiB of host memory for the GPU in %.1f s", done_bytes / _GIB, took_s)
        elif logs:
            logger.info(
                "pinning %.2f GiB of host memory for the GPU: %.2f GiB in %.1f s, about %.0f s more",
                self._total_bytes / _GIB,
                done_bytes / _GIB,
                took_s,
                took_s * (self._total_bytes / done_bytes - 1),
            )

    def _give_up(self, reason: str) -> None:
        with self._changed:
            is_first, self._pins = self._pins, False
            self._changed.notify_all()
        if is_first:
            logger.warning("cannot pin the CPU pool (%s): copies between it and the GPU are slower", reason)
