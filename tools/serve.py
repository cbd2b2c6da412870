"""Cache server as a process, for ``kvstore serve``."""

from __future__ import annotations

import gc
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.memory.mapped import keep_freed
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.config import StoreConfig
    from kvstore.ops.admin_http import PageServer
    from kvstore.server.hub import Hub
    from kvstore.server.options import ServerOptions

_GIB = 2**30
_KEPT_BYTES = 256 << 20  # freed memory to keep, for the frames of some clients
_SNAPSHOT_TIMEOUT_S = 2.0


def server_options(config: StoreConfig) -> ServerOptions:
    """Return the options of a server with this configuration.

    Raises:
        ConfigError: the configuration is not one of a server.
    """
    from kvstore.format.sealing import open_ring  # noqa: PLC0415
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
            keys=open_ring(config.encryption_keys),
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
    """Return the start-up report: tiers, sizes, endpoints."""
    endpoints = [f"kvs+ipc://{options.folder}"] if options.folder else []
    if options.tcp is not None:
        keys = f"{len(options.listed)} clients with keys" if options.keys else "without keys: loopback only"
        endpoints.append(f"{options.tcp} ({keys})")
    tiers = {"memory": f"{options.pool_bytes / _GIB:.2f} GiB"}
    if options.disk is not None:
        tiers["disk"] = f"{options.disk.capacity_bytes / _GIB:.2f} GiB in {options.disk.folder}"
    quotas = {name: f"{size / _GIB:.2f} GiB" for name, size in options.quotas.items()}
    return {"tiers": tiers, "endpoints": endpoints, "quotas": quotas, "policy": options.policy}


def run_server(hub: Hub, http_port: int | None, report: Callable[[dict[str, object]], None]) -> bool:
    """Serve until a signal arrives; return False if chunks were lost at the end.

    Args:
        hub: the server, not yet running.
        http_port: port of its HTTP pages; None for no pages.
        report: called once, when clients can connect.

    Raises:
        ConfigError: the pages cannot be served. Nothing was served yet.
    """
    keep_freed(_KEPT_BYTES)
    with without_full_collections():
        return _run(hub, http_port, report)


def _run(hub: Hub, http_port: int | None, report: Callable[[dict[str, object]], None]) -> bool:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: hub.stop())
    state = planned(hub.options)
    pages = None
    try:
        if http_port is not None:
            pages = _open_pages(hub, http_port)
            state["http"] = f"http://127.0.0.1:{pages.port}/metrics"
        if hub.tcp_port is not None:
            state["tcp_port"] = hub.tcp_port
        found = sum(len(space.chunks) for space in hub.stock.spaces.values())
        report({**state, "chunks_found_on_disk": found, "status": "ready"})
        return hub.run()
    except ConfigError:
        hub.stop()
        hub.run()
        raise
    finally:
        if pages is not None:
            pages.close()


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


def _open_pages(hub: Hub, port: int) -> PageServer:
    from kvstore.ops.admin_http import PageServer  # noqa: PLC0415
    from kvstore.server.operators import exposition  # noqa: PLC0415

    def page(shown: Callable[[dict[str, Any]], tuple[int, str]]) -> tuple[int, str]:
        try:
            return shown(hub.snapshot(_SNAPSHOT_TIMEOUT_S))
        except TimeoutError:
            return 503, "the server does not answer\n"

    pages = {
        "/metrics": lambda: page(lambda tree: (200, exposition(tree))),
        "/healthz": lambda: page(lambda tree: (200 if tree["status"] == "ok" else 503, f"{tree['status']}\n")),
    }
    remedy = "choose another server_http_port, or leave it out"
    return PageServer(pages, port, name="the server's HTTP endpoint", remedy=remedy)
