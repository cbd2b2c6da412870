"""One real vLLM engine for a test, so small that several fit into one process one after the other."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest

from support.forked import import_vllm
from support.uses import are_loads_idle, are_saves_idle, uses_of

BLOCK_TOKENS = 32
CHUNK_TOKENS = 256
NUM_BLOCKS = 1024  # more than all prompts fill; the gigabyte that vLLM would take is zeroed for each engine
VOCAB = 1024
TIE_GAP = 1e-4  # two best logprobs closer than this may swap between two plain runs, too

Prompt = list[int]


def prepare_environment(*, two_processes: bool) -> None:
    """Set the environment that vLLM reads when an engine is made."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # engines of several files would share one core
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_ENABLE_V1_MULTIPROCESSING="1" if two_processes else "0",
    )


class Completion(NamedTuple):
    """Result of a prompt."""

    token_ids: list[int]
    cached_tokens: int  # not computed: vLLM's own prefix cache and ours together
    tie_at: int | None  # the first position whose two best logprobs are a tie, if logprobs were asked for


@dataclass
class StoreSetup:
    """Options of the connector of an engine."""

    disk: Path | None = None
    cpu_gib: float = 0.25
    disk_gib: float = 1.0
    role: str = "kv_both"
    policy: str = "recompute"
    by_module_path: bool = False
    behind: dict[str, Any] | None = None  # another connector, behind ours in a MultiConnector
    extra: dict[str, Any] = field(default_factory=dict)

    def transfer_config(self) -> dict[str, Any]:
        """Return the value of vLLM's ``--kv-transfer-config``."""
        # On a busy machine a load may indeed be slower than a tiny model, and tests want their hits.
        extra = {"kvstore.max_local_cpu_size": self.cpu_gib, "kvstore.load_only_if_faster": False, **self.extra}
        if self.disk is not None:
            extra |= {"kvstore.local_disk": str(self.disk), "kvstore.max_local_disk_size": self.disk_gib}
        config = {
            "kv_connector": "KVStoreConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": extra,
        }
        if self.by_module_path:
            config["kv_connector_module_path"] = "kvstore.adapters.vllm.connector"
        if self.behind is not None:
            both = {"connectors": [config, self.behind]}
            config = {**config, "kv_connector": "MultiConnector", "kv_connector_extra_config": both}
        return config


class Engine:
    """A context manager around ``vllm.LLM``, which leaves nothing behind in the process."""

    def __init__(self, model: Path, store: StoreSetup | None = None, **overrides: Any) -> None:
        import_vllm()
        from vllm import LLM

        settings: dict[str, Any] = {
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": NUM_BLOCKS,
            "enforce_eager": True,
            "seed": 0,
            "disable_log_stats": True,
        }
        if store is not None:
            settings["kv_transfer_config"] = store.transfer_config()
        self.llm = LLM(model=str(model), **(settings | overrides))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut down as vLLM does, and free its process-wide state."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        ours = logging.getLogger("kvstore")  # restored to its state before the connector joined it to vLLM's
        ours.handlers.clear()
        ours.propagate = True

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 12,
        salts: Sequence[str | None] | None = None,
        lora: Any = None,
        logprobs: int | None = None,
        asks: dict[str, Any] | None = None,
    ) -> list[Completion]:
        """Return greedy completions of token prompts; ``asks`` are fields of ``kv_transfer_params``."""
        from vllm import SamplingParams

        extra = None if asks is None else {"kv_transfer_params": asks}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, extra_args=extra
        )
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for request, salt in zip(inputs, salts or [None] * len(inputs), strict=True):
            if salt is not None:
                request["cache_salt"] = salt
        outputs = self.llm.generate(inputs, params, lora_request=lora, use_tqdm=False)
        return [_completion(output) for output in outputs]

    def abort_after(self, steps: int, prompts: Sequence[Prompt]) -> None:
        """Let clients send requests, and abort them after so many steps."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        names = [f"{steps}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        assert not engine.has_unfinished_requests()

    def generate_one_by_one(self, prompts: Sequence[Prompt], *, max_tokens: int = 12) -> list[Completion]:
        """Return greedy completions, each prompt alone in its batch."""
        return [self.generate([prompt], max_tokens=max_tokens)[0] for prompt in prompts]

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache, so that hits can only come from the store."""
        assert self.llm.reset_prefix_cache()

    @property
    def core_scheduler(self) -> Any:
        """vLLM's scheduler, available only with the engine in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def store_scheduler(self) -> Any:
        """Our scheduler side."""
        return _ours(self.core_scheduler.connector)._scheduler

    @property
    def store_worker(self) -> Any:
        """Our worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return _ours(get_kv_transfer_group())._worker

    @property
    def moved(self) -> Any:
        """Counters of what the worker has moved so far."""
        return self.store_worker._counters()

    def settle(self) -> None:
        """Wait until everything stored is on disk and known to be there."""
        self.generate([[1, 2, 3]], max_tokens=1)  # the last stores of ended requests are carried out with a step
        self.store_worker._background.finish_saves()
        assert not self.store_worker._mover.flush(30.0).pending
        self.generate([[1, 2, 3]], max_tokens=1)  # and the reports of ended writes travel with the next

    def assert_idle(self) -> None:
        """Assert that nothing of ours is under way, and that vLLM has all its blocks back."""
        self.settle()
        scheduler = self.store_scheduler
        assert uses_of(scheduler.index) == 0
        assert not scheduler._steps.in_flight
        assert are_saves_idle(scheduler._connected.saves)
        assert are_loads_idle(scheduler._connected.loads)
        assert not scheduler._trackers
        pool = self.core_scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block


def through_memory(remote_url: str) -> StoreSetup:
    """Return a setup that uses memory only in passing, so that all hits are of the remote tier."""
    return StoreSetup(
        extra={
            "kvstore.remote_url": remote_url,
            "kvstore.local_cpu": False,
            "kvstore.max_remote_queue": 100_000,
            "kvstore.lookup_timeout_ms": 5000,
            "kvstore.remote_lookup_cache_secs": 0.5,
        }
    )


def hits_again(engine: Engine, prompts: list[Prompt], *, asks: dict[str, Any] | None = None) -> list[Completion]:
    """Ask until the answers are loaded from the store, which must first be found to be back, and filled."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        engine.forget_local()
        outputs = engine.generate(prompts, asks=asks)
        if is_all_cached(prompts, outputs):
            return outputs
        engine.settle()
    raise AssertionError("no hits, although the server is back")


def forget_failed_start() -> None:
    """Free the process-wide state of an engine that failed to start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def _ours(connector: Any) -> Any:
    """Return our connector, also where it is the first of several."""
    return getattr(connector, "_connectors", [connector])[0]


def _completion(output: Any) -> Completion:
    best = output.outputs[0]
    tie_at = None
    for position, ranked in enumerate(best.logprobs or []):
        values = sorted((entry.logprob for entry in ranked.values()), reverse=True)
        if len(values) > 1 and values[0] - values[1] < TIE_GAP:
            tie_at = position
            break
    return Completion(list(best.token_ids), output.num_cached_tokens or 0, tie_at)


def assert_same_outputs(plain: Sequence[Completion], ours: Sequence[Completion]) -> None:
    """Assert equal token ids, up to the first position where plain vLLM itself had a tie."""
    assert len(plain) == len(ours)
    for number, (expected, got) in enumerate(zip(plain, ours, strict=True)):
        end = expected.tie_at if expected.tie_at is not None else len(expected.token_ids)
        assert got.token_ids[:end] == expected.token_ids[:end], f"prompt {number} differs from plain vLLM"


def whole_blocks(num_tokens: int) -> int:
    """Return the tokens that a full hit of a prompt this long loads: whole blocks, one token left to compute."""
    return min(num_tokens - num_tokens % BLOCK_TOKENS, num_tokens - 1)


def is_all_cached(prompts: list[Prompt], outputs: list[Completion]) -> bool:
    """Tell if each prompt was a full hit."""
    return all(got.cached_tokens >= whole_blocks(len(prompt)) for prompt, got in zip(prompts, outputs, strict=True))


def make_prompts(seed: int = 0) -> list[Prompt]:
    """Return 44 prompts of 1 to 1,500 tokens; half of them share prefixes of different lengths."""
    rng = random.Random(seed)

    def words(count: int) -> Prompt:
        return [rng.randrange(5, VOCAB - 8) for _ in range(count)]

    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 100, 200, 255, 256, 257, 288, 300, 400, 511, 512, 513, 700, 1000, 1500]
    alone = [words(length) for length in lengths]
    system, document = words(300), words(520)
    shared = [system + words(length) for length in (1, 20, 84, 211, 212, 213, 400, 40, 40, 700, 3)]
    shared += [document + words(length) for length in (1, 8, 9, 100, 248, 249, 500, 30, 30, 60, 980)]
    return alone + shared


def counted_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets one entry for each preemption by vLLM, in any engine of this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preemptions: list[None] = []
    original = Scheduler._preempt_request

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        preemptions.append(None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    return preemptions


MODES: dict[str, dict[str, Any]] = {
    "within a step": {"kvstore.enable_async_loading": False, "kvstore.enable_async_saving": False},
    "layer by layer": {"kvstore.enable_async_loading": False, "kvstore.use_layerwise": True},
    "beside": {"kvstore.enable_async_loading": True, "kvstore.enable_async_saving": True},
}

# Where every mode takes long, continuous integration tries only the one that differs most, and a soak the others.
ONE_MODE_AND_SOAK = pytest.mark.parametrize(
    "mode",
    [pytest.param(keys, id=name, marks=() if name == "beside" else pytest.mark.soak) for name, keys in MODES.items()],
)


def check_ends(engine: Engine, prompt: Prompt, plain: Sequence[Completion], end_s: float) -> None:
    """Check that an engine loads a prompt whose chunks end at a monotonic time, and computes it afterwards."""
    loaded = engine.generate([prompt], logprobs=2, asks={"kvstore.skip_save": True})
    assert time.monotonic() < end_s, "the engine took too long"
    assert_same_outputs(plain, loaded)
    assert is_all_cached([prompt], loaded)
    time.sleep(max(0.0, end_s + 0.5 - time.monotonic()))
    engine.forget_local()
    computed = engine.generate([prompt], logprobs=2)
    assert_same_outputs(plain, computed)
    assert not computed[0].cached_tokens, "its own copies have ended, too"
    assert engine.store_scheduler.index.counters.expired
    engine.assert_idle()
