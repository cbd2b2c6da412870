"""Opens the parts of an engine's processes: the scheduler side's admin endpoint, a worker and its cache server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import vllm

from kvstore.adapters.vllm.glue.binding import groups_of, paged_kv_of
from kvstore.adapters.vllm.glue.namespace import namespace_of
from kvstore.adapters.vllm.glue.options import engine_options, sends, worker_options
from kvstore.adapters.vllm.glue.parallel import port_of, rank_of, workers_here
from kvstore.adapters.vllm.scheduler.operator import SchedulerControls
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.memory import limits
from kvstore.model.errors import ConfigError
from kvstore.ops.access import read_token
from kvstore.ops.admin_http import AdminServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.config import StoreConfig
    from kvstore.engine.options import RemoteOptions
    from kvstore.model.heads import Part
    from kvstore.model.keys import Namespace
    from kvstore.model.layout import KVLayout
    from kvstore.server.embedded import EmbeddedServer


def admin_server(vllm_config: VllmConfig, config: StoreConfig, scheduler: StoreScheduler) -> AdminServer | None:
    """Open the admin endpoint of the scheduler side; None if it is off.

    Raises:
        ConfigError: it cannot be opened.
    """
    if not config.internal_api_server_enabled:
        return None
    controls = SchedulerControls(scheduler, config, {"vllm": vllm.__version__})
    port = config.internal_api_server_port_start
    replica = int(vllm_config.parallel_config.data_parallel_rank) if port else 0
    file = config.internal_api_server_token_file
    token = read_token(Path(file)) if file else None
    return AdminServer(controls, config.internal_api_server_host, port + replica, token)


def open_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig, kv_caches: Mapping[str, torch.Tensor]
) -> StoreWorker:
    """Find the blocks in the caches, allocate the memory and open the tiers of a worker.

    Raises:
        KVStoreError: a part of it cannot be opened, or the KV cache cannot be stored.
    """
    workers = workers_here(vllm_config)
    asked = f"max_local_cpu_size of {config.max_local_cpu_bytes / 2**30:.1f} GiB for each of {workers} workers here"
    sends_bytes = config.pd_buffer_size if sends(vllm_config, config) else 0
    if config.listens or sends_bytes:
        asked += f", and pd_buffer_size of {config.pd_buffer_size / 2**30:.1f} GiB"
    limits.require_memory((config.host_memory_bytes + sends_bytes) * workers, asked)
    paged = paged_kv_of(kv_caches, kv_cache_config, vllm_config, config.chunk_size)
    options = replace(worker_options(vllm_config, kv_cache_config, config), groups=groups_of(paged, kv_cache_config))
    namespace = namespace_of(vllm_config, kv_cache_config, config, paged)
    with ExitStack() as opened:
        engine = engine_options(vllm_config, kv_cache_config, config, (kv_caches, paged))
        server = _embedded_server(vllm_config, namespace, paged.layout, config, engine.remote)
        if server is not None:
            opened.callback(server.close)
        worker = StoreWorker(paged, namespace, engine, options, server)
        opened.pop_all()
        return worker


def _embedded_server(
    vllm_config: VllmConfig, namespace: Namespace, layout: KVLayout, config: StoreConfig, remote: RemoteOptions | None
) -> EmbeddedServer | None:
    """Open this worker's server for other engines, whose parts are in ``remote``; None if it does not listen.

    Raises:
        ConfigError: it cannot be opened as configured.
    """
    if not config.listens:
        return None
    try:
        from kvstore.protocol.keyfiles import read_list, read_pair  # noqa: PLC0415 - an extra
        from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"pd_peer_init_port is set: {error}") from error
    options = EmbeddedOptions(
        config.pd_buffer_size,
        config.pd_peer_host,
        port_of(vllm_config, config, rank_of(vllm_config)),
        keys=read_pair(Path(config.server_key_file)) if config.server_key_file else None,
        listed=read_list(Path(config.server_clients)) if config.server_clients else {},
        hold_s=config.pd_timeout_ms / 1000,
        parts=tuple(_parts_sent_here(remote)) if remote is not None else (),
        channel=config.transfer_channel,
    )
    return EmbeddedServer(namespace, layout, options)


def _parts_sent_here(remote: RemoteOptions) -> Iterator[Part]:
    parts = (part for division in remote.divisions for part in division.parts)
    return (part for part in parts if part.sends_to == remote.rank)
