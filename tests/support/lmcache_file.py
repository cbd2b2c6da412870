"""A configuration as users of LMCache write it, with every key that is often used."""

from __future__ import annotations

EVERYTHING = """\
chunk_size: 512
local_cpu: true
max_local_cpu_size: 1.5
local_disk: "file:///var/tmp/lmcache/"
max_local_disk_size: 3
remote_url: "redis://user:secret@cache:6379"
remote_serde: "naive"
use_layerwise: true
save_decode_cache: true
save_unfull_chunk: true
pre_caching_hash_algorithm: sha256_cbor
cache_policy: FIFO
blocking_timeout_secs: 5
min_retrieve_tokens: 64
enable_async_loading: true
priority_limit: 3
lookup_timeout_ms: 3000
pin_timeout_sec: 300
numa_mode: auto
local_cpu_use_hugepages: true
reserve_local_cpu_size: 2
enable_pd: false
pd_role: sender
pd_peer_host: 10.0.0.1
pd_peer_init_port: [7300]
pd_peer_alloc_port: [7400]
pd_proxy_host: 10.0.0.2
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_bidirectional: false
enable_p2p: true
enable_controller: true
lmcache_instance_id: one
controller_pull_url: "localhost:9001"
enable_blending: false
blend_min_tokens: 256
internal_api_server_enabled: true
internal_api_server_host: 127.0.0.1
internal_api_server_port_start: 7001
extra_config:
  use_odirect: true
  disk_io_threads: 8
  save_only_first_rank: true
  ping_timeout: 3
"""
