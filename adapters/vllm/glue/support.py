"""Refuses at start the versions, flags, parallelism and models that cannot be served correctly."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import vllm
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, SlidingWindowSpec, iter_layer_specs

from kvstore.adapters.vllm.flag import CONNECTOR_FLAG
from kvstore.adapters.vllm.glue.capabilities import FOUND, SLEEPS
from kvstore.adapters.vllm.glue.groups import block_tokens_of, has_states, is_grouped, kind_of, stored_groups
from kvstore.adapters.vllm.glue.interface import TESTED, is_tested
from kvstore.model.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvstore.config import StoreConfig

logger = logging.getLogger(__name__)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> None:
    """Refuse at start what cannot be served correctly.

    Raises:
        ConfigError: a version, flag or parallelism that is not supported; the message says what to do.
        LayoutError: a KV cache that cannot be stored.
    """
    check_flags(vllm_config, config)
    _check_groups(vllm_config, kv_cache_config, config)
    if vllm_config.kv_transfer_config.is_kv_consumer and config.enable_async_loading is False:
        _check_window(kv_cache_config)
    _check_sizes(block_tokens_of(kv_cache_config), config)


def check_flags(vllm_config: VllmConfig, config: StoreConfig) -> None:
    """Do the part of ``check_supported`` that is possible before the model is loaded.

    Raises:
        ConfigError: a version, flag or parallelism that is not supported; the message says what to do.
    """
    _check_version(config)
    _check_sleep(vllm_config, config)
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism splits a block over ranks, which is not supported: set "
            "--decode-context-parallel-size and --prefill-context-parallel-size to 1"
        )
    if vllm_config.kv_transfer_config.is_kv_consumer:
        _check_loads(vllm_config, config)


def log_limits(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Warn, in the scheduler's process, of limits under which vLLM is served."""
    if not is_tested(vllm.__version__):
        logger.warning("%s. It has everything that kvstore uses, so it is served", _untested())
    if (reason := stores_nothing(vllm_config, kv_cache_config)) is not None:
        logger.warning("nothing is cached: %s", reason)
    elif (reason := _stores_little(kv_cache_config)) is not None:
        logger.warning("little is cached: %s", reason)


def _check_version(config: StoreConfig) -> None:
    if not config.allow_untested_vllm and not is_tested(vllm.__version__):
        raise ConfigError(f"{_untested()}: install one of these, or set allow_untested_vllm to true")


def _untested() -> str:
    return f"vLLM {vllm.__version__} has not been tested with this version of kvstore; {', '.join(TESTED)} have"


def _check_sleep(vllm_config: VllmConfig, config: StoreConfig) -> None:
    """Refuse sleep where vLLM does not announce it, because it would free device memory during transfers."""
    model = vllm_config.model_config
    may_sleep = model.enable_sleep_mode or getattr(model, "enable_cumem_allocator", False)
    if not may_sleep or FOUND[SLEEPS]:
        return
    if config.max_local_gpu_size:
        raise ConfigError(
            "max_local_gpu_size is set, and vLLM may sleep: it would take the memory away while kvstore uses it. Start "
            "vLLM without --enable-sleep-mode, unset max_local_gpu_size, or use vLLM 0.33"
        )
    if model.enable_sleep_mode and not vllm.platforms.current_platform.is_cpu():
        raise ConfigError(
            f"vLLM {vllm.__version__} may sleep, and does not tell kvstore when: it would take memory away that copies "
            f"still use. Start vLLM without --enable-sleep-mode, or use vLLM {SLEEPS.since}"
        )


def _check_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig) -> None:
    groups = stored_groups(kv_cache_config)
    if not groups:
        raise LayoutError("this model has no KV cache that can be shared between requests: start vLLM without kvstore")
    for group in groups:
        kind_of(group.kv_cache_spec)  # or it raises
    if not is_grouped(kv_cache_config):
        if len(kv_cache_config.kv_cache_groups) > 1:  # a load that fails would end the engine
            raise LayoutError(
                "only one of this model's KV cache groups can be stored, which is not supported: start vLLM without "
                "kvstore"
            )
        return
    what = "a KV cache of several groups, or with states,"
    if vllm_config.speculative_config is not None:
        raise LayoutError(
            f"{what} is not supported with speculative decoding: start vLLM without --speculative-config, with "
            "--disable-hybrid-kv-cache-manager, or without kvstore"
        )
    if config.local_disk_serde == "int8" or config.remote_codec == "int8":
        raise ConfigError(f"{what} cannot be quantized by the codec int8: use split, lz4 or none")


def stores_nothing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return the reason why nothing of this model can be stored as vLLM was started; None if something can."""
    if has_states(kv_cache_config) and vllm_config.cache_config.mamba_cache_mode == "none":
        return "this model keeps states, and vLLM keeps none for a prefix: start it with --enable-prefix-caching"
    if vllm_config.model_config.use_mla and vllm.platforms.current_platform.is_cpu():
        return "on a CPU vLLM computes prompts of models with MLA from their first token only: start it without kvstore"
    return None


def _stores_little(kv_cache_config: KVCacheConfig) -> str | None:
    """Return the reason why few prompts of this model leave a state that can be stored; None if all can."""
    unit_tokens = getattr(kv_cache_config, "hash_block_size", None)  # 0.30 does not say
    block_tokens = block_tokens_of(kv_cache_config)
    if unit_tokens is None or unit_tokens >= block_tokens or not has_states(kv_cache_config):
        return None
    return (
        f"this model keeps states, and vLLM keeps those of every {unit_tokens} tokens, where kvstore stores those at "
        f"the ends of blocks of {block_tokens}: start vLLM without --prefix-match-unit"
    )


def _check_loads(vllm_config: VllmConfig, config: StoreConfig) -> None:
    """Refuse settings with which a failed load would end its request, or vLLM deliver tokens computed on garbage."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise ConfigError(
            f'kv_load_failure_policy is "{policy}": a chunk that cannot be loaded would end its request with an error. '
            f"Start vLLM with {CONNECTOR_FLAG}"
        )
    if config.enable_async_loading is not False:
        return
    slow = {
        "local_disk": config.local_disk,
        "remote_url": config.shared_url,
        "enable_pd": config.enable_pd,
        "peers": config.peers,
    }
    if any(slow.values()) and vllm_config.scheduler_config.async_scheduling:
        keys = " and ".join(key for key, value in slow.items() if value)
        raise ConfigError(
            f"{keys} is set, enable_async_loading is false, and vLLM schedules asynchronously: vLLM would deliver a "
            "token that it computed before it learned that a chunk could not be read. Leave enable_async_loading at "
            "auto, or start vLLM with --no-async-scheduling"
        )


def _check_window(kv_cache_config: KVCacheConfig) -> None:
    """Refuse loads within steps for windowed layers: vLLM cannot recompute what such a load failed to bring."""
    if frees_blocks(kv_cache_config):
        raise ConfigError(
            "enable_async_loading is false, and the layers of this model attend to a window: if a load within a step "
            "fails, vLLM cannot recompute it, because it has freed the blocks before. Set it to auto"
        )


def _check_sizes(block_tokens: int, config: StoreConfig) -> None:
    if 0 < config.max_tokens_per_load < block_tokens:
        raise ConfigError(
            f"max_tokens_per_load {config.max_tokens_per_load} is less than vLLM's block size {block_tokens}, so "
            "nothing would be loaded: raise it, or set it to 0 for no limit"
        )


def frees_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Tell if vLLM takes blocks from running requests once the blocks have left their layers' window.

    vLLM puts the null block in their place, also when it takes a prefix from its own cache or from a connector.
    """
    if is_grouped(kv_cache_config):
        return True
    specs = iter_layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    return any(isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs)


def overwrites_early(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Tell if a worker may overwrite blocks of preempted requests before it notifies the connector.

    Model runner V2 does when it receives a step: it zeroes blocks where layers differ in precision, and with several
    groups of layers it copies some. Where vLLM does not say, it may do either.
    """
    if not is_tested(vllm.__version__):
        return True
    if not getattr(vllm_config, "use_v2_model_runner", True):
        return False
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True)) or is_grouped(kv_cache_config)
