"""Caches as vLLM itself allocates them, in all its layouts, moved there and back through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.layouts import Paged, put_blocks, snapshot, take_blocks
from support.vllm_objects import moved
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvstore.adapters.vllm.glue.binding import paged_kv_of
from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.model.errors import InvalidCallError, LayoutError
from kvstore.model.keys import Namespace
from kvstore.paged.planes import LayerCache
from kvstore.transfer.mover import as_block_ids

pytestmark = pytest.mark.vllm

get_kv_cache_config_from_groups = moved(
    "get_kv_cache_config_from_groups", "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
)  # the second since 0.33

BLOCKS, BLOCK = 10, 4
SOURCES, TARGETS = [7, 4, 9, 3, 8, 5], [2, 9, 3, 7, 1, 6]  # a chunk of four blocks, and a tail of two
LLAMA = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=4, dtype=torch.bfloat16)
FP8 = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=4, dtype=torch.uint8)
DRAFT = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=6, dtype=torch.float32)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def packed_mla(state_bytes: int, alignment: int | None = None) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        state_content_bytes=state_bytes,
        alignment=alignment,
    )


MODELS: dict[str, dict[str, KVCacheSpec]] = {
    "llama": {"0": LLAMA, "1": LLAMA},
    "fp8": {"0": FP8, "1": FP8},
    "llama with a draft": {"0": LLAMA, "1": LLAMA, "draft": DRAFT},
    "MLA": {"0": MLA},
    "fp8_ds_mla": {"0": packed_mla(656), "1": packed_mla(656)},
    "nvfp4_ds_mla, padded": {"0": packed_mla(352, alignment=1024), "1": packed_mla(352, alignment=1024)},
    "MLA with a smaller draft": {"0": packed_mla(656), "draft": packed_mla(352)},
}
LAYOUTS = [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC]


def vllm_config(layout: KVCacheLayout) -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 64),
    )


def cache_config(layers: dict[str, KVCacheSpec], layout: KVCacheLayout) -> KVCacheConfig:
    specs = list(layers.values())
    alike = all(spec == specs[0] for spec in specs)
    spec = specs[0] if alike else UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers)
    return get_kv_cache_config_from_groups(vllm_config(layout), [KVCacheGroupSpec(list(layers), spec)], 1 << 30)


def allocate(config: KVCacheConfig, layout: KVCacheLayout, kernel_block: int | None = None) -> dict[str, LayerCache]:
    caches: dict[str, LayerCache] = allocate_kv_cache(
        config, torch.device("cpu"), layout, kernel_block and [kernel_block]
    )
    return caches


def check_there_and_back(paged: Paged, config: KVCacheConfig, layout: KVCacheLayout) -> None:
    bound = paged_kv_of(paged.caches, config, vllm_config(layout), 4 * BLOCK)
    tokens = list(range(len(SOURCES) * BLOCK))
    paged.fill(seed=1)
    stored = take_blocks(paged, SOURCES)
    with CacheEngine(bound, Namespace({"layout": str(layout)}), EngineOptions(2 * bound.layout.slot_bytes)) as engine:
        assert engine.store(tokens, slot_mapping=slots_of(SOURCES)) == len(tokens)
        paged.fill(seed=2)
        put_blocks(paged, TARGETS, stored)
        wanted = snapshot(paged)
        paged.fill(seed=2)
        assert engine.retrieve(tokens, slot_mapping=slots_of(TARGETS)).all()
    assert snapshot(paged) == wanted


def slots_of(blocks: Sequence[int]) -> list[int]:
    return [block * BLOCK + token for block in blocks for token in range(BLOCK)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", MODELS)
def test_as_vllm_allocates_them(model: str, layout: KVCacheLayout) -> None:
    config = cache_config(MODELS[model], layout)
    check_there_and_back(Paged(allocate(config, layout)), config, layout)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=lambda layout: layout.name)  # vLLM splits no others
@pytest.mark.parametrize("model", ["llama", "llama with a draft", "fp8_ds_mla"])
def test_kernel_blocks(model: str, layout: KVCacheLayout) -> None:
    config = cache_config(MODELS[model], layout)
    paged = Paged(allocate(config, layout, BLOCK // 2), ratio=2)
    assert {plane.tensor.shape[0] for plane in paged.planes()} == {2 * BLOCKS}
    check_there_and_back(paged, config, layout)


def test_a_pair_of_tensors_for_each_layer() -> None:
    """HPUs keep the key cache and the value cache apart."""
    config = cache_config(MODELS["llama"], LAYOUTS[0])
    half = (BLOCKS, BLOCK, 3, 4)
    pairs = {name: (torch.zeros(half, dtype=torch.bfloat16), torch.zeros(half, dtype=torch.bfloat16)) for name in "01"}
    check_there_and_back(Paged(dict(pairs)), config, LAYOUTS[0])


def test_the_null_block_is_refused() -> None:
    config = cache_config(MODELS["llama"], LAYOUTS[0])
    paged = paged_kv_of(allocate(config, LAYOUTS[0]), config, vllm_config(LAYOUTS[0]), 4 * BLOCK)
    with pytest.raises(InvalidCallError, match=r"block id 0 is not in 1\.\.9"):
        paged.gather(as_block_ids([3, 0]), np.zeros(paged.layout.payload_bytes(2), np.uint8))


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC], ids=lambda layout: layout.name)
def test_heads_apart_are_refused(layout: KVCacheLayout) -> None:
    config = cache_config(MODELS["llama"], layout)
    with pytest.raises(LayoutError, match=r"layer 0: .*not supported"):
        paged_kv_of(allocate(config, layout), config, vllm_config(layout), 4 * BLOCK)


def test_state_beside_the_tensors_is_refused() -> None:
    config = cache_config(MODELS["llama"], LAYOUTS[0])
    halves = {name: torch.zeros(BLOCKS, 3, BLOCK, 4, dtype=torch.bfloat16) for name in "01"}
    with pytest.raises(LayoutError, match="layer 0: a block has 192 bytes, but the registered tensor has 96"):
        paged_kv_of(halves, config, vllm_config(LAYOUTS[0]), 4 * BLOCK)


def test_a_layer_without_a_cache_is_refused() -> None:
    config = cache_config(MODELS["llama"], LAYOUTS[0])
    caches = allocate(config, LAYOUTS[0])
    del caches["1"]
    with pytest.raises(LayoutError, match="no KV cache for layer 1"):
        paged_kv_of(caches, config, vllm_config(LAYOUTS[0]), 4 * BLOCK)


def test_a_stage_without_layers_of_a_group_counts_blocks_as_the_others_do() -> None:
    """The group whose blocks hold more tokens has no layer here."""
    alone = cache_config({"0": LLAMA}, LAYOUTS[0])
    coarse = KVCacheGroupSpec([], replace(LLAMA, block_size=2 * BLOCK))
    config = replace(alone, kv_cache_groups=[*alone.kv_cache_groups, coarse])
    layout = paged_kv_of(allocate(alone, LAYOUTS[0]), config, vllm_config(LAYOUTS[0]), 4 * BLOCK).layout
    assert (layout.block_tokens, layout.blocks_per_chunk) == (2 * BLOCK, 2)
