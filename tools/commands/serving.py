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
    from kvstore.server.options import ServerOptions

_FREEING_S: Final = 10.0  # without progress: engines unmap an earlier server's memory before the system frees any


def serve(
    config: Annotated[Path, typer.Option(help="YAML file; docs/server.md has an example.", exists=True)],
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the configuration, and show what it means.")
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

    log_to_stderr()
    ignore_hangup()  # until there is something to reload
    loaded = load_config(path=config).config
    logging.getLogger().setLevel(loaded.server_log_level)
    require_memory(loaded.max_local_cpu_bytes, "the cache server", patience_s=_FREEING_S)
    options = server_options(loaded)
    options.check()
    if check:
        print_report(planned(options), as_json=as_json)
        return
    if not _run(config, loaded, options, partial(print_report, as_json=as_json)):
        raise typer.Exit(FAILED)


def _run(path: Path, config: StoreConfig, options: ServerOptions, report: Callable[[dict[str, object]], None]) -> bool:
    from kvstore.server.hub import Hub  # noqa: PLC0415
    from kvstore.tools.serve.process import run_server  # noqa: PLC0415
    from kvstore.tools.serve.reloading import Reloader  # noqa: PLC0415

    reloader = Reloader(path, config)
    if config.server_http_port is None:
        return run_server(lambda: Hub(options), reloader, None, report)
    from kvstore.tools.serve.pages import Pages  # noqa: PLC0415 - its packages are an extra

    pages = Pages(config, reloader)
    try:
        return run_server(lambda: Hub(options), reloader, pages, report)
    finally:
        pages.close()


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
