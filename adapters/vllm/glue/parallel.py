"""Identity of a worker within its engine: its rank, its part of the KV, its folder and its port."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.distributed.parallel_state import get_node_count, get_world_group
from vllm.utils.network_utils import get_ip

from kvstore.adapters.vllm.glue.capabilities import kv_replicas
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.config import StoreConfig


class Shard(NamedTuple):
    """The part of a model's KV that a worker holds, and the worker's number among those with the same part."""

    name: str
    replica: int


def shard_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Shard:
    """Return the part of the KV that this worker holds."""
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pp_rank, tp_rank = divmod(rank_of(vllm_config), tp_size)
    replicas = kv_replicas(kv_cache_config)
    shard, replica = divmod(tp_rank, replicas)
    return Shard(shard_name(pp_rank, pp_size, shard, tp_size // replicas), replica)


def shard_name(pp_rank: int, pp_size: int, shard: int, num_shards: int) -> str:
    """Return the name of one of the shards of a pipeline stage."""
    return f"pp {pp_rank}/{pp_size} tp {shard}/{num_shards}"


def rank_of(vllm_config: VllmConfig) -> int:
    """Return the number of this worker among those of one replica."""
    parallel = vllm_config.parallel_config
    return int(parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size))


def workers_here(vllm_config: VllmConfig) -> int:
    """Return the number of this replica's workers on this host, if all hosts have as many."""
    parallel = vllm_config.parallel_config
    hosts = get_node_count() if torch.distributed.is_initialized() else 1
    workers = int(parallel.world_size)
    return min(workers, -(-workers * int(parallel.data_parallel_size) // hosts))


def is_first_here() -> bool:
    """Tell if this worker is the first one on its host."""
    return torch.distributed.is_initialized() and get_world_group().local_rank == 0


def host_address() -> str:
    """Return the address of this host as vLLM tells it to others, such as VLLM_HOST_IP."""
    return str(get_ip())


def folder_of(vllm_config: VllmConfig, folder: Path, rank: int | None = None, world_size: int | None = None) -> Path:
    """Return the part of a disk's folder for this worker, or for a rank of an engine with ``world_size`` workers."""
    parallel = vllm_config.parallel_config
    rank, world_size = (parallel.rank, parallel.world_size) if world_size is None else (rank, world_size)
    if parallel.data_parallel_size > 1:
        folder /= f"replica-{parallel.data_parallel_rank}"
    if world_size > 1:
        folder /= f"rank-{rank}-of-{world_size}"
    return folder


def port_of(vllm_config: VllmConfig, config: StoreConfig, rank: int) -> int:
    """Return the port of a rank's worker; workers are counted over all replicas of a data-parallel engine.

    Raises:
        ConfigError: no port is configured for it.
    """
    ports = config.pd_peer_init_port
    parallel = vllm_config.parallel_config
    workers_before = int(parallel.data_parallel_rank) * parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    number = int(workers_before) + rank
    if isinstance(ports, tuple):
        if number >= len(ports):
            raise ConfigError(
                f"pd_peer_init_port lists {len(ports)} ports, but none for worker {number}: add one for each worker"
            )
        return ports[number]
    assert ports is not None
    return ports + number
