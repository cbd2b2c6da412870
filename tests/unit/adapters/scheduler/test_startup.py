"""The log block at start, which shows the settings that are often wrong, and no password."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.divided import Worker

from kvstore import __version__
from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.startup import Surroundings, log_start, startup_lines
from kvstore.config import load_config
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout

LAYOUT = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=32)
FACTS = WorkerFacts(1024, 2**20, 2**30, (0, 0), [], Namespace({"rank": 0}), LAYOUT)
AROUND = Surroundings("0.32.0", "kv_both", "recompute")
OPTIONS = SchedulerOptions(SaveRules(16, 32, save_decode=False, save_tails=True), load_rules=LoadRules())


def block(text: str, tmp_path: Path, *facts: WorkerFacts, **more: object) -> list[str]:
    file = tmp_path / "kvstore.yaml"
    file.write_text(text)
    extra = {f"kvstore.{key}": value for key, value in more.items()}
    loaded = load_config(extra, path=file, environ={"KVSTORE_CHUNK_SIZE": "32"})
    return list(startup_lines(loaded, OPTIONS, AROUND, facts or (FACTS,), 7))


def test_memory_and_disk(tmp_path: Path) -> None:
    assert block(
        "max_local_cpu_size: 1.0\nlocal_disk: /mnt/kv\nmax_local_disk_size: 1", tmp_path, save_decode_cache=True
    ) == [
        f"version {__version__} in vLLM 0.32.0",
        (
            f"configuration: file {tmp_path}/kvstore.yaml, environment KVSTORE_CHUNK_SIZE, kv_connector_extra_config "
            "kvstore.save_decode_cache"
        ),
        (
            "vLLM asks for: kv_role kv_both, kv_load_failure_policy recompute; loads in the background if that is "
            "faster, stores within a step"
        ),
        "memory: at most 1.00 GiB",
        "disk /mnt/kv: at most 1.00 GiB, 7 chunks found",
        f"namespace {FACTS.namespace.id.hex()}",
    ]


def test_several_workers(tmp_path: Path) -> None:
    ranks = [replace(FACTS, gpu_bytes=2 << 30), replace(FACTS, namespace=Namespace({"rank": 1}))]
    lines = block("max_local_gpu_size: 3", tmp_path, *ranks)
    assert not any(line.startswith("GPU") for line in block("max_local_gpu_size: 3", tmp_path)), "it was left out"
    assert "memory: at most 2.00 GiB (1.00 GiB for each of 2 workers)" in lines
    assert "GPU: at most 4.00 GiB (2.00 GiB for each of 2 workers)" in lines
    assert lines[-1] == f"namespace {FACTS.namespace.id.hex()}, and 1 more for the other ranks"
    assert not any(line.startswith("disk") for line in lines)
    assert "local_cpu is false" in "".join(block("local_cpu: false", tmp_path, *ranks))


@pytest.mark.parametrize("problem", [None, "Redis at cache:6379 refuses the login: WRONGPASS"])
def test_a_remote_tier_with_its_state_and_without_its_password(tmp_path: Path, problem: str | None) -> None:
    text = "remote_url: redis://me:secret@cache:6379\nremote_password: secret"
    facts = [replace(FACTS, remote_problem=problem)] * 2
    lines = block(text, tmp_path, *facts)
    (line,) = [line for line in lines if line.startswith("remote tier")]
    state = f"NOT USED: {problem}; it is tried again" if problem else "answers"
    assert line == f"remote tier redis://***@cache:6379: {state}"
    assert "secret" not in "".join(lines)


def test_a_tier_that_is_only_read(tmp_path: Path) -> None:
    text = "enable_pd: true\npd_role: receiver\npd_peer_init_port: 7000\nremote_url: redis://me:secret@cache"
    lines = block(text, tmp_path)
    assert "remote tier: the server that each worker opens for other engines" in lines
    assert "remote tier redis://***@cache, which is only read: answers" in lines


def test_other_engines(tmp_path: Path) -> None:
    text = "enable_pd: true\npd_role: receiver\npd_peer_init_port: 7000\npeers: [kvs://me:secret@other:7000]"
    lines = block(text, tmp_path)
    assert "remote tier: the server that each worker opens for other engines" in lines
    assert f"{lines[-3]}, NOT USED: a wrong key; it is tried again" in block(
        text, tmp_path, replace(FACTS, remote_problem="a wrong key")
    )
    assert any(line.startswith("peers") and "other:7000" in line for line in lines)
    assert "secret" not in "".join(lines)


def test_other_sizes_are_named_if_they_are_read(tmp_path: Path) -> None:
    worker = Worker(0, 2)
    ranks = [replace(FACTS, divisions=(worker.division(1), worker.division(4)))]
    assert "also read: chunks that engines of tensor-parallel size 1 and 4 have stored" in block("", tmp_path, *ranks)
    refused = block("reshard_from: [1]\nlocal_disk: /d\nmax_local_disk_size: 1", tmp_path)
    assert not any(line.startswith("also read") for line in refused)


@pytest.mark.parametrize("url", [None, "kvs://10.0.0.6:5566"], ids=["nowhere", "told"])
def test_workers_on_several_hosts(tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str | None) -> None:
    """A tier that nobody can ask for a worker is a warning."""
    file = tmp_path / "kvstore.yaml"
    file.write_text("remote_url: kvs+ipc:///run/kvstore")
    facts = [FACTS, replace(FACTS, host="elsewhere", remote_url=url)]
    with caplog.at_level(logging.INFO):
        log_start(load_config({}, path=file, environ={}), OPTIONS, AROUND, None, facts)
    (record,) = caplog.records
    assert (record.levelno == logging.WARNING) is (url is None)
    assert "several hosts" in record.message
    state = "NOT USED: worker 1 has its own on another host" if url is None else "answers"
    assert f"remote tier kvs+ipc:///run/kvstore: {state}" in record.message
