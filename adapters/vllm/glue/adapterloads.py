"""Detects loads of LoRA adapters, which vLLM does not report to connectors, as their files may have been replaced."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstore.adapters.vllm.requests.adapterfiles import AdapterFiles

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

_watching: Final[WeakSet[AdapterFiles]] = WeakSet()


def adapter_files(role: KVConnectorRole) -> AdapterFiles:
    """Return the adapters' files for a connector; the scheduler's are notified of loads. For the engine's thread."""
    files = AdapterFiles()
    if role is KVConnectorRole.SCHEDULER:
        if not _watching:
            _watch_engine()
        _watching.add(files)
    return files


def _watch_engine() -> None:
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - workers have no engine

    add_lora = getattr(EngineCore.add_lora, "__wrapped__", EngineCore.add_lora)

    @wraps(add_lora)
    def noted(core: EngineCore, lora_request: LoRARequest) -> bool:
        for files in list(_watching):
            files.note_load(lora_request.lora_int_id)
        return bool(add_lora(core, lora_request))

    EngineCore.add_lora = noted
