"""Test of two real vLLMs that share a Mooncake Store: each loads the other's KV, and an owner's end costs only time."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.mooncake_store import Store, a_store
from support.runner import generated_elsewhere, staying_elsewhere
from support.vllm_engine import (
    Completion,
    Engine,
    Prompt,
    assert_same_outputs,
    hits_again,
    is_all_cached,
    through_memory,
)

from kvstore.tiers.mooncake.session import Reply, Session

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


@pytest.mark.soak
def test_owners_are_killed_in_the_middle_of_a_request(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two vLLMs run; while one loads the other's KV, the transfer stands still and then its other end is gone."""
    with a_store() as servers:
        store = through_memory(servers.master.url)
        job = {"model": str(tiny_model), "max_tokens": 12}
        job["engines"] = [{"store": vars(store) | {"disk": None}, "rounds": ["cold"], "prompts": prompts}]
        with staying_elsewhere(job) as (cold,), Engine(tiny_model, store) as engine:
            assert_same_outputs(plain_outputs, cold)
            with monkeypatch.context() as patch:
                reads = _kill_at_the_first_read(servers, patch)
                assert_same_outputs(plain_outputs, engine.generate(prompts))
            assert _has_failed(reads[0]), "the owners' end came before or after the read"
            engine.assert_idle()

            for owner in servers.owners:
                owner.start()
            assert_same_outputs(plain_outputs, hits_again(engine, prompts))
            engine.assert_idle()


def _kill_at_the_first_read(servers: Store, patch: pytest.MonkeyPatch) -> list[Future[Reply]]:
    """Stop the owners of memory before a read of chunks begins, and kill them once it has; returns all reads."""
    reads: list[Future[Reply]] = []
    start = Session.start

    def kill_meanwhile(self: Session, call: str, *args: Any) -> Future[Reply]:
        if call not in ("get", "ranges"):
            return start(self, call, *args)
        is_first = not reads
        if is_first:
            for owner in servers.owners:
                owner.freeze()
        reads.append(start(self, call, *args))
        if is_first:
            with pytest.raises(TimeoutError):
                reads[0].result(0.5)
            for owner in servers.owners:
                assert owner.process is not None
                owner.process.kill()  # as it stands: it does not go on before its end
                owner.kill()
        return reads[-1]

    patch.setattr(Session, "start", kill_meanwhile)
    return reads


def _has_failed(read: Future[Reply]) -> bool:
    reply = read.result(30.0)
    return "error" in reply or min(reply["codes"]) < 0
