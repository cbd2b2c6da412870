"""Stand-ins for vLLM's configuration, with the fields that the adapter reads."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvstore.config.schema import StoreConfig

BLOCK = 16
CONFIG = StoreConfig(chunk_size=4 * BLOCK)


def spec(block_size: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=torch.float32)


def cache_config(*found: KVCacheGroupSpec) -> KVCacheConfig:
    found = found or (KVCacheGroupSpec(["layer.0"], spec()),)
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=list(found))


def vllm_config(
    *, policy: str = "recompute", consumer: bool = True, dcp: int = 1, pcp: int = 1, sleep: bool = False
) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=consumer, is_kv_producer=True, kv_load_failure_policy=policy),
        model_config=SimpleNamespace(enable_sleep_mode=sleep, use_mla=False),
        cache_config=SimpleNamespace(mamba_cache_mode="align"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp, use_ubatching=False
        ),
    )


def configured(transfer: KVTransferConfig, events: KVEventsConfig | None = None, *, drafts: bool = False) -> Any:
    return SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=events,
        model_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(use_ubatching=drafts),
        speculative_config=SimpleNamespace(use_eagle=lambda: True) if drafts else None,
    )


def worker_config(*, rank: int = 0, tp: int = 1, pp: int = 1, draft: str | None = None) -> Any:
    """Return a worker's configuration with the named fields."""
    parallel = SimpleNamespace(
        rank=rank,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        world_size=tp * pp,
        data_parallel_size=1,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden": 8}), dtype=torch.float32, quantization=None
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=parallel,
        speculative_config=draft and SimpleNamespace(model=draft),
    )


def windowed() -> KVCacheConfig:
    window = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=3 * BLOCK
    )
    return cache_config(KVCacheGroupSpec(["layer.0"], window))


def mamba(mode: str = "align") -> MambaSpec:
    return MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode=mode)


def hybrid() -> KVCacheConfig:
    return cache_config(KVCacheGroupSpec(["layer.0"], spec()), KVCacheGroupSpec(["layer.1"], mamba()))


def moved(name: str, *modules: str) -> Any:
    """Return the object of this name, from the first of the modules that has it."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


def make_arg_parser(parser: Any) -> Any:
    """Return the parser of ``vllm serve``."""
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")  # the second since 0.33
    return moved("make_arg_parser", *places)(parser)
