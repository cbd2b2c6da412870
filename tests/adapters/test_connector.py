"""Hooks of the connector that have nothing to do, and hooks in which vLLM takes blocks back."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock
from weakref import WeakSet

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvstore.adapters.vllm.connector import KVStoreConnector
from kvstore.adapters.vllm.glue import weightloads
from kvstore.adapters.vllm.glue.metadata import FactsMetadata, PlanMetadata
from kvstore.adapters.vllm.plan import ReqMeta, StepPlan, WorkerFacts
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.worker.worker import StoreWorker
from kvstore.model.errors import KVStoreError

pytestmark = pytest.mark.vllm


def make(spec: AttentionSpec, role: KVConnectorRole = KVConnectorRole.WORKER) -> KVStoreConnector:
    """Make a side, by default that of a worker before any cache is registered."""
    transfer = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "kvstore.max_local_cpu_size": 1000.0
        },  # more than any machine has: must not be allocated
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(enable_sleep_mode=False, use_mla=False),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        kv_events_config=None,
        speculative_config=None,
    )
    return KVStoreConnector(config, role, KVCacheConfig(8, [], [KVCacheGroupSpec(["layer.0"], spec)]))


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=48)


@pytest.fixture
def connector() -> KVStoreConnector:
    return make(FULL)


@pytest.mark.parametrize(("spec", "preempted", "waits"), [(FULL, [], False), (FULL, ["one"], True), (WINDOW, [], True)])
def test_stores_beside_end_before_blocks_are_given_away(spec: AttentionSpec, preempted: list[str], waits: bool) -> None:
    """Blocks that have left a window belong to others in the next step, like those of preempted requests."""
    connector = make(spec)
    connector._scheduler = StoreScheduler(SchedulerOptions(SaveRules(16, 64, save_decode=False, save_tails=True)))
    output: Any = SimpleNamespace(
        num_scheduled_tokens={}, preempted_req_ids=set(preempted), kv_connector_block_state=None
    )
    planned = connector.build_connector_meta(output)
    assert isinstance(planned, PlanMetadata)
    assert planned.plan.preempts is waits


def test_weights_taken_in_place_begin_an_epoch_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "collective_rpc", EngineCore.collective_rpc)
    monkeypatch.setattr(weightloads, "_watching", WeakSet())
    connector, core = make(FULL, KVConnectorRole.SCHEDULER), Mock(spec=EngineCore, model_executor=Mock())
    epochs = []
    for call in ("synchronize_device", "update_weights", "finish_weight_update"):
        EngineCore.collective_rpc(core, call)
        epochs.append(connector._scheduling._epoch)
    assert epochs[0] == ""
    assert len(set(epochs)) == 3
    connector.shutdown()
    EngineCore.collective_rpc(core, "update_weights")
    assert connector._scheduling._epoch == epochs[-1]


def test_requests_that_begin_anew_are_among_those_that_were_loaded(connector: KVStoreConnector) -> None:
    assert connector.get_transfer_results(set()).failed_recving == set()
    worker = Mock(spec=StoreWorker)
    worker.take_ended_requests.return_value = {"ended"}
    worker.take_fetched_requests.return_value = {"one", "two"}
    worker.take_failed_requests.return_value = {"two"}
    connector._worker = worker
    results = connector.get_transfer_results(set())
    assert (results.finished_sending, results.finished_recving) == ({"ended"}, {"one", "two"})
    assert results.failed_recving == {"two"}


@pytest.mark.parametrize("at_rest", [True, False])
def test_vllm_sleeps_when_nothing_uses_its_memory(connector: KVStoreConnector, *, at_rest: bool) -> None:
    connector.unregister_kv_caches()  # before any cache was registered
    connector.restore_kv_caches()
    worker = Mock(spec=StoreWorker)
    worker.drain.return_value = at_rest
    connector._worker = worker
    refused: Any = pytest.raises(KVStoreError, match=r"cannot sleep now.*blocking_timeout_secs")
    with nullcontext() if at_rest else refused:
        connector.unregister_kv_caches()
    worker.drain.assert_called_once_with(connector._config.blocking_timeout_secs)
    connector.restore_kv_caches()
    worker.restore.assert_called_once_with()


def test_what_workers_say_when_they_wake_up_changes_nothing(connector: KVStoreConnector) -> None:
    """vLLM 0.33 repeats the handshake, and a new index would lose what is stored and what is on its way."""
    facts = FactsMetadata(Mock(spec=WorkerFacts))
    scheduler = Mock(spec=StoreScheduler)
    connector._scheduler = scheduler
    told = connector._log_start = Mock()
    for _ in range(2):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): facts})
        scheduler.connect.assert_called_once_with([facts.facts])
        told.assert_called_once_with(scheduler.index, [facts.facts])


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
