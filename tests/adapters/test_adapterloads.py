"""Reports of vLLM's engine that it loads a LoRA adapter, however often connectors are made in its process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from kvstore.adapters.vllm.glue.adapterloads import adapter_files

pytestmark = pytest.mark.vllm


class Executor:
    """Executor that loads adapters, as vLLM's workers do."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self.loaded.append(lora_request.lora_int_id)
        return True


def test_loads_are_noted_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "add_lora", EngineCore.add_lora)
    noted: list[tuple[int, list[int]]] = []
    executor = Executor()
    engines = [adapter_files(KVConnectorRole.SCHEDULER) for _ in range(2)]
    worker = adapter_files(KVConnectorRole.WORKER)
    for files in (*engines, worker):
        monkeypatch.setattr(files, "note_load", lambda number: noted.append((number, list(executor.loaded))))
    core = SimpleNamespace(model_executor=executor)
    assert EngineCore.add_lora(core, LoRARequest("one", 7, "/nowhere"))
    assert noted == [(7, []), (7, [])], "by both engines, and before the load"
    assert executor.loaded == [7]
    for files in (*engines, worker):
        files.close()
