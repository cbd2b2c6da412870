"""Process of a cache server: its signals, its HTTP pages, and its end."""

from __future__ import annotations

import gc
import signal
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
    ended = threading.Event()

    def end(*_: object) -> None:
        ended.set()
        hub.stop()

    with without_full_collections(), ExitStack() as opened:
        former = successions.find(options)
        pages = opened.enter_context(closing(open_pages())) if open_pages is not None and former is None else None
        hub = _open_hub(options, former)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        reloader.start(hub)
        opened.callback(reloader.close)
        state = planned(hub.options)
        if open_pages is not None and pages is None:
            pages = _open_after(open_pages)
            opened.callback(pages.close)
        if pages is not None:
            pages.start(hub)
            state["http"] = f"{pages.url}/metrics"
        if hub.tcp_port is not None:
            state["tcp_port"] = hub.tcp_port
        if options.folder is not None:
            opened.enter_context(closing(Giver(hub)))
        found = sum(len(space.chunks) for space in hub.stock.spaces.values())
        report({**state, "chunks_found_on_disk" if former is None else "chunks_taken_over": found, "status": "ready"})
        is_sound = hub.run()
    if successions.waits_at_end and hub.pause is not None and hub.pause.is_final:
        ended.wait()
    return is_sound


@dataclass(frozen=True)
class Successions:
    """What a server does about its predecessor and its successor.

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


def _open_after(open_pages: Callable[[], Pages]) -> Pages:
    """Open the pages, whose port the predecessor leaves soon."""
    deadline_s = time.monotonic() + _LEAVE_S
    while True:
        try:
            return open_pages()
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)


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
