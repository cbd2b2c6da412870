"""Tests of real vLLMs with one rank and with two, which read each other's KV from disk, a server or hand-overs."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import ServerProcess
from support.redis_server import wait_for
from support.runner import run_elsewhere
from support.vllm_engine import (
    BLOCK_TOKENS,
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    is_all_cached,
    through_memory,
)

from kvstore.tools.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

SOME = slice(4, None, 5)  # of the prompts, with tails and whole chunks, alone and with common prefixes
PATIENT = {"kvstore.lookup_timeout_ms": 30_000}  # on a busy machine
TWO_RANKS = {"tensor_parallel_size": 2, "async_scheduling": False}


@pytest.fixture(autouse=True)
def _a_core_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def of_two_ranks(model: Path, prompts: list[Prompt], *stores: StoreSetup, **more: Any) -> list[list[Completion]]:
    """Return the answers of engines of two ranks, one after the other; ``more`` as for ``support.runner``."""
    plain = {"prompts": prompts, "overrides": TWO_RANKS, "rounds": ["once"], **more}
    engines: list[dict[str, Any]] = [plain | {"store": vars(store)} for store in stores]
    for engine in engines:
        engine["store"]["disk"] = engine["store"]["disk"] and str(engine["store"]["disk"])
    job: dict[str, Any] = {"model": str(model), "two_processes": True, "max_tokens": 12, "engines": engines}
    return [outputs for (outputs,) in run_elsewhere(job, timeout_s=900.0)]


def on_disk(folder: Path, *sizes: int) -> StoreSetup:
    return StoreSetup(disk=folder, extra={"kvstore.reshard_from": list(sizes), **PATIENT})


def through(server: ServerProcess, *sizes: int) -> StoreSetup:
    store = through_memory(server.url)
    store.extra |= {"kvstore.reshard_from": list(sizes), **PATIENT}
    return store


@pytest.mark.sweep
def test_one_rank_reads_what_two_have_stored(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: ServerProcess, tmp_path: Path
) -> None:
    prompts, plain_outputs = prompts[SOME], plain_outputs[SOME]
    both = on_disk(tmp_path / "disk")
    both.extra |= {"kvstore.remote_url": server.url, "kvstore.max_remote_queue": 100_000}
    (stored,) = of_two_ranks(tiny_model, prompts, both)
    assert_same_outputs(plain_outputs, stored)
    for store in (on_disk(tmp_path / "disk", 2), through(server, 1, 2)):
        with Engine(tiny_model, store) as engine:
            outputs = engine.generate(prompts)
            assert_same_outputs(plain_outputs, outputs)
            assert is_all_cached(prompts, outputs)
            engine.assert_idle()


@pytest.mark.sweep
def test_two_ranks_read_what_one_has_stored(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], server: ServerProcess, tmp_path: Path
) -> None:
    prompts, plain_outputs = prompts[SOME], plain_outputs[SOME]
    both = on_disk(tmp_path / "disk")
    both.extra |= {"kvstore.remote_url": server.url, "kvstore.max_remote_queue": 100_000}
    with Engine(tiny_model, both) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.settle()
    for outputs in of_two_ranks(tiny_model, prompts, on_disk(tmp_path / "disk", 1), through(server, 1, 2)):
        assert_same_outputs(plain_outputs, outputs)
        assert is_all_cached(prompts, outputs)


def handing_over(port: int) -> tuple[StoreSetup, StoreSetup]:
    """Return setups of a prefill engine, and of a decode engine that listens at a port and the next ones."""
    both: dict[str, Any] = {
        "kvstore.enable_pd": True,
        "kvstore.pd_buffer_size": 64 << 20,
        "kvstore.pd_timeout_ms": 60_000,
    }
    receives = {"kvstore.pd_peer_init_port": port, "kvstore.reshard_from": [1, 2], **PATIENT}
    return (
        StoreSetup(cpu_gib=0.1, role="kv_producer", extra=both),
        StoreSetup(cpu_gib=0.1, role="kv_consumer", extra=both | receives),
    )


def handed_over_to(*ports: int) -> dict[str, Any]:
    return {"disagg_spec": {"req_id": "r", "receiver_host": "127.0.0.1", "receiver_init_port": list(ports)}}


def assert_all_handed_over(prompts: list[Prompt], outputs: list[Completion]) -> None:
    """Check that all whole blocks were handed over, except one with the last token, which is computed."""
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.cached_tokens >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.soak
def test_one_rank_takes_what_two_hand_over(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion]
) -> None:
    prompts, plain_outputs, port = prompts[SOME], plain_outputs[SOME], free_port()
    prefill, decode = handing_over(port)
    with Engine(tiny_model, decode) as engine:
        (first,) = of_two_ranks(tiny_model, prompts, prefill, asks=handed_over_to(port, port))
        assert_same_outputs(plain_outputs, first)
        outputs = engine.generate(prompts)
        assert_same_outputs(plain_outputs, outputs)
        assert_all_handed_over(prompts, outputs)


@pytest.mark.soak
def test_two_ranks_take_what_one_hands_over(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """KV is sent to the first rank, and the second rank reads its heads there."""
    prompts, plain_outputs, port, sent = prompts[SOME], plain_outputs[SOME], free_port(), tmp_path / "sent"
    prefill, decode = handing_over(port)
    with ThreadPoolExecutor(1) as beside:
        decoding = beside.submit(of_two_ranks, tiny_model, prompts, decode, begins_after=str(sent))
        try:
            for number in range(2):
                wait_for("a rank listens", partial(is_listening, port + number, decoding), timeout_s=600.0)
            with Engine(tiny_model, prefill) as engine:
                assert_same_outputs(plain_outputs, engine.generate(prompts, asks=handed_over_to(port)))
                assert engine.store_worker._pushes._pusher.flush(60.0)
        finally:
            sent.touch()
        (outputs,) = decoding.result()
    assert_same_outputs(plain_outputs, outputs)
    assert_all_handed_over(prompts, outputs)


def is_listening(port: int, process: Future[Any]) -> bool:
    if process.done():
        process.result()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
