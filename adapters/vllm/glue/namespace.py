"""Namespace of a worker's KV: everything that must be equal for KV to be interchangeable."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.v1.kv_cache_interface import AttentionSpec

from kvstore.adapters.vllm.glue.groups import is_grouped, stored_groups, stored_specs
from kvstore.adapters.vllm.glue.parallel import shard_of
from kvstore.adapters.vllm.glue.settings import drafts_of, settings_of
from kvstore.adapters.vllm.identity import fingerprint_file, fingerprint_folder
from kvstore.format.chunkfile import FORMAT_VERSION
from kvstore.model.errors import ConfigError
from kvstore.model.heads import LAYOUT_FIELD, SHARD_FIELD
from kvstore.model.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore.config import StoreConfig
    from kvstore.paged.base import PagedKV


_LONGROPE: Final = ("longrope", "su")
_ROPE_TYPES: Final = ("rope_type", "type")
_ORIGINAL: Final = "original_max_position_embeddings"
_TUNED_TOKENS: Final = 32768  # above this vLLM tunes the attention of Llama 4
_TUNING: Final = "attn_temperature_tuning"


def namespace_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig, paged: PagedKV
) -> Namespace:
    """Return the namespace of this worker: everything that must be equal for KV to be interchangeable.

    Raises:
        ConfigError: the model cannot be identified.
    """
    model = vllm_config.model_config
    drafts = drafts_of(vllm_config)
    return Namespace(
        {
            "format": FORMAT_VERSION,
            "model": _model_identity(vllm_config, config.model_id),
            "model_config": _digest(_effective_config(model.hf_config)),
            "draft": _draft_identity(drafts) if drafts else "none",
            "layers": _digest(_layer_names(kv_cache_config)),
            SHARD_FIELD: shard_of(vllm_config, kv_cache_config).name,
            "chunk_tokens": config.chunk_size,
            LAYOUT_FIELD: paged.layout.fingerprint,
            **settings_of(vllm_config, kv_cache_config),
            **_lengths_of(model),
            **_numbers_of(kv_cache_config),
        }
    )


def _layer_names(kv_cache_config: KVCacheConfig) -> object:
    names = [group.layer_names for group in stored_groups(kv_cache_config)]
    return names if is_grouped(kv_cache_config) else names[0]


def _numbers_of(kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Return a field where numbers of one byte mean others than elsewhere, as FP8 on an MI300; none for most.

    The registered caches do not tell, as their elements are bytes.
    """
    fp8 = vllm.platforms.current_platform.fp8_dtype()
    attention = (spec for spec in stored_specs(kv_cache_config) if isinstance(spec, AttentionSpec))
    has_bytes = any(spec.dtype.itemsize == 1 for spec in attention)
    return {"fp8": str(fp8)} if has_bytes and fp8 != torch.float8_e4m3fn else {}


def _model_identity(vllm_config: VllmConfig, model_id: str | None) -> str:
    model = vllm_config.model_config
    if model_id is not None:
        return f"id {model_id}"
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ConfigError("with load_format=dummy nothing identifies the weights: set kvstore.model_id")
    if identity := _identity_of_files(model.model):
        return identity
    commit = _commit_of_weights(model)
    if commit:
        return f"hub {model.model}@{commit}"
    raise ConfigError(
        f"cannot identify the weights of {model.model!r}: it is neither a folder nor a file nor a hub model with a "
        "known commit; set kvstore.model_id"
    )


def _identity_of_files(name: str) -> str | None:
    """Return the identity of weights in a folder or file; None if it is neither, as for a name of the hub."""
    path = Path(name)
    if path.is_dir():
        return f"files {fingerprint_folder(path)}"
    return f"file {fingerprint_file(path)}" if path.is_file() else None


def _commit_of_weights(model: ModelConfig) -> str | None:
    """Return the commit of the repository with the weights; ``--hf-config-path`` may name another for the rest."""
    noted: str | None = getattr(model.hf_config, "_commit_hash", None)  # the one that EAGLE wraps in another has none
    if noted is not None and getattr(model, "hf_config_path", None) in {None, model.model}:
        return noted
    revision = getattr(model, "revision", None)
    commit = str(getattr(revision, "resolved", revision))  # huggingface_hub keeps the commit with the name
    return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None


def _draft_identity(drafts: Any) -> str:  # noqa: ANN401 - vLLM's SpeculativeConfig
    """Return the identity of the draft model, whose layers are stored with the target's."""
    if drafts.model and (identity := _identity_of_files(drafts.model)):
        return identity
    model = getattr(drafts, "draft_model_config", None)
    commit = _commit_of_weights(model) if model is not None else None
    version = commit or getattr(drafts, "revision", None)
    return f"{drafts.model}@{version}" if version else str(drafts.model)


def _effective_config(hf_config: Any) -> object:  # noqa: ANN401 - transformers' class, whatever its version
    """Return the model's configuration after all overrides, without the fields that do not affect KV."""
    fields = dict(hf_config.to_dict())
    for irrelevant in ("_name_or_path", "transformers_version", "_commit_hash", "max_model_len"):  # vLLM adds the last
        fields.pop(irrelevant, None)
    return fields


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _lengths_of(model: ModelConfig) -> dict[str, str]:
    """Return the fields of a namespace that depend on the longest context; none for most models.

    ``rope`` names the factors of LongRoPE (Phi-3, Phi-4-mini, MiniCPM). ``attention_scale`` is True if Llama 4 scales
    queries by their position, which the generation configuration may override.

    Most models' rotary angles do not depend on it, so their engines share KV with different ``--max-model-len``.
    """
    text_type = str(getattr(getattr(model, "hf_text_config", None), "model_type", ""))
    named = {}
    if bounds := sorted(set(_bounds_of(model.hf_config.to_dict()))):
        length = _built_length(model)
        named["rope"] = " ".join(f"{'long' if length > bound else 'short'} {bound}" for bound in bounds)
    if text_type.startswith("llama4"):
        given = {**model.try_get_generation_config(), **model.override_generation_config}
        named["attention_scale"] = str(bool(given.get(_TUNING, _built_length(model) > _TUNED_TOKENS)))
    return named


def _built_length(model: ModelConfig) -> int:
    """Return the longest context with which the layers were built; vLLM may lower it later to fit its memory."""
    if getattr(model, "original_max_model_len", None) == -1:
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


def _bounds_of(fields: object, original: object = None) -> Iterator[int]:
    """Yield the lengths above which the parts of a configuration use LongRoPE's long factors."""
    if isinstance(fields, Mapping):
        original = fields.get(_ORIGINAL, original)
        if original is not None and any(fields.get(name) in _LONGROPE for name in _ROPE_TYPES):
            yield int(str(original))
        for part in fields.values():
            yield from _bounds_of(part, original)
    elif isinstance(fields, list | tuple):
        for part in fields:
            yield from _bounds_of(part, original)
