"""Keys of LMCache that have no effect here, and what that means for whoever wrote them.

Names are those of LMCache 0.5, its older synonyms included. Each one is accepted with one warning, so that an existing
file works as it is. A key that kvstore gains leaves this table for the schema.
"""

from __future__ import annotations

from typing import Final

FAMILIES: Final[dict[str, str]] = {
    "remote_storage_plugins audit_actual_remote_url external_lookup_client mp_host mp_port": (
        "LMCache's servers and plugins are not used: `remote_url` names the tier that hosts share"
    ),
    "pre_caching_hash_algorithm": "keys are always sha256 and equal in every process, whatever PYTHONHASHSEED is",
    "cost_aware_half_life_seconds cost_aware_ewma_alpha": "there is no such policy: `cache_policy` has one that adapts",
    "lookup_server_worker_ids enable_scheduler_bypass_lookup hit_miss_ratio": (
        "lookups are answered from the scheduler's own memory: they ask no other process but a remote tier"
    ),
    "pin_timeout_sec pin_check_interval_sec": (
        "a chunk is held while a request needs it, and a pin for `pin_max_secs`"
    ),
    "retrieve_locations store_location": "every tier that is configured is read and written",
    "local_disk_path_sharding": "the folder is divided by kvstore itself",
    (
        "gds_path gds_path_sharding gds_buffer_size use_gds gds_backend cufile_buffer_size maru_path maru_pool_size"
    ): "there is no GPUDirect or CXL storage: chunks go through CPU memory to `local_disk`",
    "numa_mode": "memory is placed by the operating system: bind the process with numactl where it matters",
    "local_cpu_use_hugepages": "memory is taken in pages of the operating system's choice",
    "reserve_local_cpu_size": (
        "a pool that does not fit in memory is refused at start: lower `max_local_cpu_size` to leave memory to others"
    ),
    (
        "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio "
        "lazy_memory_step_ratio lazy_memory_safe_size"
    ): "all of `max_local_cpu_size` is reserved at start",
    "pd_peer_alloc_port pd_peer_query_port": "one port, `pd_peer_init_port`, does all",
    "pd_proxy_host pd_proxy_port pd_skip_proxy_notification": (
        "engines do not talk to the proxy: what it needs to know stands in their answers"
    ),
    (
        "pd_buffer_device pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec "
        "pd_max_prefill_len pd_backend_mode"
    ): "KV is handed over through host memory: `pd_buffer_size` bounds it, and `pd_timeout_ms` the wait",
    "transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device": "there is no NIXL: KV travels over TCP",
    (
        "enable_xpyd enable_nixl nixl_role nixl_peer_host nixl_peer_port nixl_receiver_port nixl_peer_init_port "
        "nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port"
    ): "older names: `enable_pd` and the keys that begin with `pd_` have taken their place",
    "enable_p2p p2p_host p2p_init_ports p2p_lookup_ports peer_init_ports peer_lookup_ports": (
        "engines do not look for each other: `peers` names those that are read"
    ),
    (
        "enable_controller lmcache_instance_id controller_url controller_pull_url controller_reply_url "
        "lmcache_worker_port lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time "
        "lmcache_worker_heartbeat_time"
    ): "there is no controller: no port is opened and nothing is reported to one",
    (
        "enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str"
    ): "there is no blending: only prefixes of a prompt are found again",
    "internal_api_server_include_index_list internal_api_server_socket_path_prefix script_allowed_imports": (
        "the administration server is the scheduler's only, listens on a port, and runs no scripts"
    ),
    "remote_config_url app_id": "nothing is fetched from a configuration service",
    "runtime_plugin_locations plugin_locations storage_plugins external_backends": (
        "LMCache's plugins are not loaded: nothing is stored in their backends"
    ),
    "enable_kv_events": "events come with vLLM's own, where its `--kv-events-config` switches them on",
    (
        "enable_chunk_statistics chunk_statistics_auto_start_statistics chunk_statistics_strategy "
        "chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks"
    ): "there are no chunk statistics: vLLM's `/metrics` has ours, and `record_trace` notes which chunks are used",
    "enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode": (
        "hidden states are not stored: only KV is"
    ),
    "py_enable_gc use_gpu_connector_v3": "the engine's Python and GPU settings are left alone",
}
"""Keys that belong together, separated by spaces, and what their absence means."""

NOT_IMPLEMENTED: Final = {key: meaning for keys, meaning in FAMILIES.items() for key in keys.split()}

OTHER_CODECS: Final = frozenset({"cachegen", "kivi"})
"""Values of ``remote_serde`` that LMCache knows and kvstore does not."""

OTHER_SCHEMES: Final = frozenset({"lm", "s3", "fs", "infinistore", "mooncakestore", "blackhole", "audit", "eic"})
"""Schemes of ``remote_url`` that LMCache knows and kvstore does not."""

EXTRA_CONFIG: Final = "extra_config"
EXTRA_CONFIG_KEYS: Final = frozenset({"disk_io_threads", "use_odirect"})
"""What LMCache keeps inside ``extra_config`` and kvstore has as keys of its own."""

UNPREFIXED: Final = frozenset({"discard_partial_chunks", "skip_last_n_tokens"})
"""What LMCache reads from vLLM's extra config without a prefix."""

_SAME_HERE: Final[dict[str, object]] = {"py_enable_gc": True}


def loses_nothing(key: str, value: object) -> bool:
    """Whether ignoring this value changes nothing: the feature is switched off, or kvstore does just that."""
    return not value or value == _SAME_HERE.get(key)
