"""Process of a cache server: its signals, its HTTP pages, and its end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from kvstore.memory.mapped import keep_freed
from kvstore.model.errors import ConfigError
from kvstore.server.hub import Hub
from kvstore.server.succession.giving import Giver
from kvstore.server.succession.taking import Succession, find_predecessor
from kvstore.tools.serve.options import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.server.options import ServerOptions
    from kvstore.tools.serve.pages import Pages
    from kvstore.tools.serve.reloading import Reloader

logger = logging.getLogger(__name__)

_WAITING: Final = (
    "import signal; ends = {signal.SIGTERM, signal.SIGINT}; signal.pthread_sigmask(signal.SIG_BLOCK, ends); "
    "signal.sigwait(ends)"
)
_LEAVE_S: Final = 10.0  # longest wait for a port that the predecessor leaves
_RETRY_S: Final = 0.05
_KEPT_BYTES = 256 << 20  # freed memory to keep, for the frames of some clients


def run_server(
    options: ServerOptions,
    reloader: Reloader,
    open_pages: Callable[[], Pages] | None,
    report: Callable[[dict[str, object]], None],
    successions: Successions,
) -> bool:
    """Serve until a signal arrives, or a successor takes over; return False if chunks were lost at the end.

    Args:
        options: of the server, whose opening may take minutes.
        reloader: reads the configuration again at SIGHUP.
        open_pages: opens the HTTP pages; None for none.
        report: called once, when clients can connect.
        successions: says if it replaces a server, and what follows after a successor has replaced it.

    Raises:
        KVStoreError: the server cannot be opened.
    """
    keep_freed(_KEPT_BYTES)
    signal.signal(signal.SIGHUP, lambda *_: reloader.ask())  # until the server is open, the question waits
    signal.signal(signal.SIGTERM, _end_at_once)  # which the first process of a container would ignore otherwise
    ending = Ending()
    with without_full_collections(), ExitStack() as opened:
        former = successions.find(options)
        if former is not None:  # from some moment on only this process has the chunks
            ending.handle_signals()
        pages = opened.enter_context(closing(open_pages())) if open_pages is not None and former is None else None
        hub = _open_hub(options, former)
        ending.handle_signals()
        ending.begin_with(hub)
        reloader.start(hub)
        opened.callback(reloader.close)
        state = planned(hub.options)
        if pages is not None:
            pages.start(hub)
            state["http"] = f"{pages.url}/metrics"
        elif open_pages is not None:
            _open_later(open_pages, hub, opened)
        if hub.tcp_port is not None:
            state["tcp_port"] = hub.tcp_port
        if options.folder is not None:
            _await_successors(hub, opened)
        found = sum(len(space.chunks) for space in hub.stock.spaces.values())
        report({**state, "chunks_found_on_disk" if former is None else "chunks_taken_over": found, "status": "ready"})
        is_sound = hub.run()
    if successions.waits_at_end and hub.pause is not None and hub.pause.is_final:
        os.execv(sys.executable, [sys.executable, "-c", _WAITING])  # noqa: S606 - without the memory, which is the successor's
    return is_sound


class Ending:
    """End of the server by signals, also by those that arrive before there is one."""

    def __init__(self) -> None:
        self._hub: Hub | None = None
        self._is_asked = False

    def handle_signals(self) -> None:
        """End the server at SIGTERM and SIGINT, from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def begin_with(self, hub: Hub) -> None:
        """End this server, at once if it was asked for before."""
        self._hub = hub
        if self._is_asked:
            hub.stop()

    def _end(self, *_: object) -> None:
        self._is_asked = True
        if self._hub is not None:
            self._hub.stop()


def _open_later(open_pages: Callable[[], Pages], hub: Hub, opened: ExitStack) -> None:
    """Open the pages on a thread, because the predecessor leaves their port only after its end."""
    ending = threading.Event()

    def work() -> None:
        deadline_s = time.monotonic() + _LEAVE_S
        while not ending.is_set():
            try:
                pages = open_pages()
            except ConfigError as error:
                if time.monotonic() > deadline_s:
                    logger.error("there are no HTTP pages: %s", error)  # noqa: TRY400 - it says all
                    return
                ending.wait(_RETRY_S)
            else:
                pages.start(hub)
                ending.wait()
                pages.close()
                return

    thread = threading.Thread(target=work, name="kvstore-pages", daemon=True)
    thread.start()
    opened.callback(thread.join, _LEAVE_S)
    opened.callback(ending.set)


def _await_successors(hub: Hub, opened: ExitStack) -> None:
    """Await successors; a server that cannot be replaced serves all the same."""
    try:
        opened.enter_context(closing(Giver(hub)))
    except ConfigError as error:
        logger.error("this server cannot be replaced while it runs: %s", error)  # noqa: TRY400 - it says all


@dataclass(frozen=True)
class Successions:
    """Rules for the predecessor and the successor of a server.

    Attributes:
        takes_over: it replaces the server that runs in its folder, if there is one.
        waits_at_end: once a successor has replaced it, it waits for a signal, because something would restart it.
    """

    takes_over: bool = False
    waits_at_end: bool = False

    def find(self, options: ServerOptions) -> Succession | None:
        """Return the succession of the server that is to be replaced; None if there is none.

        Raises:
            ConfigError, SuccessionError: see ``find_predecessor``.
        """
        return find_predecessor(options) if self.takes_over else None


def _open_hub(options: ServerOptions, former: Succession | None) -> Hub:
    if former is None:
        return Hub(options)
    with closing(former):
        return Hub(options, succession=former)


def _end_at_once(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Disable full garbage collections, which would stop a server of 40,000 chunks for 200 ms.

    Chunks are part of no cycle. Young generations are still collected, and most cycles die young.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
