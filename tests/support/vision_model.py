"""A tiny random Idefics3, which vLLM's CPU build runs without torchvision, and pictures for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kvstore.tools.dev.weights import randomize
from kvstore.tools.models import write_tokenizer

VOCAB = 1024
IMAGE_TOKEN = VOCAB  # the first beyond the tokenizer's
_SIDE = 224
_PATCH = 14
_PER_TOKEN = 2  # patches, in each direction: a picture is 64 tokens
_MAX_POSITION = 4096


def build_idefics3(folder: Path) -> Path:
    """Write the model, its tokenizer and its processor; returns ``folder``."""
    import transformers as hf

    heads: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 256}
    vision = {**heads, "num_hidden_layers": 2, "image_size": _SIDE, "patch_size": _PATCH}
    special = {"bos_token_id": VOCAB - 3, "eos_token_id": VOCAB - 2, "pad_token_id": VOCAB - 1}
    text = hf.LlamaConfig(
        **heads, **special, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, vocab_size=VOCAB + 64,
        max_position_embeddings=_MAX_POSITION,
    )  # fmt: skip
    config = hf.Idefics3Config(
        vision_config=vision, text_config=text, scale_factor=_PER_TOKEN, image_token_id=IMAGE_TOKEN,
        pad_token_id=VOCAB - 1,
    )  # fmt: skip
    model = hf.Idefics3ForConditionalGeneration(config)
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB, _MAX_POSITION)
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<image>", "<fake_token_around_image>", "<global-img>"], special_tokens=True)
    edge = {"longest_edge": _SIDE}
    pictures = hf.Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge)
    tokens = (_SIDE // _PATCH // _PER_TOKEN) ** 2
    hf.Idefics3Processor(pictures, tokenizer, image_seq_len=tokens).save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    """Return a picture of coloured squares."""
    squares = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
