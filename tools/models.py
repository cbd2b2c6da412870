"""Llama models with random weights, and their tokenizer, written to disk without any download.

With weights from N(0, 2/sqrt(fan_in)), embeddings and the output head from N(0, 1) and norms at 1, greedy outputs
depend on the whole prompt, so equal outputs imply equal KV. The same arguments give the same bytes.

The ids of a vocabulary are first the words ``w0``, ``w1``, ..., whose number is the id, then the bytes and the
beginning of a word, then the special tokens. Other text is read byte by byte, so different texts are different tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

DType = Literal["float32", "bfloat16", "float16"]
SPECIAL_TOKENS = ("<s>", "</s>", "<unk>")
"""Special tokens, which have the last ids of every vocabulary."""
_SPACE = "\u0120"  # a space's byte, as tokenizers write it
_WORD = f"{_SPACE}w"
_PIECES = (*sorted(ByteLevel.alphabet()), _WORD)


@dataclass(frozen=True)
class LlamaShape:
    """Size of a Llama model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def query_width(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in all layers, in float32."""
        return 2 * self.layers * self.kv_width * 4


TINY = LlamaShape(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=704, vocab=1281)
"""Model large enough to check outputs: 14 MB in float32, built in an instant."""
DEMO = LlamaShape(layers=12, hidden=1024, heads=16, kv_heads=4, head_dim=64, intermediate=2560, vocab=2305)
"""Model large enough to measure: 520 MB in float32; computing 3,000 tokens takes seconds on a small machine."""


def build_llama(
    folder: Path, shape: LlamaShape, *, dtype: DType = "float32", seed: int = 0, max_position: int = 4096
) -> Path:
    """Write a model and its tokenizer in the format of vLLM and transformers, and return ``folder``.

    A folder that already holds exactly this model is not changed.
    """
    built_from = json.dumps({**asdict(shape), "dtype": dtype, "seed": seed, "max_position": max_position})
    receipt = folder / "built_from.json"
    if receipt.is_file() and receipt.read_text(encoding="utf-8") == built_from:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    receipt.unlink(missing_ok=True)
    _write_json(folder / "config.json", _llama_config(shape, dtype, max_position))
    write_tokenizer(folder, shape.vocab, max_position)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (torch.ones(size) if std is None else torch.randn(size, generator=generator) * std).to(torch_dtype)
        for name, size, std in _llama_weights(shape)
    }
    words = count_words(shape.vocab)
    weights["lm_head.weight"][words : words + len(_PIECES)] = 0  # answers are words, which can be sent back as text
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    receipt.write_text(built_from, encoding="utf-8")
    return folder


def count_words(vocab: int) -> int:
    """Return the number of words in a vocabulary; words have the first ids."""
    return vocab - len(_PIECES) - len(SPECIAL_TOKENS)


def random_tokens(num_tokens: int, *, vocab: int, seed: int) -> list[int]:
    """Return the token ids of a random prompt of words."""
    return random.Random(seed).choices(range(count_words(vocab)), k=num_tokens)  # noqa: S311 - not a secret


def as_text(tokens: list[int]) -> str:
    """Return the text that the tokenizer turns into exactly these tokens, which must be words."""
    return " ".join(f"w{token}" for token in tokens)


def write_tokenizer(folder: Path, vocab: int, max_position: int) -> None:
    """Write the tokenizer of a model with ``vocab`` token ids, in which a space is part of the word after it."""
    words = [f"{_WORD}{number}" for number in range(count_words(vocab))]
    ids = {word: number for number, word in enumerate([*words, *_PIECES, *SPECIAL_TOKENS])}
    merges = [(_SPACE, "w"), *((word[:-1], word[-1]) for word in words)]  # a word grows digit by digit
    tokenizer = Tokenizer(BPE(ids, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.decoder = ByteDecoder()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _llama_weights(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Yield name, size and standard deviation of every weight; None stands for ones."""

    def linear(name: str, fan_out: int, fan_in: int) -> tuple[str, tuple[int, ...], float | None]:
        return f"{name}.weight", (fan_out, fan_in), 2 / math.sqrt(fan_in)

    hidden = shape.hidden
    yield "model.embed_tokens.weight", (shape.vocab, hidden), 1.0
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield linear(f"{prefix}.self_attn.q_proj", shape.query_width, hidden)
        yield linear(f"{prefix}.self_attn.k_proj", shape.kv_width, hidden)
        yield linear(f"{prefix}.self_attn.v_proj", shape.kv_width, hidden)
        yield linear(f"{prefix}.self_attn.o_proj", hidden, shape.query_width)
        yield linear(f"{prefix}.mlp.gate_proj", shape.intermediate, hidden)
        yield linear(f"{prefix}.mlp.up_proj", shape.intermediate, hidden)
        yield linear(f"{prefix}.mlp.down_proj", hidden, shape.intermediate)
        yield f"{prefix}.input_layernorm.weight", (hidden,), None
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,), None
    yield "model.norm.weight", (hidden,), None
    yield "lm_head.weight", (shape.vocab, hidden), 1.0


def _llama_config(shape: LlamaShape, dtype: DType, max_position: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": shape.vocab - 3,
        "eos_token_id": shape.vocab - 2,
        "dtype": dtype,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
