"""Builds the namespace fields that depend on vLLM's settings and environment, from the tables of fields.

A setting that changes nothing is left out, so engines that do not use it share KV with versions of vLLM without it. A
field of a newer vLLM that the table does not know is written if it differs from its default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm import envs
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvstore.adapters.vllm.glue.fields import MODEL_DTYPE, RULES, VARIABLES, Rule
from kvstore.adapters.vllm.glue.groups import stored_groups
from kvstore.adapters.vllm.identity import digest_of
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

STATES_FIELD: Final = "states"
"""The namespace field for the specs of layers."""

NO_DRAFT_LAYERS: Final = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculation that add no layer with KV."""

_SECTIONS: Final[Mapping[str, str]] = {
    "": "VllmConfig",
    "model_config": "ModelConfig",
    "model_config.multimodal_config": "MultiModalConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "lora_config": "LoRAConfig",
    "speculative_config": "SpeculativeConfig",
    "load_config": "LoadConfig",
    "attention_config": "AttentionConfig",
    "mamba_config": "MambaConfig",
    "quant_config": "QuantizationConfig",
}
_MAX_DEPTH: Final = 12
_MISSING: Final = object()


def drafts_of(vllm_config: VllmConfig) -> Any:  # noqa: ANN401 - vLLM's SpeculativeConfig
    """Return the speculative configuration if its draft layers have KV, else None."""
    speculative = vllm_config.speculative_config
    return None if getattr(speculative, "method", None) in NO_DRAFT_LAYERS else speculative


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Return the number of next tokens on which a token's KV in draft layers depends; 0 except for EAGLE and MTP.

    vLLM then computes the last block of a hit in its own prefix cache again.
    """
    drafts = drafts_of(vllm_config)
    if drafts is None or not drafts.use_eagle():
        return 0
    return int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))  # 1 where vLLM has but one module


def settings_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Return the namespace fields that the table has written.

    Raises:
        ConfigError: a value cannot be compared with another engine's.
    """
    written: dict[str, str] = {}
    for path, name in _SECTIONS.items():
        section: Any = vllm_config
        for part in path.split(".") if path else ():
            section = getattr(section, part, None)
        if section is None or (path == "speculative_config" and drafts_of(vllm_config) is None):
            continue
        written |= _written_of(section, name, vllm_config.model_config.dtype)
    written |= _unknown_of(kv_cache_config, "KVCacheConfig") | _variables()
    if states := _states_of(kv_cache_config):
        written[STATES_FIELD] = states
    return written


def _variables() -> dict[str, str]:
    """Return the environment's variables that change KV, by the values that vLLM reads."""
    known = {name: _read(name) for name in VARIABLES.keys() & envs.environment_variables.keys()}
    return {name: _shown(name, value) for name, value in known.items() if value != VARIABLES[name]}


def _read(name: str) -> object:
    """Return the value of a variable as vLLM reads it; as it is where vLLM cannot, which may never need it."""
    try:
        return envs.environment_variables[name]()
    except (ValueError, OSError):
        return os.environ.get(name)


def text_of(value: object) -> str:
    """Return a text that is equal for equal values in every process.

    Raises:
        TypeError: there is no such text, as for an object that shows its address.
    """
    return json.dumps(_plain(value, _MAX_DEPTH), sort_keys=True, separators=(",", ":"))


def _states_of(kv_cache_config: KVCacheConfig) -> str:
    """Return a digest of the specs of all stored layers; "" if other namespace fields cover them."""
    groups = []
    for group in stored_groups(kv_cache_config):
        written = _unknown_of(group, "KVCacheGroupSpec")
        layers = [_written_of(spec, type(spec).__name__) for spec in iter_layer_specs(group.kv_cache_spec)]
        groups.append([written, *sorted({json.dumps(layer, sort_keys=True) for layer in layers if layer})])
    return _digest(groups) if any(part for group in groups for part in group) else ""


def _written_of(section: object, name: str, model_dtype: object = None) -> dict[str, str]:
    """Return the fields of one section that belong in the namespace."""
    rules = _rules_of(section, name)
    written = {}
    for field, rule in rules.items():
        if not rule.is_written or (value := getattr(section, field, _MISSING)) is _MISSING:
            continue
        if not any(value == (model_dtype if neutral is MODEL_DTYPE else neutral) for neutral in rule.unless):
            key = rule.why or f"{name}.{field}"
            written[key] = _shown(key, _content_of(key, value) if rule.names_file else value)
    return written | _unknown_of(section, name)


def _unknown_of(section: object, name: str) -> dict[str, str]:
    """Return the fields of a section that the table does not know and that differ from their default."""
    kinds = [kind.__name__ for kind in type(section).__mro__ if kind.__name__ in RULES]
    if not kinds:
        return {}
    rules, written = _rules_of(section, name), {}
    if type(section).__name__ not in kinds:  # a subclass of a known class
        written[f"{name}.class"] = type(section).__qualname__
    for field, default in _defaults_of(type(section)).items():
        value = getattr(section, field, _MISSING)
        if field in rules or value is _MISSING or value is default or (default is not _MISSING and value == default):
            continue
        key = f"{type(section).__name__}.{field}"
        written[key] = _shown(key, value)
        logger.warning("this kvstore does not know vLLM's %s, so only engines with the same value share KV", key)
    return written


def _rules_of(section: object, name: str) -> Mapping[str, Rule]:
    """Return the rules for a class and its parents, its own first."""
    names = dict.fromkeys([*(kind.__name__ for kind in type(section).__mro__), name])
    return ChainMap(*(dict(RULES[one]) for one in names if one in RULES))


def _defaults_of(kind: type[Any]) -> dict[str, object]:
    """Return the fields of a dataclass, or the parameters of another class's constructor, with their defaults.

    Quantization methods are no dataclasses. An unknown one has read the model's configuration, which counts.
    """
    if not dataclasses.is_dataclass(kind):
        if kind.__name__ not in RULES:
            return {}
        given = list(inspect.signature(kind.__init__).parameters.values())[1:]
        named = (one for one in given if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD})
        return {one.name: _MISSING if one.default is one.empty else one.default for one in named}
    return {field.name: _default_of(field) for field in dataclasses.fields(kind)}


def _default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    default: Any = field.default
    if hasattr(default, "get_default"):  # pydantic's
        default = default.get_default(call_default_factory=True)
    return _MISSING if default is dataclasses.MISSING else default


def _content_of(key: str, path: object) -> str:
    try:
        return digest_of(Path(str(path)))
    except OSError as error:
        raise ConfigError(f"cannot read the file that vLLM's {key} names, {path}: {error}") from error


def _shown(key: str, value: object) -> str:
    """Return a value as text for a namespace field: single values as they are, others as a digest.

    Raises:
        ConfigError: it cannot be compared with another engine's.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, str | int | float | torch.dtype):
        return str(value)
    try:
        return _digest(value)
    except TypeError as error:
        raise ConfigError(
            f"vLLM's {key} is {value!r}, which changes KV, and cannot be compared with another engine's: {error}. "
            "Start vLLM without it"
        ) from error


def _digest(value: object) -> str:
    return hashlib.sha256(text_of(value).encode()).hexdigest()[:16]


def _plain(value: object, depth: int) -> object:
    """Reduce a value to lists, texts and numbers."""
    if depth == 0:
        raise TypeError("it has too many levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, int | float | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if isinstance(value, type | FunctionType):
        if "<" in value.__qualname__:
            raise TypeError(f"{value.__qualname__} has no name of its own")
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return [type(value).__name__, _plain(parts, depth - 1)]
    if isinstance(value, Mapping):
        return sorted([text_of(key), _plain(part, depth - 1)] for key, part in value.items())
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(part, depth - 1), sort_keys=True) for part in value)
    return list(_listed(value, depth - 1))


def _listed(value: object, depth: int) -> Iterator[object]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__} has no stable text")
    for part in value:
        yield _plain(part, depth)
