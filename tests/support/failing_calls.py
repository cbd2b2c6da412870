"""Calls of the system that fail at random, or move fewer bytes than asked, as those of a failing disk do."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

_WRITES: Final = (errno.ENOSPC, errno.EIO)
_READS: Final = (errno.EIO,)
_NAMES: Final = (errno.EIO, errno.EACCES)
CALLS: Final = {
    "pwritev": _WRITES,
    "preadv": _READS,
    "rename": _NAMES,
    "unlink": _NAMES,
    "ftruncate": _WRITES,
    "truncate": _WRITES,
    "mkdir": _WRITES,
}
_MOVES: Final = ("pwritev", "preadv")


class FailingCalls:
    """Functions of ``os`` that fail with a probability while it is not 0. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self.share = 0.0
        self.failed = Counter[str]()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._around(name, getattr(os, name)))
            yield

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            number = self._draw(name)
            if number is None:
                return real(*args, **keywords)
            if number == 0:  # a short one, which is no error
                return real(args[0], _half(args[1]), *args[2:])
            raise OSError(number, os.strerror(number), args[0])

        return call

    def _draw(self, name: str) -> int | None:
        """Return the number of an error, 0 for a short move, or None for a call that works."""
        with self._lock:
            if self._dice.random() >= self.share:
                return None
            self.failed[name] += 1
            if name in _MOVES and self._dice.random() < 0.5:
                return 0
            return self._dice.choice(CALLS[name])


def _half(views: Sequence[memoryview]) -> list[memoryview]:
    """Return about the first half of some buffers: a byte at least, and whole pages, as direct I/O needs."""
    first = views[0].cast("B")
    pages = len(first) // 2 // 4096 * 4096
    return [first[: pages or len(first)]]
