"""Sessions and retention, from the fields of OpenAI's and Anthropic's clients to headers and fields for engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.proxied import ASKED, PATH

from kvstore.tools.proxy.choice import session_beginning
from kvstore.tools.proxy.objects import members_of
from kvstore.tools.proxy.requests import Ask
from kvstore.tools.proxy.sessions import SESSION_ID, retention_s, session_of

Serve = Callable[..., httpx.Client]
DAY_S = 86_400


def session(header: str = "", **body: object) -> str:
    return session_of(members_of(json.dumps(body).encode()), header)


def retained_s(**body: object) -> int:
    return retention_s(members_of(json.dumps(body).encode()))


def test_the_name_of_a_session() -> None:
    assert session() == session(prompt_cache_key=None) == session(prompt_cache_key=7, session_id=["a"]) == ""
    assert session(prompt_cache_key="a b", session_id="one") == "one"
    assert session("two", prompt_cache_key="key") == "two"
    assert session("two", session_id="one") == "one"
    assert session(prompt_cache_key="key") == "key"


@pytest.mark.parametrize("name", ["a b", "\u00e4", "a\r\nAuthorization: x", "x" * 257, "\x00"])
def test_names_that_no_header_holds_are_hashed(name: str) -> None:
    found = session(prompt_cache_key=name)
    assert SESSION_ID.fullmatch(found)
    assert found == session(prompt_cache_key=name) != session(prompt_cache_key=name + "x")


def test_a_name_of_megabytes_is_none() -> None:
    assert session(prompt_cache_key="x" * 5000) == ""


@pytest.mark.parametrize(
    ("body", "expected_s"),
    [
        ({}, 0),
        ({"prompt_cache_retention": "24h"}, DAY_S),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": 24}, 0),
        ({"prompt_cache_retention": "99999d"}, 365 * DAY_S),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"ttl": 30}}, 0),
        ({"prompt_cache_options": "30m"}, 0),
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}, "prompt_cache_retention": "30m"}, 3600),
        ({"cache_control": {"type": "none"}}, 0),
        ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, 0),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 3600),
        ({"tools": [{"name": "x", "cache_control": {"type": "ephemeral"}}]}, 300),
        ({"messages": [{"role": "user", "content": '{"cache_control": {"type": "ephemeral"}}'}]}, 0),
        ({"messages": [{"role": "user", "content": '\\", "cache_control": {"type": "ephemeral"}'}]}, 0),
        ({"unknown": [{"cache_control": {"type": "ephemeral"}}]}, 0),
    ],
)
def test_the_longest_retention_counts(body: dict[str, Any], expected_s: int) -> None:
    assert retained_s(**body) == expected_s


def test_a_client_that_names_our_field_means_it() -> None:
    body = {"prompt_cache_retention": "24h", "kv_transfer_params": {"kvstore.retain": 7}}
    ask = Ask.parse(json.dumps(body).encode()).retaining()
    assert json.loads(b"".join(ask.for_decode(None, counted=False))) == body


def test_a_session_is_a_beginning_of_its_own() -> None:
    (one,), (other,) = session_beginning([b"m"], "one"), session_beginning([b"m"], "other")
    assert one.share == other.share == 1.0
    assert len({one.key, other.key, session_beginning([b"n"], "one")[0].key}) == 3
    assert session_beginning([b"m"], "") == []
    ask = Ask.parse(json.dumps({"prompt": "x" * 2000, "model": "m"}).encode())
    assert ask.beginnings("one")[1:] == ask.beginnings()


class TestTheWay:
    def test_both_engines_are_told_the_session(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        asked = {**ASKED, "prompt_cache_key": "one", "prompt_cache_retention": "24h"}
        serve().post(PATH, json=asked).raise_for_status()
        assert prefill.last.headers["x-session-id"] == decode.last.headers["x-session-id"] == "one"
        assert decode.last.body == asked, "retention is not passed on without --retain"
        serve().post(PATH, json=ASKED, headers={"X-Session-ID": "two"}).raise_for_status()
        assert decode.last.headers["x-session-id"] == "two"
        serve().post(PATH, json=ASKED).raise_for_status()
        assert "x-session-id" not in decode.last.headers

    def test_retention(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        serve(retain=True).post(PATH, json={**ASKED, "prompt_cache_retention": "24h"}).raise_for_status()
        for engine in (prefill, decode):
            assert engine.last.body["kv_transfer_params"]["kvstore.retain"] == DAY_S

    def test_messages(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        """Anthropic's; a stream ends with an event of its own."""
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        serve().post("/v1/messages", json=asked).raise_for_status()
        assert prefill.last.body == {**asked, "max_tokens": 1, "stream": False}
        assert (decode.last.path, decode.last.body) == ("/v1/messages", asked)
