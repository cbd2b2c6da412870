"""Times of real vLLM with the connector and without it, on this machine's CPU, for ``kvstore bench``.

    python -m kvstore.adapters.vllm.offline.measuring MODEL VOCABULARY ROUNDS

prints its samples as one line of JSON, a pair of seconds each: first the limit's, then ours. The limit of a hit is a
hit of the same prompt in vLLM's own prefix cache right before. The limit of a turn whose chunks were prefetched is 1.2
hits in memory. The limit of the hooks is a share of the time of their steps. The limit of throughput is vLLM without
the connector, which is also compared with itself.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

from vllm import LLM, SamplingParams, TokensPrompt

from kvstore.adapters.vllm.connector import KVStoreConnector
from kvstore.adapters.vllm.offline.engine import connector_of, end_vllm, transfer_config
from kvstore.model.errors import KVStoreError
from kvstore.model.keys import PrefixHasher

MARK: Final = "BENCH SAMPLES "  # before the JSON
BLOCK_TOKENS: Final = 32
HIT_TOKENS: Final = 2048
HOOK_SHARE: Final = 0.01  # of a step's time
HIT_COST: Final = 1.3  # times a hit in vLLM's own prefix cache
PREFETCH_COST: Final = 1.2  # times a hit in memory
_TURN_TOKENS: Final = 1024
_CROWD: Final = 3  # prompts of so many tokens, which fill the pool
_PATIENCE_S: Final = 20.0
_PREFETCHING: Final = {
    "kvstore.max_local_cpu_size": 0.06,
    "kvstore.max_local_disk_size": 4.0,
    "kvstore.cache_policy": "LRU",
    "kvstore.load_only_if_faster": False,
    "kvstore.request_fields": "prefetch,skip_save",
}
_BATCH_PROMPTS: Final = 4
_BATCH_TOKENS: Final = 384
_START_S: Final = 1.0  # may be added by the connector
_START_POOL_GIB: Final = 4.0
_MAX_STARTS: Final = 5
_HOOKS: Final = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "request_finished",
)


T = TypeVar("T")
Sample = tuple[float, float]  # seconds: the limit's, and ours


class Samples(NamedTuple):
    """Samples of each line of the benchmark."""

    one_token_left: list[Sample]
    any_length: list[Sample]
    prefetched: list[Sample]
    hooks: list[Sample]
    throughput: list[Sample]
    control: list[Sample]
    start: list[Sample]


STORE: Final = transfer_config({"kvstore.max_local_cpu_size": 1.0})


@contextmanager
def opened(model: str, transfer: dict[str, Any] | None, **more: int | str) -> Iterator[LLM]:
    """Yield a vLLM in this process, with a connector or without one, and with ``more`` of vLLM's own settings."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2 * HIT_TOKENS,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
        **more,
    }
    if transfer is not None:
        settings["kv_transfer_config"] = transfer
    llm = LLM(model=model, **settings)
    try:
        yield llm
    finally:
        end_vllm(llm)


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int = 1, extra_args: dict[str, Any] | None = None
) -> tuple[float, list[int]]:
    """Return the seconds until all prompts have been answered, and the tokens of each that were not computed."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    begin_s = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return time.perf_counter() - begin_s, [output.num_cached_tokens or 0 for output in outputs]


class _Asker:
    """Client that asks for one token at a time and measures the time."""

    def __init__(self, llm: LLM, vocabulary: int, seed: int) -> None:
        self.llm = llm
        self._vocabulary = vocabulary
        self._rng = random.Random(seed)  # noqa: S311 - prompts that are the same in every run

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(5, self._vocabulary) for _ in range(num_tokens)]

    def ask(self, *prompts: list[int], **fields: object) -> tuple[float, int]:
        """Return the seconds, and the tokens of the last prompt that were not computed."""
        named = {f"kvstore.{name}": value for name, value in fields.items()}
        seconds, cached_tokens = ask(self.llm, prompts, extra_args=named or None)
        return seconds, cached_tokens[-1]

    def hit_pair(self, prompt: list[int]) -> Sample:
        """Time a hit in vLLM's own prefix cache, which has the prompt, and then a hit in memory."""
        own_s, own_tokens = self.ask(prompt)
        self.llm.reset_prefix_cache()
        ours_s, our_tokens = self.ask(prompt)
        if our_tokens < own_tokens or not own_tokens:
            raise KVStoreError(f"of {len(prompt)} tokens vLLM's own cache had {own_tokens}, and the store {our_tokens}")
        return own_s, ours_s

    def crowd(self) -> float:
        """Fill the pool with prompts, and return the seconds that this takes."""
        begin_s = time.perf_counter()
        for _ in range(_CROWD):
            self.ask(self.prompt(_TURN_TOKENS))
        return time.perf_counter() - begin_s

    def return_pair(self, away_s: float) -> Sample:
        """Time a hit in memory, and the next turn after so many seconds, in which the chunks have left memory."""
        prompt = self.prompt(_TURN_TOKENS)
        self.ask(prompt)
        memory_s, memory_tokens = self.ask(prompt, prefetch=away_s)
        due_s = time.perf_counter() + away_s
        self.crowd()
        if self._is_in_memory(prompt) or time.perf_counter() > due_s:
            raise KVStoreError("the prompt has not left memory, or not in time")
        time.sleep(max(0.0, due_s - time.perf_counter()))
        while not self._is_in_memory(prompt):
            if time.perf_counter() > due_s + _PATIENCE_S:
                raise KVStoreError(f"no prefetch in {_PATIENCE_S} s")
            self.ask(self.prompt(BLOCK_TOKENS), skip_save=True)  # steps, without which vLLM plans nothing
        prefetched_s, num_tokens = self.ask(prompt)
        if num_tokens < memory_tokens or not num_tokens:
            raise KVStoreError(f"after the prefetch {num_tokens} tokens were a hit, and before {memory_tokens}")
        return PREFETCH_COST * memory_s, prefetched_s

    def _is_in_memory(self, prompt: list[int]) -> bool:
        connector = connector_of(self.llm)
        layout, index = connector.facts[0].layout, connector.index
        hasher = PrefixHasher(layout.blocks_per_chunk * layout.block_tokens, layout.block_tokens)
        hasher.update(prompt)
        return index is not None and all(index.in_memory(key) for key in hasher.chunk_keys())


def _hits(llm: LLM, vocabulary: int, rounds: int) -> tuple[list[Sample], list[Sample]]:
    asker = _Asker(llm, vocabulary, seed=1)
    asker.ask(asker.prompt(BLOCK_TOKENS))  # triggers work that is done only once
    prompt = asker.prompt(HIT_TOKENS + 1)
    asker.ask(prompt)
    one_token_left = [asker.hit_pair(prompt) for _ in range(rounds)]
    any_length = []
    for number in range(rounds):
        prompt = asker.prompt(HIT_TOKENS // 4 * (1 + number % 4) - BLOCK_TOKENS // 2 - number)
        asker.ask(prompt)
        own_s, ours_s = asker.hit_pair(prompt)
        one_block_s, _ = asker.ask(asker.prompt(BLOCK_TOKENS))
        any_length.append((HIT_COST * own_s + one_block_s, ours_s))
    return one_token_left, any_length


def _prefetched(model: str, vocabulary: int, rounds: int) -> list[Sample]:
    """Time the next turn of a conversation that others have crowded out of memory, and a hit in memory before."""
    with tempfile.TemporaryDirectory() as folder:
        transfer = transfer_config(_PREFETCHING | {"kvstore.local_disk": folder})
        with opened(model, transfer, enable_prefix_caching=False) as llm:
            asker = _Asker(llm, vocabulary, seed=4)
            asker.crowd()  # triggers work that is done only once
            away_s = 1.5 * asker.crowd()
            return [asker.return_pair(away_s) for _ in range(rounds)]


@contextmanager
def _hook_clock() -> Iterator[Callable[[], float]]:
    """Time every hook of the connector; the function yielded returns the sum since its last call."""
    total_s = [0.0]

    def timed(hook: Callable[..., T]) -> Callable[..., T]:
        @wraps(hook)
        def call(*args: object, **kwargs: object) -> T:
            begin_s = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                total_s[0] += time.perf_counter() - begin_s

        return call

    def take() -> float:
        seconds, total_s[0] = total_s[0], 0.0
        return seconds

    with ExitStack() as patches:
        for name in _HOOKS:
            patches.enter_context(patch.object(KVStoreConnector, name, timed(getattr(KVStoreConnector, name))))
        yield take


def _hooks(llm: LLM, vocabulary: int, rounds: int) -> list[Sample]:
    """Time all hooks together where no prompt is a hit and everything is stored."""
    asker = _Asker(llm, vocabulary, seed=2)
    pairs = []
    with _hook_clock() as take:
        for _ in range(rounds):
            take()
            steps_s, _ = asker.ask(*(asker.prompt(_BATCH_TOKENS) for _ in range(_BATCH_PROMPTS)))
            pairs.append((HOOK_SHARE * steps_s, take()))
    return pairs


def _batches(llm: LLM, vocabulary: int, rounds: int) -> list[float]:
    """Return the seconds of each batch of new prompts."""
    asker = _Asker(llm, vocabulary, seed=3)
    asker.ask(asker.prompt(BLOCK_TOKENS))
    return [asker.ask(*(asker.prompt(_BATCH_TOKENS) for _ in range(_BATCH_PROMPTS)))[0] for _ in range(rounds)]


def _starts(model: str, rounds: int) -> list[Sample]:
    """Time vLLM's start until it accepts requests, without the connector and with it."""

    def start_s(transfer: dict[str, Any] | None) -> float:
        begin_s = time.perf_counter()
        with opened(model, transfer):
            return time.perf_counter() - begin_s

    big = transfer_config({"kvstore.max_local_cpu_size": _START_POOL_GIB})
    return [(start_s(None) + _START_S, start_s(big)) for _ in range(min(rounds, _MAX_STARTS))]


def measure(model: str, vocabulary: int, rounds: int) -> Samples:
    """Measure all lines, with one engine after the other."""
    with opened(model, None) as llm:
        plain = _batches(llm, vocabulary, rounds)
    with opened(model, STORE) as llm:
        ours = _batches(llm, vocabulary, rounds)
        hooks = _hooks(llm, vocabulary, rounds)
        one_token_left, any_length = _hits(llm, vocabulary, rounds)
    with opened(model, None) as llm:
        control = _batches(llm, vocabulary, rounds)
    prefetched = _prefetched(model, vocabulary, rounds)
    throughput, again = (list(zip(plain, others, strict=True)) for others in (ours, control))
    return Samples(one_token_left, any_length, prefetched, hooks, throughput, again, _starts(model, rounds))


if __name__ == "__main__":
    samples = measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(MARK + json.dumps(samples._asdict()), flush=True)  # noqa: T201 - to the process that started this one
