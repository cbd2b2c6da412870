"""Process of a cache server: its signals, its HTTP pages, and its end."""

from __future__ import annotations

import gc
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from kvstore.memory.mapped import keep_freed
from kvstore.tools.serve.options import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.server.hub import Hub
    from kvstore.tools.serve.pages import Pages
    from kvstore.tools.serve.reloading import Reloader

_KEPT_BYTES = 256 << 20  # freed memory to keep, for the frames of some clients


def run_server(
    open_hub: Callable[[], Hub], reloader: Reloader, pages: Pages | None, report: Callable[[dict[str, object]], None]
) -> bool:
    """Serve until a signal arrives; return False if chunks were lost at the end.

    Args:
        open_hub: opens the server, which may take minutes.
        reloader: reads the configuration again at SIGHUP.
        pages: the HTTP pages; None for none.
        report: called once, when clients can connect.

    Raises:
        KVStoreError: the server cannot be opened.
    """
    keep_freed(_KEPT_BYTES)
    signal.signal(signal.SIGHUP, lambda *_: reloader.ask())  # until the server is open, the question waits
    signal.signal(signal.SIGTERM, _end_at_once)  # which the first process of a container would ignore otherwise
    with without_full_collections():
        hub = open_hub()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: hub.stop())
        reloader.start(hub)
        try:
            state = planned(hub.options)
            if pages is not None:
                pages.start(hub)
                state["http"] = f"{pages.url}/metrics"
            if hub.tcp_port is not None:
                state["tcp_port"] = hub.tcp_port
            found = sum(len(space.chunks) for space in hub.stock.spaces.values())
            report({**state, "chunks_found_on_disk": found, "status": "ready"})
            return hub.run()
        finally:
            reloader.close()


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
