"""A deadline for every call: a disk that hangs is a broken tier, not a hung engine.

A system call that hangs cannot be cancelled, only abandoned. So calls run on threads of this wrapper, which they may
block for good. After the deadline the caller gets ``TierTimeoutError``, whose ``pending`` is done once the call has
ended and its buffers are free again. Nothing is copied: the normal path costs one hand-over between threads (tens of
microseconds), and after a time-out the caller sets its buffers aside.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ClosedError, InvalidCallError, TierError, TierTimeoutError
from kvstore.tiers.base import Loan, Tier, Transfer
from kvstore.tiers.guards.base import TierWrapper
from kvstore.tiers.guards.crew import Crew, start_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.keys import Namespace

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Deadline(TierWrapper):
    """Ends every wait after a deadline, waiting for a thread included.

    A call that timed out before it began is withdrawn. One that had begun goes on: a late ``put``, ``remove`` or
    ``clear`` still takes effect. While all threads are stuck in such calls, every call fails at once with
    ``TierError``. Callbacks of ``pending`` run on the thread of the late call. ``used_bytes``, ``stored_bytes``,
    ``size_of`` and ``counters`` run on the caller's thread, without a deadline: they answer from memory.

    Args:
        inner: the tier to guard.
        timeout_s: the deadline of calls about chunks, whatever the size of the batch.
        threads: calls at the same time. Use more than the callers have, or a few stuck calls slow down the rest.
        slow_timeout_s: the deadline of ``scan``, ``clear``, ``reset`` and ``close``, which may touch every file.
        max_waiting: calls that may wait for a thread; beyond them a call fails at once with ``TierError``.
        crew: threads shared with other tiers, and closed by their owner; they bring their own two counts.

    Raises:
        InvalidCallError: a time or a count that is not positive.
    """

    def __init__(
        self,
        inner: Tier,
        timeout_s: float,
        threads: int = 8,
        *,
        slow_timeout_s: float = 60.0,
        max_waiting: int = 64,
        crew: Crew | None = None,
    ) -> None:
        super().__init__(inner)
        if not (timeout_s > 0 and slow_timeout_s > 0 and threads > 0 and max_waiting > 0):
            given = f"{timeout_s=} {threads=} {slow_timeout_s=} {max_waiting=}"
            raise InvalidCallError(f"a deadline needs positive times and counts, not {given}")
        self._timeout_s = timeout_s
        self._slow_timeout_s = slow_timeout_s
        self._lock = threading.Lock()
        self._owns_crew = crew is None
        self._crew = crew or Crew(inner.name, threads, max_waiting)
        self._stuck: set[Future[Any]] = set()
        self._timeouts = 0
        self._late_reset: Future[None] = Future()
        self._late_reset.set_result(None)
        self._closed = False

    @property
    def stuck_calls(self) -> int:
        """Calls that timed out and have not ended yet."""
        return len(self._stuck)

    @property
    def timeouts(self) -> int:
        """Calls that timed out so far."""
        return self._timeouts

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Forward within the slow deadline."""
        return self._call("scan", super().scan, self._slow_timeout_s)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward within the deadline.

        Raises:
            TierError: timed out, or no thread is left.
        """
        return self._call("contains", lambda: self.inner.contains(refs), self._timeout_s)

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward within the deadline.

        Raises:
            TierTimeoutError: timed out; until its ``pending`` is done the buffers may still be written to.
            TierError: no thread is left, or the tier is broken.
        """
        return self._call("get", lambda: self.inner.get(transfers), self._timeout_s)

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward like ``get``."""
        return self._call("get_layers", lambda: self.inner.get_layers(transfers, layers), self._timeout_s)

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward within the deadline. A loan that comes too late is given back at once.

        Raises:
            TierTimeoutError: timed out.
            TierError: no thread is left, or the tier is broken.
        """
        fixed = tuple(refs)
        try:
            return self._call("borrow", lambda: self.inner.borrow(fixed), self._timeout_s)
        except TierTimeoutError as error:
            error.pending.add_done_callback(_end_late_loan)
            raise

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward within the deadline.

        Raises:
            TierTimeoutError: timed out; until its ``pending`` is done the buffers may still be read, and must not
                change. Its result says whether the chunks were stored after all.
            TierError: no thread is left, or the tier is broken.
        """
        return self._call("put", lambda: self.inner.put(transfers), self._timeout_s)

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward within the deadline.

        Raises:
            TierError: timed out (it may yet take effect), or no thread is left.
        """
        fixed = tuple(refs)  # an iterator of the caller's must not run on another thread
        self._call("remove", lambda: self.inner.remove(fixed), self._timeout_s)

    def clear(self) -> None:
        """Forward within the slow deadline.

        Raises:
            TierError: timed out (it may yet take effect), no thread is left, or the tier refused.
        """
        self._call("clear", self.inner.clear, self._slow_timeout_s)

    def drop_spares(self, wanted_bytes: int) -> None:
        """Forward within the deadline.

        Raises:
            TierError: timed out (it may yet take effect), or no thread is left.
        """
        drop_spares = super().drop_spares
        self._call("drop_spares", lambda: drop_spares(wanted_bytes), self._timeout_s)

    def reset(self, namespace: Namespace) -> None:
        """Forward within the slow deadline, on a thread of its own, so that no stuck call can prevent it.

        It waits only for an earlier reset: the tier must end in the namespace that was named last.

        Raises:
            TierTimeoutError: timed out. Until its ``pending`` is done, other calls fail at once with ``TierError``.
            TierError: the tier would not let go of the old chunks.
        """
        before = self._late_reset

        def reset() -> None:
            wait_for([before])
            self.inner.reset(namespace)

        resetting = self._aside("reset", reset)
        try:
            resetting.result(self._slow_timeout_s)
        except TimeoutError as error:
            self._late_reset = resetting
            self._give_up(resetting)
            message = f"reset of the {self.name} tier took longer than {self._slow_timeout_s} s"
            raise TierTimeoutError(message, resetting) from error

    def close(self) -> None:
        """Close the tier within the slow deadline; after it, warn and leave it to a daemon thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._owns_crew:
            self._crew.close()
        try:
            self._aside("close", self.inner.close).result(self._slow_timeout_s)
        except TimeoutError:
            logger.warning("the %s tier does not close within %s s: abandoned", self.name, self._slow_timeout_s)

    def _call(self, operation: str, action: Callable[[], Result], timeout_s: float) -> Result:
        future = self._submit(operation, action)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if not future.cancel() and future.done():  # it ended at the last moment, or raised this very exception
                return future.result()
            self._crew.give_up(future)
            self._give_up(future)
            message = f"{operation} of the {self.name} tier took longer than {timeout_s} s"
            raise TierTimeoutError(message, future) from error
        finally:
            del future  # or its exception and this frame would keep each other alive

    def _aside(self, operation: str, action: Callable[[], None]) -> Future[None]:
        """Start a call on a thread of its own, as all others may be stuck."""
        return start_aside(f"kvstore-{self.name}-{operation}", action)

    def _submit(self, operation: str, action: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            if self._closed:
                raise ClosedError(f"the {self.name} tier was closed")
            if not self._late_reset.done():
                raise TierError(f"{operation} of the {self.name} tier: an earlier reset has not ended")
            return self._crew.submit(operation, action)

    def _give_up(self, future: Future[Any]) -> None:
        with self._lock:
            self._timeouts += 1
            if not future.cancelled():
                self._stuck.add(future)
        future.add_done_callback(self._come_back)  # runs at once if the call has just ended

    def _come_back(self, future: Future[Any]) -> None:
        with self._lock:
            self._stuck.discard(future)


def _end_late_loan(lending: Future[Loan]) -> None:
    if not lending.cancelled() and lending.exception() is None:
        lending.result().end()
