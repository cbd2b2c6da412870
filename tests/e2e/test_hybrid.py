"""Tests of models with several kinds of KV cache groups: windows, states, chunked local attention.

A hit needs all chunks before a token, and the checkpoint there. Outputs equal plain vLLM's, token by token in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import ServerProcess, short_folder
from support.hybrid_engines import (
    LONG,
    PROMPTS,
    SHARED_TOKENS,
    SIBLINGS,
    Hybrid,
    answers_with_logprobs,
    cached,
    counted_loads,
    kinds_of,
    words,
    zeroed_checkpoints,
)
from support.hybrid_models import ATTENTION_CHUNK, MAKERS
from support.redis_server import RedisServer, running
from support.runner import staying_elsewhere
from support.vllm_engine import Completion, Prompt, StoreSetup, assert_same_outputs, counted_preemptions, through_memory

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

WINDOW, LOCAL, STATE, FULL = "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec", "FullAttentionSpec"
GROUPS = {
    "gptoss": [WINDOW, FULL],
    "gemma3": [WINDOW] * 3 + [FULL],
    "granite4": [STATE] * 3 + [FULL],
    "mistral": [WINDOW],
    "nemotronh": [STATE] * 2 + [FULL],
    "llama4": [LOCAL] * 3 + [FULL],
    "gemma3n": [WINDOW] * 3 + [FULL],
    "gemma4": [WINDOW] * 3 + [FULL],
}
BLOCK_TOKENS = {"granite4": 64, "nemotronh": 64, "gemma4": 64, "qwen3next": 544}  # others: 32
FOUND_BY_SIBLINGS = {
    "gptoss": [64, SHARED_TOKENS, SHARED_TOKENS],  # its window is no larger than the chunk
    "llama4": [768, SHARED_TOKENS, SHARED_TOKENS],  # four attention chunks, none of which is needed after its end
    "mistral": [SHARED_TOKENS] * 3,  # without a full group, every chunk has a checkpoint at its end
}
RUNS: dict[str, list[pytest.MarkDecorator]] = {
    "gemma3": [],
    "gptoss": [pytest.mark.sweep],
    "granite4": [pytest.mark.sweep],
}  # others: in a soak

FEW_BLOCKS = {"gptoss": 62, "granite4": 58, "llama4": 100, "gemma4": 80}  # little more than vLLM needs to start


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a model by its name."""
    from kvstore.tools.dev.mamba2 import end_steps_at_states

    end_steps_at_states()

    def made(name: str, **more: Any) -> Hybrid:
        folder = MAKERS[name](tmp_path_factory.mktemp("models") / name)
        return Hybrid(name, folder, BLOCK_TOKENS.get(name, 32), **more)

    return made


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=RUNS.get(name, [pytest.mark.soak])) for name in GROUPS],
)
def hybrid(request: pytest.FixtureRequest, make: Any) -> Hybrid:
    """Return each model in turn."""
    made: Hybrid = make(request.param)
    return made


@pytest.fixture(scope="module")
def plain(hybrid: Hybrid) -> list[Completion]:
    """Return the answers of plain vLLM to the prompts, then to the siblings."""
    with hybrid.engine() as engine:
        return engine.generate([*PROMPTS, *SIBLINGS], logprobs=2)


def test_hits_from_memory_and_disk(hybrid: Hybrid, plain: list[Completion], tmp_path: Path) -> None:
    expected, store = plain[: len(PROMPTS)], hybrid.store(tmp_path / "disk")
    with hybrid.engine(store) as engine:
        assert kinds_of(engine) == GROUPS[hybrid.name]
        assert_same_outputs(expected, engine.generate(PROMPTS))
        engine.settle()
        engine.forget_local()
        from_memory = engine.generate(PROMPTS)
        assert_same_outputs(expected, from_memory)
        assert cached(from_memory) == hybrid.hits()
        engine.assert_idle()
    with hybrid.engine(store) as engine:
        from_disk = engine.generate(PROMPTS)
        assert_same_outputs(expected, from_disk)
        assert cached(from_disk) == hybrid.hits()
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()


def test_outputs_stand_on_what_checkpoints_hold(hybrid: Hybrid, plain: list[Completion]) -> None:
    """With zeros in place of windows and states, outputs differ, so equal outputs prove right checkpoints."""
    with hybrid.engine(hybrid.store()) as engine:
        engine.generate(PROMPTS)
        engine.settle()
        engine.forget_local()
        with zeroed_checkpoints(engine) as zeroed:
            damaged = engine.generate(PROMPTS)
        assert cached(damaged) == hybrid.hits()
        assert len(zeroed) == sum(hit > 0 for hit in hybrid.hits())
        pairs = list(zip(plain, damaged, hybrid.hits(), strict=False))
        if LOCAL in GROUPS[hybrid.name]:  # nothing is needed at the end of an attention chunk
            pairs = [pair for pair in pairs if pair[2] % ATTENTION_CHUNK]
        assert all(was.token_ids != got.token_ids for was, got, hit in pairs if hit > 0)


def test_prompts_that_part_in_the_middle(hybrid: Hybrid, plain: list[Completion]) -> None:
    """The first prompt that diverges finds no checkpoint there, and stores one, which the next prompt finds."""
    expected = plain[-len(SIBLINGS) :]
    with hybrid.engine(hybrid.store()) as engine:
        engine.generate([LONG])
        found = []
        for number, prompt in enumerate(SIBLINGS):
            engine.settle()
            engine.forget_local()
            (answer,) = engine.generate([prompt])
            assert_same_outputs(expected[number : number + 1], [answer])
            found.append(answer.cached_tokens)
        assert found == FOUND_BY_SIBLINGS.get(hybrid.name, [0, SHARED_TOKENS, SHARED_TOKENS])
        engine.assert_idle()


def test_checkpoints_at_intervals(hybrid: Hybrid, plain: list[Completion]) -> None:
    """With a checkpoint after every chunk, where steps leave a state, the first prompt that diverges finds one."""
    store = hybrid.store(checkpoint_interval=hybrid.chunk_tokens)
    with hybrid.engine(store, max_num_batched_tokens=hybrid.chunk_tokens) as engine:
        engine.generate([LONG])
        engine.settle()
        engine.forget_local()
        (answer,) = engine.generate(SIBLINGS[:1])
        assert_same_outputs(plain[-len(SIBLINGS) :][:1], [answer])
        assert answer.cached_tokens == SHARED_TOKENS
        engine.assert_idle()


def test_what_vllm_has_itself_is_stored_right(hybrid: Hybrid, plain: list[Completion]) -> None:
    """After a hit of vLLM's own, its tables have null blocks where a window or a state was."""
    with hybrid.engine(hybrid.store()) as engine:
        engine.generate([LONG], asks={"kvstore.skip_save": True})
        for _ in range(2):
            again = engine.generate([LONG])
            assert_same_outputs(plain[len(PROMPTS) - 1 : len(PROMPTS)], again)
            assert cached(again) == hybrid.hits([LONG])
        engine.settle()
        engine.forget_local()
        assert_same_outputs(plain[-len(SIBLINGS) :], engine.generate_one_by_one(SIBLINGS))
        engine.assert_idle()


def test_aborted_requests(hybrid: Hybrid, plain: list[Completion], tmp_path: Path) -> None:
    """After aborts of waiting, loading, prefilling and decoding requests, others are right, and no block leaks."""
    store = hybrid.store(tmp_path / "disk", save_decode_cache=True)
    with hybrid.engine(store, max_num_batched_tokens=256) as engine:
        for steps in (0, 1, 2, 5, 12):
            engine.abort_after(steps, PROMPTS)
            engine.settle()
            engine.forget_local()
        assert_same_outputs(plain[: len(PROMPTS)], engine.generate(PROMPTS))
        engine.assert_idle()


def files_in(folder: Path) -> list[Path]:
    """Return the files of chunks and parts, in a mixed order."""
    return sorted(path for path in folder.rglob("*.safetensors") if path.parent.name != ".free")


def cut(folder: Path) -> None:
    """Cut all files within their headers."""
    for path in files_in(folder):
        path.write_bytes(path.read_bytes()[:1000])


def remove(folder: Path) -> None:
    """Remove a third of the files."""
    for path in files_in(folder)[::3]:
        path.unlink()


def flip(folder: Path) -> None:
    """Flip a bit in a third of the files, in the middle of the stored bytes."""
    for path in files_in(folder)[::3]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_loads_that_fail_are_tried_once(hybrid: Hybrid, plain: list[Completion], tmp_path: Path) -> None:
    """After a failed load vLLM restarts the request and looks up again, so a second failure would loop."""
    expected = plain[: len(PROMPTS)]
    with hybrid.engine(hybrid.store(tmp_path / "disk", local_cpu=False)) as engine:
        engine.generate(PROMPTS)
        engine.settle()
        counters = engine.store_scheduler.index.counters
        for harm in (cut, remove, flip):
            failed = counters.failed_loads
            assert len(files_in(tmp_path / "disk")) > len(PROMPTS)
            harm(tmp_path / "disk")
            engine.forget_local()
            with counted_loads() as loads:
                assert_same_outputs(expected, engine.generate(PROMPTS))
            assert counters.failed_loads > failed
            assert max(loads.values()) == 1
            engine.settle()  # failed loads have been recomputed and stored again
            engine.forget_local()
            again = engine.generate(PROMPTS)
            assert_same_outputs(expected, again)
            assert cached(again) == hybrid.hits()
            engine.assert_idle()


def crowd(seed: int) -> list[Prompt]:
    """Return 16 prompts of about 300 tokens, half of which share a prefix."""
    stem = words(seed, 200)
    return [[*(stem if number % 2 else words(seed + 1 + number, 200)), *words(number, 100)] for number in range(16)]


@pytest.mark.soak
@pytest.mark.parametrize("name", FEW_BLOCKS)
def test_few_blocks(name: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are preempted while others load are resumed, and blocks are never mixed up."""
    hybrid, prompts = make(name), crowd(seed=100)
    with hybrid.engine() as engine:
        plain = engine.generate(prompts, max_tokens=120, logprobs=2)
    preemptions = counted_preemptions(monkeypatch)
    few = {"num_gpu_blocks_override": FEW_BLOCKS[name], "max_model_len": 768, "max_num_seqs": 16}
    for extra in ({}, {"save_decode_cache": True}):
        store = hybrid.store(tmp_path / f"disk{len(extra)}", **extra)
        with hybrid.engine(store, **few) as engine:
            for _ in ("cold", "warm"):
                preemptions.clear()
                assert_same_outputs(plain, engine.generate(prompts, max_tokens=120))
                assert preemptions
                engine.settle()
                engine.forget_local()
            engine.assert_idle()


@pytest.fixture(params=["redis", "server"])
def remote_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a remote tier."""
    if request.param == "redis":
        redis = RedisServer(tmp_path / "redis")
        with running(redis):
            yield f"redis://127.0.0.1:{redis.port}"
        return
    with short_folder() as folder:
        server = ServerProcess(folder)
        try:
            yield server.start().url
        finally:
            server.kill()


def killed(hybrid: Hybrid, store: StoreSetup, prompts: list[Prompt]) -> list[Completion]:
    """Return the answers of an engine in another process, which is killed without a close once all is stored."""
    job: dict[str, Any] = {"model": str(hybrid.folder), "max_tokens": 12, "ends_steps_at_states": True}
    setup = vars(store) | {"disk": str(store.disk)}
    part = {"prompts": prompts, "store": setup, "rounds": ["cold"], "overrides": {"dtype": hybrid.dtype}}
    with suppress(_KilledError), staying_elsewhere(job | {"engines": [part]}) as (cold,):
        raise _KilledError
    return cold


class _KilledError(Exception):
    """Raised to kill the process without a close."""


@pytest.mark.soak
@pytest.mark.parametrize("name", GROUPS)
def test_hits_from_disk_after_a_kill(name: str, make: Any, tmp_path: Path) -> None:
    hybrid = make(name)
    with hybrid.engine() as engine:
        plain = engine.generate(PROMPTS, logprobs=2)
    store = hybrid.store(tmp_path / "disk")
    assert_same_outputs(plain, killed(hybrid, store, PROMPTS))
    with hybrid.engine(store) as engine:
        found = engine.generate(PROMPTS)
        assert_same_outputs(plain, found)
        assert cached(found) == hybrid.hits()
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()


def shared(hybrid: Hybrid, url: str) -> StoreSetup:
    """Return the setup of several engines that share a remote tier."""
    store = through_memory(url)
    store.extra |= hybrid.store().extra
    return store


@pytest.mark.soak
@pytest.mark.parametrize("name", GROUPS)
def test_hits_from_a_remote_tier(name: str, make: Any, remote_url: str) -> None:
    hybrid = make(name)
    store = shared(hybrid, remote_url)
    with hybrid.engine() as engine:
        plain = engine.generate(PROMPTS, logprobs=2)
    with hybrid.engine(store) as engine:
        assert_same_outputs(plain, engine.generate(PROMPTS))
        engine.settle()
    with hybrid.engine(store) as engine:
        found = engine.generate(PROMPTS)
        assert_same_outputs(plain, found)
        assert cached(found) == hybrid.hits()
        engine.assert_idle()


EXACT: dict[str, dict[str, Any]] = {
    "qwen3next": {"chunk_tokens": 544, "dtype": "bfloat16"},  # no other kernel
    "lfm2": {},  # outputs of plain vLLM depend on the batch
}


@dataclass(frozen=True)
class Exact:
    """A model without a float32 oracle, compared with hits of vLLM's own prefix cache, one request per batch."""

    hybrid: Hybrid
    prompts: list[Prompt]
    own: list[list[tuple[int, float]]]

    def assert_finds_all(self, store: StoreSetup) -> None:
        """Check that a new engine's answers are bit-identical, and its hits as long."""
        with self.hybrid.engine(store) as engine:
            assert [answers_with_logprobs(engine, prompt) for prompt in self.prompts] == self.own
            engine.forget_local()
            assert cached(engine.generate_one_by_one(self.prompts)) == self.hybrid.hits(self.prompts)
            engine.assert_idle()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.soak) for name in EXACT])
def exact(request: pytest.FixtureRequest, make: Any) -> Exact:
    """Return each such model in turn."""
    hybrid: Hybrid = make(request.param, **EXACT[request.param])
    prompts = [prompt for prompt, hit in zip(PROMPTS, hybrid.hits(), strict=True) if hit]
    with hybrid.engine(enable_prefix_caching=True) as engine:
        own = [[answers_with_logprobs(engine, prompt) for _ in range(2)][1] for prompt in prompts]
        assert cached(engine.generate_one_by_one(prompts)) == hybrid.hits(prompts)
    return Exact(hybrid, prompts, own)


def test_hits_equal_vllms_own_bit_by_bit(exact: Exact, tmp_path: Path) -> None:
    store = exact.hybrid.store(tmp_path / "disk")
    with exact.hybrid.engine(store) as engine:
        engine.generate_one_by_one(exact.prompts)
        engine.settle()
        engine.forget_local()
        assert [answers_with_logprobs(engine, prompt) for prompt in exact.prompts] == exact.own
        engine.settle()
    exact.assert_finds_all(store)


def test_hits_after_a_kill_equal_vllms_own(exact: Exact, tmp_path: Path) -> None:
    store = exact.hybrid.store(tmp_path / "disk")
    for prompt in exact.prompts:  # each in a separate batch
        killed(exact.hybrid, store, [prompt])
    exact.assert_finds_all(store)


def test_hits_from_a_remote_tier_equal_vllms_own(exact: Exact, remote_url: str) -> None:
    store = shared(exact.hybrid, remote_url)
    with exact.hybrid.engine(store) as engine:
        engine.generate_one_by_one(exact.prompts)
        engine.settle()
    exact.assert_finds_all(store)
