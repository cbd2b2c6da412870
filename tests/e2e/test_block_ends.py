"""Tests of prompts that diverge at any token on real vLLM: outputs equal plain vLLM's, and hit lengths are exact."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cache_server import ServerProcess, short_folder
from support.vllm_engine import (
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    through_memory,
    whole_blocks,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

VOCAB = 1000


def parting_prompts(count: int, seed: int) -> list[Prompt]:
    """Return prompts that each share a random prefix with an earlier one."""
    rng = random.Random(seed)
    found = [[rng.randrange(5, VOCAB) for _ in range(900)]]
    while len(found) < count:
        stem = rng.choice(found)
        found.append(
            [*stem[: rng.randrange(len(stem))], *(rng.randrange(5, VOCAB) for _ in range(rng.randrange(1, 400)))]
        )
    return found


def found_tokens(prompt: Prompt, stored: list[Prompt]) -> int:
    """Return the longest prefix, in whole blocks, of a prompt and any stored one; one token is always computed."""
    shared = 0
    for other in stored:
        common = next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
        shared = max(shared, min(len(prompt), len(other)) if common is None else common)
    return min(shared - shared % 32, whole_blocks(len(prompt)))


def ask(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    """Generate one prompt after the other, with vLLM's own cache empty each time."""
    answers = []
    for prompt in prompts:
        engine.forget_local()
        answers += engine.generate([prompt])
        engine.settle()
    return answers


@pytest.mark.sweep
def test_the_longest_common_prefix_is_found(tiny_model: Path, tmp_path: Path) -> None:
    """It is found in memory, on disk after a restart, where every hit reads files, and at a server filled by others."""
    prompts = parting_prompts(18, seed=3)
    with Engine(tiny_model, enable_prefix_caching=False) as engine:
        plain = engine.generate(prompts, logprobs=2)
    first, second = prompts[:7], prompts[7:14]
    with short_folder() as folder, ExitStack() as stopped:
        server = ServerProcess(folder).start()
        stopped.callback(server.kill)
        store = through_memory(server.url)
        in_memory = {"kvstore.local_cpu": True, "kvstore.load_only_if_faster": False}
        with Engine(tiny_model, StoreSetup(tmp_path / "disk", extra=store.extra | in_memory)) as engine:
            answers = ask(engine, first)
        with Engine(tiny_model, StoreSetup(tmp_path / "disk", extra={"kvstore.local_cpu": False})) as engine:
            answers += ask(engine, second)
            engine.assert_idle()
        with Engine(tiny_model, store) as engine:
            answers += ask(engine, prompts[14:])
            engine.assert_idle()
    assert_same_outputs(plain, answers)
    expected = [found_tokens(prompt, prompts[:number]) for number, prompt in enumerate(prompts[:14])]
    known = [first + prompts[14 : 14 + number] for number in range(len(prompts) - 14)]
    expected += [found_tokens(prompt, stored) for prompt, stored in zip(prompts[14:], known, strict=True)]
    assert [answer.cached_tokens for answer in answers] == expected
    assert sum(tokens % 256 > 0 for tokens in expected) > len(prompts) // 2, "most part inside a chunk"
