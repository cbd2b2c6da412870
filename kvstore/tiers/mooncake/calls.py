"""Calls of Mooncake with deadlines, and the process that carries them out, which is started when it is missing."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from kvstore.model.errors import TierError
from kvstore.model.layout import ALIGNMENT_BYTES, round_up
from kvstore.tiers.base import TierCounters
from kvstore.tiers.mooncake import codes
from kvstore.tiers.mooncake.session import Reply, Session
from kvstore.tiers.mooncake.url import MooncakeTarget

logger = logging.getLogger(__name__)

_MIN_SLOTS: Final = 4
_MAX_SLOTS: Final = 64
_DEADLINE_PART: Final = 0.9  # of the time of the guard around the tier, so that this ends first


class Calls:
    """Calls of one tier. Thread-safe; deadlines are times of ``time.monotonic``.

    Args:
        target: the store.
        chunk_bytes: of the largest object.
        counters: count chunks that are held, and processes that are replaced.
    """

    def __init__(self, target: MooncakeTarget, chunk_bytes: int, counters: TierCounters) -> None:
        self._target = target
        self._counters = counters
        self.slot_bytes = round_up(chunk_bytes, ALIGNMENT_BYTES)
        self._num_slots = min(_MAX_SLOTS, max(_MIN_SLOTS, (target.staging_mib << 20) // self.slot_bytes))
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._is_closed = False
        _open_calls.add(self)

    @property
    def held_slots(self) -> int:
        """Number of slots that wait for the end of a call whose caller has given up."""
        return self._session.slots.held if self._session else 0

    def deadline_s(self) -> float:
        """Return the deadline of a call of the tier that begins now."""
        return time.monotonic() + _DEADLINE_PART * self._target.timeout_s

    def ask(self, epoch_key: str, deadline_s: float, call: str, **order: object) -> Reply:
        """Return the reply to a call without slots.

        Raises:
            TierError: it failed, took too long, or earlier calls hang.
        """
        session = self._open(deadline_s)
        if session.is_stuck:
            raise TierError(f"Mooncake at {self._target} hangs in earlier calls")
        future = session.start(call, epoch_key, (), order)
        try:
            reply = session.wait(future, deadline_s)
        finally:
            future.add_done_callback(partial(_judge_page, session, call))  # at once, unless it ends later
        if reply is None:
            raise TierError(f"Mooncake at {self._target} did not answer within {self._target.timeout_s} s")
        return reply

    def give(self, deadline_s: float) -> Session:
        """Give the store this tier's memory, if it has none of it yet, and return the process that has done so.

        Only tiers that move chunks call this: memory is lost with its process, and a lookup's comes and goes.

        Raises:
            TierError: the process does not start, or the store does not take the memory.
        """
        session = self._open(deadline_s)
        if self._target.segment_mib and not session.is_stuck:
            session.give(self._target.segment_mib << 20, deadline_s)
        return session

    def take(self, most: int, deadline_s: float) -> tuple[Session, list[int]]:
        """Return the process and slots for up to ``most`` chunks; none if time ran out, or hanging calls hold too many.

        Raises:
            TierError: the process does not start.
        """
        session = self.give(deadline_s)
        rest_s = deadline_s - time.monotonic()
        return session, [] if session.is_stuck or rest_s <= 0 else session.slots.take(most, rest_s)

    def carry_out(
        self, session: Session, slots: Sequence[int], epoch_key: str, deadline_s: float, call: str, **order: object
    ) -> Reply | None:
        """Carry out a call on slots; None if there are none, or it was given up and holds them until it ends.

        The process is given up, with the slots, if a transfer or the call failed, as it may still write to them.

        Raises:
            TierError: it failed, and holds no slots that another call may get.
        """
        if not slots:
            return None
        try:
            future = session.start(call, epoch_key, slots, order)
        except TierError:  # it did not begin
            session.slots.give_back(slots)
            raise
        try:
            reply = session.wait(future, deadline_s)
        except TierError:
            session.condemn(slots)
            self._counters.add(held=len(slots))
            raise
        if reply is None:
            # Before the slots are free again.
            future.add_done_callback(lambda _: _end_late(session, slots, future, call, order["keys"]))
            session.slots.hold(slots, future)
            self._counters.add(held=len(slots))
        elif _may_still_run(reply):
            session.condemn(slots)
            self._counters.add(held=len(slots))
        return reply

    def close(self) -> None:
        """End the process, within seconds. No later call starts one."""
        with self._lock:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            if session.slots.held:
                logger.warning("Mooncake's process ends in the middle of calls on %d chunks", session.slots.held)
            session.close()

    def forget(self) -> None:
        """Leave the process and its memory, on which its calls run, to the engine from which this one was forked."""
        self._lock = threading.Lock()  # another thread may have held it
        session, self._session = self._session, None
        if session is not None:
            session.forget()

    def _open(self, deadline_s: float) -> Session:
        """Return the running process, after a start if there is none.

        Raises:
            TierError: it does not start in time, or after ``close``.
        """
        with self._lock:
            if self._is_closed:
                raise TierError(f"calls of Mooncake at {self._target} were closed")
            if self._session is not None and self._session.is_over:
                self._session.kill()
                self._session = None
                self._counters.add(replaced=1)
            if self._session is None:
                self._session = Session(self._target, self.slot_bytes, self._num_slots)
            session = self._session
        if session.wait(session.ready, deadline_s) is None:
            raise TierError(f"Mooncake at {self._target} is still starting")
        return session


_open_calls: weakref.WeakSet[Calls] = weakref.WeakSet()


def _forget_in_child() -> None:
    for calls in list(_open_calls):
        calls.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _may_still_run(reply: Reply) -> bool:
    return "error" in reply or any(map(codes.may_still_run, [reply.get("epoch_code", 0), *reply["codes"]]))


def _judge_page(session: Session, call: str, future: Future[Reply]) -> None:
    """Give up a process that may still transfer an epoch from or to the page that a later call fills."""
    reply: Reply = {"error": ""} if future.exception() else future.result()
    written = reply.get("codes", ()) if call in {"begin", "renew"} else ()
    if "error" in reply or any(map(codes.may_still_run, [reply.get("epoch_code", 0), *written])):
        session.condemn()


def _end_late(session: Session, slots: Sequence[int], future: Future[Reply], call: str, keys: object) -> None:
    """Keep slots that are still in use, and remove what a write has stored, which its caller takes for failed."""
    reply: Reply = {"error": ""} if future.exception() else future.result()
    if _may_still_run(reply):
        session.condemn(slots)
    if "error" in reply:
        return
    assert isinstance(keys, list)
    stored = [key for key, code in zip(keys, reply["codes"], strict=True) if code == 0]
    if call == "put" and stored:
        with suppress(TierError):
            session.start("remove", "", (), {"keys": stored})
