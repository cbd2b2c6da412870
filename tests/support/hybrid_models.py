"""Tiny random models with several kinds of KV cache groups, which vLLM's CPU build can run.

Each maker writes a model into a folder. Windows and chunks of attention are short, so that tests' prompts are longer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.tools.dev.weights import ONES, Normal, randomize, save

VOCAB = 1024
MAX_POSITION = 8192
WINDOW = 96
ATTENTION_CHUNK = 192

SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
THREE_SLIDING_AND_FULL = ["sliding_attention"] * 3 + ["full_attention"]

# Gemma adds a layer's output to a large residual, and would repeat its input: small embeddings, large layers.
LOUD_LAYERS = {"post_": Normal(2.0, 0.0), "norm": Normal(0.0, 0.0), "embed": Normal(0.0, 0.0625)}


def _common(**shape: Any) -> dict[str, Any]:
    """Return the configuration that all models here have in common, with the changes of ``shape``."""
    return {
        "vocab_size": VOCAB,
        "bos_token_id": VOCAB - 3,
        "eos_token_id": VOCAB - 2,
        "pad_token_id": VOCAB - 1,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        **shape,
    }


def _save(model: Any, folder: Path, by_name: dict[str, Normal] | None = None) -> Path:
    randomize(model, by_name)
    return save(model, folder, vocab=VOCAB, max_position=MAX_POSITION)


def longrope(folder: Path, original_tokens: int) -> Path:
    """Make a Phi-3 with other angles for contexts longer than ``original_tokens``; one group."""
    from transformers import Phi3Config, Phi3ForCausalLM

    angles = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original_tokens, **angles}
    shape = {**_common(), "max_position_embeddings": 4 * original_tokens, "rope_theta": 10000.0}
    model = Phi3ForCausalLM(
        Phi3Config(**shape, original_max_position_embeddings=original_tokens, rope_scaling={"type": "longrope", **rope})
    )
    return _save(model, folder)


def gptoss(folder: Path) -> Path:
    """Make a model with a window and a full group; attention sinks, experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    shape = _common(head_dim=64, sliding_window=WINDOW, layer_types=SLIDING_AND_FULL * 2, **experts)
    return _save(GptOssForCausalLM(GptOssConfig(**shape)), folder)


def gemma3(folder: Path) -> Path:
    """Make a model with three window groups and a full one."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = {"num_hidden_layers": 8, "layer_types": THREE_SLIDING_AND_FULL * 2}
    shape = _common(head_dim=64, sliding_window=WINDOW, query_pre_attn_scalar=64, **layers)
    return _save(Gemma3ForCausalLM(Gemma3TextConfig(**shape)), folder, LOUD_LAYERS)


def gemma3n(folder: Path) -> Path:
    """Make a model with three window groups and a full one; the last four layers use others' KV and are in no group."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    layers = {"num_hidden_layers": 12, "num_kv_shared_layers": 4, "layer_types": THREE_SLIDING_AND_FULL * 3}
    inputs = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 32, "laurel_rank": 16}
    shape = _common(head_dim=64, sliding_window=WINDOW, tie_word_embeddings=True, **layers, **inputs)
    weights = {"post_": Normal(4.0, 0.0), "correct_output_scale": ONES, "embed_tokens.": Normal(0.0, 0.0625)}
    return _save(Gemma3nForCausalLM(Gemma3nTextConfig(**shape)), folder, weights)


def gemma4(folder: Path) -> Path:
    """Make a model with three window groups and a full one, whose heads are larger: its blocks have fewer tokens."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    layers = {"num_hidden_layers": 8, "layer_types": THREE_SLIDING_AND_FULL * 2}
    heads = {"head_dim": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 0}
    shape = _common(sliding_window=WINDOW, **layers, **heads)
    weights = {"post_": Normal(2.0, 0.0), "embed_tokens": Normal(0.0, 0.0625)}
    return _save(Gemma4ForCausalLM(Gemma4TextConfig(**shape)), folder, weights)


def mistral(folder: Path) -> Path:
    """Make a model with one group, a window."""
    from transformers import MistralConfig, MistralForCausalLM

    return _save(MistralForCausalLM(MistralConfig(**_common(head_dim=64, sliding_window=WINDOW))), folder)


def llama4(folder: Path) -> Path:
    """Make a model with three groups of chunked local attention and a full one. vLLM joins them to one full group, if
    the environment does not have ``VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1``.
    """
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 256}
    shape = _common(head_dim=64, attention_chunk_size=ATTENTION_CHUNK, no_rope_layer_interval=4, **experts)
    return _save(Llama4ForCausalLM(Llama4TextConfig(**shape)), folder)


def granite4(folder: Path) -> Path:
    """Make a model with three Mamba2 groups and a full one. Needs ``end_steps_at_states``, as the next one."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    mamba = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
    shape = _common(
        layer_types=["mamba", "attention", "mamba", "mamba"],
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_expand=2,
        **mamba,
    )
    return _save(GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**shape)), folder)


def nemotronh(folder: Path) -> Path:
    """Make a model with two Mamba2 groups and a full one, and a layer that keeps nothing."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4}
    shape = _common(
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        head_dim=64,
        expand=2,
        **mamba,
    )
    return _save(NemotronHForCausalLM(NemotronHConfig(**shape)), folder)


def qwen3next(folder: Path) -> Path:
    """Make a model with three groups of linear attention and a full one; the CPU's kernel takes bfloat16 only."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
    shape = _common(
        head_dim=64,
        full_attention_interval=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **linear,
        **experts,
    )
    weights = {"linear_attn.norm": ONES, "norm": Normal(0.0, 0.0)}
    return _save(Qwen3NextForCausalLM(Qwen3NextConfig(**shape)), folder, weights)


def lfm2(folder: Path) -> Path:
    """Make a model with three groups of short convolutions and a full one."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
    shape = _common(tie_word_embeddings=True, conv_dim=256, block_dim=256, block_ff_dim=256, **layers)
    weights = {"embed_tokens": Normal(0.0, 0.0625)}
    return _save(Lfm2ForCausalLM(Lfm2Config(**shape)), folder, weights)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "gptoss": gptoss,
    "gemma3": gemma3,
    "mistral": mistral,
    "granite4": granite4,
    "nemotronh": nemotronh,
    "qwen3next": qwen3next,
    "llama4": llama4,
    "lfm2": lfm2,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
}
