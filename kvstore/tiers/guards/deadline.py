"""Deadline for every call, so that a disk that hangs is a broken tier and not a hung engine.

A system call that hangs cannot be cancelled, only abandoned. So calls run on threads of this wrapper, which they may
block permanently. After the deadline the caller gets ``TierTimeoutError``, whose ``pending`` is done once the call has
ended and its buffers are free again. Nothing is copied: the normal path costs one hand-over between threads (tens of
microseconds), and after a time-out the caller sets its buffers aside.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Final, TypeVar

from kvstore.chunks import ChunkRef
from kvstore.errors import ClosedError, InvalidCallError, TierError, TierTimeoutError
from kvstore.keys import Namespace
from kvstore.tiers.base import Loan, Tier
from kvstore.tiers.guards.base import TierWrapper
from kvstore.tiers.guards.crew import Crew, start_aside

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_SLOW: Final = frozenset({"scan", "trails", "clear"})  # reset and close are also slow, but run on separate threads


class Deadline(TierWrapper):
    """Wrapper that ends every wait after a deadline, including the wait for a thread.

    A call that timed out before it began is withdrawn. One that had begun continues: a late ``put``, ``remove``,
    ``clear`` or ``drop_spares`` still takes effect. Until the ``pending`` of its ``TierTimeoutError`` is done, a
    ``get`` may still write to its buffers, and a ``put`` may still read them, so they must not change. The result of
    ``pending`` is the final outcome of the chunks. Its callbacks run on the thread of the late call.

    While all threads are stuck in such calls, every call fails at once with ``TierError``. ``used_bytes``,
    ``stored_bytes``, ``size_of`` and ``counters`` run on the caller's thread, without a deadline, because they answer
    from memory.

    Args:
        inner: the tier to guard.
        timeout_s: the deadline of calls about chunks, for any size of the batch.
        threads: calls at the same time. Use more than the callers have, or a few stuck calls slow down the rest.
        slow_timeout_s: the deadline of ``scan``, ``clear``, ``reset`` and ``close``, which may touch every file.
        crew: threads shared with other tiers, and closed by their owner, in place of ``threads`` new ones.

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
        crew: Crew | None = None,
    ) -> None:
        super().__init__(inner)
        if not (timeout_s > 0 and slow_timeout_s > 0):
            raise InvalidCallError(f"a deadline needs positive times, not {timeout_s=} {slow_timeout_s=}")
        self._timeout_s = timeout_s
        self._slow_timeout_s = slow_timeout_s
        self._lock = threading.Lock()
        self._owns_crew = crew is None
        self._crew = crew or Crew(inner.name, threads)
        self._stuck: set[Future[Any]] = set()
        self._late_reset: Future[None] = Future()
        self._late_reset.set_result(None)
        self._closed = False

    @property
    def stuck_calls(self) -> int:
        """Number of calls that timed out and have not ended yet."""
        return len(self._stuck)

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward within the deadline. A loan that arrives too late is ended at once.

        Raises:
            TierTimeoutError: timed out.
            TierError: no thread is left, or the tier is broken.
        """
        try:
            return super().borrow(tuple(refs))
        except TierTimeoutError as error:
            error.pending.add_done_callback(_end_late_loan)
            raise

    def reset(self, namespace: Namespace) -> None:
        """Forward within the slow deadline, on a new thread, so that no stuck call can prevent it.

        It waits only for an earlier reset, because the tier must end in the namespace that was named last.

        Raises:
            TierTimeoutError: timed out. Until its ``pending`` is done, other calls fail at once with ``TierError``.
            TierError: the tier did not remove the old chunks.
        """
        before = self._late_reset

        def reset() -> None:
            wait_for([before])
            self.inner.reset(namespace)

        resetting = start_aside(self.name, "reset", reset)
        try:
            resetting.result(self._slow_timeout_s)
        except TimeoutError as error:
            self._late_reset = resetting
            self._give_up(resetting)
            message = f"reset of the {self.name} tier took longer than {self._slow_timeout_s} s"
            raise TierTimeoutError(message, resetting) from error

    def close(self) -> None:
        """Close the tier within the slow deadline; after it, warn and leave the rest to a daemon thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._owns_crew:
            self._crew.close()
        try:
            start_aside(self.name, "close", self.inner.close).result(self._slow_timeout_s)
        except TimeoutError:
            logger.warning("the %s tier does not close within %s s: abandoned", self.name, self._slow_timeout_s)

    def _call(self, operation: str, action: Callable[[], Result]) -> Result:
        timeout_s = self._slow_timeout_s if operation in _SLOW else self._timeout_s
        with self._lock:
            if self._closed:
                raise ClosedError(f"the {self.name} tier was closed")
            if not self._late_reset.done():
                raise TierError(f"{operation} of the {self.name} tier: an earlier reset has not ended")
            future = self._crew.submit(operation, action)
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

    def _give_up(self, future: Future[Any]) -> None:
        self._stuck.add(future)
        future.add_done_callback(self._stuck.discard)  # runs at once if the call has just ended


def _end_late_loan(lending: Future[Loan]) -> None:
    if not lending.cancelled() and lending.exception() is None:
        lending.result().end()
