"""Layers of a model, read from its ``config.json`` as transformers and vLLM 0.32 read it.

Missing fields of a configuration get transformers' defaults.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.model.errors import ConfigError
from kvstore.model.groups import GroupKind
from kvstore.tools.modelgroups import DTYPE_BYTES, Attention, Geometry, KVModel, State

Config = Mapping[str, Any]
_FULL, _WINDOW, _LOCAL, _STATE = (GroupKind.FULL,), (GroupKind.WINDOW,), (GroupKind.LOCAL,), (GroupKind.STATE,)
_BOTH, _NOTHING = (GroupKind.FULL, GroupKind.STATE), ()
_KINDS: Final[dict[str, tuple[GroupKind, ...]]] = {
    "full_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _WINDOW,
    "chunked_attention": _LOCAL,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "conv": _STATE,
    "hybrid": _BOTH,
    "mlp": _NOTHING,
    "moe": _NOTHING,
}
_LETTERS: Final = {"*": _FULL, "M": _STATE, "-": _NOTHING, "E": _NOTHING}  # of hybrid_override_pattern
_FULL_EVERY: Final = {"gpt_oss": 2, "gemma2": 2, "cohere2": 4, "gemma3n": 5, "gemma3": 6, "gemma4": 6}
_LEFT_OUT: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3n": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 15},
    "gemma4": {"global_head_dim": 512},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"head_dim": 128, "mamba_ssm_cache_dtype": "float32"},
}
_UNREADABLE: Final = ("linear_attn_config", "attn_type_list", "hybrid_layer_pattern", "attention_other_setting")


def model_of(model: Path, kv_dtype: str | None = None, state_dtype: str | None = None) -> KVModel:
    """Read a model's ``config.json``.

    Args:
        model: the model's folder, or the file.
        kv_dtype: as vLLM's ``--kv-cache-dtype``; None or ``auto`` for the model's own.
        state_dtype: as vLLM's ``--mamba-ssm-cache-dtype``, likewise.

    Raises:
        ConfigError: there is no such file, or it lacks a needed field.
    """
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; name the folder of a model, or give --layers"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a model's configuration")
    try:
        return parse_model(config, kv_dtype, state_dtype)
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{file} does not say {error}: give --layers, --kv-heads and --head-size") from error


def parse_model(config: Config, kv_dtype: str | None = None, state_dtype: str | None = None) -> KVModel:
    """Return the model of a parsed ``config.json``.

    Raises:
        ConfigError: the configuration has a dtype or layers that are not supported.
        LookupError: a needed field is missing.
        TypeError: a value has a wrong type.
        ValueError: a value is not a number.
    """
    config = {**config, **config.get("text_config", {})}  # of multimodal models
    config = {**_LEFT_OUT.get(_type_of(config), {}), **config}
    own_dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    kv_dtype = _own(kv_dtype) or own_dtype
    for dtype in (own_dtype, kv_dtype):
        check_dtype(dtype)
    layers = _layers(config)
    shared = int(config.get("num_kv_shared_layers") or 0)  # the last layers read the KV of earlier ones
    number = Counter(kind for kinds in layers[: len(layers) - shared] for kind in kinds)
    attention = tuple(
        Attention(_geometry(config, kind, number[kind], kv_dtype), kind, _span_tokens(config, kind))
        for kind in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.LOCAL)
        if number[kind]
    )
    if not attention:
        raise ConfigError("this model has no attention layers: calc knows no model of states alone")
    states = number[GroupKind.STATE]
    return KVModel(attention, states, _state(config, own_dtype, _own(state_dtype)) if states else None)


def check_dtype(dtype: str) -> None:
    """Refuse a type of unknown size.

    Raises:
        ConfigError: the type is unknown; the message lists the known ones.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"the dtype {dtype!r} is not known: use one of {', '.join(DTYPE_BYTES)}")


def _own(dtype: str | None) -> str | None:
    return None if dtype == "auto" else dtype


def _type_of(config: Config) -> str:
    return str(config.get("model_type", "")).removesuffix("_text")


# -- kinds of layers -------------------------------------------------------------------------------------------------


def _layers(config: Config) -> list[tuple[GroupKind, ...]]:
    """Return the kinds of KV or state that each layer keeps."""
    if unreadable := [name for name in _UNREADABLE if config.get(name)]:
        raise ConfigError(f"calc does not know the layers that {unreadable[0]} describes")
    if pattern := config.get("hybrid_override_pattern"):
        return [_LETTERS[letter] for letter in str(pattern)]
    if named := config.get("layer_types") or config.get("layers_block_type"):
        found = [_named(str(name)) for name in named]
        return found if _window_tokens(config) else [_FULL if kinds == _WINDOW else kinds for kinds in found]
    return [_unnamed(config, number) for number in range(int(config["num_hidden_layers"]))]


def _named(name: str) -> tuple[GroupKind, ...]:
    if name not in _KINDS:
        raise ConfigError(f"calc does not know layers of type {name!r}; it knows {', '.join(_KINDS)}")
    return _KINDS[name]


def _unnamed(config: Config, number: int) -> tuple[GroupKind, ...]:
    """Return the kinds of a layer if the configuration has no list of layers."""
    if (period := config.get("attn_layer_period")) is not None:
        return _FULL if number % int(period) == int(config["attn_layer_offset"]) else _STATE
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if (indices := config.get(name)) is not None:
            return _FULL if number in indices else _STATE
    if "linear_num_value_heads" in config:
        return _STATE if (number + 1) % int(config.get("full_attention_interval", 4)) else _FULL
    if _type_of(config) == "falcon_h1":
        return _BOTH
    if config.get("attention_chunk_size"):
        ropes = config.get("no_rope_layers")
        return _LOCAL if (ropes[number] if ropes else (number + 1) % 4) else _FULL
    return _windowed(config, number)


def _windowed(config: Config, number: int) -> tuple[GroupKind, ...]:
    if not _window_tokens(config):
        return _FULL
    if "use_sliding_window" in config:  # of Qwen
        return _WINDOW if number >= int(config.get("max_window_layers", 28)) else _FULL
    every = config.get("sliding_window_pattern") or _FULL_EVERY.get(_type_of(config))
    return _FULL if every and (number + 1) % int(every) == 0 else _WINDOW


def _window_tokens(config: Config) -> int:
    """Return the tokens of a window, the next token included; 0 if there is no window."""
    return int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0


def _span_tokens(config: Config, kind: GroupKind) -> int:
    """Return ``Group.span_tokens``: tokens before the next one that a window covers, or local attention's chunk."""
    match kind:
        case GroupKind.WINDOW:  # Cohere's window excludes the next token
            return _window_tokens(config) - (not _type_of(config).startswith("cohere2"))
        case GroupKind.LOCAL:
            return int(config["attention_chunk_size"])
        case _:
            return 0


# -- sizes -----------------------------------------------------------------------------------------------------------


def _geometry(config: Config, kind: GroupKind, layers: int, dtype: str) -> Geometry:
    if config.get("kv_lora_rank") is not None:
        return Geometry(layers, 1, int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]), dtype)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = config.get("head_dim") or config.get("attention_head_dim")
    if _type_of(config) == "zamba2":  # its attention also reads the embedding's output
        head_dim = 2 * int(config["hidden_size"]) // heads
    if _type_of(config) == "gemma4" and kind is GroupKind.FULL:
        head_dim = config["global_head_dim"]
        kv_heads = int((config.get("attention_k_eq_v") and config.get("num_global_key_value_heads")) or kv_heads)
    return Geometry(layers, kv_heads, 2 * int(head_dim or int(config["hidden_size"]) // heads), dtype)


def _state(config: Config, dtype: str, matrix_dtype: str | None) -> State:
    """Return the state of a layer, whose kind depends on the fields of the configuration."""
    said = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")  # Nemotron-H, Qwen3.5
    matrix_dtype = matrix_dtype or _own(said) or dtype
    check_dtype(matrix_dtype)
    if "linear_num_value_heads" in config:
        return _delta_net(config, dtype, matrix_dtype)
    if "conv_L_cache" in config:
        channels = int(config.get("conv_dim") or config["hidden_size"])
        return State(channels, int(config["conv_L_cache"]) - 1, dtype=dtype)
    if "attn_layer_period" in config:
        channels = int(config["mamba_expand"]) * int(config["hidden_size"])
        kept = int(config["mamba_d_conv"]) - 1
        return State(channels, kept, channels, int(config["mamba_d_state"]), dtype=dtype, matrix_dtype=matrix_dtype)
    return _mamba2(config, dtype, matrix_dtype)


def _delta_net(config: Config, dtype: str, matrix_dtype: str) -> State:
    heads, value_dim = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
    key_heads, key_dim = int(config["linear_num_key_heads"]), int(config["linear_key_head_dim"])
    channels = 2 * key_heads * key_dim + heads * value_dim
    kept = int(config["linear_conv_kernel_dim"]) - 1
    return State(channels, kept, heads, value_dim * key_dim, dtype=dtype, matrix_dtype=matrix_dtype)


def _mamba2(config: Config, dtype: str, matrix_dtype: str) -> State:
    def number(*names: str) -> int:
        return int(next(config[name] for name in names if config.get(name) is not None))

    try:
        heads = number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
        state_size = number("mamba_d_state", "ssm_state_size")
        groups = number("mamba_n_groups", "mamba_ngroups", "n_groups")
        kept = number("mamba_d_conv", "conv_kernel") - 1
        if "mamba_num_heads" in config:  # Nemotron-H
            channels = heads * number("mamba_head_dim")
        else:
            channels = int(config.get("mamba_d_ssm") or number("mamba_expand") * number("hidden_size"))
    except StopIteration:
        raise ConfigError(f"calc does not know the states of a {config.get('model_type')!r}") from None
    head_elements = channels // heads * state_size
    return State(channels, kept, heads, head_elements, groups, 2 * state_size, dtype, matrix_dtype)
