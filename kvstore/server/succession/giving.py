"""Predecessor's part: awaits a successor, and hands the estate over."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.protocol.knock import knock
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.pause import Pause
from kvstore.server.succession.estate import FORMAT, OLDEST_FORMAT, draw_up
from kvstore.server.succession.link import (
    MAX_FDS,
    MAX_WAIT_S,
    SUCCESSOR_SOCKET,
    Bequest,
    Claim,
    Link,
    More,
    Reply,
    Settled,
    SuccessionError,
    listen,
    write_estate,
)

if TYPE_CHECKING:
    from kvstore.server.hub import Hub

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LOOK_S: Final = 0.5
_CLAIM_S: Final = 2.0
_ASK_S: Final = 10.0  # for the thread that decides
_QUIET_S: Final = 10.0  # for writes to disk that have begun, and then for all else that has
_STEP_S: Final = 0.001
_END_WAIT_S: Final = 5.0


class Giver:
    """Thread that awaits a successor in the server's folder. Thread-safe.

    Args:
        hub: the server, which has a folder and a pause.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, hub: Hub) -> None:
        assert hub.options.folder is not None
        assert hub.pause is not None
        assert hub.options.channel is None, "reads through a channel would have to end first"
        self._hub = hub
        self._pause: Pause = hub.pause
        self._path: Path = hub.options.folder / SUCCESSOR_SOCKET
        self._closing = threading.Event()
        self._is_succeeded = False
        try:
            self._listener = listen(hub.options.folder)
        except OSError as error:
            raise ConfigError(f"successors cannot be awaited at {self._path}: {error}") from error
        self._listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._run, name="kvstore-succession", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a hand-over that is not final yet fails. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():  # or a successor listens there
            knock(self._listener)
        self._thread.join(_END_WAIT_S)

    def _run(self) -> None:
        with self._listener:
            while not self._closing.is_set() and not self._is_succeeded:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # nobody came
                    continue
                if self._closing.is_set():
                    connection.close()
                else:
                    self._meet(connection)
        if not self._is_succeeded:  # or it is the successor's by now
            self._path.unlink(missing_ok=True)

    def _meet(self, connection: socket.socket) -> None:
        link = Link(connection, _CLAIM_S)
        try:
            claim = link.receive(Claim)[0] if link.is_trusted else None
        except SuccessionError:  # it only looked if a server is here
            claim = None
        try:
            if claim is not None:
                self._talk(link, claim)
        except (SuccessionError, TimeoutError, OSError) as error:
            logger.error("process %d did not take over: %s", link.process, error)  # noqa: TRY400 - it says all
        except Exception:
            logger.exception("unexpected error: process %d did not take over", link.process)
        finally:
            link.close()

    def _talk(self, link: Link, claim: Claim) -> None:
        link.wait_for(MAX_WAIT_S)
        objection = self._objection(claim)
        link.send(Reply(not objection, objection, __version__))
        if objection:
            logger.warning("refused to be replaced by process %d: %s", link.process, objection)
            return
        logger.info("handing over to kvstore %s, process %d", claim.version, link.process)
        with ExitStack() as failed:
            failed.callback(self._hub.report, self._pause.end)
            self._wait(lambda: not self._hub.pool.is_growing, "its memory is not allocated")
            self._wait(self._pause.hold_writes, "its writes to disk have not ended")
            paused_s = time.monotonic()
            self._ask(self._pause.begin)
            self._wait(self._pause.is_quiet, "what it has begun has not ended")
            self._send_estate(link, paused_s)
            link.receive(Settled)
            self._ask(self._pause.make_final)
            link.send(Reply(is_yes=True))
            failed.pop_all()
            self._is_succeeded = True
        self._hub.stop()

    def _objection(self, claim: Claim) -> str:
        """Return the reason why a process cannot take over; empty if it can."""
        options, pool = self._hub.options, self._hub.pool
        disk = str(options.disk.folder.resolve()) if options.disk is not None else ""
        oldest, newest = claim.formats
        if newest < OLDEST_FORMAT or oldest > FORMAT:
            return (
                f"kvstore {__version__}, which runs here, writes estates of formats {OLDEST_FORMAT} to {FORMAT}, and "
                f"{claim.version} reads {oldest} to {newest}: upgrade step by step, or restart the server"
            )
        if claim.pool_bytes // PAGE_BYTES != pool.num_bytes // PAGE_BYTES:
            return (
                f"the server here has {pool.num_bytes / 2**30:g} GiB of memory, and max_local_cpu_size says "
                f"{claim.pool_bytes / 2**30:g}: keep it, or restart the server"
            )
        if claim.disk != disk:
            return f"local_disk names {claim.disk or 'none'}, and the server here uses {disk or 'none'}: keep it"
        return ""

    def _send_estate(self, link: Link, paused_s: float) -> None:
        core, writes = self._hub.core, self._hub.service.writes
        (memory, listener, *lock), connections = self._ask(self._pause.descriptors)
        tokens = [token for token, _ in connections]
        estate = self._ask(lambda: draw_up(core, writes.waiting, tokens, paused_s))
        fd, num_bytes = write_estate(estate)
        try:
            link.send(Bequest(num_bytes, len(connections)), [memory, listener, fd, *lock])
        finally:
            os.close(fd)
        for first in range(0, len(connections), MAX_FDS):
            link.send(More(), [fd for _, fd in connections[first : first + MAX_FDS]])

    def _wait(self, is_done: Callable[[], bool], failure: str) -> None:
        deadline_s = time.monotonic() + _QUIET_S
        while not self._ask(is_done):
            if time.monotonic() > deadline_s or self._closing.is_set():
                raise SuccessionError(f"{failure} after {_QUIET_S:g} s: this server goes on")
            time.sleep(_STEP_S)

    def _ask(self, call: Callable[[], Result]) -> Result:
        return self._hub.ask(call, _ASK_S)
