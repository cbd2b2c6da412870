"""Trial of one model under vLLM without the connector, then with it, in this process.

    python -m kvstore.tools.dev.models.trial ARCHITECTURE FOLDER

Each stage that succeeds prints its results as a line of JSON on standard output, after ``MARK``. The process may end at
any stage.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm import LLM, SamplingParams, TokensPrompt

from kvstore.adapters.vllm.offline.engine import transfer_config
from kvstore.adapters.vllm.offline.measuring import opened
from kvstore.tools.dev.mamba2 import end_steps_at_states
from kvstore.tools.dev.models.shapes import VOCAB, build

MARK: Final = "TRIAL "
STORE: Final = transfer_config({"kvstore.max_local_cpu_size": 0.5, "kvstore.load_only_if_faster": False})
_TIE_GAP: Final = 1e-4  # two best logprobs closer than this swap between plain runs as well
_LENGTHS: Final = (700, 1300)  # of prompts: the longer one has a block of any model
_MAX_TOKENS: Final = 16


class Answer(NamedTuple):
    """vLLM's answer to a prompt."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int
    sure_tokens: int  # those before the first tie


def main() -> None:
    """Carry out the trial that the command line names."""
    architecture, folder = sys.argv[1], Path(sys.argv[2])
    end_steps_at_states()
    build(architecture, folder)
    say(built=True)
    dtype = "float32"
    try:
        expected, groups = plain(folder, dtype)
    except (AssertionError, RuntimeError):  # kernels of some models take no other type
        dtype = "bfloat16"
        expected, groups = plain(folder, dtype)
    say(runs=dtype, groups=groups, differs=expected[0].tokens != expected[1].tokens)
    with opened(str(folder), None, dtype=dtype, enable_prefix_caching=True) as llm:
        ask(llm)
        own = ask(llm)
    say(own_cached=[one.cached_tokens for one in own], own_equal=are_equal(expected, own))
    with opened(str(folder), STORE, dtype=dtype, enable_prefix_caching=True) as llm:
        ask(llm)
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache")
        found = ask(llm)
    say(
        cached=[one.cached_tokens for one in found],
        equal=are_equal(expected, found),
        equal_own=[one[:3] for one in own] == [one[:3] for one in found],
    )


def say(**known: object) -> None:
    """Print results for the parent process."""
    print(MARK + json.dumps(known), flush=True)


def plain(folder: Path, dtype: str) -> tuple[list[Answer], list[str]]:
    """Return vLLM's answers without any cache, and the spec names of its KV cache groups."""
    with opened(str(folder), None, dtype=dtype, enable_prefix_caching=False) as llm:
        core: Any = llm.llm_engine.engine_core
        config = core.engine_core.scheduler.kv_cache_config
        return ask(llm), [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]


def ask(llm: LLM) -> list[Answer]:
    """Generate answers to prompts that begin differently, each alone in its batch."""
    rng = random.Random(0)  # noqa: S311 - not a secret
    prompts = [[rng.randrange(5, VOCAB - 8) for _ in range(length)] for length in _LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=2)
    return [
        answer(llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)[0]) for prompt in prompts
    ]


def answer(output: Any) -> Answer:  # noqa: ANN401 - vLLM's
    """Convert vLLM's output to an answer."""
    best = output.outputs[0]
    tokens = list(best.token_ids)
    ranked = [sorted((entry.logprob for entry in at.values()), reverse=True) for at in best.logprobs]
    sure = next((number for number, two in enumerate(ranked) if two[0] - two[1] < _TIE_GAP), len(tokens))
    own = [at[token].logprob for token, at in zip(tokens, best.logprobs, strict=True)]
    return Answer(tokens, own, output.num_cached_tokens or 0, sure)


def are_equal(expected: Sequence[Answer], got: Sequence[Answer]) -> bool:
    """Tell if all tokens before the first tie are the same."""
    pairs = zip(expected, got, strict=True)
    return all(one.tokens[: one.sure_tokens] == other.tokens[: one.sure_tokens] for one, other in pairs)


if __name__ == "__main__":
    main()
