"""Counts the calls to a tier that fail, and times its reads and writes. ``ops/meters`` reads both."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstore.errors import TierError, TierTimeoutError
from kvstore.tiers.guards.base import TierWrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.chunks import ChunkRef, Outcome
    from kvstore.keys import Namespace
    from kvstore.tiers.base import Loan, Tier, Transfer

MAX_TIMES: Final = 4096  # of each operation, kept until somebody takes them


class Statistics(TierWrapper):
    """Counts and times the calls to a tier. Thread-safe.

    Attributes:
        errors: calls that raised ``TierError``.
        timeouts: those of them that timed out.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.errors = 0
        self.timeouts = 0
        self._lock = threading.Lock()
        self._times_s = {operation: deque[float](maxlen=MAX_TIMES) for operation in ("get", "put")}

    def take_times_s(self, operation: str) -> list[float]:
        """How long each ``get`` or ``put`` took that ended since the last call, failed ones included."""
        with self._lock:
            taken = list(self._times_s[operation])
            self._times_s[operation].clear()
        return taken

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward and count."""
        with self._call():
            return self.inner.contains(refs)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward, count and time."""
        with self._timed_call("get"):
            return self.inner.get(transfers)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward and count."""
        with self._call():
            return self.inner.get_layers(transfers, layers)

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward, count and time as a ``get``."""
        with self._timed_call("get"):
            return self.inner.borrow(refs)

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward, count and time."""
        with self._timed_call("put"):
            return self.inner.put(transfers)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward and count."""
        with self._call():
            self.inner.remove(refs)

    def clear(self) -> None:
        """Forward and count."""
        with self._call():
            self.inner.clear()

    def reset(self, namespace: Namespace) -> None:
        """Forward and count."""
        with self._call():
            self.inner.reset(namespace)

    @contextmanager
    def _call(self) -> Iterator[None]:
        try:
            yield
        except TierError as error:
            with self._lock:
                self.errors += 1
                self.timeouts += isinstance(error, TierTimeoutError)
            raise

    @contextmanager
    def _timed_call(self, operation: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        try:
            with self._call():
                yield
        finally:
            with self._lock:
                self._times_s[operation].append(time.perf_counter() - begin_s)
