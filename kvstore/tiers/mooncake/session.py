"""A running process of Mooncake, and the memory shared with it; a new process has new memory.

So nothing that an old one still does, not even one that cannot be killed, reaches the slots of the next.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import numpy as np

from kvstore.model.errors import TierError, TierSetupError
from kvstore.tiers.mooncake import child
from kvstore.tiers.mooncake.outbox import Outbox
from kvstore.tiers.mooncake.slots import Slots
from kvstore.tiers.mooncake.url import MooncakeTarget

_END_S: Final = 2.0  # for the process to end by itself
_HOPELESS_S: Final = 60.0  # twice as long as Mooncake's calls hang
_MISSING: Final = "cannot be loaded: pip install 'vllm-kvstore[mooncake]', and apt-get install libibverbs1 librdmacm1"
Reply = dict[str, Any]


class Session:
    """Process of one tier, started at once. Thread-safe; only ``wait`` and ``close`` wait.

    Args:
        target: the store.
        slot_bytes: of each slot.
        num_slots: number of chunks on their way.

    Raises:
        TierError: the machine has no memory or no process left.
    """

    def __init__(self, target: MooncakeTarget, slot_bytes: int, num_slots: int) -> None:
        self._target = target
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Reply]] = {}
        self._given_up: dict[int, float] = {}  # when, in seconds
        self._error: TierError | None = None
        self._is_condemned = False
        self._giving_lock = threading.Lock()
        self._giving: Future[Reply] | None = None
        self._begun_s = time.monotonic()
        self.ready: Future[Reply] = Future()
        self._calls[0] = self.ready
        pages_bytes = target.connections * child.PAGE_BYTES
        try:
            self._link, self._process, memory = _start(target, pages_bytes + slot_bytes * num_slots)
        except OSError as error:
            raise TierError(f"Mooncake's process does not start: {error}") from error
        self._outbox = Outbox(self._link)
        self._first_offset = pages_bytes
        self.slots = Slots(np.frombuffer(memory, np.uint8)[pages_bytes:], slot_bytes)
        threading.Thread(target=self._listen, name="kvstore-mooncake-answers", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True if its process has ended, starts or has a call that ends no more, or has lost slots."""
        now_s = time.monotonic()
        oldest_s = min([*self._given_up.values()], default=now_s)
        if not self.ready.done():
            oldest_s = min(oldest_s, self._begun_s)
        return self._error is not None or self._is_condemned or now_s - oldest_s > _HOPELESS_S

    @property
    def is_stuck(self) -> bool:
        """True if calls that were given up leave too little for others."""
        return self.slots.are_scarce or len(self._given_up) >= self._target.connections

    def start(self, call: str, epoch_key: str, slots: Sequence[int], order: Mapping[str, object]) -> Future[Reply]:
        """Start a call on some slots, which stay taken until it has ended.

        Raises:
            TierError: the process has ended.
        """
        at = [self._first_offset + self.slots.offset(slot) for slot in slots]
        number, future = next(self._numbers), Future[Reply]()
        line = json.dumps({"id": number, "call": call, "epoch_key": epoch_key, "at": at, **order}).encode() + b"\n"
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                self._outbox.put(line)
            except OSError as error:
                self._is_condemned = True  # at once, or a call before its end is noticed would fail as well
                self._process.kill()
                raise TierError(f"Mooncake's process at {self._target} has ended: {error}") from error
            except BufferError as error:
                raise TierError(f"Mooncake's process at {self._target} takes no calls: {error}") from error
            self._calls[number] = future
        return future

    def give(self, size_bytes: int, deadline_s: float) -> None:
        """Give memory to the store, once, and wait until it has it.

        Raises:
            TierError: the store does not take it, and the process is given up; or it takes too long.
        """
        with self._giving_lock:
            if self._giving is None:
                self._giving = self.start("give", "", (), {"size": size_bytes})
        try:
            reply = self.wait(self._giving, deadline_s)
        except TierError:
            self.condemn()
            raise
        if reply is None:
            raise TierError(f"Mooncake at {self._target} takes too long to take memory")
        if code := reply["codes"][0]:
            self.condemn()
            raise TierError(f"Mooncake at {self._target} does not take {size_bytes:,} bytes of memory, code {code}")

    def wait(self, future: Future[Reply], deadline_s: float) -> Reply | None:
        """Return the reply to a call; None if it took too long, and was given up.

        Raises:
            TierError: the call failed, or the process ended.
        """
        try:
            reply = future.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            self._give_up(future)
            return None
        if "error" in reply:
            raise TierError(f"Mooncake at {self._target} fails: {reply['error']}")
        return reply

    def _give_up(self, future: Future[Reply]) -> None:
        number = next((number for number, one in [*self._calls.items()] if one is future), None)
        if number:  # not the start, which goes on
            self._given_up.setdefault(number, time.monotonic())
            future.add_done_callback(lambda _: self._given_up.pop(number, None))

    def condemn(self, slots: Sequence[int] = ()) -> None:
        """Give up the process, and slots that a transfer may still write to: the next call has another process."""
        self.slots.lose(slots)
        self._is_condemned = True

    def kill(self) -> None:
        """End the process without waiting; memory that it may still use stays its own."""
        self._process.kill()

    def forget(self) -> None:
        """Leave the process to the engine from which this one was forked: close this copy of the socket, no more."""
        self._process.returncode = 0  # not this engine's to end
        with suppress(OSError):  # the process had ended, and its socket is closed
            os.close(self._link.detach())

    def close(self) -> None:
        """End the process like ``kill``, but let it leave the store before, for a bounded time. Idempotent."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _listen(self) -> None:
        """Take the replies of the process until it ends, then fail the calls that are left."""
        error = TierError(f"Mooncake's process at {self._target} has ended")
        try:
            with self._link.makefile("rb") as lines:
                for line in lines:
                    reply = json.loads(line)
                    if reply["id"] == 0 and "error" in reply:  # it does not start, and ends
                        error = self._refusal(reply["error"])
                        continue
                    with self._lock:
                        future = self._calls.pop(reply["id"])
                    future.set_result(reply)
        except (OSError, ValueError, KeyError):  # half a line, or something else that is no reply
            self.kill()
        finally:
            with self._lock:
                self._error = error
                left, self._calls = [*self._calls.values()], {}
            self._outbox.close()
            for future in left:
                future.set_exception(error)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._link.close()

    def _refusal(self, reason: str) -> TierError:
        kind = reason.partition(":")[0]
        if kind in ("ImportError", "ModuleNotFoundError"):
            return TierSetupError(f"the mooncake tier {_MISSING} ({reason})")
        return TierError(f"Mooncake at {self._target} cannot be used: {reason}")


def _start(target: MooncakeTarget, size_bytes: int) -> tuple[socket.socket, subprocess.Popen[bytes], mmap.mmap]:
    """Start the process; returns a socket to it, and the memory shared with it."""
    link, far_link = socket.socketpair()
    memory_fd = os.memfd_create("kvstore-mooncake")
    try:
        os.ftruncate(memory_fd, size_bytes)
        memory = mmap.mmap(memory_fd, size_bytes)
        settings = {
            "master": [target.host, target.port],
            "hostname": target.hostname,
            "protocol": target.protocol,
            "devices": target.devices,
            "metadata_server": target.metadata_server,
            "threads": target.connections,
        }
        fds = (far_link.fileno(), memory_fd)
        process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-P", child.__file__, *map(str, fds), json.dumps(settings)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # Mooncake writes a line for each call that fails; MC_LOG_DIR keeps them
            start_new_session=True,  # or Ctrl-C would end it before the engine has stored what it must
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except BaseException:
        link.close()
        raise
    finally:
        os.close(memory_fd)
        far_link.close()
    return link, process, memory
