"""The connector's hooks where there is nothing for them to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvstore.adapters.vllm.connector import KVStoreConnector, PlanMetadata
from kvstore.adapters.vllm.steps import ReqMeta, StepPlan

pytestmark = pytest.mark.vllm


@pytest.fixture
def connector() -> KVStoreConnector:
    """The worker's side, before any cache is registered."""
    transfer = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "kvstore.max_local_cpu_size": 1000.0
        },  # more than anybody has: must not be asked for
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return KVStoreConnector(config, KVConnectorRole.WORKER, KVCacheConfig(8, [], [KVCacheGroupSpec(["layer.0"], spec)]))


@pytest.mark.parametrize(
    "caches",
    [
        {},
        {"layer.0": torch.empty(0)},
        {"layer.0": torch.empty(2, 0, 16, 2, 64)},
        {"layer.0": (torch.empty(0), torch.empty(0))},
    ],
    ids=["none", "empty", "no blocks", "an empty pair"],
)
def test_a_profiling_run_does_nothing(connector: KVStoreConnector, caches: Any) -> None:
    connector.register_kv_caches(caches)
    assert connector.get_handshake_metadata() is None
    connector.bind_connector_metadata(PlanMetadata(StepPlan(1, 0, [ReqMeta("one", lost_block_ids=[1])])))
    connector.handle_preemptions(cast("KVConnectorMetadata", None))
    connector.start_load_kv(cast("Any", None))
    connector.wait_for_layer_load("layer.0")
    connector.save_kv_layer("layer.0", torch.empty(0), cast("Any", None))
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta() is None
    connector.clear_connector_metadata()
    connector.shutdown()
