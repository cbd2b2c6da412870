"""What a tier is to forget, in order and on a thread of its own: nobody who asks for it waits for the tier.

Removals that wait are carried out together. A clear or a reset takes the place of all that waits before it, and what
comes after it waits for it. Each errand has a number; whoever must come after some of them waits for the last one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple

from kvstore.chunks import ChunkRef
from kvstore.errors import ClosedError, TierError
from kvstore.keys import Namespace
from kvstore.tiers.base import Tier
from kvstore.tiers.tasks import carry_out

logger = logging.getLogger(__name__)

_MAX_REFS: Final = 1024  # removed in one call, which has a deadline
Then = Callable[[], None]


class _Sweep(NamedTuple):
    """A clear, or with a namespace a reset; its number, and what is called then."""

    namespace: Namespace | None
    number: int
    then: list[Then]


class _Errand(NamedTuple):
    """What is carried out at once: a sweep, or removals; and what is called then, whatever came of it."""

    sweep: _Sweep | None
    refs: dict[ChunkRef, None]
    then: list[Then]
    number: int  # of the last one that this one stands for


class Errands:
    """Removals, clears and resets of one tier. Thread-safe; only ``wait`` and ``close`` wait.

    Args:
        tier: that its errors come within a deadline is the business of the wrappers around it.
        complain: called with what could not be done, and why.
    """

    def __init__(self, tier: Tier, complain: Callable[[str, TierError], None]) -> None:
        self._tier = tier
        self._complain = complain
        self._thread = ThreadPoolExecutor(1, f"kvstore-order-{tier.name}")
        self._changed = threading.Condition()
        self._sweep: _Sweep | None = None  # waits; it is older than the removals that wait
        self._removals: dict[ChunkRef, None] = {}
        self._then: list[Then] = []
        self._under_way: _Errand | None = None
        self._is_scheduled = False
        self._is_closed = False
        self._queued = 0
        self._done = 0

    @property
    def queued(self) -> int:
        """The number of the last errand; 0 if there was none."""
        return self._queued

    @property
    def pending(self) -> int:
        """Chunks that wait to be removed, or are; everything counts as one."""
        with self._changed:
            under_way = self._under_way
            now = 0 if under_way is None else max(1, len(under_way.refs))
            return now + len(self._removals) + (self._sweep is not None)

    def hides(self, refs: Iterable[ChunkRef]) -> bool:
        """Whether any of some chunks must not be read any more, though the tier may still have it."""
        with self._changed:
            under_way = self._under_way
            if self._sweep is not None or (under_way is not None and under_way.sweep is not None):
                return True
            leaving = under_way.refs if under_way is not None else {}
            return any(ref in self._removals or ref in leaving for ref in refs)

    def remove(self, refs: Iterable[ChunkRef], then: Then | None = None) -> None:
        """Take chunks off the tier. ``then`` is called in any case, once, when that was tried."""
        with self._changed:
            is_taken = not self._is_closed
            if is_taken:
                self._removals.update(dict.fromkeys(refs))
                if then is not None:
                    self._then.append(then)
                self._schedule()
        if not is_taken and then is not None:
            _call([then])

    def clear(self) -> None:
        """Take everything off the tier."""
        self._take_all(None)

    def reset(self, namespace: Namespace) -> None:
        """Let the tier forget everything, and enter another namespace."""
        self._take_all(namespace)

    def wait(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until the errands up to a number have been tried; False if time ran out, or they were given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._is_closed, timeout_s)
            return self._done >= number

    def close(self) -> None:
        """Give up what waits, and end the thread: what is under way ends within the tier's deadline."""
        with self._changed:
            self._is_closed = True
            then = (self._sweep.then if self._sweep is not None else []) + self._then
            self._removals, self._then, self._sweep = {}, [], None
            self._changed.notify_all()
        _call(then)
        self._thread.shutdown(wait=True)

    def _take_all(self, namespace: Namespace | None) -> None:
        with self._changed:
            if self._is_closed:
                return
            before, self._then = self._then, []
            self._removals = {}  # they go with everything else
            if self._sweep is not None:
                before = self._sweep.then + before
                namespace = namespace or self._sweep.namespace  # a reset that has not begun also clears
            self._schedule()
            self._sweep = _Sweep(namespace, self._queued, before)

    def _schedule(self) -> None:
        """Number an errand, and see that somebody takes it up. Needs the lock."""
        self._queued += 1
        if not self._is_scheduled:
            self._start()

    def _start(self) -> None:
        self._is_scheduled = True
        self._thread.submit(self._carry_out).add_done_callback(_tell)

    def _carry_out(self) -> None:
        errand = self._next()
        if errand is None:
            return
        try:
            self._try(errand)
        finally:  # whatever was raised: others wait for this one
            with self._changed:
                self._under_way = None
                self._done = errand.number
                self._changed.notify_all()
            _call(errand.then)

    def _next(self) -> _Errand | None:
        with self._changed:
            self._is_scheduled = False
            if self._is_closed:
                return None
            sweep, self._sweep = self._sweep, None
            if sweep is not None:
                self._under_way = _Errand(sweep, {}, sweep.then, sweep.number)
            elif len(self._removals) > _MAX_REFS:
                self._under_way = _Errand(None, dict.fromkeys(islice(self._removals, _MAX_REFS)), [], self._done)
                for ref in self._under_way.refs:
                    del self._removals[ref]
            else:
                self._under_way = _Errand(None, self._removals, self._then, self._queued)
                self._removals, self._then = {}, []
            if self._under_way.number < self._queued:  # there is more
                self._start()
            return self._under_way

    def _try(self, errand: _Errand) -> None:
        sweep = errand.sweep
        what = "remove chunks from" if sweep is None else "clear" if sweep.namespace is None else "reset"
        try:
            if sweep is None:
                self._tier.remove(errand.refs)
            elif sweep.namespace is None:
                self._tier.clear()
            else:
                self._tier.reset(sweep.namespace)
        except ClosedError:
            pass  # a write that hung came to its end after close: the next start finds what it left
        except TierError as error:
            self._complain(what, error)


def _call(then: Iterable[Then]) -> None:
    """Call each of them, whatever another one raises."""
    for action in then:
        called: Future[None] = Future()
        carry_out((called, action))
        _tell(called)


def _tell(errand: Future[None]) -> None:
    """A defect must not stay in a future that nobody asks."""
    if not errand.cancelled() and (error := errand.exception()) is not None:
        logger.error("what a tier was to forget could not be carried out", exc_info=error)
