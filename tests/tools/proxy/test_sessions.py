"""Sessions and retention, from the fields of OpenAI's and Anthropic's clients to headers and fields for engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest
from msgspec import Raw
from support.fake_engine import FakeEngine
from support.proxied import ASKED, PATH, counted

from kvstore.model.errors import InvalidCallError
from kvstore.tools.proxy import sessions
from kvstore.tools.proxy.choice import session_beginning
from kvstore.tools.proxy.objects import members_of, type_of
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
        ({"cache_control": {"type": "ephemeral", "ttl": None}}, 300),
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


MESSAGE = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
STOP = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
FAILED = b'event: error\ndata: {"type": "error", "error": {"type": "api_error", "message": "no"}}\n\n'
TEXT = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'


class TestMessages:
    """Anthropic's, whose clients need other errors and authorize themselves by another header."""

    def test_they_take_the_same_way(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        serve().post("/v1/messages", json=MESSAGE).raise_for_status()
        assert prefill.last.body == {**MESSAGE, "max_tokens": 1, "stream": False}
        assert (decode.last.path, decode.last.body) == ("/v1/messages", MESSAGE)

    def test_what_one_token_cannot_be_is_left_out(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        more = {"thinking": {"type": "enabled", "budget_tokens": 2048}, "tool_choice": {"type": "tool", "name": "f"}}
        serve().post("/v1/messages", json={**MESSAGE, **more}).raise_for_status()
        assert prefill.last.body == {**MESSAGE, "max_tokens": 1, "stream": False, "tool_choice": {"type": "any"}}
        assert decode.last.body == {**MESSAGE, **more}
        others = {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
        serve().post("/v1/messages", json={**MESSAGE, **others}).raise_for_status()
        assert prefill.last.body == {**MESSAGE, **others, "max_tokens": 1, "stream": False}

    def test_decode_decides_on_refusals(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.script.status = 400
        client = serve()
        assert client.post("/v1/messages", json=MESSAGE).status_code == 200
        assert counted(client, "fallbacks_total", reason="prefill_error") == 1
        decode.script.status = 400
        assert client.post("/v1/messages", json=MESSAGE).status_code == 400

    @pytest.mark.parametrize("last", [STOP, FAILED])
    def test_a_stream_ends_with_an_event_of_its_own(self, serve: Serve, decode: FakeEngine, last: bytes) -> None:
        decode.script.events = (TEXT, last)
        client = serve()
        assert client.post("/v1/messages", json={**MESSAGE, "stream": True}).content == TEXT + last
        assert counted(client, "errors_total") == 0

    def test_a_stream_that_is_cut_ends_with_an_error_that_clients_see(self, serve: Serve, decode: FakeEngine) -> None:
        """Anthropic's own client skips events without a name."""
        decode.script.events = (TEXT, TEXT, STOP)
        decode.script.dies_after = 1
        client = serve()
        http = anthropic.DefaultHttpxClient(trust_env=False)
        url = str(client.base_url)
        theirs = anthropic.Anthropic(base_url=url, api_key="none", http_client=http, max_retries=0)
        with theirs, pytest.raises(anthropic.APIStatusError) as refused:
            list(theirs.messages.create(**MESSAGE, stream=True))
        assert refused.value.body == {"type": "error", "error": refused.value.body["error"]}

    def test_their_key(self, serve: Serve, decode: FakeEngine) -> None:
        client = serve(api_keys=("secret-key",))
        assert client.post("/v1/messages", json=MESSAGE, headers={"x-api-key": "wrong-key"}).status_code == 401
        refused = client.post("/v1/messages", json=MESSAGE)
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        client.post("/v1/messages", json=MESSAGE, headers={"x-api-key": "secret-key"}).raise_for_status()
        assert decode.last.headers["authorization"] == "Bearer secret-key"


@pytest.mark.parametrize("name", ["session_id", "prompt_cache_key", "prompt_cache_retention", "cache_control"])
def test_bytes_that_are_no_text_say_nothing(name: str) -> None:
    body = members_of(b'{"model": "m", "%b": "\xff"}' % name.encode())
    assert (session_of(body, ""), retention_s(body)) == ("", 0)
    assert type_of(Raw(b'{"type": "\xff"}')) == ""
    with pytest.raises(InvalidCallError, match="JSON object"):
        members_of(b'{"\xff": 1}')


def test_few_marks_of_many_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs microseconds, on the loop that relays all streams."""
    looked: list[object] = []
    monkeypatch.setattr(sessions, "_control", looked.append)
    assert retention_s({"messages": Raw(b"[%b{}]" % (b'{"cache_control":{"ttl":1}},' * 100_000))}) == 0
    assert len(looked) < 100


def test_prompts_of_messages_begin_with_the_system() -> None:
    def beginnings(system: str, text: str) -> list[int]:
        body = {"system": system, "messages": [{"role": "user", "content": text}]}
        return [one.key for one in Ask.parse(json.dumps(body).encode()).beginnings()]

    system = "x" * 30_000
    assert len({*beginnings(system, "one")} & {*beginnings(system, "two" * 1000)}) >= 5
    assert not {*beginnings(system, "one")} & {*beginnings("y" + system, "one")}
