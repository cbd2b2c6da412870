"""The parts of vLLM that this adapter uses. The installed vLLM is checked for them, so a new one need not be refused.

A class counts as having an attribute if it, or a parent, declares, annotates or defines it, or if its constructor
mentions it, so no instance has to be created and no source to be read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any, Final, NamedTuple

from kvstore.model.errors import ConfigError

TESTED: Final = ("0.30", "0.31", "0.32")
"""The versions with which the whole matrix of tests was run; docs/versions.md has the figures."""

_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_HOOKS_OF_MIXINS: Final = {"request_finished_all_groups"}
_OPTIONAL_HOOKS: Final = {
    "get_external_cache_hit_sources",
    "has_pending_push_work",
    "restore_kv_caches",
    "unregister_kv_caches",
}


class Use(NamedTuple):
    """A class or function with its parts that are used: attributes of a class, or arguments passed by name."""

    module: str
    name: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_USED: Final[Mapping[str, Mapping[str, str]]] = {
    _BASE: {
        "KVConnectorBase_V1": "_kv_cache_manager bind_connector_metadata get_transfer_results",
        "KVConnectorHandshakeMetadata": "",
        "KVConnectorMetadata": "",
        "KVConnectorRole": "SCHEDULER",
        "KVConnectorTransferResults": "failed_recving",
        "SupportsHMA": "request_finished_all_groups",
        "KVConnectorWorkerMetadata": "aggregate",
    },
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": "_registry register_connector"},
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": "vllm_config metric_types labelnames per_engine_labelvalues observe",
        "KVConnectorStats": "data reset aggregate reduce is_empty",
    },
    "vllm.v1.core.sched.output": {
        "KVConnectorBlockState": "get_block_ids",
        "SchedulerOutput": "num_scheduled_tokens preempted_req_ids kv_connector_block_state",
    },
    "vllm.v1.outputs": {"KVConnectorOutput": "invalid_block_ids kv_connector_worker_meta"},
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheBlocks": "get_block_ids",
        "KVCacheManager": "evict_blocks",
    },
    "vllm.v1.request": {
        "Request": (
            "request_id all_token_ids output_token_ids num_tokens num_prompt_tokens num_computed_tokens "
            "sampling_params pooling_params kv_transfer_params lora_request cache_salt mm_features prompt_embeds "
            "prompt_is_token_ids resumable"
        ),
    },
    "vllm.sampling_params": {"SamplingParams": "extra_args"},
    "vllm.v1.engine.core": {"EngineCore": "add_lora collective_rpc"},
    "vllm.lora.request": {"LoRARequest": "lora_name lora_int_id lora_path load_inplace"},
    "vllm.multimodal.inputs": {
        "MultiModalFeatureSpec": "data identifier mm_position modality",
        "MultiModalFieldElem": "data",
        "PlaceholderRange": "offset length",
    },
    "vllm.config": {
        "VllmConfig": (
            "model_config cache_config parallel_config scheduler_config load_config speculative_config "
            "kv_transfer_config kv_events_config"
        ),
        "ModelConfig": (
            "model dtype hf_config quantization enable_sleep_mode get_head_size get_total_num_kv_heads "
            "multimodal_config use_mla"
        ),
        "MultiModalConfig": "mm_processor_cache_gb",
        "CacheConfig": "cache_dtype enable_prefix_caching",
        "ParallelConfig": (
            "rank world_size tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_rank "
            "decode_context_parallel_size prefill_context_parallel_size use_ubatching"
        ),
        "SchedulerConfig": "async_scheduling",
        "SpeculativeConfig": "method use_eagle",
        "LoadConfig": "load_format",
        "KVTransferConfig": (
            "kv_connector kv_role is_kv_producer is_kv_consumer kv_load_failure_policy kv_connector_extra_config"
        ),
        "KVEventsConfig": "enable_kv_cache_events",
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": "kv_cache_groups num_blocks",
        "KVCacheGroupSpec": "layer_names kv_cache_spec",
        "AttentionSpec": "block_size num_kv_heads unpadded_page_size_bytes",
        "FullAttentionSpec": "",
        "SlidingWindowSpec": "sliding_window extra_retained_tokens",
        "ChunkedLocalAttentionSpec": "attention_chunk_size",
        "MambaSpec": "state_content_size_bytes",
        "RSWASpec": "",
        "MLAAttentionSpec": "",
        "UniformTypeKVCacheSpecs": "kv_cache_specs",
        "iter_layer_specs": "",
        "get_kv_cache_spec_kind": "",
    },
    "vllm.v1.core.kv_cache_utils": {
        "BlockHash": "",
        "maybe_convert_block_hash": "",
    },
    "vllm.distributed.parallel_state": {"get_node_count": "", "get_world_group": "", "GroupCoordinator": "local_rank"},
    "vllm.envs": {"environment_variables": ""},
    "vllm.utils.network_utils": {"get_ip": ""},
    "vllm.distributed.kv_events": {
        "MEDIUM_CPU": "",
        "MEDIUM_STORAGE": "",
        "BlockRemoved": "block_hashes medium group_idx",
        "BlockStored": (
            "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name group_idx kv_cache_spec_kind"
        ),
    },
}
"""The parts that are used, by module and name: attributes of a class, or arguments passed by name."""

USES: Final = tuple(
    Use(module, name, tuple(parts.split())) for module, names in _USED.items() for name, parts in names.items()
)


def require() -> None:
    """Refuse a vLLM that lacks a part, before any part is imported by name.

    Raises:
        ConfigError: names what is missing, and the versions that have it.
    """
    _refuse(missing())


def require_hooks(connector: type[Any], base: type[Any]) -> None:
    """Refuse a vLLM whose hooks do not match the connector's methods.

    Raises:
        ConfigError: names the methods.
    """
    _refuse(missing_hooks(connector, base))


def missing(uses: tuple[Use, ...] = USES) -> list[str]:
    """Return the parts that the installed vLLM lacks, as ``module.name`` or ``module.name.attribute``."""
    return [name for use in uses for name in _missing_of(use)]


def missing_hooks(connector: type[Any], base: type[Any]) -> list[str]:
    """Return the methods that vLLM does not call or calls with other arguments, and those the connector lacks."""
    return [f"{base.__module__}.{base.__name__}.{name}" for name in _wrong_hooks(connector, base)]


def is_tested(version: str) -> bool:
    """Tell if the whole matrix of tests was run with a version such as ``0.32.1+cpu``."""
    return any(version == tested or version.startswith(tested + ".") for tested in TESTED)


def _refuse(lacking: list[str]) -> None:
    if not lacking:
        return
    from vllm import __version__  # noqa: PLC0415 - only to name it

    raise ConfigError(
        f"vLLM {__version__} lacks what kvstore uses: {', '.join(lacking)}. Install one of the versions that were "
        f"tested ({', '.join(TESTED)}), or a newer kvstore"
    )


def _missing_of(use: Use) -> Iterator[str]:
    try:
        found = getattr(import_module(use.module), use.name)
    except (ImportError, AttributeError):
        yield str(use)
        return
    parts = _parts_of(found) if use.parts else set()
    yield from (f"{use}.{part}" for part in use.parts if part not in parts)


def _parts_of(found: type[Any]) -> set[str]:
    """Return the attributes of a class that are known without an instance."""
    parts = set(dir(found))
    for parent in found.__mro__:
        parts.update(inspect.get_annotations(parent))
        parts.update(getattr(parent, "__dataclass_fields__", ()))
        parts.update(vars(parent).get("__slots__", ()))
        constructor = vars(parent).get("__init__")
        code = getattr(constructor, "__code__", None)
        if code is not None:
            parts.update(code.co_names)
            parts.update(code.co_varnames)
    return parts


def _wrong_hooks(connector: type[Any], base: type[Any]) -> Iterator[str]:
    for name, ours in vars(connector).items():
        if name.startswith("_") or not isinstance(ours, FunctionType | classmethod | property):
            continue
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None:
            if name not in _OPTIONAL_HOOKS | _HOOKS_OF_MIXINS:
                yield name
        elif not _takes(ours, theirs):
            yield f"{name}, which is called otherwise" if isinstance(ours, property) else _shown(name, theirs)
    defined = {name for parent in connector.__mro__ if parent is not base for name in vars(parent)}
    yield from sorted(set(getattr(base, "__abstractmethods__", ())) - defined)


def _takes(ours: Any, theirs: Any) -> bool:  # noqa: ANN401 - functions, class methods or properties
    """Tell if a method can be called with every argument that another one declares."""
    if isinstance(ours, property) or isinstance(theirs, property):
        return isinstance(ours, property) and isinstance(theirs, property)
    mine, given = (list(inspect.signature(_function(one)).parameters.values()) for one in (ours, theirs))
    rest = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    named = [one.name for one in given if one.kind not in rest]
    if [one.name for one in mine[: len(named)]] != named:
        return False
    return all(one.kind in rest or one.default is not one.empty for one in mine[len(named) :])


def _shown(name: str, theirs: Any) -> str:  # noqa: ANN401 - a function, or a class method
    return f"{name}({', '.join(inspect.signature(_function(theirs)).parameters)})"


def _function(method: Any) -> Any:  # noqa: ANN401 - a function, or a class method around one
    return getattr(method, "__func__", method)
