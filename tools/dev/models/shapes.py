"""Tiny random models of the architectures that vLLM generates text with and transformers can build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import transformers
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS as GENERATING

from kvstore.tools.dev.weights import randomize, save

VOCAB: Final = 1024
MAX_POSITION: Final = 8192
LAYERS: Final = 4
_FULL: Final = "full_attention"

_LAYER_FIELDS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# Values of fields in a tiny model. Fields that a configuration lacks, or that are None, stay unchanged.
SIZES: Final = {
    name: size
    for size, names in (
        (VOCAB, "vocab_size vocab_size_per_layer_input"),
        (VOCAB - 3, "bos_token_id"),
        (VOCAB - 2, "eos_token_id"),
        (VOCAB - 1, "pad_token_id"),
        (MAX_POSITION, "max_position_embeddings n_positions max_seq_len seq_length"),
        (LAYERS, " ".join(_LAYER_FIELDS)),
        (1, "n_group topk_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace n_shared_experts"),
        (2, "num_key_value_heads linear_num_key_heads num_experts_per_tok moe_topk top_k moe_k"),
        (4, "num_attention_heads n_head n_heads linear_num_value_heads"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (8, "mamba_n_heads mamba_num_heads n_mamba_heads"),
        (16, "mamba_d_state ssm_state_size state_size laurel_rank"),
        (32, "hidden_size_per_layer_input"),
        (64, "head_dim qk_nope_head_dim v_head_dim mamba_d_head mamba_head_dim"),
        (64, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        (96, "sliding_window"),
        (128, "q_lora_rank linear_key_head_dim linear_value_head_dim global_head_dim"),
        (192, "attention_chunk_size"),
        (256, "hidden_size n_embd d_model word_embed_proj_dim conv_dim block_dim"),
        (256, "intermediate_size ffn_dim n_inner ffn_hidden_size shared_intermediate_size intermediate_size_mlp"),
        (512, "mamba_d_ssm"),
    )
    for name in names.split()
}

# Exceptions from the rules.
SPECIAL: Final[Mapping[str, Mapping[str, Any]]] = {
    # Here and below: fields that vLLM reads, and that only published configurations have.
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4},
    },
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "FalconForCausalLM": {"num_kv_heads": 4},
    "FalconH1ForCausalLM": {"mamba_expand": 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", _FULL] * 2},
    "Gemma4ForCausalLM": {"global_head_dim": 128, "hidden_size_per_layer_input": 0},
    "Glm4MoeForCausalLM": {"head_dim": 64, "first_k_dense_replace": 1},
    "GPTJForCausalLM": {"rotary_dim": 32},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {"conv_dim": 256, "block_dim": 256, "layer_types": ["conv", "conv", _FULL, "conv"]},
    "Lfm2MoeForCausalLM": {"conv_dim": 256, "layer_types": ["conv", "conv", _FULL, "conv"]},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 64},
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [1, 1, 1, 0],
        "layernorm_epsilon": 1e-6,
        "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": 96,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_v_head_dim": 64,
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "NemotronForCausalLM": {"num_key_value_heads": 2, "head_dim": 64},
    "Phi3ForCausalLM": {"pad_token_id": VOCAB - 1},
}


def architectures() -> Iterator[str]:
    """Return the names of text-only architectures that transformers has a class for."""
    return (
        name for name in GENERATING if hasattr(transformers, name) and not name.endswith("ForConditionalGeneration")
    )


def build(architecture: str, folder: Path) -> None:
    """Write a tiny model; errors of transformers propagate."""
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    fields = {**tiny(config_class().to_dict()), **SPECIAL.get(architecture, {})}
    model = model_class(config_class(**fields))
    randomize(model)
    save(model, folder, vocab=VOCAB, max_position=MAX_POSITION)


def tiny(usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a usual configuration that differ in a tiny one, with their values."""
    fields: dict[str, Any] = {name: SIZES[name] for name, value in usual.items() if name in SIZES and is_size(value)}
    heads = usual.get("num_attention_heads")
    if "num_key_value_heads" in fields and usual["num_key_value_heads"] == heads:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    num_layers = next((usual[name] for name in _LAYER_FIELDS if is_size(usual.get(name))), 0)
    for name, value in usual.items():
        if isinstance(value, list) and len(value) == num_layers:
            fields[name] = pattern(value)
    return fields


def is_size(value: object) -> bool:
    """Tell if a field is a number to be replaced."""
    return isinstance(value, int) and not isinstance(value, bool)


def pattern(usual: Sequence[Any]) -> list[Any]:
    """Return the kinds of a few layers: every kind of the usual layers in turn, with full attention last."""
    kinds = [kind for number, kind in enumerate(usual) if kind not in usual[:number]][:LAYERS]
    if _FULL in kinds:
        kinds = [*(kind for kind in kinds if kind != _FULL), _FULL]
    return [kinds[number % len(kinds)] for number in range(LAYERS)]
