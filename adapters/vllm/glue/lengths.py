"""Namespace fields that depend on the longest context.

Most models have none: their rotary angles do not depend on it, so engines with different ``--max-model-len`` share KV.
Two kinds of models are built differently when it exceeds a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_LONGROPE: Final = ("longrope", "su")
_ROPE_TYPES: Final = ("rope_type", "type")
_ORIGINAL: Final = "original_max_position_embeddings"
_TUNED_TOKENS: Final = 32768  # above this vLLM tunes the attention of Llama 4
_TUNING: Final = "attn_temperature_tuning"


def lengths_of(model: ModelConfig) -> dict[str, str]:
    """Return the fields of a namespace that depend on the longest context; none for most models.

    ``rope`` names the factors of LongRoPE (Phi-3, Phi-4-mini, MiniCPM). ``attention_scale`` is True if Llama 4 scales
    queries by their position, which the generation configuration may override.
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
