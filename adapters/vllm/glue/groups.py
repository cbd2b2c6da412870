"""The KV cache groups of vLLM's configuration, as this library knows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvstore.model.errors import LayoutError
from kvstore.model.groups import Group, GroupKind, Groups
from kvstore.model.layout import round_up

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

    from kvstore.config import StoreConfig


def group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return vLLM's numbers of the groups that are stored; the others are scratch space of single requests."""
    return tuple(kv_cache_config.prefix_cacheable_group_ids)


def stored_groups(kv_cache_config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """Return the groups that are stored; our numbers of them are their positions here."""
    return [kv_cache_config.kv_cache_groups[number] for number in group_ids(kv_cache_config)]


def stored_specs(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """Return the specs of the layers of all groups that are stored."""
    return [spec for group in stored_groups(kv_cache_config) for spec in iter_layer_specs(group.kv_cache_spec)]


def is_grouped(kv_cache_config: KVCacheConfig) -> bool:
    """Tell if there are several groups, or one that keeps states; blocks are then moved as rows."""
    specs = stored_specs(kv_cache_config)
    return len(group_ids(kv_cache_config)) > 1 or not all(isinstance(spec, AttentionSpec) for spec in specs)


def has_states(kv_cache_config: KVCacheConfig) -> bool:
    """Tell if a group keeps a state of Mamba, linear attention or a convolution."""
    return any(kind_of(group.kv_cache_spec) is GroupKind.STATE for group in stored_groups(kv_cache_config))


def block_tokens_of(kv_cache_config: KVCacheConfig) -> int:
    """Return the number of tokens after which a block of every group ends."""
    return math.lcm(*(int(group.kv_cache_spec.block_size) for group in stored_groups(kv_cache_config)))


def fitting_chunk_size(kv_cache_config: KVCacheConfig, config: StoreConfig) -> int:
    """Return ``chunk_size``, rounded up to whole blocks of every group."""
    return round_up(config.chunk_size, block_tokens_of(kv_cache_config))


def announced_group(kv_cache_config: KVCacheConfig) -> int | None:
    """Return vLLM's number of the group whose blocks KV events name: one that keeps all tokens.

    None if there is none, or if vLLM's block hashes cover other numbers of tokens than a block of all groups.
    """
    if not is_grouped(kv_cache_config):
        return 0
    block_tokens = block_tokens_of(kv_cache_config)
    if getattr(kv_cache_config, "hash_block_size", None) not in {None, block_tokens}:  # 0.30 does not say
        return None
    groups = zip(group_ids(kv_cache_config), stored_groups(kv_cache_config), strict=True)
    return next((number for number, group in groups if kind_of(group.kv_cache_spec) is GroupKind.FULL), None)


def kind_of(spec: KVCacheSpec) -> GroupKind:
    """Return the kind of KV that layers with this specification keep.

    Raises:
        LayoutError: the layers differ in kind, equal prefixes need not have equal KV, or the kind is unknown.
    """
    kinds = {_kind_of_layer(layer) for layer in iter_layer_specs(spec)}
    if len(kinds) != 1:
        raise LayoutError(
            f"layers of one KV cache group keep different kinds of KV: {sorted(kind.value for kind in kinds)}"
        )
    return kinds.pop()


def model_groups(kv_cache_config: KVCacheConfig, block_bytes: Sequence[int]) -> Groups:
    """Return all stored groups of a model, given the bytes of a block of each on this rank."""
    groups = []
    for group, size_bytes in zip(stored_groups(kv_cache_config), block_bytes, strict=True):
        spec = group.kv_cache_spec
        groups.append(Group(kind_of(spec), int(spec.block_size), size_bytes, _span_tokens(spec)))
    return Groups(tuple(groups))


def _kind_of_layer(spec: KVCacheSpec) -> GroupKind:
    if getattr(spec, "non_causal", False):
        raise LayoutError(
            "prompt tokens of this model attend to later tokens, so equal prefixes need not have equal KV: "
            "start vLLM without kvstore"
        )
    if isinstance(spec, MambaSpec):
        return GroupKind.STATE
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.WINDOW
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.LOCAL
    if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        return GroupKind.FULL
    raise LayoutError(
        f"a layer's KV cache is a {type(spec).__name__}, in which equal prefixes need not have equal KV: not supported"
    )


def _span_tokens(spec: KVCacheSpec) -> int:
    """Return the span of the layer that attends to the most tokens."""
    return max(_span_tokens_of_layer(layer) for layer in iter_layer_specs(spec))


def _span_tokens_of_layer(spec: KVCacheSpec) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0
