"""Removals, clears and resets of one tier, in order and on a separate thread, so that no caller waits for the tier.

Waiting removals are carried out together. A clear or a reset replaces earlier clears and resets, and first carries out
the removals that waited before it, because damaged chunks must not be found again even if it fails. Errands have
numbers: a write that must come after some of them waits for the last one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from kvstore.chunks import ChunkRef
from kvstore.errors import ClosedError, TierError
from kvstore.keys import Namespace
from kvstore.tiers.abandonable_threads import carry_out
from kvstore.tiers.base import Tier

logger = logging.getLogger(__name__)

_MAX_REFS: Final = 1024  # removed in one call, which has a deadline
Then = Callable[[], None]


@dataclass(eq=False)
class _Errand:
    """Removals, or a sweep: a clear, or with a namespace a reset.

    Attributes:
        refs: the chunks to remove; None for a sweep.
        namespace: the one that a reset enters.
        before: of a sweep, chunks to remove first, which other engines or peers may have.
        otherwise: of a clear, chunks to remove one by one if it fails, which only this engine knows.
        number: of the last call that this errand completes.
        then: called afterwards, even if the errand failed.
    """

    refs: dict[ChunkRef, None] | None
    namespace: Namespace | None = None
    before: dict[ChunkRef, None] = field(default_factory=dict)
    otherwise: dict[ChunkRef, None] = field(default_factory=dict)
    number: int = 0
    then: list[Then] = field(default_factory=list)


class Errands:
    """Removals, clears and resets of one tier. Thread-safe; only ``wait`` and ``close`` wait.

    Args:
        tier: its wrappers ensure that every call ends in time.
        complain: called with a failed action and its error.
    """

    def __init__(self, tier: Tier, complain: Callable[[str, TierError], None]) -> None:
        self._tier = tier
        self._complain = complain
        self._thread = ThreadPoolExecutor(1, f"kvstore-order-{tier.name}")
        self._changed = threading.Condition()
        self._waiting: deque[_Errand] = deque()  # a sweep, then removals, or only one of them
        self._under_way: _Errand | None = None
        self._is_closed = False
        self._queued = 0
        self._done = 0

    @property
    def queued(self) -> int:
        """Number of the last errand; 0 if there was none."""
        return self._queued

    @property
    def pending(self) -> int:
        """Chunks whose removal waits or is under way; a clear or a reset counts as one."""
        with self._changed:
            return sum(max(1, len(errand.refs or ())) for errand in self._unfinished())

    def hides(self, refs: Collection[ChunkRef]) -> bool:
        """Tell if any of these chunks must no longer be read, although the tier may still have it."""
        with self._changed:
            return any(errand.refs is None or any(ref in errand.refs for ref in refs) for errand in self._unfinished())

    def remove(self, refs: Iterable[ChunkRef], then: Then | None = None) -> None:
        """Remove chunks from the tier. ``then`` is called once, after the attempt or ``close``."""
        with self._changed:
            is_taken = not self._is_closed
            if is_taken:
                if not self._waiting or self._waiting[-1].refs is None:
                    self._add(_Errand({}))
                errand = self._waiting[-1]
                assert errand.refs is not None
                errand.refs.update(dict.fromkeys(refs))
                self._number(errand)
                if then is not None:
                    errand.then.append(then)
        if not is_taken and then is not None:
            _call([then])

    def clear(self, refs: Iterable[ChunkRef] = ()) -> None:
        """Remove all chunks from the tier; if that fails, at least these."""
        self._sweep(None, refs)

    def reset(self, namespace: Namespace) -> None:
        """Remove all chunks from the tier, which enters another namespace."""
        self._sweep(namespace, ())

    def wait(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until the errands up to a number have been tried; False after a time-out or ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._is_closed, timeout_s)
            return self._done >= number

    def close(self) -> None:
        """Drop waiting errands, and end the thread; a call under way ends within the tier's deadline."""
        with self._changed:
            self._is_closed = True
            then = [action for errand in self._waiting for action in errand.then]
            self._waiting.clear()
            self._changed.notify_all()
        _call(then)
        self._thread.shutdown(wait=True)

    def _unfinished(self) -> list[_Errand]:
        return [*self._waiting] if self._under_way is None else [self._under_way, *self._waiting]

    def _sweep(self, namespace: Namespace | None, refs: Iterable[ChunkRef]) -> None:
        with self._changed:
            if self._is_closed:
                return
            sweep = _Errand(None, namespace, otherwise=dict.fromkeys(refs))
            for errand in self._waiting:
                sweep.then += errand.then
                sweep.before.update(errand.before if errand.refs is None else errand.refs)
                sweep.otherwise.update(errand.otherwise)
                sweep.namespace = sweep.namespace or errand.namespace  # a reset that has not begun also clears
            self._waiting.clear()
            self._number(sweep)
            self._add(sweep)

    def _number(self, errand: _Errand) -> None:
        """Give an errand the next number. Needs the lock."""
        self._queued += 1
        errand.number = self._queued

    def _add(self, errand: _Errand) -> None:
        """Queue an errand, and let the thread carry out one more. Needs the lock."""
        self._waiting.append(errand)
        self._thread.submit(self._carry_out).add_done_callback(_tell)

    def _carry_out(self) -> None:
        errand = self._next()
        if errand is None:
            return
        try:
            self._try(errand)
        finally:  # also if it raises, because others wait for this one
            with self._changed:
                self._under_way = None
                self._done = errand.number
                self._changed.notify_all()
            _call(errand.then)

    def _next(self) -> _Errand | None:
        """Begin the first errand, or a part of it. None if a sweep has replaced it, or after ``close``."""
        with self._changed:
            if not self._waiting:
                return None
            errand = self._waiting.popleft()
            if errand.refs is not None and len(errand.refs) > _MAX_REFS:
                part = dict.fromkeys(islice(errand.refs, _MAX_REFS))
                for ref in part:
                    del errand.refs[ref]
                self._add(errand)  # only removals are the last to wait, so it is the first again
                errand = _Errand(part, number=self._done)
            self._under_way = errand
            return errand

    def _try(self, errand: _Errand) -> None:
        if errand.refs is not None:
            self._attempt("remove chunks from", partial(self._tier.remove, errand.refs))
            return
        self._remove(errand.before)
        namespace = errand.namespace
        if namespace is not None:
            self._attempt("reset", lambda: self._tier.reset(namespace))
        elif not self._attempt("clear", self._tier.clear):
            self._remove(errand.otherwise)

    def _remove(self, refs: Iterable[ChunkRef]) -> None:
        left = iter(refs)
        while not self._is_closed and (part := list(islice(left, _MAX_REFS))):
            self._attempt("remove chunks from", partial(self._tier.remove, part))

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        """Call the tier; return True if it succeeded, and report a ``TierError``."""
        try:
            action()
        except ClosedError:
            pass  # a write that hung has ended after ``close``; the next start finds its file
        except TierError as error:
            self._complain(what, error)
            return False
        return True


def _call(then: Iterable[Then]) -> None:
    """Call each action, even if another one raises."""
    for action in then:
        called: Future[None] = Future()
        carry_out((called, action))
        _tell(called)


def _tell(errand: Future[None]) -> None:
    """Log an unexpected error, which would otherwise stay unseen in its future."""
    if not errand.cancelled() and (error := errand.exception()) is not None:
        logger.error("removing chunks from a tier failed", exc_info=error)
