"""Tests of setups that cannot be served right: vLLM refuses them at start, with a message that says what to do."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, assert_same_outputs, forget_failed_start

from kvstore.model.errors import ConfigError, FolderOwnedError, KVStoreError

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def refusal(model: Path, store: StoreSetup, **overrides: Any) -> str:
    """Return the message with which an engine refuses to start."""
    with pytest.raises(KVStoreError) as caught, Engine(model, store, **overrides):
        pass
    forget_failed_start()
    return str(caught.value)


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (StoreSetup(policy="fail"), ["kv_load_failure_policy", '"recompute"', "--kv-transfer-config"]),
        (StoreSetup(extra={"kvstore.chunk_sise": 256}), ["chunk_sise", "256", "chunk_size"]),
        (StoreSetup(cpu_gib=4000.0), ["max_local_cpu_size", "4000"]),
        (StoreSetup(disk=Path("/proc/kvstore"), disk_gib=1.0), ["/proc/kvstore"]),
        (StoreSetup(extra={"lmcache.max_local_cpu_size": "5GB", "kvstore.max_local_cpu_size": "5GB"}), ["5GB", "GiB"]),
    ],
    ids=["policy", "unknown key", "memory", "folder", "unit"],
)
def test_configuration(tiny_model: Path, store: StoreSetup, words: list[str]) -> None:
    message = refusal(tiny_model, store)
    for word in words:
        assert word in message


def test_more_disk_than_there_is(tiny_model: Path, tmp_path: Path) -> None:
    assert "max_local_disk_size" in refusal(tiny_model, StoreSetup(tmp_path / "disk", disk_gib=900_000.0))


@pytest.mark.sweep
def test_owned_folder(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start fails if the cache is required; otherwise vLLM answers without it."""
    from kvstore.model.keys import Namespace
    from kvstore.model.layout import KVLayout
    from kvstore.tiers.disk.tier import DiskTier

    layout = KVLayout(page_bytes=(4096,), planes=1, block_tokens=32, chunk_tokens=256)
    other = DiskTier(tmp_path / "disk", Namespace({"model": "other"}), layout, 1 << 24)
    store = StoreSetup(tmp_path / "disk")
    with pytest.raises(FolderOwnedError, match=str(tmp_path / "disk")), Engine(tiny_model, store):
        pass
    forget_failed_start()
    # So that it does not join vLLM's logger, which caplog cannot see, as an earlier engine of this process did.
    ours = logging.getLogger("kvstore")
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(ours, "propagate", True)
    with Engine(tiny_model, replace(store, extra={"kvstore.required": False})) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.forget_local()
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        assert engine.store_worker is None
        assert engine.store_scheduler.index is None
    (line,) = [line for line in caplog.messages if "runs without the cache" in line]
    assert str(tmp_path / "disk") in line
    other.close()


def test_untested_version(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    message = refusal(tiny_model, StoreSetup(extra={"kvstore.allow_untested_vllm": False}))
    assert "0.99.0" in message
    assert "0.32" in message


@pytest.mark.sweep
def test_asynchronous_scheduling_with_a_disk(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous scheduling, vLLM's default on a GPU, is simulated, because vLLM on a CPU never uses it."""
    from kvstore.adapters.vllm import connector
    from kvstore.adapters.vllm.glue.support import check_supported

    def on_a_gpu(vllm_config: Any, *rest: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        check_supported(vllm_config, *rest)

    monkeypatch.setattr(connector, "check_supported", on_a_gpu)
    within = {"kvstore.enable_async_loading": False}
    assert "--no-async-scheduling" in refusal(tiny_model, StoreSetup(tmp_path / "disk", extra=within))


def test_dummy_weights_need_a_name(tiny_model: Path) -> None:
    assert "model_id" in refusal(tiny_model, StoreSetup(), load_format="dummy")
    assert issubclass(ConfigError, ValueError)
