"""Prompts that part anywhere, on real vLLM: outputs are those of plain vLLM, and hits are exactly as long as told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, assert_same_outputs, whole_blocks

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

VOCAB = 1000


def parting_prompts(count: int, seed: int) -> list[Prompt]:
    """Each begins like an earlier one, parts from it anywhere, and goes on alone."""
    rng = random.Random(seed)
    found = [[rng.randrange(5, VOCAB) for _ in range(900)]]
    while len(found) < count:
        stem = rng.choice(found)
        found.append(
            [*stem[: rng.randrange(len(stem))], *(rng.randrange(5, VOCAB) for _ in range(rng.randrange(1, 400)))]
        )
    return found


def found_tokens(prompt: Prompt, stored: list[Prompt]) -> int:
    """The longest prefix, in whole blocks, of a prompt and any that was stored; one token is always computed."""
    shared = 0
    for other in stored:
        common = next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
        shared = max(shared, min(len(prompt), len(other)) if common is None else common)
    return min(shared - shared % 32, whole_blocks(len(prompt)))


def ask(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    """One by one, vLLM's own cache empty each time."""
    answers = []
    for prompt in prompts:
        engine.forget_local()
        answers += engine.generate([prompt])
        engine.settle()
    return answers


def test_the_longest_common_prefix_is_found(tiny_model: Path, tmp_path: Path) -> None:
    """In memory, and behind a restart on disk, where every hit reads files."""
    prompts = parting_prompts(14, seed=3)
    with Engine(tiny_model, enable_prefix_caching=False) as engine:
        plain = engine.generate(prompts, logprobs=2)
    half = len(prompts) // 2
    everything = {"kvstore.load_only_if_faster": False}
    with Engine(tiny_model, StoreSetup(tmp_path / "disk", extra=everything)) as engine:
        answers = ask(engine, prompts[:half])
    with Engine(tiny_model, StoreSetup(tmp_path / "disk", extra=everything | {"kvstore.local_cpu": False})) as engine:
        answers += ask(engine, prompts[half:])
        engine.assert_idle()
    assert_same_outputs(plain, answers)
    expected = [found_tokens(prompt, prompts[:number]) for number, prompt in enumerate(prompts)]
    assert [answer.cached_tokens for answer in answers] == expected
    assert sum(tokens % 256 > 0 for tokens in expected) > len(prompts) // 2, "most part inside a chunk"
