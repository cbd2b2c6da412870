"""Tests of faults: each becomes a miss, vLLM computes, outputs stay right, and nothing leaks."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runner import started
from support.vllm_engine import (
    ONE_MODE_AND_SOAK,
    Completion,
    Engine,
    Prompt,
    StoreSetup,
    assert_same_outputs,
    whole_blocks,
)

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[random.Random(path.name).randrange(len(raw) // 2, len(raw) * 3 // 4)] ^= 0x10
    path.write_bytes(raw)


def flip_header(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[100] ^= 0x01
    path.write_bytes(raw)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not _is_bookkeeping(path))


def _is_bookkeeping(path: Path) -> bool:
    return path.name in {".lock", "namespace.json", "layout.json", "trails"}


def test_damaged_files(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """Every third file is damaged after its lookup; loads fail in the middle of requests, and are recomputed."""
    store = StoreSetup(tmp_path / "disk")
    with Engine(tiny_model, store) as engine:
        engine.generate(prompts)
        engine.settle()
    with Engine(tiny_model, store) as engine:
        damaged = chunk_files(tmp_path / "disk")[::3]
        assert len(damaged) > 10
        for path, damage in zip(damaged, itertools.cycle((cut, flip, flip_header, empty, missing)), strict=False):
            damage(path)
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        assert engine.store_scheduler.index.counters.failed_loads > 0
        engine.settle()
        engine.forget_local()
        again = engine.generate(prompts)  # lost chunks have been recomputed and stored again
        assert_same_outputs(plain_outputs, again)
        for prompt, output in zip(prompts, again, strict=True):
            assert output.cached_tokens >= whole_blocks(len(prompt))
        engine.assert_idle()
        assert bytes_on_disk(tmp_path / "disk") == engine.store_worker._tiers.disk.used_bytes


@pytest.mark.sweep
def test_the_whole_folder_disappears(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    store = StoreSetup(tmp_path / "disk")
    with Engine(tiny_model, store) as engine:
        engine.generate(prompts)
        engine.settle()
    with Engine(tiny_model, store) as engine:
        shutil.rmtree(tmp_path / "disk")
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.assert_idle()


@ONE_MODE_AND_SOAK
def test_every_third_load_fails(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: dict[str, Any],
) -> None:
    """After random read failures, blocks are recomputed for all of the requests that share them."""
    from kvstore.model.chunks import Outcome
    from kvstore.tiers.disk.tier import DiskTier

    store = StoreSetup(tmp_path / "disk", extra={"kvstore.local_cpu": False} | mode)
    calls = 0

    def failing(original: Callable[..., list[Outcome]]) -> Callable[..., list[Outcome]]:
        def get(*args: Any) -> list[Outcome]:
            nonlocal calls
            calls += 1
            return [Outcome.FAILED] if calls % 3 == 0 else original(*args)

        return get

    with Engine(tiny_model, store) as engine:
        engine.generate(prompts)
        engine.settle()
        engine.forget_local()
        for name in ("get", "get_layers"):
            monkeypatch.setattr(DiskTier, name, failing(getattr(DiskTier, name)))
        for _ in range(3):
            assert_same_outputs(plain_outputs, engine.generate(prompts))
            engine.settle()
            engine.forget_local()
        assert engine.store_scheduler.index.counters.failed_loads > 10
        engine.assert_idle()


def test_killed_while_storing(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path
) -> None:
    """After a kill -9 during stores, the next start serves complete files, sweeps the rest, and counts every byte."""
    folder = tmp_path / "disk"
    engine_job = {"store": {"disk": str(folder)}, "rounds": ["cold"], "prompts": prompts, "stays": True}
    job = {"model": str(tiny_model), "two_processes": False, "max_tokens": 12, "engines": [engine_job]}
    with started(job, subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 120
        while len(chunk_files(folder)) < 8:  # some are complete, more are under way
            assert time.monotonic() < deadline_s, "nothing was stored"
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    survivors = len(chunk_files(folder))
    with Engine(tiny_model, StoreSetup(folder)) as engine:
        disk = engine.store_worker._tiers.disk
        assert len(engine.store_scheduler.index) == survivors
        assert bytes_on_disk(folder) == disk.used_bytes == engine.store_scheduler.index.disk_used_bytes
        outputs = engine.generate(prompts)
        assert_same_outputs(plain_outputs, outputs)
        assert engine.moved.chunks_loaded_from_disk > 0
        engine.assert_idle()
        assert bytes_on_disk(folder) == disk.used_bytes
