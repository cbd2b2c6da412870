"""Parts of vLLM that kvstore uses: an installed version is examined for them, and a missing one is named."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import vllm
from support.vllm_objects import cache_config, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import request
from vllm.v1.core.sched import output

import kvstore.adapters.vllm as adapters
from kvstore.adapters.vllm.connector import KVStoreConnector
from kvstore.adapters.vllm.glue import interface, support
from kvstore.adapters.vllm.glue.interface import TESTED, USES, Use, is_tested, missing, missing_hooks
from kvstore.model.errors import ConfigError

pytestmark = pytest.mark.vllm
BASE = base.KVConnectorBase_V1


def test_the_installed_version_has_everything() -> None:
    interface.require()
    interface.require_hooks(KVStoreConnector, BASE)


def test_a_class_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    with pytest.raises(ConfigError, match=rf"lacks.*base\.KVConnectorTransferResults.*{TESTED[0]}, {TESTED[1]}"):
        interface.require()


def test_a_module_that_is_gone_is_named() -> None:
    assert missing((Use("vllm.v1.metrics.nowhere", "Something"),)) == ["vllm.v1.metrics.nowhere.Something"]


@pytest.mark.parametrize("name", ["kv_connector_block_state", "num_scheduled_tokens"])
def test_a_field_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fields = [field for field in dataclasses.fields(output.SchedulerOutput) if field.name != name]
    made = dataclasses.make_dataclass("SchedulerOutput", [(field.name, Any) for field in fields])
    monkeypatch.setattr(output, "SchedulerOutput", made)
    assert missing() == [f"vllm.v1.core.sched.output.SchedulerOutput.{name}"]


def test_an_attribute_that_no_constructor_sets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Request(request.Request):  # type: ignore[misc]
        pass

    class Other:
        def __init__(self) -> None:
            self.request_id = ""

    monkeypatch.setattr(request, "Request", Request)
    assert missing() == [], "what a parent sets counts"
    monkeypatch.setattr(request, "Request", Other)
    lacking = missing()
    assert "vllm.v1.request.Request.all_token_ids" in lacking
    assert "vllm.v1.request.Request.request_id" not in lacking


def test_fields_are_found_without_annotations_in_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 keeps no annotations there."""
    monkeypatch.setattr(inspect, "get_annotations", lambda _class: {})
    assert missing() == []


def test_every_attribute_that_is_asked_for_is_used() -> None:
    """The list stays current: an attribute that the code no longer uses must not refuse a version."""
    adapter = Path(adapters.__file__).parent
    sources = "".join(path.read_text() for path in adapter.rglob("*.py") if path.name != "interface.py")
    for use in USES:
        for part in use.parts:
            assert part in sources, f"{use}.{part}"


# -- methods that vLLM calls ------------------------------------------------------------------------------------------


def other_base(**methods: Any) -> type[Any]:
    """Make the base class of another version; ``None`` removes a method."""
    given = {name: value for name, value in inspect.getmembers_static(BASE) if not name.startswith("__")}
    return type("KVConnectorBase_V1", (), {name: value for name, value in {**given, **methods}.items() if value})


def test_a_method_that_vllm_no_longer_calls_is_named() -> None:
    with pytest.raises(ConfigError, match=r"KVConnectorBase_V1\.handle_preemptions"):
        interface.require_hooks(KVStoreConnector, other_base(handle_preemptions=None))


def test_a_method_of_later_versions_may_be_missing() -> None:
    assert missing_hooks(KVStoreConnector, other_base(get_external_cache_hit_sources=None)) == []


def test_a_method_with_another_argument_is_named() -> None:
    def allocated(self: Any, request: Any, blocks: Any, num_external_tokens: int, groups: Any) -> None: ...

    (wrong,) = missing_hooks(KVStoreConnector, other_base(update_state_after_alloc=allocated))
    assert wrong.endswith("update_state_after_alloc(self, request, blocks, num_external_tokens, groups)")


def test_a_method_with_an_argument_less_is_named() -> None:
    def allocated(self: Any, request: Any, blocks: Any) -> None: ...

    assert missing_hooks(KVStoreConnector, other_base(update_state_after_alloc=allocated))


def test_a_property_that_became_a_method_is_named() -> None:
    (wrong,) = missing_hooks(KVStoreConnector, other_base(requires_kv_delivery=lambda self: True))
    assert wrong.endswith("requires_kv_delivery, which is called otherwise")


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.30.0", True), ("0.32.1+cpu", True), ("0.32", True), ("0.3.2", False), ("0.320.0", False), ("0.99.0", False)],
)
def test_versions(version: str, *, tested: bool) -> None:
    assert is_tested(version) is tested


def test_an_untested_version_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("kvstore")
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(vllm, "__version__", f"{TESTED[-1]}.0")
    support.log_limits(vllm_config(), cache_config())
    assert caplog.messages == []
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    support.log_limits(vllm_config(), cache_config())
    (line,) = caplog.messages
    assert "vLLM 0.99.0 has not been tested" in line
    assert "is served" in line


def test_with_unknown_additions_nothing_is_missing() -> None:
    def new_hook(self: Any, something: int) -> None: ...

    assert missing_hooks(KVStoreConnector, other_base(new_hook=new_hook)) == []
