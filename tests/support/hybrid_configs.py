"""Public configurations of models with windows or states, with the fields that concern their KV."""

from __future__ import annotations

from typing import Any

WINDOW, FULL = "sliding_attention", "full_attention"

HYBRIDS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": [WINDOW, FULL] * 12,
    },
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
    "Granite-4.0-H-Small": {
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 40,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["attention" if number in {5, 15, 25, 35} else "mamba" for number in range(40)],
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
    },
    "LFM2-1.2B": {
        "model_type": "lfm2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_dim": 2048,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
}
