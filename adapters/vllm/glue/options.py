"""Options of the scheduler side and of a worker, derived from vLLM's configuration and ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import vllm

from kvstore.adapters.vllm.glue.division import divisions_of
from kvstore.adapters.vllm.glue.groups import (
    announced_group,
    block_tokens_of,
    fitting_chunk_size,
    has_states,
    is_grouped,
)
from kvstore.adapters.vllm.glue.parallel import folder_of, host_address, is_first_here, port_of, rank_of, shard_of
from kvstore.adapters.vllm.glue.settings import lookahead_tokens
from kvstore.adapters.vllm.glue.support import frees_blocks, overwrites_early
from kvstore.adapters.vllm.requests.params import server_url
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.telemetry.announcer import ContextOf
from kvstore.adapters.vllm.telemetry.events import context_of
from kvstore.adapters.vllm.worker.pushes import PushOptions
from kvstore.adapters.vllm.worker.worker import WorkerOptions
from kvstore.config.keys.remote import HOST_MARK
from kvstore.config.schema import PD_ROLES
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.protocol.hosts import is_on_each_host
from kvstore.tiers import READ_ONLY, tier_behind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.config import StoreConfig
    from kvstore.paged.base import PagedKV
    from kvstore.paged.planes import LayerCache

logger = logging.getLogger(__name__)


def fitting_config(config: StoreConfig, kv_cache_config: KVCacheConfig, *, logs_change: bool) -> StoreConfig:
    """Return the configuration with a ``chunk_size`` of whole blocks, and this host's address for other engines."""
    chunk_size = fitting_chunk_size(kv_cache_config, config)
    if chunk_size != config.chunk_size and logs_change:
        logger.warning(
            "chunk_size is %d instead of %d: it must be whole blocks of every KV cache group of this model",
            chunk_size,
            config.chunk_size,
        )
    host = config.pd_peer_host
    host = host.replace(HOST_MARK, host_address()) if HOST_MARK in host else host
    return config.model_copy(update={"chunk_size": chunk_size, "pd_peer_host": host})


def scheduler_options(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> SchedulerOptions:
    """Return the scheduler side's options for lookups and plans."""
    transfer = vllm_config.kv_transfer_config
    if config.enable_pd and config.pd_role is not None and PD_ROLES[config.pd_role] != transfer.kv_role:
        logger.warning(
            "pd_role %s is ignored: vLLM's kv_role, %s, decides which engine stores and which loads",
            config.pd_role,
            transfer.kv_role,
        )
    ahead_tokens = lookahead_tokens(vllm_config)
    if config.verify_fraction and ahead_tokens:
        logger.warning(
            "verify_fraction is ignored: in the draft layers a chunk's last token may have the KV of another prompt's "
            "next token, which would count as a mismatch"
        )
        config = config.model_copy(update={"verify_fraction": 0.0})
    return SchedulerOptions(
        rules=SaveRules(
            block_tokens=block_tokens_of(kv_cache_config),
            chunk_tokens=config.chunk_size,
            save_decode=_saves_decode(vllm_config, config),
            # A step leaves a state at the end of a prompt, and seldom at the end of a chunk.
            save_tails=config.saves_tails or has_states(kv_cache_config),
            # vLLM computes the last ones again, if modules look further than at the next token.
            skip_last_tokens=max(config.skip_last_n_tokens, ahead_tokens - 1),
            spares_last_token=is_grouped(kv_cache_config),
            marks_decode=has_states(kv_cache_config),
            lookahead_tokens=ahead_tokens,
        ),
        loads=transfer.is_kv_consumer or config.goes_both_ways,
        saves=(transfer.is_kv_producer or config.goes_both_ways) and not config.force_skip_save,
        config=config,
        remote=remote_options(config, _place_to_leave_out(vllm_config, config)),
        load_rules=LoadRules(
            async_load=True if frees_blocks(kv_cache_config) else config.enable_async_loading,
            runs_ahead=vllm_config.scheduler_config.async_scheduling,
            layerwise=_goes_layerwise(vllm_config, kv_cache_config, config),
            only_if_faster=config.load_only_if_faster,
        ),
        async_save=_async_save(config),
        handover=_handover_options(vllm_config, config),
        announces=_announces(vllm_config, kv_cache_config),
    )


def _saves_decode(vllm_config: VllmConfig, config: StoreConfig) -> bool:
    """Tell if the KV of generated tokens is stored.

    That of diffusion models is not: with ``diffusion_read_only`` vLLM ends a request without the step that would
    compute it, and the blocks hold what is left of steps in which tokens attend to later ones.
    """
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return False
    return config.save_decode_cache or (config.goes_both_ways and bool(vllm_config.kv_transfer_config.is_kv_consumer))


def _announces(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ContextOf | None:
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    if announced_group(kv_cache_config) is None:
        logger.warning(
            "KV events are not published: vLLM's block hashes cover other numbers of tokens than this model's blocks"
        )
        return None
    return partial(context_of, block_tokens=block_tokens_of(kv_cache_config))


def worker_options(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> WorkerOptions:
    """Return a worker's options for moving KV."""
    return WorkerOptions(
        layer_names=() if is_grouped(kv_cache_config) else tuple(kv_cache_config.kv_cache_groups[0].layer_names),
        names_layers_early=bool(vllm_config.parallel_config.use_ubatching),
        layerwise=_goes_layerwise(vllm_config, kv_cache_config, config),
        async_save=_async_save(config),
        overwrites_early=overwrites_early(vllm_config, kv_cache_config),
        push=_push_options(vllm_config, config),
        runs_ahead=vllm_config.scheduler_config.async_scheduling,
        remote_url=_url_from_elsewhere(vllm_config, config),
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
    )


def _sends_its_part(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> bool:
    """Tell if this worker sends chunks to its tier.

    Of workers that hold the same KV, as all ranks do with MLA, one sends it to a shared tier, or one on each host if
    the hosts have separate tiers, but each to its own server.
    """
    if config.listens or shard_of(vllm_config, kv_cache_config).replica == 0:
        return True
    url = config.shared_url
    return is_first_here() and url is not None and (config.remote_host_url is not None or is_on_each_host(url))


def _url_from_elsewhere(vllm_config: VllmConfig, config: StoreConfig) -> str | None:
    """Return the address at which other hosts reach this worker's tier or server; None if they cannot."""
    url, named = config.shared_url, config.remote_host_url
    if config.listens:
        url = server_url(config.pd_peer_host, port_of(vllm_config, config, rank_of(vllm_config)))
    elif named is not None:
        address = host_address()
        url = named.replace(HOST_MARK, f"[{address}]" if ":" in address else address)
    return None if url is None or is_on_each_host(url) else url


def engine_options(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: StoreConfig,
    caches: tuple[Mapping[str, LayerCache], PagedKV] | None = None,
) -> EngineOptions:
    """Return a worker's options for keeping KV; every worker has its own folder.

    ``caches``, as registered and as blocks, determine the divisions for other tensor-parallel sizes.
    """
    remote = remote_options(config, _place_to_leave_out(vllm_config, config))
    if remote is not None:
        divisions = divisions_of(vllm_config, kv_cache_config, config, *caches) if caches else ()
        remote = replace(
            remote,
            sends=_sends_its_part(vllm_config, kv_cache_config, config),
            rank=rank_of(vllm_config),
            divisions=divisions,
            servers=tuple(_servers(vllm_config, config)) if config.listens and divisions else (),
        )
    return EngineOptions(
        max_local_cpu_bytes=config.max_local_cpu_bytes,
        local_cpu=config.local_cpu,
        local_disk=tuple(folder_of(vllm_config, Path(folder)) for folder in config.local_disk_folders),
        max_local_disk_bytes=config.max_local_disk_bytes,
        save_unfull_chunk=config.saves_tails,
        use_odirect=config.use_odirect,
        disk_io_threads=config.disk_io_threads,
        io_timeout_s=config.blocking_timeout_secs,
        max_write_queue=config.max_write_queue,
        remote=remote,
        disk_codec=config.local_disk_serde,
        encryption_keys=config.encryption_keys,
        max_local_gpu_bytes=config.max_local_gpu_bytes,
        pin_in_background=config.pin_in_background,
        quotas=config.quotas,
    )


def _servers(vllm_config: VllmConfig, config: StoreConfig) -> Iterator[str]:
    """Yield the addresses of the workers of this engine, by rank.

    Raises:
        ConfigError: no port is configured for one of them.
    """
    parallel = vllm_config.parallel_config
    for rank in range(int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)):
        yield server_url(config.pd_peer_host, port_of(vllm_config, config, rank))


def _own_place(vllm_config: VllmConfig, config: StoreConfig) -> tuple[str, int] | None:
    """Return the host and port of this engine's first worker for other engines; None if they do not reach it.

    Raises:
        ConfigError: no port is configured for this replica.
    """
    return (config.pd_peer_host, port_of(vllm_config, config, rank=0)) if config.listens else None


def _place_to_leave_out(vllm_config: VllmConfig, config: StoreConfig) -> tuple[str, int] | None:
    return _own_place(vllm_config, config) if config.watched_peers else None


def remote_options(config: StoreConfig, own: tuple[str, int] | None = None) -> RemoteOptions | None:
    """Return the options for KV of other engines, in a shared tier or in each engine's server; None without any.

    An engine that listens has its own server in place of a shared tier, and reads the shared tier in addition. Each
    worker names its own server. ``own`` is the place of this engine's first worker.
    """
    if not config.has_remote:
        return None
    url, shared = (None, config.shared_url) if config.listens else (config.shared_url, None)
    of_servers = {"connections": config.remote_connections, "timeout_s": config.blocking_timeout_secs}
    settings = of_servers | {
        **_keys(config),
        "username": config.remote_username,
        "password": config.remote_password,
        "ttl_s": config.remote_ttl_secs,
        "codec": config.remote_codec if config.remote_codec != "none" else None,
        "encryption_keys": config.encryption_keys if config.encrypts_remote else None,
    }
    is_read_only = tier_behind(url) in READ_ONLY if url is not None else not config.listens
    return RemoteOptions(
        url,
        _given(of_servers if config.listens else settings),
        shared=shared,
        shared_settings=_given(settings) if shared is not None else {},
        required=config.remote_required,
        io_threads=config.remote_io_threads,
        lookup_timeout_s=config.lookup_timeout_ms / 1000,
        hold_s=config.remote_lookup_cache_secs,
        max_queue=0 if is_read_only else config.max_remote_queue,
        peers=config.fixed_peers if config.peers or config.enable_pd or config.reshard_from else None,
        watched_peers=config.watched_peers,
        own_place=own,
        peer_settings=_given(of_servers | _keys(config)),
        sources=_sources(config),
    )


def _handover_options(vllm_config: VllmConfig, config: StoreConfig) -> HandoverOptions:
    """Return the role of this engine among those that share requests; none without ``enable_pd``.

    Raises:
        ConfigError: no port is configured for this replica.
    """
    if not config.enable_pd:
        return HandoverOptions()
    transfer, sources = vllm_config.kv_transfer_config, config.sources
    return HandoverOptions(
        sends=transfer.is_kv_producer,
        receives=transfer.is_kv_consumer,
        own=_own_place(vllm_config, config),
        allows_host=config.allows_host,
        allows_source=lambda host, port: (host.lower(), port) in sources,
        sends_to_peers=config.pd_allowed_hosts is None,
        reads_from_peers=config.goes_both_ways,
        timeout_s=config.pd_timeout_ms / 1000,
        answers=config.pd_bidirectional and transfer.is_kv_consumer,
        shared=config.shared_name,
    )


def sends(vllm_config: VllmConfig, config: StoreConfig) -> bool:
    """Tell if this engine computes prompts for others; each of its workers then has a buffer of ``pd_buffer_size``."""
    return config.enable_pd and bool(vllm_config.kv_transfer_config.is_kv_producer)


def _push_options(vllm_config: VllmConfig, config: StoreConfig) -> PushOptions | None:
    """Return a worker's options for handing KV over; None if this engine computes no prompts for others."""
    if not sends(vllm_config, config):
        return None
    settings = _given({"timeout_s": config.blocking_timeout_secs, **_keys(config)})
    return PushOptions(rank_of(vllm_config), config.pd_buffer_size, settings, config.transfer_channel)


def _goes_layerwise(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> bool:
    """Tell if KV is moved layer by layer.

    False with a draft model, whose layers run after vLLM has asked for failed loads, and with several groups of layers,
    which are always loaded asynchronously.
    """
    is_possible = vllm_config.speculative_config is None and not is_grouped(kv_cache_config)
    return config.use_layerwise and is_possible


def _async_save(config: StoreConfig) -> bool:
    on_device = not vllm.platforms.current_platform.is_cpu()
    return on_device if config.enable_async_saving is None else config.enable_async_saving


def _sources(config: StoreConfig) -> tuple[str, ...]:
    """Return the addresses of engines that requests may name, except those of peers, which are read anyway."""
    peers = {(parts.hostname, parts.port) for parts in map(urlsplit, config.fixed_peers)}
    return tuple(sorted(server_url(host, port) for host, port in config.sources - peers if port is not None))


def _keys(config: StoreConfig) -> dict[str, object]:
    return {"client_key_file": config.remote_key_file, "server_key_file": config.remote_server_key_file}


def _given(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if value is not None}
