"""Reports of a wrong field: the client, the log and a counter name it."""

from __future__ import annotations

import logging

import pytest

from kvstore.adapters.vllm.requests.params import (
    HANDOVER_FIELD,
    NO_PARAMS,
    OTHER_FIELD,
    PROBE,
    WITHOUT_CACHE,
    FieldError,
    RequestParams,
    parse_params,
)
from kvstore.adapters.vllm.requests.request_fields import PROBLEM, RequestFields
from kvstore.config import StoreConfig
from kvstore.config.schema import REQUEST_FIELDS
from kvstore.ops import metrics

SECRET = "what-a-client-wrote"


def reader(found: list[str]) -> RequestFields:
    return RequestFields(StoreConfig(request_fields=REQUEST_FIELDS, enable_pd=True), found.append)


@pytest.mark.parametrize(
    ("fields", "counted", "words"),
    [
        ({"kvstore.skip_sav": True}, "skip_save", "kvstore.skip_save"),
        ({"kvstore.tll": 5}, "ttl", "kvstore.ttl"),
        ({"kvstore.ttl": SECRET}, "ttl", "kvstore.ttl must be"),
        ({"lmcache.pin": SECRET}, "pin", "kvstore.pin must be"),
        ({"kvstore.tag.team": 7}, "tag", "kvstore.tag.<name> must be"),
        ({"kvstore.probe": ""}, PROBE, "kvstore.probe must be"),
        ({f"kvstore.{SECRET}": 1}, OTHER_FIELD, "known names are"),
        ([SECRET], OTHER_FIELD, "mapping"),
        ({"disagg_spec": SECRET}, HANDOVER_FIELD, "disagg_spec must be"),
        ({"disagg_spec": {"receiver_host": SECRET}}, HANDOVER_FIELD, "receiver_init_port"),
        ({"remote_host": SECRET}, HANDOVER_FIELD, "remote_port"),
    ],
)
def test_a_wrong_field(fields: object, counted: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []
    fields_of = reader(found)
    assert fields_of.read("a", None, fields) == (WITHOUT_CACHE, None)
    assert fields_of.read("b", None, fields) == (WITHOUT_CACHE, None)
    assert found == [counted, counted]
    assert (counted,) in metrics.REQUEST_FIELD_ERRORS.values
    (record,) = caplog.records
    assert words in record.getMessage()
    answer = fields_of.answer("a", {"remote_port": 1})
    assert answer is not None
    assert answer["remote_port"] == 1
    assert words in str(answer[PROBLEM])
    assert SECRET not in f"{answer}{caplog.text}"
    assert fields_of.answer("a", None) is None, "the request has ended"
    assert fields_of.answer("b", None) is not None


def test_what_is_right_is_answered_as_before(caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []
    fields_of = reader(found)
    caplog.set_level(logging.DEBUG)
    assert fields_of.read("a", None, {"kvstore.ttl": 3}) == (RequestParams(ttl_s=3), None)
    assert fields_of.answer("a", None) is None
    assert fields_of.answer("a", {"x": 1}) == {"x": 1}
    assert not found
    assert not caplog.records


def test_a_proxy_that_sends_the_answer_on_does_no_harm() -> None:
    assert parse_params({PROBLEM: "a field is wrong"}) == NO_PARAMS


def test_every_field_has_its_own_count() -> None:
    counted = {value for (value,) in metrics.REQUEST_FIELD_ERRORS.values}
    assert counted == {*REQUEST_FIELDS, PROBE, HANDOVER_FIELD, OTHER_FIELD}


def test_a_probe_counts_whatever_the_operator_lists() -> None:
    assert parse_params({"kvstore.probe": "x"}, counted=()) == RequestParams(probe="x")
    with pytest.raises(FieldError):
        parse_params({"kvstore.probe": "x" * 257}, counted=())
