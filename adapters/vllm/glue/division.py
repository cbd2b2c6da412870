"""Division of a worker's KV heads for engines of other tensor-parallel sizes; refused where heads are not separable."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvstore.adapters.vllm.glue.binding import page_heads_of
from kvstore.adapters.vllm.glue.capabilities import COUNTS_REPLICAS, FOUND, kv_replicas
from kvstore.adapters.vllm.glue.groups import is_grouped, stored_specs
from kvstore.adapters.vllm.glue.parallel import folder_of, rank_of, shard_name
from kvstore.model.errors import LayoutError
from kvstore.model.heads import Division, Part, heads_of, shards_with

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.config import StoreConfig
    from kvstore.paged.base import PagedKV
    from kvstore.paged.planes import HeadedPages, LayerCache

logger = logging.getLogger(__name__)

_WHOLE_HEADS: Final = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of ``cache_dtype`` with which the bytes of a head are self-contained: no scales per token, no packing."""


class _Engine(NamedTuple):
    """This worker's configuration."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    config: StoreConfig


def divisions_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: StoreConfig,
    kv_caches: Mapping[str, LayerCache],
    paged: PagedKV,
) -> tuple[Division, ...]:
    """Return one for each size in ``reshard_from`` but our own; none, with a warning, if the layout forbids it."""
    own_size = int(vllm_config.parallel_config.tensor_parallel_size)
    sizes = [size for size in config.reshard_from if size != own_size]
    if not sizes:
        return ()
    try:
        total = _require_heads(vllm_config, kv_cache_config)
        pages = page_heads_of(kv_caches, kv_cache_config, vllm_config, config.chunk_size)
        return _divisions(sizes, total, _Engine(vllm_config, kv_cache_config, config), pages, paged)
    except LayoutError as error:
        if rank_of(vllm_config) == 0:
            logger.warning("reshard_from is ignored: %s", error)
        return ()


def _require_heads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the model's number of KV heads, which tensor parallelism divides among the ranks.

    Raises:
        LayoutError: part of the KV cache is divided differently, or not at all.
    """
    model, dtype = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    if is_grouped(kv_cache_config):
        raise LayoutError("this model has windows or states, which ranks do not divide by KV heads")
    specs = stored_specs(kv_cache_config)
    if any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        raise LayoutError("with MLA there are no KV heads to divide: all ranks hold the same")
    if vllm_config.speculative_config is not None:
        raise LayoutError("the layers of a draft model may be divided differently from those of its target")
    if dtype not in _WHOLE_HEADS or getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(f"with kv_cache_dtype {dtype} scales belong to KV heads, or to those of one rank")
    total = int(model.get_total_num_kv_heads())
    each = max(1, total // int(vllm_config.parallel_config.tensor_parallel_size))
    arch = getattr(model, "model_arch_config", None)  # 0.30 has none
    differ = getattr(arch, "per_layer_overrides", None) or getattr(model.hf_config, "block_configs", None)
    if differ or any(int(spec.num_kv_heads) != each for spec in specs):
        raise LayoutError("its layers differ in their number of KV heads")
    return total


def _divisions(
    sizes: Sequence[int], total: int, engine: _Engine, pages: HeadedPages, paged: PagedKV
) -> tuple[Division, ...]:
    if pages.layout(pages.num_heads) != paged.layout:  # the layouts of other sizes would be wrong, too
        raise LayoutError("its number of KV heads does not match its layout")
    return tuple(_division(size, total, engine, pages) for size in sizes)


def _division(size: int, total: int, engine: _Engine, pages: HeadedPages) -> Division:
    """Return the division of this worker's KV for an engine of one size.

    Raises:
        LayoutError: the KV cannot be divided.
    """
    vllm_config, kv_cache_config, config = engine
    parallel = vllm_config.parallel_config
    pp_size = int(parallel.pipeline_parallel_size)
    pp_rank, tp_rank = divmod(rank_of(vllm_config), int(parallel.tensor_parallel_size))
    num_workers = int(parallel.tensor_parallel_size) * pp_size
    replicas = kv_replicas(kv_cache_config)
    num_own = int(parallel.tensor_parallel_size) // replicas
    heads = heads_of(tp_rank // replicas, num_own, total)
    num_shards = size // _replicas_at(size, kv_cache_config)
    layout = pages.layout(max(1, total // num_shards))
    parts = []
    for shard in shards_with(heads, num_shards, total):
        rank = pp_rank * size + shard * (size // num_shards)
        folders = [folder_of(vllm_config, Path(folder), rank, size * pp_size) for folder in config.local_disk_folders]
        name = shard_name(pp_rank, pp_size, shard, num_shards)
        sends_to = rank * num_workers // (size * pp_size)
        needed = [shards_with(heads_of(own, num_own, total), num_shards, total) for own in range(num_own)]
        num_readers = replicas * sum(shard in shards for shards in needed)
        held = heads_of(shard, num_shards, total)
        parts.append(Part(rank, name, layout, held, tuple(folders), sends_to, num_readers))
    stored = config.local_disk_serde, config.encryption_keys
    return Division(size, tuple(parts), pages.layout(len(heads)), heads, pages.rows, *stored)


def _replicas_at(size: int, kv_cache_config: KVCacheConfig) -> int:
    """Return the number of ranks with the same KV in an engine of that size, as vLLM counts them."""
    specs = stored_specs(kv_cache_config)
    limits = [getattr(spec, "max_tp_shards", None) for spec in specs] if FOUND[COUNTS_REPLICAS] else [None]
    known = [limit for limit in limits if limit]
    return max(1, size // max(known)) if len(known) == len(limits) else 1
