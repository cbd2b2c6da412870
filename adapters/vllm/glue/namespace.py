"""Whose KV it is: everything that must be equal for KV to be interchangeable."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.adapters.vllm.glue.groups import is_grouped, stored_groups
from kvstore.adapters.vllm.glue.parallel import shard_of
from kvstore.adapters.vllm.identity import fingerprint_folder
from kvstore.errors import ConfigError
from kvstore.format.chunkfile import FORMAT_VERSION
from kvstore.heads import LAYOUT_FIELD, SHARD_FIELD
from kvstore.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.config import StoreConfig
    from kvstore.paged.base import PagedKV


def namespace_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig, paged: PagedKV
) -> Namespace:
    """Everything that must be equal for KV to be interchangeable, for this worker.

    Raises:
        ConfigError: the model cannot be identified.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return Namespace(
        {
            "format": FORMAT_VERSION,
            "model": _model_identity(vllm_config, config.model_id),
            "model_config": _digest(_effective_config(model.hf_config)),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "kv_cache_dtype": str(cache.cache_dtype),
            "draft": _draft_identity(speculative.model) if speculative else "none",
            "layers": _digest(_layer_names(kv_cache_config)),
            SHARD_FIELD: shard_of(vllm_config, kv_cache_config).name,
            "chunk_tokens": config.chunk_size,
            LAYOUT_FIELD: paged.layout.fingerprint,
        }
    )


def _layer_names(kv_cache_config: KVCacheConfig) -> object:
    names = [group.layer_names for group in stored_groups(kv_cache_config)]
    return names if is_grouped(kv_cache_config) else names[0]


def _model_identity(vllm_config: VllmConfig, model_id: str | None) -> str:
    model = vllm_config.model_config
    if model_id is not None:
        return f"id {model_id}"
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ConfigError("with load_format=dummy nothing identifies the weights: set kvstore.model_id")
    folder = Path(model.model)
    if folder.is_dir():
        return f"files {fingerprint_folder(folder)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return f"hub {model.model}@{commit}"
    raise ConfigError(
        f"cannot identify the weights of {model.model!r}: it is neither a folder nor a hub model with a known commit; "
        "set kvstore.model_id"
    )


def _draft_identity(model: str | None) -> str:
    """The draft model, whose layers are stored with the target's."""
    folder = Path(model or "")
    return f"files {fingerprint_folder(folder)}" if model and folder.is_dir() else str(model)


def _effective_config(hf_config: Any) -> object:  # noqa: ANN401 - transformers' class, whatever its version
    """The model's configuration after all overrides, less what does not matter for KV."""
    fields = dict(hf_config.to_dict())
    for irrelevant in ("_name_or_path", "transformers_version", "_commit_hash"):
        fields.pop(irrelevant, None)
    return fields


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
