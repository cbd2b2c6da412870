"""Reports of vLLM's engine that its workers have taken other weights, however often connectors are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from kvstore.adapters.vllm.glue import weightloads
from kvstore.adapters.vllm.glue.weightloads import WEIGHT_CALLS, leave_alone, reset_with_weights

pytestmark = pytest.mark.vllm


class Cache:
    """Cache that notes what the workers had been asked when it was reset."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked
        self.resets: list[list[str]] = []

    def reset_cache(self) -> None:
        self.resets.append([*self.asked])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the workers of the core below were asked; the engine is watched only in this test."""
    monkeypatch.setattr(EngineCore, "collective_rpc", EngineCore.collective_rpc)
    monkeypatch.setattr(weightloads, "_watching", WeakSet())
    return []


def core_with(asked: list[str], error: Exception | None = None) -> Any:
    def collective_rpc(method: str, *_: object) -> list[None]:
        asked.append(method)
        if error is not None:
            raise error
        return [None]

    return SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=collective_rpc))


@pytest.mark.parametrize("call", sorted(WEIGHT_CALLS))
def test_every_cache_is_reset_once_the_workers_have_taken_weights(call: str, asked: list[str]) -> None:
    caches = [Cache(asked), Cache(asked)]
    for cache in caches:
        reset_with_weights(cache)
    assert EngineCore.collective_rpc(core_with(asked), call, kwargs={}) == [None]
    assert [cache.resets for cache in caches] == [[[call]]] * 2


def test_a_cache_is_reset_if_only_some_weights_were_taken(asked: list[str]) -> None:
    cache = Cache(asked)
    reset_with_weights(cache)
    with pytest.raises(RuntimeError):
        EngineCore.collective_rpc(core_with(asked, RuntimeError("cut off")), "update_weights")
    assert cache.resets == [["update_weights"]]


@pytest.mark.parametrize("call", ["start_weight_update", "synchronize_device", lambda worker: worker, bytearray()])
def test_other_calls_reset_nothing(call: Any, asked: list[str]) -> None:
    cache = Cache(asked)
    reset_with_weights(cache)
    EngineCore.collective_rpc(core_with(asked), call)
    assert cache.resets == []


def test_a_cache_that_closes_is_reset_no_more(asked: list[str]) -> None:
    cache, other = Cache(asked), Cache(asked)
    for one in (cache, other):
        reset_with_weights(one)
    leave_alone(cache)
    EngineCore.collective_rpc(core_with(asked), "update_weights")
    assert (cache.resets, other.resets) == ([], [["update_weights"]])


def test_workers_have_such_calls() -> None:
    """Check for two of them; which others there are depends on the version."""
    assert {"reload_weights", "update_weights"} <= WEIGHT_CALLS & set(dir(Worker))
