"""Random weights for models of any architecture that transformers can build.

They are drawn such that greedy outputs depend on the whole prompt, so equal outputs imply equal KV and states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch

from kvstore.tools.models import write_tokenizer


class Normal(NamedTuple):
    """Normal distribution to draw weights from."""

    mean: float
    std: float


class Savable(Protocol):
    """Model of transformers that can be saved."""

    def save_pretrained(self, folder: Path, /) -> object:
        """Write the weights and the configuration."""


ONES: Final = Normal(1.0, 0.0)
_BY_NAME: Final = {
    "A_log": Normal(-2.0, 1.0),  # with the next line, a state decays slowly enough to carry the whole prompt
    "dt_bias": Normal(-2.5, 0.8),
    "dt_proj.bias": Normal(-2.5, 0.8),
    "conv.weight": Normal(0.0, 0.7),
    "conv1d.weight": Normal(0.0, 0.7),
    "norm": ONES,
    "embed": Normal(0.0, 1.0),
    "lm_head": Normal(0.0, 1.0),
}
_GAIN: Final = 2.0


def randomize(model: torch.nn.Module, by_name: Mapping[str, Normal] | None = None) -> None:
    """Draw all weights with a fixed seed; ``by_name`` gives the distribution of weights whose name contains a key."""
    rules = {**(by_name or {}), **{key: rule for key, rule in _BY_NAME.items() if key not in (by_name or {})}}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            drawn = next((rule for key, rule in rules.items() if key in name), None) or _default(name, weight)
            weight.normal_(drawn.mean, drawn.std, generator=generator)


def save(model: Savable, folder: Path, *, vocab: int, max_position: int) -> Path:
    """Write a model and a tokenizer in the format of vLLM, and return ``folder``."""
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab, max_position)
    return folder


def _default(name: str, weight: torch.Tensor) -> Normal:
    if name.endswith(".D"):  # of Mamba
        return ONES
    if weight.dim() < 2 or name.endswith("bias"):
        return Normal(0.0, 0.1)
    fan_in = weight.shape[-1] if weight.dim() == 2 else max(weight.shape[-2:])  # experts have either order
    return Normal(0.0, _GAIN / fan_in**0.5)
