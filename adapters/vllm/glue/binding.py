"""The KV caches that vLLM registers, as blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import vllm
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvstore.adapters.vllm.glue.groups import block_tokens_of, is_grouped, kind_of, model_groups, stored_groups
from kvstore.adapters.vllm.requests.blocks import NULL_BLOCK
from kvstore.model.errors import LayoutError
from kvstore.model.groups import GroupKind
from kvstore.paged.binding import bind_groups, bind_paged_kv
from kvstore.paged.grouped import GroupedPagedKV
from kvstore.paged.planes import HeadedPages, find_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    from kvstore.model.groups import Groups
    from kvstore.paged.base import PagedKV
    from kvstore.paged.planes import LayerCache


def hold_nothing(kv_caches: Mapping[str, LayerCache]) -> bool:
    """Tell if there is no cache yet, as in a profiling run."""
    parts = [part for cache in kv_caches.values() for part in ([cache] if isinstance(cache, torch.Tensor) else cache)]
    return not any(part.numel() for part in parts)


def paged_kv_of(
    kv_caches: Mapping[str, LayerCache], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, chunk_size: int
) -> PagedKV:
    """Return the registered caches as blocks, each layer once.

    Raises:
        LayoutError: an unknown layout, or per-token state outside the registered tensors.
    """
    groups = stored_groups(kv_cache_config)
    how = _How(kv_cache_config.num_blocks, chunk_size, _packing(vllm_config, kv_cache_config))
    if not is_grouped(kv_cache_config):
        return _bind(kv_caches, groups[0], how)
    full = [number for number, group in enumerate(groups) if kind_of(group.kv_cache_spec) is GroupKind.FULL]
    how = how._replace(piece_bytes=_piece_bytes(kv_cache_config, full, chunk_size))
    bound: list[PagedKV | None] = []
    for group in groups:
        bound.append(_bind(kv_caches, group, how) if group.layer_names else None)
        how = how._replace(beside=how.beside or bound[-1])
    return bind_groups(bound, full, block_tokens=block_tokens_of(kv_cache_config), chunk_tokens=chunk_size)


class _How(NamedTuple):
    """Parameters for binding groups; on a device they share the buffers of the first, which hold any chunk or part."""

    num_blocks: int
    chunk_size: int
    packing: str
    piece_bytes: int = 0
    beside: PagedKV | None = None


def _piece_bytes(kv_cache_config: KVCacheConfig, full: Sequence[int], chunk_size: int) -> int:
    """Return the largest size of a chunk or a part of a checkpoint on this worker, in bytes."""
    groups = stored_groups(kv_cache_config)
    block_bytes = [sum(_content_bytes(_spec_of(group, name)) for name in group.layer_names) for group in groups]
    blocks = [chunk_size // int(group.kv_cache_spec.block_size) for group in groups]
    in_chunk = sum(block_bytes[number] * blocks[number] for number in full)
    return in_chunk or max(block_bytes) * (chunk_size // block_tokens_of(kv_cache_config))


def page_heads_of(
    kv_caches: Mapping[str, LayerCache], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, chunk_size: int
) -> HeadedPages:
    """Locate the KV heads in the pages of a model of one group.

    Raises:
        LayoutError: the shapes do not determine them.
    """
    (group,) = stored_groups(kv_cache_config)
    specs = {name: _spec_of(group, name) for name in group.layer_names}
    return find_heads(
        {name: kv_caches[name] for name in specs},
        max(int(spec.num_kv_heads) for spec in specs.values() if isinstance(spec, AttentionSpec)),
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=int(group.kv_cache_spec.block_size),
        chunk_tokens=chunk_size,
        packing=_packing(vllm_config, kv_cache_config),
    )


def groups_of(paged: PagedKV, kv_cache_config: KVCacheConfig) -> Groups | None:
    """Return the groups that a worker keeps, with their bytes; None for one group that keeps all tokens."""
    return model_groups(kv_cache_config, paged.block_bytes) if isinstance(paged, GroupedPagedKV) else None


def _bind(kv_caches: Mapping[str, LayerCache], group: KVCacheGroupSpec, how: _How) -> PagedKV:
    """Bind the layers of one group."""
    missing = [name for name in group.layer_names if name not in kv_caches]
    if missing:
        raise LayoutError(f"vLLM registered no KV cache for layer {missing[0]}: not supported")
    specs = {name: _spec_of(group, name) for name in group.layer_names}
    is_state = any(isinstance(spec, MambaSpec) for spec in specs.values())
    paged = bind_paged_kv(
        {name: _content(name, kv_caches[name], spec) for name, spec in specs.items()},
        num_blocks=how.num_blocks,
        block_tokens=int(group.kv_cache_spec.block_size),
        chunk_tokens=how.chunk_size,
        reserved_blocks=NULL_BLOCK + 1,
        packing="" if is_state else how.packing,
        has_channels=not any(isinstance(spec, MLAAttentionSpec | MambaSpec) for spec in specs.values()),
        beside=how.beside,
        piece_bytes=how.piece_bytes,
    )
    for (name, spec), page_bytes in zip(specs.items(), paged.layout.page_bytes, strict=True):
        reached_bytes = page_bytes * paged.layout.planes
        if reached_bytes != _content_bytes(spec):
            raise LayoutError(
                f"layer {name}: a block has {_content_bytes(spec)} bytes, but the registered tensor has "
                f"{reached_bytes}: state outside the tensor cannot be stored"
            )
    return paged


def _spec_of(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _content_bytes(spec: KVCacheSpec) -> int:
    return int(spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.unpadded_page_size_bytes)


def _content(name: str, cache: LayerCache, spec: KVCacheSpec) -> LayerCache:
    """Return a layer's cache without the padding behind a state, which vLLM extends to a page of attention."""
    if not isinstance(spec, MambaSpec):
        return cache
    if not isinstance(cache, torch.Tensor):
        raise LayoutError(f"layer {name}: its states are registered as {len(cache)} tensors: not supported")
    return cache.view(torch.uint8)[..., : _content_bytes(spec)]  # never a copy, which would not follow the model


def _packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the packing of blocks, which on CPUs depends on the instruction set; empty elsewhere."""
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
