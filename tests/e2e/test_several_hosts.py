"""Tests of two ranks on two hosts, on real vLLM: each uses the cache server and the folder of its host."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.forked import VLLM, forker
from support.runner import run_elsewhere
from support.two_hosts import TwoHosts, two_hosts
from support.vllm_engine import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    Completion,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    is_all_cached,
)

from kvstore.tools.processes import free_port, kill_group

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

BOTH: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    with two_hosts() as hosts:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        monkeypatch.setenv("VLLM_HOST_IP", hosts.host.near)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", hosts.host.cable)
        yield hosts


@contextmanager
def second_rank(hosts: TwoHosts, model: Path, store: StoreSetup, port: int) -> Iterator[None]:
    """Run the second rank on the far host: vLLM without its own scheduler."""
    flags = {
        "dtype": "float32",
        "block-size": BLOCK_TOKENS,
        "max-model-len": 2048,
        "max-num-batched-tokens": 512,
        "max-num-seqs": 8,
        "num-gpu-blocks-override": NUM_BLOCKS,
        "seed": 0,
        "tensor-parallel-size": 2,
        "nnodes": 2,
        "node-rank": 1,
        "master-addr": hosts.host.near,
        "master-port": port,
        "distributed-executor-backend": "mp",
        "kv-transfer-config": json.dumps(store.transfer_config()),
    }
    words: list[object] = ["vllm.entrypoints.cli.main", "serve", model, "--headless", "--enforce-eager"]
    words += [word for name, value in flags.items() for word in (f"--{name}", value)] + ["--no-async-scheduling"]
    env = {**os.environ, "VLLM_HOST_IP": hosts.host.far, "GLOO_SOCKET_IFNAME": hosts.host.far_cable}
    with (hosts.folder / "vllm.log").open("wb") as log:
        process = forker(VLLM).start(hosts.host.words(words, binds=hosts.binds), stdout=log, stderr=log, env=env)
    try:
        yield
    finally:
        kill_group(process.pid)
        process.wait()


def answers(
    hosts: TwoHosts, model: Path, prompts: list[Prompt], *rounds: str, **keys: object
) -> list[list[Completion]]:
    """Start an engine on both hosts, and return its answers by round."""
    extra = {f"kvstore.{key}": value for key, value in keys.items()}
    store: dict[str, Any] = {"extra": {"kvstore.local_cpu": False, "kvstore.lookup_timeout_ms": 5000, **extra}}
    port = free_port()
    placed = {**BOTH, "node_rank": 0, "master_addr": hosts.host.near, "master_port": port, "async_scheduling": False}
    engine = {"prompts": prompts, "overrides": placed, "store": store, "rounds": rounds}
    with second_rank(hosts, model, StoreSetup(**store), port):
        try:
            job = {"model": str(model), "two_processes": True, "max_tokens": 12, "engines": [engine]}
            (found,) = run_elsewhere(job)
        except AssertionError as error:
            error.add_note((hosts.folder / "vllm.log").read_text(errors="replace")[-8000:])
            raise
    return found


def test_servers_of_both_hosts(
    hosts: TwoHosts, tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion]
) -> None:
    """Outputs are right cold, from both servers, by another engine, and without the far server."""
    some = [number for number, prompt in enumerate(prompts) if len(prompt) > 200][:12]
    asked, plain = [prompts[number] for number in some], [plain_outputs[number] for number in some]
    keys = {
        "remote_url": f"kvs+ipc://{hosts.run}",
        "remote_host_url": f"kvs://{{host}}:{hosts.port}",
        "remote_key_file": hosts.keys["client_key_file"],
        "remote_server_key_file": hosts.keys["server_key_file"],
        "max_remote_queue": 100_000,
    }
    cold, warm = answers(hosts, tiny_model, asked, "cold", "warm", **keys)
    assert_same_outputs(plain, cold)
    assert_same_outputs(plain, warm)
    assert is_all_cached(asked, warm)
    (other,) = answers(hosts, tiny_model, asked, "another engine", **keys)
    assert_same_outputs(plain, other)
    assert is_all_cached(asked, other)
    hosts.kill_far_server()
    (without,) = answers(hosts, tiny_model, asked[:2], "without the far server", **keys)
    assert_same_outputs(plain[:2], without)
    assert not any(output.cached_tokens for output in without)


def test_folders_of_both_hosts(
    hosts: TwoHosts, tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion]
) -> None:
    """Outputs are right from the disks, after a restart, and where the far host has lost some files."""
    some = [number for number, prompt in enumerate(prompts) if len(prompt) > 200][:12]
    asked, plain = [prompts[number] for number in some], [plain_outputs[number] for number in some]
    keys = {"local_disk": str(hosts.disk / "kv"), "max_local_disk_size": 0.5}
    cold, warm = answers(hosts, tiny_model, asked, "cold", "warm", **keys)
    assert_same_outputs(plain, cold)
    assert_same_outputs(plain, warm)
    far = hosts.binds[hosts.disk]
    files = [sorted(home.rglob("*.safetensors")) for home in (hosts.disk, far)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]] != []
    assert [path.parts[-1] for path in (hosts.disk / "kv").iterdir() if path.is_dir()] == ["rank-0-of-2"]
    assert [path.parts[-1] for path in (far / "kv").iterdir() if path.is_dir()] == ["rank-1-of-2"]
    for path in files[1][::3]:
        path.unlink()
    (after,) = answers(hosts, tiny_model, asked, "after a restart", **keys)
    assert_same_outputs(plain, after)
    hits = [output.cached_tokens > 0 for output in after]
    assert any(hits)
    assert not is_all_cached(asked, after)
