"""Requests of every kind to one vLLM engine, over few blocks, small tiers and reads that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.vllm_engine import VOCAB, Completion, Engine, Prompt, StoreSetup, assert_same_outputs

CHUNK_GIB = 256 * 4 * 2 * 2 * 64 * 4 / 2**30  # tokens, layers, K and V, heads, head size, float32
FEW_BLOCKS = {"num_gpu_blocks_override": 64, "max_model_len": 1024}
MAX_TOKENS = 8


class Churn(NamedTuple):
    """Course of one engine: requests with equal outputs, aborted ones, chunks evicted, and loads that failed."""

    equal: int
    aborted: int
    evicted: int
    failed_loads: int


def distinct_prompts(rng: random.Random) -> list[Prompt]:
    """Return prompts of which most share prefixes."""

    def words(count: int) -> Prompt:
        return [rng.randrange(5, VOCAB - 8) for _ in range(count)]

    stems = [words(rng.randrange(200, 600)) for _ in range(6)]
    distinct = [words(rng.randrange(1, 300)) for _ in range(20)]
    return distinct + [rng.choice(stems)[: rng.randrange(1, 600)] + words(rng.randrange(1, 120)) for _ in range(60)]


def some_fail(original: Callable[..., list[Any]], calls: list[int]) -> Callable[..., list[Any]]:
    """Make every other read fail, in turn with an error and with wrong bytes."""
    from kvstore.model.chunks import Outcome

    def get(*args: Any) -> list[Any]:
        calls[0] += 1
        if calls[0] % 2:
            return original(*args)
        return [(Outcome.FAILED, Outcome.CORRUPT)[calls[0] // 2 % 2]] * len(args[1])

    return get


class Clients:
    """Clients that add requests as slots become free, abort some, and keep the outputs of the others."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], rng: random.Random) -> None:
        self._llm = engine.llm.llm_engine
        self._prompts = prompts
        self._rng = rng
        self.completions: dict[int, Completion] = {}
        self.aborted: set[int] = set()

    def run(self) -> None:
        waiting, alive = list(range(len(self._prompts))), set[int]()
        while waiting or self._llm.has_unfinished_requests():
            while waiting and len(alive) < 16:
                alive.add(waiting[0])
                self._send(waiting.pop(0))
            for output in self._llm.step():
                number = int(output.request_id)
                if output.finished and number in alive:
                    alive.remove(number)
                    self.completions[number] = Completion(list(output.outputs[0].token_ids), 0, None)
            if alive and self._rng.random() < 0.05:
                gone = self._rng.choice(sorted(alive))
                alive.remove(gone)
                self.aborted.add(gone)
                self._llm.abort_request([str(gone)])

    def _send(self, number: int) -> None:
        from vllm import SamplingParams

        asks = {
            "kvstore.skip_save": self._rng.random() < 0.1,
            "kvstore.skip_load": self._rng.random() < 0.1,
            "kvstore.pin": self._rng.random() < 0.05,
        }
        params = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, extra_args={"kv_transfer_params": asks}
        )
        prompt: dict[str, Any] = {"prompt_token_ids": self._prompts[number]}
        if self._rng.random() < 0.1:
            prompt["cache_salt"] = self._rng.choice(["red", "blue"])
        self._llm.add_request(str(number), prompt, params)


def plain_outputs(model: Path, distinct: Sequence[Prompt]) -> list[Completion]:
    """Return the answers of plain vLLM."""
    with Engine(model) as engine:
        return engine.generate(distinct, max_tokens=MAX_TOKENS, logprobs=2)


def churn(
    model: Path,
    folder: Path,
    mode: dict[str, Any],
    distinct: Sequence[Prompt],
    plain: Sequence[Completion],
    chosen: Sequence[int],
    rng: random.Random,
) -> Churn:
    """Send the ``chosen`` of the prompts; outputs must equal those of ``plain``, and afterwards nothing is in use."""
    from kvstore.tiers.disk.tier import DiskTier

    keys = {
        "kvstore.save_decode_cache": True,
        "kvstore.cache_policy": "LRU",
        "kvstore.request_fields": "skip_save,skip_load,pin",
    }
    store = StoreSetup(folder, cpu_gib=6.5 * CHUNK_GIB, disk_gib=48 * CHUNK_GIB, extra=mode | keys)
    calls = [0]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "get_layers"):
            patch.setattr(DiskTier, name, some_fail(getattr(DiskTier, name), calls))
        with Engine(model, store, **FEW_BLOCKS) as engine:
            clients = Clients(engine, [distinct[number] for number in chosen], rng)
            clients.run()
            engine.settle()
            counters = engine.store_scheduler.index.counters
            for lease in list(engine.store_scheduler.index._leases._leases):
                engine.store_scheduler.index.release(lease)
            engine.assert_idle()
            assert engine.store_scheduler.index.leases == 0
    assert len(clients.completions) + len(clients.aborted) == len(chosen)
    done = sorted(clients.completions)
    assert_same_outputs([plain[chosen[number]] for number in done], [clients.completions[number] for number in done])
    evicted = counters.evicted_memory + counters.evicted_disk
    return Churn(len(done), len(clients.aborted), evicted, counters.failed_loads)
