"""``kvstore serve`` and ``keygen``: the cache server as a process."""

from __future__ import annotations

import ctypes
import json
import logging
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools.console import FAILED, WRONG_USAGE, AsJson, errors, give_up

if TYPE_CHECKING:
    from kvstore.config import StoreConfig
    from kvstore.ops.admin_http import PageServer
    from kvstore.server.hub import Hub
    from kvstore.server.options import ServerOptions

_GIB = 2**30
# From malloc.h of glibc, and how much freed memory stays in the process: that of some clients' frames.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGEST_BYTES = 256 << 20, 32 << 20
_SNAPSHOT_TIMEOUT_S = 2.0


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command(epilog="Example: kvstore serve --config cache.yaml")(serve)
    app.command(epilog="Example: kvstore keygen --folder keys server")(keygen)


def serve(
    config: Annotated[Path, typer.Option(help="YAML file; docs/server.md has an example.", exists=True)],
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the configuration, and say what it means.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report the start as one JSON object.")] = False,
) -> None:
    """Keep a cache for every engine on this host, and on others, until SIGTERM or SIGINT.

    Chunks on their way to disk are then written, for as long as server_drain_secs; a second signal ends it at once.
    Exits with 2 if the configuration or the folder cannot be used, with 1 if chunks were given up at the end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        loaded = _load(config)
        options = server_options(loaded)
        options.check()
        if check:
            _report(planned(options), as_json=as_json)
            return
        from kvstore.server.hub import Hub  # noqa: PLC0415

        hub = Hub(options)
    except (KVStoreError, ImportError) as error:
        give_up(error)
    if not _run(hub, loaded.server_http_port, as_json=as_json):
        raise typer.Exit(FAILED)


def keygen(
    name: Annotated[str, typer.Argument(help="Of whom, as the files are called: server, or a client's.")],
    *,
    folder: Annotated[Path, typer.Option(help="Where to put <name>.key and <name>.pub.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Make a pair of keys, for a server that other hosts reach, or for one of its clients."""
    try:
        from kvstore.protocol.keyfiles import make_keys  # noqa: PLC0415 - an extra

        public, secret = make_keys(folder, name)
    except (ConfigError, ImportError) as error:
        give_up(error)
    if as_json:
        print(json.dumps({"secret": str(secret), "public": str(public)}))
    else:
        print(f"{secret}: secret, for nobody else\n{public}: public, for the other side")


def server_options(config: StoreConfig) -> ServerOptions:
    """What a configuration says about a server.

    Raises:
        ConfigError: it cannot be used for one.
    """
    from kvstore.protocol.keyfiles import read_list, read_pair  # noqa: PLC0415
    from kvstore.server.disk_tiers import DiskOptions  # noqa: PLC0415
    from kvstore.server.options import ServerOptions, parse_listen, parse_quotas  # noqa: PLC0415

    urls = tuple(url.strip() for url in (config.server_listen or "").split(",") if url.strip())
    folder, tcp = parse_listen(urls)
    disks = config.local_disk_folders
    if len(disks) > 1:
        raise ConfigError(f"a cache server keeps its chunks in one folder, not in {len(disks)}: name one in local_disk")
    disk = None
    if disks:
        disk = DiskOptions(
            Path(disks[0]),
            config.max_local_disk_bytes,
            codec=config.local_disk_serde,
            direct=config.use_odirect,
            read_threads=config.disk_io_threads,
            timeout_s=config.blocking_timeout_secs,
        )
    return ServerOptions(
        config.max_local_cpu_bytes,
        folder=folder,
        tcp=tcp,
        keys=read_pair(Path(config.server_key_file)) if config.server_key_file else None,
        listed=read_list(Path(config.server_clients)) if config.server_clients else {},
        disk=disk,
        policy=config.cache_policy,
        disk_policy=config.disk_cache_policy or config.cache_policy,
        quotas=parse_quotas(config.server_quotas or ""),
        drain_s=config.server_drain_secs,
        max_writes=config.max_write_queue or 64,
        operators=frozenset(filter(None, map(str.strip, (config.server_operators or "").split(",")))),
        pin_max_s=config.pin_max_secs,
    )


def planned(options: ServerOptions) -> dict[str, object]:
    """The start-up report: tiers, sizes, endpoints."""
    endpoints = [f"kvs+ipc://{options.folder}"] if options.folder else []
    if options.tcp is not None:
        keys = f"{len(options.listed)} clients with keys" if options.keys else "without keys: loopback only"
        endpoints.append(f"{options.tcp} ({keys})")
    tiers = {"memory": f"{options.pool_bytes / _GIB:.2f} GiB"}
    if options.disk is not None:
        tiers["disk"] = f"{options.disk.capacity_bytes / _GIB:.2f} GiB in {options.disk.folder}"
    quotas = {name: f"{size / _GIB:.2f} GiB" for name, size in options.quotas.items()}
    return {"tiers": tiers, "endpoints": endpoints, "quotas": quotas, "policy": options.policy}


def _load(path: Path) -> StoreConfig:
    from kvstore.config import load_config  # noqa: PLC0415
    from kvstore.memory.limits import require_memory  # noqa: PLC0415

    config = load_config(path=path).config
    require_memory(config.max_local_cpu_bytes, "the cache server")
    return config


def _run(hub: Hub, http_port: int | None, *, as_json: bool) -> bool:
    """Serve until a signal comes; False if chunks were given up."""
    _keep_freed_memory()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a client has two connections, or one
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: hub.stop())
    report = planned(hub.options)
    pages = None
    try:
        if http_port is not None:
            pages = _open_pages(hub, http_port)
            report["http"] = f"http://127.0.0.1:{pages.port}/metrics"
        if hub.tcp_port is not None:
            report["tcp_port"] = hub.tcp_port
        found = sum(len(space.chunks) for space in hub.stock.spaces.values())
        _report({**report, "chunks_found_on_disk": found, "status": "ready"}, as_json=as_json)
        return hub.run()
    except ConfigError as error:  # of the pages: nothing was served yet
        errors().print(f"error: {error}")
        hub.stop()
        hub.run()
        raise typer.Exit(WRONG_USAGE) from error
    finally:
        if pages is not None:
            pages.close()


def _keep_freed_memory() -> None:
    """Let messages be received into memory that others have left: fresh pages cost as much as the copy itself."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def _open_pages(hub: Hub, port: int) -> PageServer:
    from kvstore.ops.admin_http import PageServer  # noqa: PLC0415
    from kvstore.server.reports import exposition  # noqa: PLC0415

    def metrics() -> tuple[int, str]:
        try:
            return 200, exposition(hub.snapshot(_SNAPSHOT_TIMEOUT_S))
        except TimeoutError:
            return 503, "the server does not answer\n"

    def health() -> tuple[int, str]:
        try:
            status = str(hub.snapshot(_SNAPSHOT_TIMEOUT_S)["status"])
        except TimeoutError:
            status = "the server does not answer"
        return (200 if status == "ok" else 503), f"{status}\n"

    remedy = "choose another server_http_port, or leave it away"
    return PageServer({"/metrics": metrics, "/healthz": health}, port, name="the server's HTTP endpoint", remedy=remedy)


def _report(report: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report), flush=True)
        return
    for name, value in report.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{inner} {text}" for inner, text in value.items())
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if shown:
            print(f"{name.replace('_', ' ')}: {shown}", flush=True)
