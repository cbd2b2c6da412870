"""The connector as vLLM uses it: found by name, complete, and called as the base class says."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_objects import vllm_config
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore.adapters.vllm import connector, plugin, refusals
from kvstore.adapters.vllm.connector import KVStoreConnector
from kvstore.adapters.vllm.flag import CONNECTOR_NAME
from kvstore.adapters.vllm.glue.metadata import FactsMetadata, ReportMetadata
from kvstore.adapters.vllm.glue.spans import Spans
from kvstore.adapters.vllm.identity import fingerprint_adapter
from kvstore.adapters.vllm.plan import StepReport, StepResult, WorkerFacts
from kvstore.adapters.vllm.requests import adapterfiles
from kvstore.adapters.vllm.requests.adapterfiles import AdapterFiles
from kvstore.adapters.vllm.requests.arrivals import Arrivals
from kvstore.adapters.vllm.requests.params import WITHOUT_CACHE
from kvstore.adapters.vllm.requests.request_fields import PROBLEM, RequestFields
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.config import StoreConfig
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError, KVStoreError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.ops import metrics

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=32)
FACTS = WorkerFacts(4, 4096, 0, (0, 0), [], Namespace({}), LAYOUT)
HOOKS = sorted(
    name
    for name, member in vars(KVStoreConnector).items()
    if not name.startswith("_") and hasattr(KVConnectorBase_V1, name) and not isinstance(member, property)
)


class _NothingConnected(KVStoreConnector):
    """The scheduler side, without vLLM's configuration."""

    def __init__(self) -> None:
        self._role = KVConnectorRole.SCHEDULER
        self._scheduler = StoreScheduler(SchedulerOptions(SaveRules(4, 8, save_decode=True, save_tails=True)))
        self._worker = None
        self._fields = RequestFields(StoreConfig(required=False), self._scheduler.count_wrong_field)
        self._log_start = partial(lambda *_: None)
        self._arrivals = Arrivals(AdapterFiles(), 1.0)
        self._spans = Spans()
        self._config = StoreConfig(required=False)
        self._vllm_config = vllm_config()
        self._kv_cache_config: Any = None
        self._kv_cache_manager = None
        self._has_states = False
        self.facts = []


def test_registering_twice_is_fine() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is KVStoreConnector


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(KVStoreConnector)
    assert issubclass(KVStoreConnector, SupportsHMA), "without it, vLLM has every layer keep all tokens"


def test_the_factory_finds_the_third_argument_by_name() -> None:
    assert list(inspect.signature(KVStoreConnector.__init__).parameters)[1:] == [
        "vllm_config",
        "role",
        "kv_cache_config",
    ]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_take_what_the_base_class_takes(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (KVStoreConnector, KVConnectorBase_V1))
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]


def test_every_public_method_is_a_hook() -> None:
    ours = {name for name in vars(KVStoreConnector) if not name.startswith("_")}
    of_some_versions = {"get_external_cache_hit_sources", "unregister_kv_caches", "restore_kv_caches"}
    assert ours - set(HOOKS) - of_some_versions == {"requires_kv_delivery", "request_finished_all_groups"}


def test_wrong_configuration_is_refused_before_the_model_loads() -> None:
    with pytest.raises(ValueError, match="chunk_sizes"):
        KVStoreConnector.requires_piecewise_for_cudagraph({"kvstore.chunk_sizes": 3})
    assert KVStoreConnector.requires_piecewise_for_cudagraph({}) is False


class _Flags:
    """The flags of vLLM that are read."""

    def __init__(self, **changed: object) -> None:
        self.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR_NAME,
            **{"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **changed},
        )
        self.model_config = SimpleNamespace(enable_sleep_mode=False)
        self.parallel_config = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
        self.scheduler_config = SimpleNamespace(async_scheduling=False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_load_failure_policy": "fail"}, 'kv_load_failure_policy is "fail"'),
        ({"kv_connector_extra_config": {"kvstore.chunk_sizes": 3}}, "chunk_sizes"),
    ],
)
def test_flags_are_refused_before_anything_is_started(
    changed: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program gets the error; a user of ``vllm serve`` sees its text at the end, and nothing else."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _self: _Flags(**changed))
    plugin.register()
    plugin.register()
    with pytest.raises(ConfigError, match=words):
        EngineArgs.create_engine_config(None)
    told: list[KVStoreError] = []
    monkeypatch.setattr(refusals, "is_command", lambda: True)
    monkeypatch.setattr(refusals, "note", told.append)
    with pytest.raises(SystemExit) as ended:
        EngineArgs.create_engine_config(None)
    assert ended.value.code == 1
    assert [words in str(error) for error in told] == [True]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "changed", [{}, {"kv_connector": "ExampleConnector"}, {"kv_load_failure_policy": "fail", "kv_role": "kv_producer"}]
)
def test_flags_that_are_not_refused(changed: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Flags()
    made.kv_transfer_config = replace(made.kv_transfer_config, **changed)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _self: made)
    plugin.register()
    assert EngineArgs.create_engine_config(None) is made
    made.kv_transfer_config = None
    assert EngineArgs.create_engine_config(None) is made


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["vllm", "serve", "m", "--kv-transfer-config", ""], True),
        (["vllm", "serve", "m", "--kv-transfer-config=", "--port", "1"], True),
        (["vllm", "serve", "m", "--api-key", ""], False),
    ],
)
def test_a_flag_that_a_shell_left_empty_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    """vLLM takes it for a missing one, and would serve without kvstore."""
    made = _Flags()
    made.kv_transfer_config = None
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _self: made)
    monkeypatch.setattr(refusals, "is_command", lambda: True)
    monkeypatch.setattr(sys, "argv", words)
    told: list[KVStoreError] = []
    monkeypatch.setattr(refusals, "note", told.append)
    plugin.register()
    with pytest.raises(SystemExit) if is_refused else nullcontext():
        EngineArgs.create_engine_config(None)
    assert len(told) == is_refused


def test_a_process_of_vllms_own_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _self: _Flags(kv_load_failure_policy="fail"))
    monkeypatch.setattr(refusals, "is_first_process", lambda: False)
    plugin.register()
    EngineArgs.create_engine_config(None)
    assert reads is not EngineArgs.create_engine_config


def test_errors_of_the_connector_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[KVStoreError] = []
    monkeypatch.setattr(refusals, "note", told.append)
    found, error = _NothingConnected(), TierError("broken on purpose")
    found._stores_nothing, found._config = None, StoreConfig()

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(connector, "open_worker", broken)
    with pytest.raises(TierError):
        found.register_kv_caches({"layer": torch.zeros(4)})
    assert told == [error]
    found._config = StoreConfig(required=False)
    found.register_kv_caches({"layer": torch.zeros(4)})
    assert told == [error], "vLLM goes on"


def test_facts_connect_in_the_order_of_ranks() -> None:
    found = _NothingConnected()
    refs = [ChunkRef(bytes([number]) * 16, 1) for number in range(2)]
    ranks = {
        (0, 1): FactsMetadata(replace(FACTS, survivors=[(refs[0], 1)])),
        (0, 0): FactsMetadata(replace(FACTS, survivors=[(ref, 1) for ref in refs])),
    }
    found.set_xfer_handshake_metadata_pp_aware(ranks)
    assert found._scheduling.index is not None
    assert found._scheduling._connected is not None
    assert found._scheduling._connected.num_ranks == 2


def test_what_other_connectors_said_is_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    class Foreign(KVConnectorHandshakeMetadata):  # type: ignore[misc] # vLLM's classes are Any to mypy
        pass

    found = _NothingConnected()
    found.set_xfer_handshake_metadata_pp_aware({(0, 0): Foreign(), (0, 1): FactsMetadata(FACTS)})
    assert found._scheduling.index is None
    assert "another connector answered the handshake first" in caplog.text


@pytest.mark.parametrize("others", [0, 1])
def test_a_rank_without_the_cache_is_none_for_all(caplog: pytest.LogCaptureFixture, others: int) -> None:
    found = _NothingConnected()
    ranks = {(0, rank): FactsMetadata(FACTS) for rank in range(others)}
    found.set_xfer_handshake_metadata_pp_aware({**ranks, (0, 9): FactsMetadata(None)})
    assert found._scheduling.index is None
    assert ("1 of 2 workers run without" in caplog.text) == bool(others), "a rank alone has said so itself"


@pytest.mark.parametrize("required", [True, False])
def test_a_remote_tier_that_the_scheduler_cannot_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, required: bool
) -> None:
    def refuse(*_: object) -> None:
        raise TierError("the server says no")

    found = _NothingConnected()
    found._config = StoreConfig(required=required)
    monkeypatch.setattr(found._scheduling, "connect", refuse)
    if required:
        with pytest.raises(TierError):
            found.set_xfer_handshake_metadata_pp_aware({(0, 0): FactsMetadata(FACTS)})
    else:
        found.set_xfer_handshake_metadata_pp_aware({(0, 0): FactsMetadata(FACTS)})
        assert "runs without the cache, because required is false: the server says no" in caplog.text


def lora_request(name: str, folder: Path) -> Request:
    params = SamplingParams(extra_args={"kvstore.ttl": 5})
    return Request(name, [1, 2, 3], params, None, lora_request=LoRARequest("style", 1, str(folder)))


def test_a_request_of_an_adapter_waits_for_its_files_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapterfiles, "_CLOCK_S", -1.0)  # its files are older than vLLM's load of them
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678")
    found = _NothingConnected()
    request = lora_request("styled", tmp_path)
    found.on_new_request(request)
    assert not found._scheduling._trackers, "nobody knows its keys yet"
    plain = Request("plain", [1, 2, 3], SamplingParams(), None)
    found.on_new_request(plain)
    assert found.get_num_new_matched_tokens(plain, 0) == (0, False)
    wait(found._arrivals._waiting["styled"].missing(), 30.0)
    assert found.get_num_new_matched_tokens(request, 0) == (0, False)
    tracker = found._scheduling._trackers["styled"]
    assert tracker.extras.lora == ("style", fingerprint_adapter(tmp_path))
    assert tracker.params.ttl_s == 5
    found._arrivals.close()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_request_of_an_adapter_that_cannot_be_told_is_tracked_without_the_cache(
    tmp_path: Path, *, is_gone: bool
) -> None:
    found = _NothingConnected()
    found._arrivals = Arrivals(AdapterFiles(), 30.0)
    request = lora_request("styled", tmp_path / "nowhere")
    found.on_new_request(request)
    wait(found._arrivals._waiting["styled"].missing(), 30.0)
    if is_gone:
        found.request_finished(request, [])
        assert found.get_num_new_matched_tokens(request, 0) == (0, False)
        assert not found._scheduling._trackers
    else:
        assert found.get_num_new_matched_tokens(request, 0) == (0, False)
        assert found._scheduling._trackers["styled"].params == WITHOUT_CACHE
    found._arrivals.close()


def test_malformed_parameters_are_named_once_and_the_request_is_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    found = _NothingConnected()
    for number in range(3):
        params = SamplingParams(extra_args={"kv_transfer_params": {"kvstore.ttl": "my secret"}})
        found.on_new_request(Request(f"{number}", [1, 2, 3], params, None))
    (line,) = caplog.messages
    assert "kvstore.ttl" in line
    assert "secret" not in line
    tally = found._scheduling.take_tally()
    assert tally.counters[metrics.REQUEST_FIELD_ERRORS.key("ttl")] == 3
    _, answer = found.request_finished(Request("0", [1, 2, 3], SamplingParams(), None), [])
    assert answer is not None
    assert "kvstore.ttl must be" in answer[PROBLEM]
    _, answer = found.request_finished(Request("0", [1, 2, 3], SamplingParams(), None), [])
    assert answer is None
    assert {tracker.params for tracker in found._scheduling._trackers.values()} == {WITHOUT_CACHE}
    found.on_new_request(Request("right", [1, 2, 3], SamplingParams(extra_args={"kvstore.ttl": 5}), None))
    assert found._scheduling._trackers["right"].params.ttl_s == 5


def test_a_field_that_does_not_count_is_told_once_and_the_request_is_served(caplog: pytest.LogCaptureFixture) -> None:
    found = _NothingConnected()
    for number in range(3):
        params = SamplingParams(extra_args={"kvstore.pin": True, "kvstore.ttl": 5})
        found.on_new_request(Request(f"{number}", [1, 2, 3], params, None))
    assert caplog.messages == [
        "kvstore.pin of a request is ignored: request_fields does not list it; further messages suppressed for 60 s"
    ]
    fields = {(tracker.params.pin, tracker.params.ttl_s) for tracker in found._scheduling._trackers.values()}
    assert fields == {(None, 5.0)}


def test_reports_aggregate() -> None:
    one, two = (ReportMetadata(StepReport({1: StepResult({key}, ranks_ended=1)})) for key in (b"a", b"b"))
    merged = one.aggregate(two)
    assert isinstance(merged, ReportMetadata)
    assert merged.report.steps[1] == StepResult({b"a", b"b"}, ranks_ended=2)


def test_spoilt_blocks_leave_vllms_prefix_cache() -> None:
    evicted: list[set[int]] = []
    found: Any = _NothingConnected()
    found.set_xfer_handshake_metadata_pp_aware({(0, 0): FactsMetadata(FACTS)})
    found.update_connector_output(KVConnectorOutput(invalid_block_ids={5, 9}))
    found._kv_cache_manager = SimpleNamespace(evict_blocks=evicted.append)
    found.update_connector_output(KVConnectorOutput())
    found.update_connector_output(KVConnectorOutput(invalid_block_ids={5, 9}))
    assert evicted == [{5, 9}]
