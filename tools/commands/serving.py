"""Commands ``kvstore serve`` and ``kvstore keygen``, for the cache server and its keys."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.tools.console import FAILED, Answer, log_to_stderr, print_report

if TYPE_CHECKING:
    from kvstore.config import StoreConfig
    from kvstore.tools.serve.pages import Pages
    from kvstore.tools.serve.reloading import Reloader

_FREEING_S: Final = 10.0  # without progress: engines unmap an earlier server's memory before the system frees any


def serve(
    config: Annotated[Path, typer.Option(help="YAML file; docs/server.md has an example.", exists=True)],
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the configuration, and show what it means.")
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Replace the server that runs in the folder, if one does; keep its chunks."),
    ] = False,
    wait_at_end: Annotated[
        bool, typer.Option("--wait-at-end", help="After being replaced, wait for SIGTERM instead of exiting.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report the start as one JSON object.")] = False,
) -> None:
    """Run a cache server for every engine on this host, and on others, until SIGTERM or SIGINT.

    Chunks on their way to disk are then written, for up to server_drain_secs; a second signal ends the server at once.
    SIGHUP reads the configuration again: keys, rights, quotas, log level. Exits with 2 if the configuration or the
    folder cannot be used, and with 1 if chunks were given up at the end.
    """
    from kvstore.config import load_config  # noqa: PLC0415
    from kvstore.memory.limits import require_memory  # noqa: PLC0415
    from kvstore.tools.interrupts import ignore_hangup  # noqa: PLC0415
    from kvstore.tools.serve.options import planned, server_options  # noqa: PLC0415
    from kvstore.tools.serve.reloading import Reloader  # noqa: PLC0415

    log_to_stderr()
    ignore_hangup()  # until there is something to reload
    loaded = load_config(path=config).config
    logging.getLogger().setLevel(loaded.server_log_level)
    options = server_options(loaded)
    options.check()
    from kvstore.server.succession.taking import can_be_replaced  # noqa: PLC0415 - the first import names the extra

    if not take_over or not can_be_replaced(options):
        require_memory(loaded.max_local_cpu_bytes, "the cache server", patience_s=_FREEING_S)
    if check:
        print_report(planned(options), as_json=as_json)
        return
    from kvstore.tools.serve.process import Successions, run_server  # noqa: PLC0415

    successions = Successions(takes_over=take_over, waits_at_end=wait_at_end)
    reloader = Reloader(config, loaded)
    pages = _pages(loaded, reloader)
    if not run_server(options, reloader, pages, partial(print_report, as_json=as_json), successions):
        raise typer.Exit(FAILED)


def _pages(config: StoreConfig, reloader: Reloader) -> Callable[[], Pages] | None:
    """Return a function that opens the HTTP pages; None for none."""
    if config.server_http_port is None:
        return None
    from kvstore.tools.serve.pages import Pages  # noqa: PLC0415 - its packages are an extra

    return partial(Pages, config, reloader)


def keygen(
    name: Annotated[str, typer.Argument(help="Name of the files: server, or a client's name.")],
    *,
    folder: Annotated[Path, typer.Option(help="Folder for <name>.key and <name>.pub.")] = Path(),
) -> Answer:
    """Make a pair of keys, for a server that other hosts reach, or for one of its clients."""
    from kvstore.protocol.keyfiles import make_keys  # noqa: PLC0415 - an extra

    public, secret = make_keys(folder, name)
    text = [f"{secret}: secret, for nobody else", f"{public}: public, for the other side"]
    return Answer({"secret": str(secret), "public": str(public)}, text)
