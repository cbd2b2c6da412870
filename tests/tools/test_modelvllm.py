"""Comparison of ``kvstore calc`` with transformers' reading of a configuration and with vLLM's caches."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.hybrid_configs import FULL, HYBRIDS, WINDOW

from kvstore.model.groups import GroupKind
from kvstore.tools.modelconfig import parse_model
from kvstore.tools.modelgroups import KVModel, State

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 1024}
MAMBA2 = {"mamba_n_heads": 32, "mamba_d_state": 64, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2}
SIZES = {"num_attention_heads": 16, "hidden_size": 1024}
ZAMBA2 = {"n_mamba_heads": 32, "mamba_d_state": 64, "mamba_ngroups": 2, "mamba_d_conv": 4, "mamba_expand": 2}
NEMOTRON = {"mamba_num_heads": 32, "mamba_head_dim": 40, "ssm_state_size": 64, "n_groups": 8, "conv_kernel": 4}
MAMBA1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
JAMBA = {**MAMBA1, "model_type": "jamba", "num_hidden_layers": 16, "attn_layer_period": 8, "attn_layer_offset": 4}
CLASSES = {
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "zamba2": ("zamba2", "Zamba2ForCausalLM"),
    "jamba": ("jamba", "JambaForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
}
STATES = [
    HYBRIDS["Qwen3-Next-80B-A3B"],
    HYBRIDS["Granite-4.0-H-Small"],
    HYBRIDS["LFM2-1.2B"],
    {**HEADS, **MAMBA2, "model_type": "falcon_h1", "num_hidden_layers": 6, "mamba_d_ssm": 1536},
    {**HEADS, **NEMOTRON, "model_type": "nemotron_h", "hybrid_override_pattern": "MM*-ME"},
    {**SIZES, **ZAMBA2, "model_type": "zamba2", "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    {**HEADS, **JAMBA},
]
LAYERS = [
    *HYBRIDS.values(),
    *STATES[3:],
    {**HEADS, "model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096},
    {**HEADS, "model_type": "gemma3n_text", "num_hidden_layers": 30, "num_kv_shared_layers": 0, "sliding_window": 512},
    {**HEADS, "model_type": "gemma4_text", "num_hidden_layers": 30, "sliding_window": 512},
    {**HEADS, "model_type": "cohere2", "num_hidden_layers": 40, "sliding_window": 4096},
    {**HEADS, "model_type": "llama4_text", "num_hidden_layers": 12, "attention_chunk_size": 8192},
    {**HEADS, "model_type": "qwen3", "num_hidden_layers": 36, "use_sliding_window": True, "sliding_window": 64},
    {**HEADS, "model_type": "qwen2", "num_hidden_layers": 24, "use_sliding_window": False, "sliding_window": 64},
    {**HEADS, **MAMBA2, "model_type": "bamba", "num_hidden_layers": 9, "attn_layer_indices": [2, 7]},
]
TYPES = {
    FULL: (GroupKind.FULL,),
    WINDOW: (GroupKind.WINDOW,),
    "chunked_attention": (GroupKind.LOCAL,),
    "linear_attention": (GroupKind.STATE,),
    "conv": (GroupKind.STATE,),
    "hybrid": (GroupKind.FULL, GroupKind.STATE),
    "mlp": (),
    "moe": (),
}


def type_of(config: dict[str, Any]) -> str:
    return str(config["model_type"])


def transformers_config(config: dict[str, Any]) -> Any:
    """Return the text part, as transformers reads it."""
    from transformers import AutoConfig

    fields = dict(config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config()


def state_of(config: dict[str, Any], state_dtype: str) -> State:
    state = parse_model(config, state_dtype=state_dtype).state
    assert state is not None
    return state


def vllm_states(config: dict[str, Any], tp_size: int, state_dtype: str) -> Any:
    """Return the specification of a model's states according to vLLM's class of the model."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    module, name = CLASSES[type_of(config)]
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    read = transformers_config(config)
    asked = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(hf_config=read, hf_text_config=read, dtype=torch.bfloat16),
        cache_config=SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype=state_dtype, use_replayssm=False),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    shapes, dtypes = model.get_mamba_state_shape_from_config(asked), model.get_mamba_state_dtype_from_config(asked)
    return MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1)


@pytest.mark.parametrize("config", LAYERS, ids=type_of)
def test_layers_are_what_transformers_reads(config: dict[str, Any]) -> None:
    model = parse_model(config)
    found = {one.kind: one.geometry.layers for one in model.attention} | {GroupKind.STATE: model.states}
    read = transformers_config(config)
    names = getattr(read, "layer_types", None) or read.layers_block_type
    assert +Counter(found) == Counter(kind for name in names for kind in TYPES[name])
    if GroupKind.WINDOW in found:
        assert next(one for one in model.attention if one.kind is GroupKind.WINDOW).span_tokens == (
            read.sliding_window - (read.model_type != "cohere2")
        )


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("config", STATES, ids=type_of)
def test_states_are_as_large_as_vllm_says(config: dict[str, Any], tp_size: int, state_dtype: str) -> None:
    spec = vllm_states(config, tp_size, state_dtype)
    assert state_of(config, state_dtype).state_bytes(tp_size) == spec.page_size_bytes


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("config", STATES, ids=type_of)
def test_blocks_hold_a_state_as_vllm_makes_them(config: dict[str, Any], tp_size: int) -> None:
    """This includes the heads and their size, which vLLM reads by itself."""
    import torch
    from vllm.config import vllm as vllm_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.v1.attention.backend import MultipleOf

    read = transformers_config(config)
    convertor = ModelArchConfigConvertorBase(read, read)
    states = vllm_states(config, tp_size, "bfloat16")
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: states.shapes,
        get_mamba_state_dtype_from_config=lambda _: states.dtypes,
    )
    backend: Any = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda: [MultipleOf(16)], customize_spec=lambda spec: spec
    )
    cache = SimpleNamespace(
        block_size=16, cache_dtype="auto", mamba_cache_mode="align", mamba_block_size=None, mamba_page_size_padded=None
    )
    asked: Any = SimpleNamespace(
        cache_config=cache,
        parallel_config=None,
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            use_mla=False,
            architecture="",
            get_num_kv_heads=lambda _: max(1, convertor.get_total_num_kv_heads() // tp_size),
            get_head_size=convertor.get_head_size,
        ),
    )
    with (
        mock.patch.object(ModelRegistry, "resolve_model_cls", return_value=(model, "")),
        mock.patch.object(vllm_config, "set_current_vllm_config", contextlib.nullcontext),
        mock.patch.object(Platform, "_find_non_ssm_backends", return_value=[backend]),
    ):
        Platform._align_hybrid_block_size(asked, backend)
    assert parse_model(config, state_dtype="bfloat16").block_tokens(16, tp_size) == cache.block_size


def specs_of(model: KVModel, block_tokens: int) -> dict[str, Any]:
    """Return the specification of one layer of each kind, as vLLM's attention and Mamba layers describe themselves."""
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    specs: dict[str, Any] = {}
    for one in model.attention:
        of = one.geometry
        common: dict[str, Any] = {
            "block_size": block_tokens,
            "num_kv_heads": of.kv_heads,
            "head_size": of.head_elements // 2,
            "dtype": torch.bfloat16,
        }
        match one.kind:
            case GroupKind.WINDOW:
                spec: Any = SlidingWindowSpec(**common, sliding_window=one.span_tokens + 1)
            case GroupKind.LOCAL:
                spec = ChunkedLocalAttentionSpec(**common, attention_chunk_size=one.span_tokens)
            case _:
                spec = FullAttentionSpec(**common)
        specs |= {f"{one.kind.value}.{number}": spec for number in range(of.layers)}
    if model.state is not None:
        page = max(spec.page_size_bytes for spec in specs.values())
        content = model.state.state_bytes()
        state = MambaSpec(shapes=((content,),), dtypes=(torch.int8,), page_size_padded=page, block_size=block_tokens)
        specs |= {f"state.{number}": state for number in range(model.states)}
    return specs


GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 12, "sliding_window": 512, **HEADS, "global_head_dim": 128}
SCOUT = {**HEADS, "model_type": "llama4_text", "num_hidden_layers": 48, "attention_chunk_size": 8192}


@pytest.mark.parametrize("config", [*HYBRIDS.values(), *STATES[3:], GEMMA4, SCOUT], ids=type_of)
def test_groups_are_vllms(config: dict[str, Any]) -> None:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import MambaSpec

    model = parse_model(config)
    asked: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        speculative_config=None,
    )
    made = []
    for group in get_kv_cache_groups(asked, specs_of(model, model.block_tokens(16))):
        spec, layers = group.kv_cache_spec, len(group.layer_names)
        kind = group.layer_names[0].partition(".")[0]
        page_bytes = spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.page_size_bytes
        made.append((kind, spec.block_size, layers * page_bytes))
    ours = [(one.kind.value, one.block_tokens, one.block_bytes) for one in model.groups(16).groups]
    assert Counter(made) == Counter(ours)
