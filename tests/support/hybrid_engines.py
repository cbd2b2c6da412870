"""Real vLLM engines of the tiny hybrid models: their options, the ends of hits, and loads that are spoilt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine import BLOCK_TOKENS, NUM_BLOCKS, VOCAB, Completion, Engine, Prompt, StoreSetup


def words(seed: int, count: int) -> Prompt:
    """Return a random prompt."""
    rng = random.Random(seed)
    return [rng.randrange(5, VOCAB - 8) for _ in range(count)]


# No prompt begins like another, so that each has its own hit.
LONG = words(0, 1100)
PROMPTS = [words(1, 20), words(2, 90), words(3, 300), words(4, 980), LONG]
SHARED_TOKENS = 832  # 13 chunks of 64 tokens
SIBLINGS = [[*LONG[:SHARED_TOKENS], *words(seed, 148)] for seed in (5, 6, 7)]


@dataclass(frozen=True)
class Hybrid:
    """A model, and the options and hits of its engines."""

    name: str
    folder: Path
    block_tokens: int = 32  # a multiple of every group's block
    chunk_tokens: int = 64
    dtype: str = "float32"

    def engine(self, store: StoreSetup | None = None, **overrides: Any) -> Engine:
        """Return an engine; without a store it caches nothing."""
        overrides = {"num_gpu_blocks_override": NUM_BLOCKS * BLOCK_TOKENS // self.block_tokens, **overrides}
        if store is None:
            overrides = {"enable_prefix_caching": False, **overrides}
        return Engine(self.folder, store, dtype=self.dtype, **overrides)

    def store(self, disk: Path | None = None, **extra: Any) -> StoreSetup:
        """Return a setup with chunks that end where siblings part; ``extra`` are keys without their prefix."""
        keys = {f"kvstore.{key}": value for key, value in extra.items()}
        return StoreSetup(disk, extra={"kvstore.chunk_size": self.chunk_tokens, **keys})

    def hits(self, prompts: Sequence[Prompt] = PROMPTS) -> list[int]:
        """Return the tokens of each prompt that a hit brings: all whole blocks before its last token."""
        return [(len(prompt) - 1) // self.block_tokens * self.block_tokens for prompt in prompts]


def cached(completions: Sequence[Completion]) -> list[int]:
    """Return the tokens of each completion that were not computed."""
    return [completion.cached_tokens for completion in completions]


def kinds_of(engine: Engine) -> list[str]:
    """Return vLLM's names of the kinds of its groups."""
    return [type(group.kv_cache_spec).__name__ for group in engine.core_scheduler.kv_cache_config.kv_cache_groups]


@contextmanager
def counted_loads() -> Iterator[Counter[str]]:
    """Count how often vLLM decided to load for each request."""
    from kvstore.adapters.vllm.connector import KVStoreConnector

    original, loads = KVStoreConnector.update_state_after_alloc, Counter[str]()

    def counting(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        loads[request.request_id] += num_external_tokens > 0
        original(self, request, blocks, num_external_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVStoreConnector, "update_state_after_alloc", counting)
        yield loads


@contextmanager
def zeroed_checkpoints(engine: Engine) -> Iterator[set[str]]:
    """Zero what is loaded of windows and states before vLLM hears of it. Yields the requests."""
    from kvstore.adapters.vllm.connector import KVStoreConnector

    allocated, finished = KVStoreConnector.update_state_after_alloc, KVStoreConnector.get_transfer_results
    tables: dict[str, tuple[list[int], ...]] = {}
    zeroed = set[str]()

    def noting(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tables[request.request_id] = blocks.get_block_ids()
        allocated(self, request, blocks, num_external_tokens)

    def zeroing(self: Any, finished_req_ids: set[str]) -> Any:
        results = finished(self, finished_req_ids)
        for req_id in results.finished_recving or ():
            zero_partial_groups(engine, tables[req_id])
            zeroed.add(req_id)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVStoreConnector, "update_state_after_alloc", noting)
        patch.setattr(KVStoreConnector, "get_transfer_results", zeroing)
        yield zeroed


def zero_partial_groups(engine: Engine, tables: Sequence[list[int]]) -> None:
    """Overwrite a request's blocks in all groups that do not keep all tokens."""
    config = engine.core_scheduler.kv_cache_config
    layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for group, table in zip(config.kv_cache_groups, tables, strict=True):
        if type(group.kv_cache_spec).__name__ == "FullAttentionSpec":
            continue
        for name in group.layer_names:
            cache = layers[name].kv_cache
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                ratio = tensor.shape[0] // config.num_blocks  # vLLM's kernels may count in smaller blocks
                for block in filter(None, table):
                    tensor[block * ratio : (block + 1) * ratio].zero_()


def answers_with_logprobs(engine: Engine, prompt: Prompt, max_tokens: int = 12) -> list[tuple[int, float]]:
    """Return the tokens of an answer, each with its logprob, exact to the last bit."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    best = output.outputs[0]
    ranked = best.logprobs or []
    return [(token, at[token].logprob) for token, at in zip(best.token_ids, ranked, strict=True)]
