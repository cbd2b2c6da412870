"""Test of pictures, which vLLM names by a counter that restarts in every process; their content decides hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.vllm_engine import BLOCK_TOKENS, Completion, Engine, StoreSetup, _completion, assert_same_outputs

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


pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.soak]

COUNTING: dict[str, Any] = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
TEXT = list(range(20, 130))


def ask(engine: Engine, seed: int) -> list[Completion]:
    """Return vLLM's answers to a picture, and to the same with processor arguments, which change its name only."""
    from vllm import SamplingParams

    plain: dict[str, Any] = {
        "prompt_token_ids": [5, IMAGE_TOKEN, *TEXT], "multi_modal_data": {"image": picture(seed)},
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    requests: list[Any] = [plain, {**plain, "mm_processor_kwargs": {"do_image_splitting": False}}]
    return [_completion(engine.llm.generate([request], params, use_tqdm=False)[0]) for request in requests]


def test_another_picture_after_a_restart(tmp_path: Path) -> None:
    model = build_idefics3(tmp_path / "model")
    with Engine(model, **COUNTING) as engine:
        first, second = ask(engine, 0), ask(engine, 1)
    assert first[0].token_ids != second[0].token_ids
    store = StoreSetup(disk=tmp_path / "disk", extra={"kvstore.chunk_size": 2 * BLOCK_TOKENS})
    with Engine(model, store, **COUNTING) as engine:
        assert_same_outputs(first, ask(engine, 0))
        engine.settle()
    with Engine(model, store, **COUNTING) as engine:
        assert_same_outputs(second, ask(engine, 1))
        again = ask(engine, 0)
        assert_same_outputs(first, again)
        assert all(answer.cached_tokens >= 4 * BLOCK_TOKENS for answer in again)
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()
