"""Guard around a tier: every call has a deadline, every failure is a ``TierError``, and both are counted.

A system call that hangs cannot be cancelled, only abandoned. So calls run on threads that they may block permanently.
After the deadline the caller gets ``TierTimeoutError``, whose ``pending`` is done once the call has ended and its
buffers are free again. Nothing is copied: the normal path costs one hand-over between threads (tens of microseconds),
and after a time-out the caller sets its buffers aside.

``TierWrapper`` is the base of every wrapper: a tier around a tier that keeps the same contract and forwards the calls
that are not its concern. The idea is taken from py-key-value (``key_value/aio/wrappers``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from kvstore.model.chunks import ChunkRef, Outcome, Presence
from kvstore.model.errors import ClosedError, InvalidCallError, KVStoreError, TierError, TierTimeoutError
from kvstore.model.keys import Namespace, PrefixKey
from kvstore.model.lifetime import Lifetime
from kvstore.model.retention import Retention
from kvstore.model.throttle import Throttle
from kvstore.tiers.abandonable_threads import AbandonableThreads, start_aside
from kvstore.tiers.base import UNBOUNDED_BYTES, BoundedTier, Tier, Transfer
from kvstore.tiers.loan import Loan, end_late_loan

logger = logging.getLogger(__name__)

SomeTier = TypeVar("SomeTier", bound=Tier)
Result = TypeVar("Result")

# So are reset and close, on separate threads.
_SLOW: Final = frozenset({"scan", "trails", "owners", "retained", "lifetimes", "clear"})
_TIMED: Final = {"get": "get", "borrow": "get", "put": "put"}  # the operation that a call is timed as
MAX_TIMES: Final = 4096  # of each operation, kept until they are taken


class TierWrapper(BoundedTier):
    """Wrapper that forwards every call to ``inner``, and shares its name, capacity and counters. Closes ``inner``.

    A wrapper that treats all calls alike overrides ``_call``, through which all calls with possible I/O pass except
    ``check`` and ``close``.

    Around a tier without a bound, the calls that only a ``BoundedTier`` has raise ``InvalidCallError``.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.capacity_bytes = inner.capacity_bytes if isinstance(inner, BoundedTier) else UNBOUNDED_BYTES
        self.counters = inner.counters

    def _call(
        self,
        operation: str,  # noqa: ARG002 - for wrappers
        action: Callable[[], Result],
        num_asked: int | None = None,  # noqa: ARG002 - for wrappers
    ) -> Result:
        """Carry out a call.

        Args:
            operation: name of the called method.
            action: calls the inner tier.
            num_asked: length of the list that the action must return; None if it returns no such list.
        """
        return action()

    def _tell(self, operation: str, action: Callable[[], None]) -> None:
        """Carry out a call whose loss does no harm."""
        self._call(operation, action)

    @property
    def _bounded(self) -> BoundedTier:
        """Wrapped tier, for the calls that only a tier with a bound has."""
        if not isinstance(self.inner, BoundedTier):
            raise InvalidCallError(f"the {self.name} tier has no bound, so it does not know how many bytes it holds")
        return self.inner

    def scan(self) -> list[tuple[ChunkRef, int]]:
        """Forward."""
        return self._call("scan", self._bounded.scan)

    def trails(self) -> dict[PrefixKey, bytes]:
        """Forward."""
        return self._call("trails", self._bounded.trails)

    def owners(self) -> dict[PrefixKey, bytes]:
        """Forward."""
        return self._call("owners", self._bounded.owners)

    def retain(self, retentions: Sequence[Retention]) -> None:
        """Forward."""
        bounded = self._bounded
        self._tell("retain", lambda: bounded.retain(retentions))

    def retained(self) -> list[Retention]:
        """Forward."""
        return self._call("retained", self._bounded.retained)

    @property
    def keeps_lifetimes(self) -> bool:
        """Forward."""
        return self.inner.keeps_lifetimes

    def limit(self, lifetimes: Sequence[Lifetime]) -> None:
        """Forward."""
        self._tell("limit", lambda: self.inner.limit(lifetimes))

    def lifetimes(self) -> list[Lifetime]:
        """Forward."""
        return self._call("lifetimes", self._bounded.lifetimes)

    @property
    def parts(self) -> tuple[Tier, ...]:
        """Parts of ``inner``, or this wrapper if ``inner`` is its own only part."""
        parts = self.inner.parts
        return (self,) if parts == (self.inner,) else parts

    @property
    def answers(self) -> bool:
        """Forward."""
        return self.inner.answers

    def check(self) -> None:
        """Forward."""
        self.inner.check()

    def contains(self, refs: Sequence[ChunkRef]) -> Sequence[Presence]:
        """Forward."""
        return self._call("contains", lambda: self.inner.contains(refs), len(refs))

    def look(self, refs: Sequence[ChunkRef]) -> Sequence[Presence | None]:
        """Forward, unless a subclass answers ``contains`` itself, and so this, too."""
        if type(self).contains is not TierWrapper.contains:
            return self.contains(refs)
        return self._call("contains", lambda: self.inner.look(refs), len(refs))

    @property
    def keeps_trails(self) -> bool:
        """Forward."""
        return self.inner.keeps_trails

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Forward."""
        return self._call("nearest", lambda: self.inner.nearest(trails), len(trails))

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self._call("get", lambda: self.inner.get(transfers), len(transfers))

    @property
    def reads_layers(self) -> bool:
        """Forward."""
        return self.inner.reads_layers

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward."""
        return self._call("get_layers", lambda: self.inner.get_layers(transfers, layers), len(transfers))

    @property
    def reads_fronts(self) -> bool:
        """Forward."""
        return self.inner.reads_fronts

    @property
    def lends(self) -> bool:
        """Forward."""
        return self.inner.lends

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward."""
        return self._call("borrow", lambda: self.inner.borrow(refs))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self._call("put", lambda: self.inner.put(transfers), len(transfers))

    def remove(self, refs: Iterable[ChunkRef]) -> None:
        """Forward."""
        fixed = tuple(refs)  # the caller's iterator may work only once, and not on another thread
        self._call("remove", lambda: self.inner.remove(fixed))

    def clear(self) -> None:
        """Forward."""
        self._call("clear", self.inner.clear)

    def reset(self, namespace: Namespace) -> None:
        """Forward."""
        self._call("reset", lambda: self.inner.reset(namespace))

    def drop_spares(self, wanted_bytes: int) -> None:
        """Forward."""
        bounded = self._bounded
        self._tell("drop_spares", lambda: bounded.drop_spares(wanted_bytes))

    def stored_bytes(self, num_blocks: int) -> int:
        """Forward."""
        return self._bounded.stored_bytes(num_blocks)

    def size_of(self, ref: ChunkRef) -> int:
        """Forward."""
        return self._bounded.size_of(ref)

    @property
    def usable_bytes(self) -> int:
        """Forward."""
        return self._bounded.usable_bytes

    @property
    def used_bytes(self) -> int:
        """Forward."""
        return self._bounded.used_bytes

    def close(self) -> None:
        """Forward."""
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def layers(tier: Tier) -> Iterator[Tier]:
    """Yield the wrappers around a tier, the outermost first, and last the tier itself."""
    while isinstance(tier, TierWrapper):
        yield tier
        tier = tier.inner
    yield tier


def find(tier: Tier, kind: type[SomeTier]) -> SomeTier | None:
    """Return the outermost layer of a kind, or None."""
    return next((layer for layer in layers(tier) if isinstance(layer, kind)), None)


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

    def _call(self, operation: str, action: Callable[[], Result], num_asked: int | None = None) -> Result:
        with self._observed(operation):
            return super()._call(operation, action, num_asked)

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
    ``clear``, ``retain``, ``limit`` or ``drop_spares`` still takes effect. Until the ``pending`` of its
    ``TierTimeoutError`` is done, a ``get`` may still write to its buffers, and a ``put`` may still read them, so they
    must not change. The result of ``pending`` is the final outcome of the chunks. Its callbacks run on the thread of
    the late call.

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
            raise InvalidCallError(f"timeouts must be positive, got {timeout_s=} and {slow_timeout_s=}")
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

    def borrow(self, refs: Sequence[ChunkRef]) -> Loan:
        """Forward within the deadline. A loan that arrives too late is ended at once.

        Raises:
            TierTimeoutError: timed out.
            TierError: no thread is left, or the tier is broken.
        """
        try:
            return super().borrow(tuple(refs))
        except TierTimeoutError as error:
            error.pending.add_done_callback(end_late_loan)
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
            try:
                resetting = start_aside(self.name, "reset", reset)
            except RuntimeError:  # no new thread can be started
                resetting = self._threads.submit("reset", reset)
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
            logger.warning("the %s tier did not close within %s s and is abandoned", self.name, self._slow_timeout_s)

    def _call(self, operation: str, action: Callable[[], Result], num_asked: int | None = None) -> Result:
        timeout_s = self._slow_timeout_s if operation in _SLOW else self._timeout_s
        with self._observed(operation):
            with self._lock:
                if self._closed:
                    raise ClosedError(f"the {self.name} tier was closed")
                if not self._late_reset.done():
                    raise TierError(f"{operation} of the {self.name} tier: an earlier reset has not ended")
                future = self._threads.submit(operation, lambda: self._attempt(operation, action, num_asked))
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

    def _attempt(self, operation: str, action: Callable[[], Result], num_asked: int | None = None) -> Result:
        """Carry out a call on its thread, and check the length of its answer.

        Every exception becomes a ``TierError``, because the tier may be another package's and raise anything.
        """
        try:
            return self._complete(action(), num_asked)
        except KVStoreError:
            raise
        except Exception as error:
            kind = type(error).__name__
            self._throttle.log(
                f"{operation} {kind}",
                "%s of the %s tier raised an unexpected %s, which counts as a failure of the tier",
                operation,
                self.name,
                kind,
                level=logging.ERROR,
                exc_info=error,
            )
            raise TierError(f"{operation} of the {self.name} tier raised {kind}: {error}") from error

    def _complete(self, answers: Result, num_asked: int | None) -> Result:
        if num_asked is not None and (num_answers := len(cast(Sized, answers))) != num_asked:
            raise TierError(f"the {self.name} tier answered for {num_answers} chunks, not for {num_asked}")
        return answers
