"""The demonstration's models and its verdict; the demonstration itself is ``make demo``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file
from support.lora import build_lora
from tokenizers import Tokenizer

from kvstore.tools.demo.run import DemoResult, drop_page_cache
from kvstore.tools.models import (
    SPECIAL_TOKENS,
    TINY,
    as_text,
    build_llama,
    count_words,
    random_tokens,
    write_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

GOOD = DemoResult(
    prompt_tokens=3000,
    output_tokens=24,
    cold_ttft_s=5.0,
    warm_ttft_s=0.25,
    loaded_tokens=2976,
    disk_bytes=73_000_000,
    outputs_identical=True,
)
SMALL = replace(TINY, layers=1, vocab=512)


def test_success_has_no_problems() -> None:
    assert GOOD.problems() == []
    assert GOOD.ratio == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (replace(GOOD, outputs_identical=False), "differ"),
        (replace(GOOD, loaded_tokens=0), "nothing was loaded"),
        (replace(GOOD, loaded_tokens=2815), "only 2815 of the 2816"),
    ],
)
def test_every_failure_is_named(result: DemoResult, problem: str) -> None:
    (found,) = result.problems()
    assert problem in found


def test_a_whole_number_of_chunks_leaves_one_token_to_compute() -> None:
    assert replace(GOOD, prompt_tokens=2816).expected_tokens == 2560


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    one, two, other = (build_llama(tmp_path / n, SMALL, seed=s) for n, s in (("one", 0), ("two", 0), ("other", 1)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, two, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_model_is_built_once_and_replaced_for_another_seed(tmp_path: Path) -> None:
    file = build_llama(tmp_path, SMALL) / "model.safetensors"
    before = file.stat().st_mtime_ns
    build_llama(tmp_path, SMALL)
    assert file.stat().st_mtime_ns == before
    first = file.read_bytes()
    build_llama(tmp_path, SMALL, seed=1)
    assert file.read_bytes() != first


def test_text_has_exactly_its_tokens(tmp_path: Path) -> None:
    tokens = random_tokens(300, vocab=SMALL.vocab, seed=3)
    tokenizer = Tokenizer.from_file(str(build_llama(tmp_path, SMALL) / "tokenizer.json"))
    assert tokenizer.encode(as_text(tokens)).ids == tokens


def test_different_texts_are_different_tokens(tmp_path: Path) -> None:
    """Unknown words are tokenized by byte, so a text comes back from its tokens."""
    write_tokenizer(tmp_path, SMALL.vocab, 4096)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["What is the capital of France?", "What is the capital of Spain?", "ab", "a b", "a\nb", "w1 w2", "w1w2"]
    texts += ["w01", "W1", "w0001", "w99999", "na\u00efve \u65e5\u672c \x00"]
    ids = [tokenizer.encode(text).ids for text in texts]
    assert len(set(map(tuple, ids))) == len(texts)
    assert [tokenizer.decode(found) for found in ids] == [f" {text}" for text in texts]
    assert max(max(found) for found in ids) < SMALL.vocab - len(SPECIAL_TOKENS)


def test_a_model_answers_in_words(tmp_path: Path) -> None:
    head = load_file(build_llama(tmp_path, SMALL) / "model.safetensors")["lm_head.weight"]
    silent = (head == 0).all(dim=1)
    assert silent.sum() == 257
    assert not silent[: count_words(SMALL.vocab)].any()


def test_lora_adapters_differ_in_their_weights_only(tmp_path: Path) -> None:
    one, two = (build_lora(tmp_path / str(seed), SMALL, model_folder=tmp_path, seed=seed) for seed in (1, 2))
    assert (one / "adapter_config.json").read_text() == (two / "adapter_config.json").read_text()
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    assert all(not first[name].equal(second[name]) for name in first)


def test_dropping_the_page_cache_keeps_the_bytes(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "chunk"
    file.parent.mkdir()
    file.write_bytes(b"x" * 10_000)
    drop_page_cache(tmp_path)
    assert file.read_bytes() == b"x" * 10_000
