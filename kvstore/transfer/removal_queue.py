"""Removals, clears and resets of one tier, in order and on a separate thread, so that no caller waits for the tier.

Waiting removals are carried out together. A clear or a reset replaces earlier clears and resets, and first carries out
the removals that waited before it, because damaged chunks must not be found again even if it fails. All of them have
numbers: a write that must come after some of them waits for the last one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ClosedError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.threads import carry_out, open_pool
from kvstore.tiers.base import Tier

logger = logging.getLogger(__name__)

_MAX_REFS: Final = 1024  # removed in one call, which has a deadline
Then = Callable[[], None]


@dataclass(eq=False)
class _Removal:
    """Removals, or a sweep: a clear, or with a namespace a reset.

    Attributes:
        refs: the chunks to remove; None for a sweep.
        namespace: the one that a reset enters.
        before: of a sweep, chunks to remove first, which other engines or peers may have.
        otherwise: of a clear, chunks to remove one by one if it fails, which only this engine knows.
        number: of the last call that it completes.
        then: called afterwards, even if it failed.
    """

    refs: dict[ChunkRef, None] | None
    namespace: Namespace | None = None
    before: dict[ChunkRef, None] = field(default_factory=dict)
    otherwise: dict[ChunkRef, None] = field(default_factory=dict)
    number: int = 0
    then: list[Then] = field(default_factory=list)


class RemovalQueue:
    """Removals, clears and resets of one tier. Thread-safe; only ``wait`` and ``close`` wait.

    Args:
        tier: its wrappers ensure that every call ends in time.
        warn: called with a failed action and its error.

    Attributes:
        queued: number of the last call; 0 if there was none.
        done: number of the last call that was tried, so the queue is idle if it equals ``queued``.
    """

    def __init__(self, tier: Tier, warn: Callable[[str, TierError], None]) -> None:
        self._tier = tier
        self._warn = warn
        self._thread = open_pool(1, f"kvstore-order-{tier.name}")  # writes wait for removals
        self._changed = threading.Condition()
        self._waiting: deque[_Removal] = deque()  # a sweep, then removals, or only one of them
        self._under_way: _Removal | None = None
        self._is_closed = False
        self.queued = 0
        self.done = 0

    @property
    def pending(self) -> int:
        """Chunks whose removal waits or is under way; a clear or a reset counts as one."""
        with self._changed:
            return sum(max(1, len(removal.refs or ())) for removal in self._unfinished())

    def hides(self, refs: Collection[ChunkRef]) -> bool:
        """Tell if any of these chunks must no longer be read, although the tier may still have it."""
        with self._changed:
            return any(
                removal.refs is None or any(ref in removal.refs for ref in refs) for removal in self._unfinished()
            )

    def remove(self, refs: Iterable[ChunkRef], then: Then | None = None) -> None:
        """Remove chunks from the tier. ``then`` is called once, after the attempt or ``close``."""
        with self._changed:
            is_taken = not self._is_closed
            if is_taken:
                if not self._waiting or self._waiting[-1].refs is None:
                    self._add(_Removal({}))
                removal = self._waiting[-1]
                assert removal.refs is not None
                removal.refs.update(dict.fromkeys(refs))
                self._number(removal)
                if then is not None:
                    removal.then.append(then)
        if not is_taken and then is not None:
            _call([then])

    def clear(self, refs: Iterable[ChunkRef] = ()) -> None:
        """Remove all chunks from the tier; if that fails, at least these."""
        self._sweep(None, refs)

    def reset(self, namespace: Namespace) -> None:
        """Remove all chunks from the tier, which enters another namespace."""
        self._sweep(namespace, ())

    def follow(self, what: str, action: Callable[[], None]) -> None:
        """Carry out another action of the tier on the same thread; nobody waits for it."""
        with self._changed:
            if not self._is_closed:
                self._thread.submit(self._attempt, what, action).add_done_callback(_tell)

    def wait(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until the calls up to a number have been tried; False after a time-out or ``close``."""
        if self.done >= number:  # as mostly, and the lock is not needed
            return True
        with self._changed:
            self._changed.wait_for(lambda: self.done >= number or self._is_closed, timeout_s)
            return self.done >= number

    def close(self) -> None:
        """Drop what waits, and end the thread; a call under way ends within the tier's deadline."""
        with self._changed:
            self._is_closed = True
            then = [action for removal in self._waiting for action in removal.then]
            self._waiting.clear()
            self._changed.notify_all()
        _call(then)
        self._thread.shutdown(wait=True)

    def _unfinished(self) -> list[_Removal]:
        return [*self._waiting] if self._under_way is None else [self._under_way, *self._waiting]

    def _sweep(self, namespace: Namespace | None, refs: Iterable[ChunkRef]) -> None:
        with self._changed:
            if self._is_closed:
                return
            sweep = _Removal(None, namespace, otherwise=dict.fromkeys(refs))
            for removal in self._waiting:
                sweep.then += removal.then
                sweep.before.update(removal.before if removal.refs is None else removal.refs)
                sweep.otherwise.update(removal.otherwise)
                sweep.namespace = sweep.namespace or removal.namespace  # a reset that has not begun also clears
            self._waiting.clear()
            self._number(sweep)
            self._add(sweep)

    def _number(self, removal: _Removal) -> None:
        """Give a removal the next number. Needs the lock."""
        self.queued += 1
        removal.number = self.queued

    def _add(self, removal: _Removal) -> None:
        """Queue a removal, and let the thread carry out one more. Needs the lock."""
        self._waiting.append(removal)
        self._thread.submit(self._carry_out).add_done_callback(_tell)

    def _carry_out(self) -> None:
        removal = self._next()
        if removal is None:
            return
        try:
            self._try(removal)
        finally:  # also if it raises, because others wait for this one
            with self._changed:
                self._under_way = None
                self.done = removal.number
                self._changed.notify_all()
            _call(removal.then)

    def _next(self) -> _Removal | None:
        """Begin the first removal, or a part of it. None if a sweep has replaced it, or after ``close``."""
        with self._changed:
            if not self._waiting:
                return None
            removal = self._waiting.popleft()
            if removal.refs is not None and len(removal.refs) > _MAX_REFS:
                part = dict.fromkeys(islice(removal.refs, _MAX_REFS))
                for ref in part:
                    del removal.refs[ref]
                self._add(removal)  # only removals are the last to wait, so it is the first again
                removal = _Removal(part, number=self.done)
            self._under_way = removal
            return removal

    def _try(self, removal: _Removal) -> None:
        if removal.refs is not None:
            self._attempt("remove chunks from", partial(self._tier.remove, removal.refs))
            return
        self._remove(removal.before)
        namespace = removal.namespace
        if namespace is not None:
            self._attempt("reset", lambda: self._tier.reset(namespace))
        elif not self._attempt("clear", self._tier.clear):
            self._remove(removal.otherwise)

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
            self._warn(what, error)
            return False
        return True


def _call(then: Iterable[Then]) -> None:
    """Call each action, even if another one raises."""
    for action in then:
        called: Future[None] = Future()
        carry_out((called, action))
        _tell(called)


def _tell(removal: Future[Any]) -> None:
    """Log an unexpected error, which would otherwise stay unseen in its future."""
    if not removal.cancelled() and (error := removal.exception()) is not None:
        logger.error("removing chunks from a tier failed", exc_info=error)
