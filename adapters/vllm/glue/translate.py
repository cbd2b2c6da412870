"""Between vLLM's objects and ours: the only module that knows their fields, and which versions they belong to."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import torch
import vllm

from kvstore.adapters.vllm.glue.versions import TESTED_VLLM
from kvstore.adapters.vllm.identity import fingerprint_folder
from kvstore.adapters.vllm.requests.adapterfiles import Adapter
from kvstore.adapters.vllm.requests.blocks import NULL_BLOCK
from kvstore.adapters.vllm.requests.disagg import Handover, parse_handover, server_url
from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams, parse_params
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.scheduler.operator import SchedulerControls
from kvstore.adapters.vllm.scheduler.scheduler import SchedulerOptions, StoreScheduler
from kvstore.adapters.vllm.worker.worker import PushOptions, WorkerOptions
from kvstore.assembly import EngineOptions, RemoteOptions
from kvstore.config.schema import PD_ROLES
from kvstore.errors import ConfigError, LayoutError
from kvstore.format.chunkfile import FORMAT_VERSION
from kvstore.keys import Feature, KeyExtras, Namespace
from kvstore.ops.admin_http import AdminServer
from kvstore.paged.binding import bind_paged_kv
from kvstore.tiers import READ_ONLY, tier_behind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvstore.config import StoreConfig
    from kvstore.layout import KVLayout
    from kvstore.paged.base import LayerCache, PagedKV
    from kvstore.server.embedded import EmbeddedServer

logger = logging.getLogger(__name__)

ALLOW_UNTESTED = "KVSTORE_ALLOW_UNTESTED_VLLM"
CONNECTOR_FLAG = (
    "--kv-transfer-config "
    '\'{"kv_connector":"KVStoreConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}\''
)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> None:
    """Refuse, at start, what could not be served right.

    Raises:
        ConfigError: a version, flag or parallelism that is not supported, with what to do.
        LayoutError: a KV cache that is not one group of attention layers.
    """
    if not vllm.__version__.startswith(TESTED_VLLM) and os.environ.get(ALLOW_UNTESTED) != "1":
        raise ConfigError(
            f"vLLM {vllm.__version__} has not been tested with this version of kvstore, {TESTED_VLLM}x has: "
            f"install that, or set {ALLOW_UNTESTED}=1 to try"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": a chunk that cannot be loaded would end '
            f"its request with an error. Start vLLM with {CONNECTOR_FLAG}"
        )
    slow = {
        "local_disk": config.local_disk,
        "remote_url": config.shared_url,
        "enable_pd": config.enable_pd,
        "peers": config.peers,
    }
    runs_ahead = vllm_config.scheduler_config.async_scheduling
    if any(slow.values()) and transfer.is_kv_consumer and runs_ahead and config.enable_async_loading is False:
        keys = " and ".join(key for key, value in slow.items() if value)
        raise ConfigError(
            f"{keys} is set, enable_async_loading is false, and vLLM schedules asynchronously: vLLM 0.32 would deliver "
            "a token that it computed before it learned that a chunk could not be read. Leave enable_async_loading at "
            "auto, or start vLLM with --no-async-scheduling"
        )
    model = vllm_config.model_config
    if config.max_local_gpu_size and (model.enable_sleep_mode or getattr(model, "enable_cumem_allocator", False)):
        raise ConfigError(
            "max_local_gpu_size is set, and vLLM may sleep: it would take the memory away while kvstore uses it. Start "
            "vLLM without --enable-sleep-mode, or do without max_local_gpu_size"
        )
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism splits a block over ranks, which is not supported: set "
            "--decode-context-parallel-size and --prefill-context-parallel-size to 1"
        )
    _check_groups(kv_cache_config)
    if frees_blocks(kv_cache_config) and transfer.is_kv_consumer and config.enable_async_loading is False:
        raise ConfigError(
            "enable_async_loading is false, and the layers of this model attend to a window: where a load within a "
            "step fails, vLLM could not compute the rest, as it has given up the blocks before. Leave it at auto"
        )
    block_tokens = block_tokens_of(kv_cache_config)
    if config.chunk_size % block_tokens:
        raise ConfigError(
            f"chunk_size {config.chunk_size} is not a multiple of vLLM's block size {block_tokens}: set chunk_size to "
            f"a multiple, or vLLM's --block-size to a divisor"
        )
    if 0 < config.max_tokens_per_load < block_tokens:
        raise ConfigError(
            f"max_tokens_per_load {config.max_tokens_per_load} is less than vLLM's block size {block_tokens}, so "
            "nothing would be loaded: raise it, or set it to 0 for no limit"
        )


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415 - slow to import
        AttentionSpec,
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        RSWASpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise LayoutError(
            f"this model has {len(groups)} KV cache groups, and one is supported: start vLLM with "
            "--disable-hybrid-kv-cache-manager, or without kvstore"
        )
    for spec in iter_layer_specs(groups[0].kv_cache_spec):
        if not isinstance(spec, AttentionSpec):
            raise LayoutError(
                f"a layer keeps {type(spec).__name__} state, which does not consist of tokens: not supported"
            )
        known = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
        if not isinstance(spec, known) or isinstance(spec, RSWASpec):
            raise LayoutError(
                f"a layer's KV cache is of the kind {type(spec).__name__}, in which equal prefixes need not have equal "
                "KV: not supported"
            )


def frees_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM takes blocks from requests that go on, because their layers' window has passed them by.

    It puts the null block in their place, also where it finds a prefix in its own cache, or takes it from a connector.
    """
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415 - slow to import
        ChunkedLocalAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    specs = iter_layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    return any(isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs)


def block_tokens_of(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of vLLM's block manager."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def scheduler_options(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> SchedulerOptions:
    """The scheduler side's part of the configuration."""
    transfer = vllm_config.kv_transfer_config
    if config.enable_pd and config.pd_role is not None and PD_ROLES[config.pd_role] != transfer.kv_role:
        logger.warning(
            "pd_role is %s, but vLLM's kv_role %s: that decides who stores and who loads",
            config.pd_role,
            transfer.kv_role,
        )
    return SchedulerOptions(
        rules=SaveRules(
            block_tokens=block_tokens_of(kv_cache_config),
            chunk_tokens=config.chunk_size,
            save_decode=config.save_decode_cache or (config.goes_both_ways and transfer.is_kv_consumer),
            save_tails=config.saves_tails,
            skip_last_tokens=config.skip_last_n_tokens,
        ),
        loads=transfer.is_kv_consumer or config.goes_both_ways,
        saves=(transfer.is_kv_producer or config.goes_both_ways) and not config.force_skip_save,
        local_cpu=config.local_cpu,
        priority_limit=config.priority_limit,
        min_retrieve_tokens=config.min_retrieve_tokens,
        min_remote_tokens=config.min_remote_tokens,
        max_tokens_per_load=config.max_tokens_per_load,
        max_write_queue=config.max_write_queue,
        remote=remote_options(config),
        cache_policy=config.cache_policy,
        disk_policy=config.disk_cache_policy,
        record_trace=Path(config.record_trace).expanduser() if config.record_trace else None,
        load_rules=LoadRules(
            async_load=True if frees_blocks(kv_cache_config) else config.enable_async_loading,
            runs_ahead=vllm_config.scheduler_config.async_scheduling,
            layerwise=_goes_layerwise(vllm_config, config),
            only_if_faster=config.load_only_if_faster,
        ),
        async_save=_async_save(config),
        verify_fraction=config.verify_fraction,
        handover=handover_options(vllm_config, config),
        pin_max_s=config.pin_max_secs,
        announces=vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events,
    )


def worker_options(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> WorkerOptions:
    """How a worker moves KV."""
    return WorkerOptions(
        layer_names=tuple(kv_cache_config.kv_cache_groups[0].layer_names),
        layerwise=_goes_layerwise(vllm_config, config),
        async_save=_async_save(config),
        push=_push_options(vllm_config, config),
    )


def handover_options(vllm_config: VllmConfig, config: StoreConfig) -> HandoverOptions | None:
    """Which part this engine plays among those that share requests; None if it keeps to itself.

    Raises:
        ConfigError: there is no port for this replica.
    """
    if not config.enable_pd:
        return None
    transfer = vllm_config.kv_transfer_config
    own = (config.pd_peer_host, _port_of(vllm_config, config, rank=0)) if config.listens else None
    sources = config.sources
    return HandoverOptions(
        sends=transfer.is_kv_producer,
        receives=transfer.is_kv_consumer,
        own=own,
        allows_host=config.allows_host,
        allows_source=lambda host, port: (host.lower(), port) in sources,
        timeout_s=config.pd_timeout_ms / 1000,
        answers=config.pd_bidirectional and transfer.is_kv_consumer,
    )


def _push_options(vllm_config: VllmConfig, config: StoreConfig) -> PushOptions | None:
    """How a worker hands KV over; None if this engine computes no prompts for others."""
    if not config.enable_pd or not vllm_config.kv_transfer_config.is_kv_producer:
        return None
    settings = {
        "timeout_s": config.blocking_timeout_secs,
        "client_key_file": config.remote_key_file,
        "server_key_file": config.remote_server_key_file,
    }
    return PushOptions(_rank_of(vllm_config), config.pd_buffer_size, _given(settings))


def _goes_layerwise(vllm_config: VllmConfig, config: StoreConfig) -> bool:
    """A draft model's layers come after vLLM has asked what failed, so with one everything goes in bulk."""
    return config.use_layerwise and vllm_config.speculative_config is None


def _async_save(config: StoreConfig) -> bool:
    on_device = not vllm.platforms.current_platform.is_cpu()
    return on_device if config.enable_async_saving is None else config.enable_async_saving


def admin_server(vllm_config: VllmConfig, config: StoreConfig, scheduler: StoreScheduler) -> AdminServer | None:
    """The admin endpoint of the scheduler side; None if it is off.

    Raises:
        ConfigError: it cannot be opened.
    """
    if not config.internal_api_server_enabled:
        return None
    controls = SchedulerControls(scheduler, config, {"vllm": vllm.__version__})
    port = config.internal_api_server_port_start
    replica = int(vllm_config.parallel_config.data_parallel_rank) if port else 0
    return AdminServer(controls, config.internal_api_server_host, port + replica)


def embedded_server(
    vllm_config: VllmConfig, namespace: Namespace, layout: KVLayout, config: StoreConfig
) -> EmbeddedServer | None:
    """The server of this worker, for other engines; None if it does not listen.

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
        _port_of(vllm_config, config, _rank_of(vllm_config)),
        keys=read_pair(Path(config.server_key_file)) if config.server_key_file else None,
        listed=read_list(Path(config.server_clients)) if config.server_clients else {},
    )
    return EmbeddedServer(namespace, layout, options)


def _port_of(vllm_config: VllmConfig, config: StoreConfig, rank: int) -> int:
    """Where the worker of a rank listens: workers are counted over all replicas of a data-parallel engine.

    Raises:
        ConfigError: there is no port for it.
    """
    ports = config.pd_peer_init_port
    parallel = vllm_config.parallel_config
    workers_before = int(parallel.data_parallel_rank) * parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    number = int(workers_before) + rank
    if isinstance(ports, tuple):
        if number >= len(ports):
            raise ConfigError(f"pd_peer_init_port has {len(ports)} ports, and none for worker {number}: add them")
        return ports[number]
    assert ports is not None
    return ports + number


def _rank_of(vllm_config: VllmConfig) -> int:
    """The number of this worker among those of one replica."""
    parallel = vllm_config.parallel_config
    return int(parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size))


def remote_options(config: StoreConfig) -> RemoteOptions | None:
    """What comes from other engines: from a tier that they share, or each from the others; None without any.

    An engine that listens has its own server in the place of a shared tier; each worker names its own.
    """
    if not config.has_remote:
        return None
    url = config.shared_url
    of_servers = {
        "connections": config.remote_connections,
        "timeout_s": config.blocking_timeout_secs,
    }
    keys = {
        "client_key_file": config.remote_key_file,
        "server_key_file": config.remote_server_key_file,
    }
    settings = {
        **of_servers,
        **keys,
        "username": config.remote_username,
        "password": config.remote_password,
        "ttl_s": config.remote_ttl_secs,
        "codec": config.remote_codec if config.remote_codec != "none" else None,
    }
    is_read_only = tier_behind(url) in READ_ONLY if url is not None else not config.listens
    return RemoteOptions(
        url,
        _given(of_servers if config.listens else settings),
        required=config.remote_required,
        io_threads=config.remote_io_threads,
        lookup_timeout_s=config.lookup_timeout_ms / 1000,
        hold_s=config.remote_lookup_cache_secs,
        max_queue=0 if is_read_only else config.max_remote_queue,
        peers=config.peers if config.peers or config.enable_pd else None,
        peer_settings=_given({**of_servers, **keys}),
        sources=_sources(config),
    )


def _sources(config: StoreConfig) -> tuple[str, ...]:
    """The addresses of engines that requests may name, but for those that are read anyway."""
    peers = {(parts.hostname, parts.port) for parts in map(urlsplit, config.peers)}
    return tuple(sorted(server_url(host, port) for host, port in config.sources - peers if port is not None))


def _given(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if value is not None}


def engine_options(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> EngineOptions:
    """The worker side's part of the configuration; every worker has a folder of its own.

    Of workers that hold the same KV, as all ranks do with MLA, one sends it to a shared tier; each to its own server.
    """
    remote = remote_options(config)
    if remote is not None:
        sends = config.listens or _shard_of(vllm_config, kv_cache_config).replica == 0
        remote = replace(remote, sends=sends, rank=_rank_of(vllm_config))
    return EngineOptions(
        max_local_cpu_bytes=config.max_local_cpu_bytes,
        local_cpu=config.local_cpu,
        local_disk=tuple(_worker_folder(vllm_config, Path(folder)) for folder in config.local_disk_folders),
        max_local_disk_bytes=config.max_local_disk_bytes,
        save_unfull_chunk=config.saves_tails,
        use_odirect=config.use_odirect,
        disk_io_threads=config.disk_io_threads,
        io_timeout_s=config.blocking_timeout_secs,
        max_write_queue=config.max_write_queue,
        remote=remote,
        disk_codec=config.local_disk_serde,
        max_local_gpu_bytes=config.max_local_gpu_bytes,
    )


def _worker_folder(vllm_config: VllmConfig, folder: Path) -> Path:
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        folder /= f"replica-{parallel.data_parallel_rank}"
    if parallel.world_size > 1:
        folder /= f"rank-{parallel.rank}-of-{parallel.world_size}"
    return folder


class _Shard(NamedTuple):
    """The part of a model's KV that a worker holds, and its number among the workers that hold the same."""

    name: str
    replica: int


def _shard_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> _Shard:
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pp_rank, tp_rank = divmod(parallel.rank % (tp_size * pp_size), tp_size)
    replicas = max(1, kv_cache_config.kv_tp_replicas)
    shard, replica = divmod(tp_rank, replicas)
    return _Shard(f"pp {pp_rank}/{pp_size} tp {shard}/{tp_size // replicas}", replica)


def total_workers(vllm_config: VllmConfig) -> int:
    """Workers of this engine, each with a pool of its own."""
    return int(vllm_config.parallel_config.world_size)


def namespace_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig, paged: PagedKV
) -> Namespace:
    """Everything that must be equal for KV to be interchangeable, for this worker.

    Raises:
        ConfigError: the model cannot be identified.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return Namespace(
        {
            "format": FORMAT_VERSION,
            "model": _model_identity(vllm_config, config.model_id),
            "model_config": _digest(_effective_config(model.hf_config)),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "kv_cache_dtype": str(cache.cache_dtype),
            "draft": _draft_identity(speculative.model) if speculative else "none",
            "layers": _digest(kv_cache_config.kv_cache_groups[0].layer_names),
            "shard": _shard_of(vllm_config, kv_cache_config).name,
            "chunk_tokens": config.chunk_size,
            "layout": paged.layout.fingerprint,
        }
    )


def _model_identity(vllm_config: VllmConfig, model_id: str | None) -> str:
    model = vllm_config.model_config
    if model_id is not None:
        return f"id {model_id}"
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ConfigError("with load_format=dummy nothing identifies the weights: set kvstore.model_id")
    folder = Path(model.model)
    if folder.is_dir():
        return f"files {fingerprint_folder(folder)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return f"hub {model.model}@{commit}"
    raise ConfigError(
        f"cannot identify the weights of {model.model!r}: it is neither a folder nor a hub model with a known commit; "
        "set kvstore.model_id"
    )


def _draft_identity(model: str | None) -> str:
    """The draft model, whose layers are stored with the target's."""
    folder = Path(model or "")
    return f"files {fingerprint_folder(folder)}" if model and folder.is_dir() else str(model)


def _effective_config(hf_config: Any) -> object:  # noqa: ANN401 - transformers' class, whatever its version
    """The model's configuration after all overrides, less what does not matter for KV."""
    fields = dict(hf_config.to_dict())
    for irrelevant in ("_name_or_path", "transformers_version", "_commit_hash"):
        fields.pop(irrelevant, None)
    return fields


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def hold_nothing(kv_caches: Mapping[str, LayerCache]) -> bool:
    """Whether there is no cache yet, as in a profiling run."""
    parts = [part for cache in kv_caches.values() for part in ([cache] if isinstance(cache, torch.Tensor) else cache)]
    return not any(part.numel() for part in parts)


def paged_kv_of(
    kv_caches: Mapping[str, LayerCache], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, chunk_size: int
) -> PagedKV:
    """The registered caches as blocks, each layer once.

    Raises:
        LayoutError: an unknown layout, or per-token state beside the registered tensors.
    """
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415 - slow to import
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
        iter_layer_specs,
    )

    group = kv_cache_config.kv_cache_groups[0]
    missing = [name for name in group.layer_names if name not in kv_caches]
    if missing:
        raise LayoutError(f"vLLM registered no KV cache for layer {missing[0]}: not supported")
    paged = bind_paged_kv(
        {name: kv_caches[name] for name in group.layer_names},
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=block_tokens_of(kv_cache_config),
        chunk_tokens=chunk_size,
        reserved_blocks=NULL_BLOCK + 1,
        packing=_packing(vllm_config, kv_cache_config),
        has_channels=not any(isinstance(spec, MLAAttentionSpec) for spec in iter_layer_specs(group.kv_cache_spec)),
    )
    for name, page_bytes in zip(group.layer_names, paged.layout.page_bytes, strict=True):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        reached_bytes = page_bytes * paged.layout.planes
        if reached_bytes != spec.unpadded_page_size_bytes:
            raise LayoutError(
                f"layer {name}: a block has {spec.unpadded_page_size_bytes} bytes, but the registered tensor reaches "
                f"{reached_bytes}: state beside it would be lost, which is not supported"
            )
    return paged


def _packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """On CPUs, the instruction set decides how a block is packed."""
    if not vllm.platforms.current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - only there

    model = vllm_config.model_config
    isa = _get_attn_isa(
        model.dtype,
        block_tokens_of(kv_cache_config),
        model.get_head_size(),
        vllm_config.cache_config.cache_dtype,
    )
    return f"{isa}-{torch.backends.cpu.get_cpu_capability()}"


def handover_of(request: Request) -> Handover | None:
    """What the request says about other engines that share it.

    Raises:
        InvalidCallError: a field is wrong.
    """
    return parse_handover(request.kv_transfer_params, request.request_id)


def request_params(request: Request, counted: Collection[str]) -> RequestParams:
    """What the client asks of the cache, of ``counted`` fields; ``kv_transfer_params`` count over other arguments.

    Raises:
        InvalidCallError: a field is wrong.
    """
    sampling = request.sampling_params
    if sampling is None:
        return NO_PARAMS
    return parse_params(sampling.extra_args, request.kv_transfer_params, counted=counted)


def is_shareable(request: Request) -> bool:
    """Whether a request's tokens tell what it is about.

    Prompt embeddings show as zero tokens, pooling may attend both ways, and sessions rewrite their tokens.
    """
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return False
    return request.pooling_params is None and not request.resumable


def adapter_of(request: Request) -> Adapter | None:
    """The LoRA adapter that a request names."""
    adapter = request.lora_request
    if adapter is None:
        return None
    return Adapter(adapter.lora_int_id, str(adapter.lora_name), adapter.lora_path, bool(adapter.load_inplace))


def key_extras(request: Request, params: RequestParams = NO_PARAMS, lora_files: str = "") -> KeyExtras:
    """What besides its tokens decides a request's KV; ``lora_files`` is the fingerprint of its adapter."""
    adapter = adapter_of(request)
    return KeyExtras(
        lora=(adapter.name, lora_files) if adapter is not None else None,
        cache_salt=request.cache_salt,
        tags=params.tags,
        features=tuple(
            Feature(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ),
    )
