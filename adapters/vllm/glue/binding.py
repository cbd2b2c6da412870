"""The KV caches that vLLM registers, as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs, iter_layer_specs

from kvstore.adapters.vllm.glue.support import block_tokens_of
from kvstore.adapters.vllm.requests.blocks import NULL_BLOCK
from kvstore.errors import LayoutError
from kvstore.paged.binding import bind_paged_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvstore.paged.base import LayerCache, PagedKV


def hold_nothing(kv_caches: Mapping[str, LayerCache]) -> bool:
    """Whether there is no cache yet, as in a profiling run."""
    parts = [part for cache in kv_caches.values() for part in ([cache] if isinstance(cache, torch.Tensor) else cache)]
    return not any(part.numel() for part in parts)


def paged_kv_of(
    kv_caches: Mapping[str, LayerCache], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, chunk_size: int
) -> PagedKV:
    """The registered caches as blocks, each layer once.

    Raises:
        LayoutError: an unknown layout, or per-token state outside the registered tensors.
    """
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
                f"{reached_bytes}: state outside it would be lost, which is not supported"
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
