"""LMCache's keys that have no effect here, each with the consequence.

The names are those of LMCache 0.5 and its older synonyms. Each one is accepted with one warning, so that an existing
file can be used unchanged. When kvstore gains a key, it moves from this table to the schema.
"""

from __future__ import annotations

from typing import Final

FAMILIES: Final[dict[str, str]] = {
    "remote_storage_plugins audit_actual_remote_url external_lookup_client mp_host mp_port": (
        "LMCache's servers and plugins are not used: `remote_url` names the tier that hosts share"
    ),
    "pre_caching_hash_algorithm": "keys are always sha256 and equal in every process, whatever PYTHONHASHSEED is",
    "cost_aware_half_life_seconds cost_aware_ewma_alpha": (
        "there is no such policy: `cache_policy: ADAPTIVE` adapts by itself"
    ),
    "lookup_server_worker_ids enable_scheduler_bypass_lookup hit_miss_ratio": (
        "the scheduler answers lookups from its own memory and asks no other process except a remote tier"
    ),
    "pin_timeout_sec pin_check_interval_sec": (
        "a chunk is held while a request needs it, and a pin lasts for `pin_max_secs`"
    ),
    "retrieve_locations store_location": "every configured tier is read and written",
    "local_disk_path_sharding": "kvstore divides the folder itself",
    (
        "gds_path gds_path_sharding gds_buffer_size use_gds gds_backend cufile_buffer_size maru_path maru_pool_size"
    ): "there is no GPUDirect or CXL storage: chunks go through CPU memory to `local_disk`",
    "numa_mode": "the operating system places memory: bind the process with numactl where it matters",
    "local_cpu_use_hugepages": "the operating system chooses the page size",
    "reserve_local_cpu_size": (
        "a pool that does not fit in memory is refused at start: lower `max_local_cpu_size` to leave more memory free"
    ),
    (
        "enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio "
        "lazy_memory_step_ratio lazy_memory_safe_size"
    ): "all of `max_local_cpu_size` is reserved at start",
    "pd_peer_alloc_port pd_peer_query_port": "one port serves all purposes: `pd_peer_init_port`",
    "pd_proxy_host pd_proxy_port pd_skip_proxy_notification": (
        "engines do not talk to the proxy: their answers tell it what it needs"
    ),
    (
        "pd_buffer_device pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec "
        "pd_max_prefill_len pd_backend_mode"
    ): "KV is handed over through host memory: `pd_buffer_size` bounds it, and `pd_timeout_ms` the wait",
    "nixl_backends nixl_buffer_size nixl_buffer_device": "NIXL uses UCX, and the buffer of `pd_buffer_size`",
    (
        "enable_xpyd enable_nixl nixl_role nixl_peer_host nixl_peer_port nixl_receiver_port nixl_peer_init_port "
        "nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port"
    ): "older names: use `enable_pd` and the keys that begin with `pd_`",
    "enable_p2p p2p_host p2p_init_ports p2p_lookup_ports peer_init_ports peer_lookup_ports": (
        "engines do not search for each other: list those to read from in `peers`"
    ),
    (
        "enable_controller lmcache_instance_id controller_url controller_pull_url controller_reply_url "
        "lmcache_worker_port lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time "
        "lmcache_worker_heartbeat_time"
    ): "there is no controller: no port is opened and nothing is reported to one",
    (
        "enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str"
    ): "there is no blending: only prefixes of a prompt are reused",
    "internal_api_server_include_index_list internal_api_server_socket_path_prefix script_allowed_imports": (
        "only the scheduler has an administration server; it listens on a port and runs no scripts"
    ),
    "remote_config_url app_id": "no configuration service is asked",
    "runtime_plugin_locations plugin_locations storage_plugins external_backends": (
        "LMCache's plugins are not loaded: nothing is stored in their backends"
    ),
    "enable_kv_events": "events are part of vLLM's own, which `--kv-events-config` switches on",
    (
        "enable_chunk_statistics chunk_statistics_auto_start_statistics chunk_statistics_strategy "
        "chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks"
    ): "there are no chunk statistics: see kvstore's metrics in vLLM's `/metrics`, and `record_trace`",
    "enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode": (
        "hidden states are not stored: only KV is"
    ),
    "py_enable_gc use_gpu_connector_v3": "kvstore leaves the engine's Python and GPU settings alone",
}
"""Related keys, separated by spaces, and the consequence of their absence."""

NOT_IMPLEMENTED: Final = {key: meaning for keys, meaning in FAMILIES.items() for key in keys.split()}

OTHER_CODECS: Final = frozenset({"cachegen", "kivi"})
"""Values of ``remote_serde`` that LMCache knows and kvstore does not."""

OTHER_SCHEMES: Final = frozenset({"lm", "fs", "infinistore", "blackhole", "audit", "eic"})
"""Schemes of ``remote_url`` that LMCache knows and kvstore does not."""

EXTRA_CONFIG: Final = "extra_config"
EXTRA_CONFIG_KEYS: Final = frozenset({"disk_io_threads", "use_odirect"})
"""Settings inside LMCache's ``extra_config`` that are keys here."""

UNPREFIXED: Final = frozenset({"discard_partial_chunks", "skip_last_n_tokens"})
"""Keys that LMCache reads from vLLM's extra config without a prefix."""

_SAME_HERE: Final[dict[str, object]] = {"py_enable_gc": True}


def loses_nothing(key: str, value: object) -> bool:
    """Tell if ignoring this value has no effect, because it disables a feature or matches kvstore's behaviour."""
    return not value or value == _SAME_HERE.get(key)
