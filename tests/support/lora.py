"""LoRA adapters with random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvstore.tools.models import LlamaShape

LORA_TARGETS = ("q_proj", "v_proj")


def build_lora(folder: Path, shape: LlamaShape, *, model_folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter in PEFT's format for a model of ``shape``, and return ``folder``.

    Its weights are large enough to change outputs. Adapters of different seeds differ in their weights only: file
    names, sizes and configuration are equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": shape.query_width, "v_proj": shape.kv_width}
    weights: dict[str, torch.Tensor] = {}
    for layer in range(shape.layers):
        for target in LORA_TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            down = torch.randn(rank, shape.hidden, generator=generator) / math.sqrt(shape.hidden)
            up = torch.randn(widths[target], rank, generator=generator) / math.sqrt(rank)
            weights[f"{name}.lora_A.weight"] = down
            weights[f"{name}.lora_B.weight"] = up
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_folder),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(LORA_TARGETS),
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
