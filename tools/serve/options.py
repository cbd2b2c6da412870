"""Options of a cache server, from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.config import StoreConfig
    from kvstore.server.options import ServerOptions

_GIB = 2**30


def server_options(config: StoreConfig) -> ServerOptions:
    """Return the options of a server with this configuration.

    Raises:
        ConfigError: the configuration is not one of a server.
    """
    from kvstore.format.sealing import open_ring  # noqa: PLC0415
    from kvstore.model.quotas import parse_server_quotas  # noqa: PLC0415
    from kvstore.protocol.keyfiles import read_list, read_pair  # noqa: PLC0415
    from kvstore.server.disk_tiers import DiskOptions  # noqa: PLC0415
    from kvstore.server.options import ServerOptions, parse_listen  # noqa: PLC0415

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
        quotas=parse_server_quotas(config.server_quotas or ""),
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
