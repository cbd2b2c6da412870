"""Guard around a tier: every call has a deadline, every failure is a ``TierError``, and both are counted.

A system call that hangs cannot be cancelled, only abandoned. So calls run on threads that they may block permanently.
After the deadline the caller gets ``TierTimeoutError``, whose ``pending`` is done once the call has ended and its
buffers are free again. Nothing is copied: the normal path costs one hand-over between threads (tens of microseconds),
and after a time-out the caller sets its buffers aside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ClosedError, InvalidCallError, KVStoreError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace
from kvstore.model.throttle import Throttle
from kvstore.tiers.abandonable_threads import AbandonableThreads, start_aside
from kvstore.tiers.base import Loan, Tier, Transfer
from kvstore.tiers.guards.base import TierWrapper

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Answers = TypeVar("Answers", bound=Sized)

_SLOW: Final = frozenset({"scan", "trails", "clear"})  # reset and close are also slow, but run on separate threads
_TIMED: Final = {"get": "get", "borrow": "get", "put": "put"}  # the operation that a call is timed as
MAX_TIMES: Final = 4096  # of each operation, kept until they are taken


class Statistics(TierWrapper):
    """Wrapper that counts failed calls and times reads and writes. Thread-safe; ``ops/meters`` reads both.

    Attributes:
        errors: calls that raised ``TierError``.
        timeouts: those of them that timed out.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.errors = 0
        self.timeouts = 0
        self._counting = threading.Lock()
        self._times_s = {operation: deque[float](maxlen=MAX_TIMES) for operation in ("get", "put")}

    def take_times_s(self, operation: str) -> list[float]:
        """Return the times of each ``get`` or ``put`` that ended since the last call, including failed ones."""
        with self._counting:
            taken = list(self._times_s[operation])
            self._times_s[operation].clear()
        return taken

    def _call(self, operation: str, action: Callable[[], Result]) -> Result:
        with self._observed(operation):
            return action()

    @contextmanager
    def _observed(self, operation: str) -> Iterator[None]:
        """Count and time a call."""
        begin_s = time.perf_counter()
        try:
            yield
        except TierError as error:
            with self._counting:
                self.errors += 1
                self.timeouts += isinstance(error, TierTimeoutError)
            raise
        finally:
            if operation in _TIMED:
                with self._counting:
                    self._times_s[_TIMED[operation]].append(time.perf_counter() - begin_s)


class Guard(Statistics):
    """Wrapper that ends every wait after a deadline, including the wait for a thread.

    A call that timed out before it began is withdrawn. One that had begun continues: a late ``put``, ``remove``,
    ``clear`` or ``drop_spares`` still takes effect. Until the ``pending`` of its ``TierTimeoutError`` is done, a
    ``get`` may still write to its buffers, and a ``put`` may still read them, so they must not change. The result of
    ``pending`` is the final outcome of the chunks. Its callbacks run on the thread of the late call.

    While all threads are stuck in such calls, every call fails at once with ``TierError``. ``used_bytes``,
    ``stored_bytes``, ``size_of`` and ``counters`` run on the caller's thread, without a deadline, because they answer
    from memory.

    An error that is not kvstore's, or an answer for a wrong number of chunks, is a defect in the tier or in a library
    below it. It becomes a ``TierError``, so that it ends no engine; an error is logged at most once a minute.

    Args:
        inner: the tier to guard.
        timeout_s: the deadline of calls about chunks, for any size of the batch.
        threads: calls at the same time. Use more than the callers have, or a few stuck calls slow down the rest.
        slow_timeout_s: the deadline of ``scan``, ``clear``, ``reset`` and ``close``, which may touch every file.
        shared: threads shared with other tiers, and closed by their owner, in place of ``threads`` new ones.

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
        shared: AbandonableThreads | None = None,
    ) -> None:
        super().__init__(inner)
        if not (timeout_s > 0 and slow_timeout_s > 0):
            raise InvalidCallError(f"a deadline needs positive times, not {timeout_s=} {slow_timeout_s=}")
        self._timeout_s = timeout_s
        self._slow_timeout_s = slow_timeout_s
        self._lock = threading.Lock()
        self._owns_threads = shared is None
        self._threads = shared or AbandonableThreads(inner.name, threads)
        self._stuck: set[Future[Any]] = set()
        self._late_reset: Future[None] = Future()
        self._late_reset.set_result(None)
        self._closed = False
        self._throttle = Throttle(logger)

    @property
    def stuck_calls(self) -> int:
        """Number of calls that timed out and have not ended yet."""
        return len(self._stuck)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward within the deadline."""
        return self._call("contains", lambda: self._complete(refs, self.inner.contains(refs)))

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Forward within the deadline."""
        return self._call("nearest", lambda: self._complete(trails, self.inner.nearest(trails)))

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward within the deadline."""
        return self._call("get", lambda: self._complete(transfers, self.inner.get(transfers)))

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward within the deadline."""
        return self._call("get_layers", lambda: self._complete(transfers, self.inner.get_layers(transfers, layers)))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward within the deadline."""
        return self._call("put", lambda: self._complete(transfers, self.inner.put(transfers)))

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
            self._attempt("reset", lambda: self.inner.reset(namespace))

        with self._observed("reset"):
            resetting = start_aside(self.name, "reset", reset)
            try:
                resetting.result(self._slow_timeout_s)
            except TimeoutError as error:
                self._late_reset = resetting
                raise self._abandoned(resetting, "reset", self._slow_timeout_s) from error

    def close(self) -> None:
        """Close the tier within the slow deadline; after it, warn and leave the rest to a daemon thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._owns_threads:
            self._threads.close()
        try:
            start_aside(self.name, "close", self.inner.close).result(self._slow_timeout_s)
        except TimeoutError:
            logger.warning("the %s tier does not close within %s s: abandoned", self.name, self._slow_timeout_s)

    def _call(self, operation: str, action: Callable[[], Result]) -> Result:
        timeout_s = self._slow_timeout_s if operation in _SLOW else self._timeout_s
        with self._observed(operation):
            with self._lock:
                if self._closed:
                    raise ClosedError(f"the {self.name} tier was closed")
                if not self._late_reset.done():
                    raise TierError(f"{operation} of the {self.name} tier: an earlier reset has not ended")
                future = self._threads.submit(operation, lambda: self._attempt(operation, action))
            try:
                return future.result(timeout_s)
            except TimeoutError as error:
                if not future.cancel() and future.done():  # it ended at the last moment
                    return future.result()
                self._threads.abandon(future)
                raise self._abandoned(future, operation, timeout_s) from error
            finally:
                del future  # or its exception and this frame would keep each other alive

    def _abandoned(self, future: Future[Any], operation: str, timeout_s: float) -> TierTimeoutError:
        """Stop waiting for a call; returns the error to raise."""
        self._stuck.add(future)
        future.add_done_callback(self._stuck.discard)  # runs at once if the call has just ended
        return TierTimeoutError(f"{operation} of the {self.name} tier took longer than {timeout_s} s", future)

    def _attempt(self, operation: str, action: Callable[[], Result]) -> Result:
        """Carry out a call on its thread; an error that is not kvstore's becomes a ``TierError``."""
        try:
            return action()
        except KVStoreError:
            raise
        except Exception as error:
            kind = type(error).__name__
            self._throttle.log(
                f"{operation} {kind}",
                "a defect: %s of the %s tier raised %s, which counts as a failure of the tier",
                operation,
                self.name,
                kind,
                level=logging.ERROR,
                exc_info=error,
            )
            raise TierError(f"{operation} of the {self.name} tier raised {kind}: {error}") from error

    def _complete(self, asked: Sized, answers: Answers) -> Answers:
        if len(answers) != len(asked):
            raise TierError(f"the {self.name} tier answers about {len(answers)} chunks instead of {len(asked)}")
        return answers


def _end_late_loan(lending: Future[Loan]) -> None:
    if not lending.cancelled() and lending.exception() is None:
        lending.result().end()
