"""Parsing of a client's parameters for one request: read, or refused without a word of what the client wrote."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.adapters.vllm.requests.params import (
    MAX_TAG_CHARACTERS,
    MAX_TAGS,
    MAX_TTL_S,
    NO_PARAMS,
    RequestParams,
    parse_params,
)
from kvstore.config import load_config
from kvstore.config.schema import REQUEST_FIELDS
from kvstore.model.errors import ConfigError, InvalidCallError

TEXT = st.text(max_size=5) | st.text(max_size=5).map(lambda text: (text or "x") * 300)  # or longer than what is allowed
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
NAMES = st.builds(
    "{}{}".format,
    st.sampled_from(["kvstore.", "lmcache.", "kvstore.tag.", "lmcache.tag.", ""]),
    st.sampled_from([*REQUEST_FIELDS]) | TEXT,
)
SOURCES = JSON | st.dictionaries(NAMES | JSON.filter(lambda name: name.__hash__ is not None), JSON, max_size=4)
SECRET = "what-a-client-wrote"


def test_nothing_is_asked_by_default() -> None:
    assert parse_params() == parse_params(None, {}, {"do_remote_prefill": True, "lmcache.other": 1}) == NO_PARAMS


@pytest.mark.parametrize("prefix", ["kvstore.", "lmcache."])
def test_every_field(prefix: str) -> None:
    asked: dict[str, object] = {"skip_save": True, "skip_load": False, "max_save_tokens": 9, "ttl": 1.5, "pin": False}
    asked |= {"tag.team": "red", "tag.a": ""}
    tags = (("a", ""), ("team", "red"))
    expected = RequestParams(skip_save=True, max_save_tokens=9, ttl_s=1.5, pin=False, tags=tags)
    assert parse_params({prefix + name: value for name, value in asked.items()}) == expected


def test_fields_that_do_not_count_are_not_looked_at() -> None:
    asked = {
        "kvstore.pin": True,
        "lmcache.tag.team": "red",
        "kvstore.tag.b": 7,
        "kvstore.ttl": "no",
        "kvstore.skip_save": 1,
    }
    assert parse_params(asked, counted=["skip_save"]) == RequestParams(skip_save=True, ignored=("pin", "tag", "ttl"))
    assert parse_params({"kvstore.pin": None}, counted=[]) == NO_PARAMS, "no value is no field"
    with pytest.raises(InvalidCallError, match="unknown"):
        parse_params({"kvstore.pinn": True}, counted=[])


def test_what_takes_room_from_others_does_not_count_unless_the_operator_says_so() -> None:
    """All other fields concern only the KV of the request; these take room from others."""
    default = load_config(environ={}).config.request_fields
    assert default == tuple(name for name in REQUEST_FIELDS if name not in ("retain", "prefetch", "pin"))
    every = load_config({"kvstore.request_fields": ", ".join(REQUEST_FIELDS)}, environ={}).config.request_fields
    assert every == REQUEST_FIELDS
    assert load_config({"kvstore.request_fields": []}, environ={}).config.request_fields == ()
    with pytest.raises(
        ConfigError,
        match=r"request_fields.*must be some of skip_save, skip_load, max_save_tokens, ttl, tag, demote, drop, retain",
    ):
        load_config({"kvstore.request_fields": ["pins"]}, environ={})
    with pytest.raises(ConfigError, match="pin_max_secs"):
        load_config({"kvstore.pin_max_secs": 0}, environ={})
    with pytest.raises(ConfigError, match="retain_share"):
        load_config({"kvstore.retain_share": 0.6}, environ={})


def test_ours_count_over_lmcaches_and_the_last_source_over_the_first() -> None:
    first = {"kvstore.ttl": 1, "lmcache.tag.a": "theirs", "kvstore.tag.a": "ours", "lmcache.pin": True}
    assert parse_params(first, {"lmcache.ttl": 2, "kvstore.pin": None}) == RequestParams(
        ttl_s=1, pin=True, tags=(("a", "ours"),)
    )
    assert parse_params(first, {"kvstore.ttl": 2}).ttl_s == 2


@pytest.mark.parametrize(("value", "expected"), [(1, True), (0, False), (1.0, True)])
def test_vllm_turns_true_into_1(value: float, *, expected: bool) -> None:
    assert parse_params({"kvstore.skip_save": value}).skip_save is expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_save", "true"),
        ("skip_save", 2),
        ("skip_load", []),
        ("pin", "no"),
        ("ttl", 0),
        ("retain", -1),
        ("prefetch", 0),
        ("retain", "24h"),
        ("ttl", -1),
        ("ttl", True),
        ("ttl", "60"),
        ("ttl", float("nan")),
        ("ttl", MAX_TTL_S + 1),
        ("ttl", 10**400),
        ("tag.<name>", 7),
        ("tag.<name>", "x" * (MAX_TAG_CHARACTERS + 1)),
    ],
)
def test_wrong_values_are_refused_by_the_fields_name(name: str, value: object) -> None:
    for prefix in ("kvstore.", "lmcache."):
        with pytest.raises(InvalidCallError) as caught:
            parse_params({prefix + name: value})
        assert f"kvstore.{name}" in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    [
        {f"kvstore.tag.{number}": "x" for number in range(MAX_TAGS + 1)},
        {"kvstore.tag.": "x"},
        {"kvstore.tag." + "x" * (MAX_TAG_CHARACTERS + 1): "x"},
        {f"kvstore.{SECRET}": True},
        {f"kvstore.tag.{SECRET}": {SECRET: SECRET}},
        [SECRET],
        SECRET,
        0,
    ],
)
def test_refusals_show_nothing_of_what_was_written(asked: Any) -> None:
    with pytest.raises(InvalidCallError) as caught:
        parse_params(asked)
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_limits_are_allowed() -> None:
    asked = {f"kvstore.tag.{number:0{MAX_TAG_CHARACTERS}}": "x" * MAX_TAG_CHARACTERS for number in range(MAX_TAGS)}
    assert len(parse_params(asked, {"kvstore.ttl": MAX_TTL_S}).tags) == MAX_TAGS


def test_a_typing_error_is_no_consent() -> None:
    with pytest.raises(InvalidCallError, match=r"did you mean kvstore\.skip_save"):
        parse_params({"kvstore.skip_saves": True})


@settings(max_examples=50, deadline=None)
@given(sources=st.lists(SOURCES, max_size=3))
@example(sources=[{"kvstore.ttl": 10**5000}])
@example(sources=[{"kvstore.tag.a": "\ud800"}])
def test_anything_is_read_or_refused(sources: list[Any]) -> None:
    try:
        params = parse_params(*sources)
    except InvalidCallError:
        return
    assert type(params.skip_save) is type(params.skip_load) is bool
    assert params.pin in (None, True, False)
    assert params.ttl_s is None or 0 < params.ttl_s <= MAX_TTL_S
    assert len(params.tags) <= MAX_TAGS
    assert all(len(part) <= MAX_TAG_CHARACTERS for tag in params.tags for part in tag)
