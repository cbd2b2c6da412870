"""The vLLM lines of the bench: real vLLM on this machine's CPU, with a model that is made up, in a process of its own.

    python -m kvstore.tools.bench_vllm FOLDER ROUNDS

prints its samples as one line of JSON. The limit of a hit is vLLM's own prefix cache, asked for the same prompt right
before; that of the hooks a part of the steps they were called in; that of throughput vLLM without the connector, which
is also held against itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvstore.errors import ConfigError
from kvstore.tools.bench_work import BenchError, Pair
from kvstore.tools.models import DEMO, build_llama

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

BLOCK_TOKENS: Final = 32
HIT_TOKENS: Final = 2048
HOOK_SHARE: Final = 0.01  # of a step's time
HIT_COST: Final = 1.3  # times a hit in vLLM's own prefix cache
_BATCH_PROMPTS: Final = 4
_BATCH_TOKENS: Final = 384
_POOL_GIB: Final = 1.0
_TIMEOUT_S: Final = 1800.0
_MARK: Final = "BENCH SAMPLES "
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


class VllmSamples(NamedTuple):
    """Pairs of each line."""

    one_token_left: list[Pair]
    any_length: list[Pair]
    hooks: list[Pair]
    throughput: list[Pair]
    control: list[Pair]


def measure_vllm(folder: Path, rounds: int) -> VllmSamples:
    """Run vLLM in a new process, with its model below ``folder``.

    Raises:
        ConfigError: vLLM is not installed.
        BenchError: the run failed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed: run make bench, which installs it")
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(  # noqa: S603 - this module, in this interpreter
        [sys.executable, "-m", "kvstore.tools.bench_vllm", str(folder), str(rounds)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise BenchError(f"vLLM ended with status {done.returncode}: {done.stderr[-2000:]}")
    samples = json.loads(lines[0][len(_MARK) :])
    return VllmSamples(*([Pair(*pair) for pair in samples[name]] for name in VllmSamples._fields))


@contextmanager
def _engine(model: Path, *, with_store: bool) -> Iterator[LLM]:
    from vllm import LLM  # noqa: PLC0415 - slow to import, and not everybody has it
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown  # noqa: PLC0415

    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2 * HIT_TOKENS,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    if with_store:
        settings["kv_transfer_config"] = {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvstore.max_local_cpu_size": _POOL_GIB},
        }
    llm = LLM(model=str(model), **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


class _Asker:
    """Asks for one token at a time, and takes the time."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self._rng = random.Random(seed)  # noqa: S311 - prompts that are the same in every run

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(5, DEMO.vocab - 8) for _ in range(num_tokens)]

    def ask(self, *prompts: list[int]) -> tuple[float, int]:
        """Seconds, and the tokens of the last prompt that were not computed."""
        from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415

        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        begin_s = time.perf_counter()
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - begin_s, outputs[-1].num_cached_tokens or 0

    def hit_pair(self, prompt: list[int]) -> Pair:
        """A hit in memory against one in vLLM's own prefix cache, which has the prompt."""
        own_s, own_tokens = self.ask(prompt)
        self.llm.reset_prefix_cache()
        ours_s, our_tokens = self.ask(prompt)
        if our_tokens < own_tokens or not own_tokens:
            raise BenchError(f"of {len(prompt)} tokens vLLM's own cache had {own_tokens}, and the store {our_tokens}")
        return Pair(own_s, ours_s)


def _hits(llm: LLM, rounds: int) -> tuple[list[Pair], list[Pair]]:
    asker = _Asker(llm, seed=1)
    asker.ask(asker.prompt(BLOCK_TOKENS))  # whatever is done only once
    prompt = asker.prompt(HIT_TOKENS + 1)
    asker.ask(prompt)
    one_token_left = [asker.hit_pair(prompt) for _ in range(rounds)]
    any_length = []
    for number in range(rounds):
        prompt = asker.prompt(HIT_TOKENS // 4 * (1 + number % 4) - BLOCK_TOKENS // 2 - number)
        asker.ask(prompt)
        own_s, ours_s = asker.hit_pair(prompt)
        one_block_s, _ = asker.ask(asker.prompt(BLOCK_TOKENS))
        any_length.append(Pair(HIT_COST * own_s + one_block_s, ours_s))
    return one_token_left, any_length


@contextmanager
def _hook_clock() -> Iterator[Callable[[], float]]:
    """Times every hook of the connector; the function tells the sum since it was called last."""
    from kvstore.adapters.vllm.connector import KVStoreConnector  # noqa: PLC0415 - imports vLLM

    originals = {name: getattr(KVStoreConnector, name) for name in _HOOKS}
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

    for name, hook in originals.items():
        setattr(KVStoreConnector, name, timed(hook))
    try:
        yield take
    finally:
        for name, hook in originals.items():
            setattr(KVStoreConnector, name, hook)


def _hooks(llm: LLM, rounds: int) -> list[Pair]:
    """What all hooks together take where nothing is ever found, and everything is stored."""
    asker = _Asker(llm, seed=2)
    pairs = []
    with _hook_clock() as take:
        for _ in range(rounds):
            take()
            steps_s, _ = asker.ask(*(asker.prompt(_BATCH_TOKENS) for _ in range(_BATCH_PROMPTS)))
            pairs.append(Pair(HOOK_SHARE * steps_s, take()))
    return pairs


def _batches(llm: LLM, rounds: int) -> list[float]:
    """Seconds of each batch of prompts that nobody has asked before."""
    asker = _Asker(llm, seed=3)
    asker.ask(asker.prompt(BLOCK_TOKENS))
    return [asker.ask(*(asker.prompt(_BATCH_TOKENS) for _ in range(_BATCH_PROMPTS)))[0] for _ in range(rounds)]


def _measure(folder: Path, rounds: int) -> VllmSamples:
    model = build_llama(folder / "model", DEMO)
    with _engine(model, with_store=False) as llm:
        plain = _batches(llm, rounds)
    with _engine(model, with_store=True) as llm:
        ours = _batches(llm, rounds)
        hooks = _hooks(llm, rounds)
        one_token_left, any_length = _hits(llm, rounds)
    with _engine(model, with_store=False) as llm:
        control = _batches(llm, rounds)
    throughput = [Pair(*pair) for pair in zip(plain, ours, strict=True)]
    return VllmSamples(
        one_token_left, any_length, hooks, throughput, [Pair(*pair) for pair in zip(plain, control, strict=True)]
    )


def main() -> None:
    """Measure, and print the samples."""
    samples = _measure(Path(sys.argv[1]), int(sys.argv[2]))
    print(_MARK + json.dumps(samples._asdict()), flush=True)


if __name__ == "__main__":
    main()
