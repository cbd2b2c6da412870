"""Test of two real vLLMs that share a Mooncake Store: each loads the other's KV, and an owner's end costs only time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mooncake_store import a_store
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


@pytest.mark.soak
def test_two_processes_share_a_store_that_loses_its_owners(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion]
) -> None:
    with a_store() as servers:
        store = through_memory(servers.master.url)
        assert_same_outputs(plain_outputs, generated_elsewhere(tiny_model, store, prompts, two_processes=True))
        with Engine(tiny_model, store) as engine:
            shared = engine.generate(prompts)
            assert_same_outputs(plain_outputs, shared)
            assert is_all_cached(prompts, shared)
            assert engine.moved.chunks_loaded_from_remote > 50
            engine.assert_idle()

            for owner in servers.owners:
                owner.kill()
            engine.forget_local()
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            engine.assert_idle()

            for owner in servers.owners:
                owner.start()
            assert_same_outputs(plain_outputs, hits_again(engine, prompts))
            engine.assert_idle()
