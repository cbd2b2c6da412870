"""Tests of real vLLMs that share one cache server: each loads the other's KV, and a dead server costs only time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support.cache_server import ServerProcess, mapped_pools
from support.live_engine import LiveEngine
from support.runner import generated_elsewhere
from support.vllm_engine import (
    Completion,
    Engine,
    Prompt,
    assert_same_outputs,
    hits_again,
    is_all_cached,
    through_memory,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

ROUNDS = 12  # so many that a kill after the first comes before the last


def test_what_one_vllm_has_computed_another_loads(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: ServerProcess
) -> None:
    store, few, expected = through_memory(server.url), prompts[-3:], plain_outputs[-3:]
    assert_same_outputs(expected, generated_elsewhere(tiny_model, store, few, two_processes=False))
    with Engine(tiny_model, store) as engine:
        shared = engine.generate(few)
        assert_same_outputs(expected, shared)
        assert is_all_cached(few, shared)
        server.kill()
        engine.forget_local()
        assert_same_outputs(expected, engine.generate(few))
        engine.assert_idle()


@pytest.mark.soak
def test_two_processes_share_a_server_that_dies_and_comes_back(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    server: ServerProcess,
) -> None:
    store = through_memory(server.url)
    assert_same_outputs(plain_outputs, generated_elsewhere(tiny_model, store, prompts, two_processes=True))
    assert server.terminate() == 0
    server.start()  # it now knows only the chunks on its disk
    with Engine(tiny_model, store) as engine:
        shared = engine.generate(prompts)
        assert_same_outputs(plain_outputs, shared)
        assert is_all_cached(prompts, shared)
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()

        for delay_s in (0.05, 0.5):
            engine.forget_local()
            killer = threading.Timer(delay_s, server.kill)
            killer.start()
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            killer.join()
            engine.assert_idle()
            server.start()
            assert_same_outputs(plain_outputs, hits_again(engine, prompts))
            engine.assert_idle()
        server.kill()
    assert mapped_pools() == 0


@pytest.mark.soak
def test_a_server_that_is_killed_while_two_vllms_generate(
    tmp_path: Path,
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    server: ServerProcess,
) -> None:
    store = through_memory(server.url)
    cores = sorted(os.sched_getaffinity(0))
    with (
        LiveEngine(tiny_model, store, tmp_path / "first.log", core=cores[0]) as first,
        LiveEngine(tiny_model, store, tmp_path / "second.log", core=cores[-1]) as second,
    ):
        both = first, second
        first.order(rounds=1, prompts=prompts)
        assert_same_outputs(plain_outputs, first.completions())
        first.order(idle=True)
        first.answer()
        second.order(rounds=1, prompts=prompts)
        shared = second.completions()
        assert_same_outputs(plain_outputs, shared)
        assert is_all_cached(prompts, shared)
        second.order(idle=True)
        assert second.answer() > 50

        for engine in both:
            engine.order(rounds=ROUNDS, prompts=prompts)
        for engine in both:
            loaded = engine.completions()
            assert_same_outputs(plain_outputs, loaded)
            assert is_all_cached(prompts, loaded)
        server.kill()
        for engine in both:
            for _ in range(ROUNDS - 1):
                computed = engine.completions()
                assert_same_outputs(plain_outputs, computed)
            assert not is_all_cached(prompts, computed)  # it was killed before the last round had ended
            engine.order(idle=True)
        for engine in both:
            engine.answer()

        server.start()
        assert server.files_in_shared_memory() == 0
        for engine in both:
            engine.order(hits=prompts)
        for engine in both:
            assert_same_outputs(plain_outputs, engine.completions())
        for engine in both:
            engine.order(idle=True)
            engine.answer()
            engine.order(close=True)
            mapped, left = engine.answer()
            assert mapped > 0
            assert left == 0
