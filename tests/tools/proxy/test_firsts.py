"""Streams that begin with the prefill engine's token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from msgspec import Raw
from support.fake_engine import DONE, EVENTS, USAGE, FakeEngine, Script
from support.proxied import PATH, TO_A, TO_B, counted, error_of

from kvstore.tools.proxy.first_token import first_of
from kvstore.tools.proxy.requests import Ask

Serve = Callable[..., httpx.Client]

ASKED: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0.5, "stream": True}
SPEC = {"req_id": "r", "num_transferred_tokens": 0}
ANSWER: dict[str, Any] = {
    "id": "cmpl-9",
    "object": "text_completion",
    "created": 7,
    "model": "m",
    "choices": [{"index": 0, "text": " \u00e4", "finish_reason": "length"}],
    "kv_transfer_params": {"disagg_spec": SPEC, "first_tok": 42},
}


def with_choice(**members: Any) -> dict[str, Any]:
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], **members}]}


def first_event(content: bytes) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(content.partition(b"\n\n")[0].removeprefix(b"data: "))
    return tree


@pytest.fixture
def client(serve: Serve, prefill: FakeEngine) -> httpx.Client:
    prefill.script.answer = ANSWER
    return serve(receivers=(TO_A,), first_token=True)


class TestStreams:
    def test_decode_goes_on_behind_it(self, client: httpx.Client, prefill: FakeEngine, decode: FakeEngine) -> None:
        answer = client.post(PATH, json=ASKED)
        event, rest = answer.content.split(b"\n\n", 1)
        assert json.loads(event.removeprefix(b"data: ")) == {
            **{name: ANSWER[name] for name in ("id", "object", "created", "model")},
            "choices": [{"index": 0, "text": " ä", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        }
        assert rest == b"".join((*EVENTS, DONE))
        assert prefill.last.body["kv_transfer_params"]["ret_first_tok"] is True
        assert "return_token_ids" not in prefill.last.body
        assert decode.last.body == {
            **ASKED,
            "prompt": [1, 2, 3, 42],
            "max_tokens": 6,
            "kv_transfer_params": {"disagg_spec": SPEC},
        }
        assert counted(client, "first_tokens_total") == 1

    def test_a_text_of_which_prefill_tells_the_tokens(
        self, client: httpx.Client, prefill: FakeEngine, decode: FakeEngine
    ) -> None:
        prefill.script.answer = with_choice(token_ids=[42], prompt_token_ids=[5, 6])
        assert first_event(client.post(PATH, json={**ASKED, "prompt": "hi"}).content)["id"] == "cmpl-9"
        assert prefill.last.body["return_token_ids"] is True
        assert decode.last.body["prompt"] == [5, 6, 42]

    def test_it_comes_before_decode_says_anything(self, client: httpx.Client, decode: FakeEngine) -> None:
        decode.script.holds_after = 0
        with client.stream("POST", PATH, json=ASKED) as answer:
            pieces = answer.iter_raw()
            assert first_event(next(pieces))["choices"][0]["text"] == " ä"
            decode.gate.set()
            assert b"".join(pieces) == b"".join((*EVENTS, DONE))

    def test_it_counts_as_one_of_the_answer(self, client: httpx.Client, decode: FakeEngine) -> None:
        decode.script.events = (*EVENTS, USAGE, DONE)
        asked = {**ASKED, "stream_options": {"include_usage": True}}
        events = client.post(PATH, json=asked).content.split(b"\n\n")
        usage = json.loads(events[-3].removeprefix(b"data: "))
        assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
        assert b'"usage":null' in events[3], "what counts nothing passes as it is"

    def test_with_the_place_of_its_kv(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.script.answer = ANSWER
        decode.script.events = (*EVENTS, USAGE, DONE)
        content = serve(receivers=(TO_A,), first_token=True, bidirectional=True).post(PATH, json=ASKED).content
        assert first_event(content)["id"] == "cmpl-9"
        assert b'"num_tokens": 6' in content
        assert b"completion_tokens" not in content


class TestOthersBeginAtDecode:
    @pytest.mark.parametrize(
        "more",
        [
            *({name: 1} for name in ("seed", "logprobs", "presence_penalty", "frequency_penalty", "min_tokens")),
            {"stop": ["x"]},
            {"echo": True},
            {"n": 2},
            {"max_tokens": 1},
            {"max_tokens": None},
            {"max_tokens": 2.0},
            {"response_format": {"type": "json_object"}},
            {"something": "new"},
            {"prompt": ["one"]},
            {"prompt": [[1, 2]]},
            {"prompt": None},
            {"stream": False},
            {"stream_options": {"continuous_usage_stats": True}},
            {"stream_options": 3},
            {"kv_transfer_params": {"prompt_token_ids": [1]}},
        ],
        ids=str,
    )
    def test_where_more_than_the_last_tokens_counts(
        self, client: httpx.Client, prefill: FakeEngine, decode: FakeEngine, more: dict[str, Any]
    ) -> None:
        content = client.post(PATH, json={**ASKED, **more}).content
        assert b"cmpl-9" not in content
        assert prefill.last.body["kv_transfer_params"]["ret_first_tok"] is False
        told = {**ASKED, **more}
        assert (decode.last.body["prompt"], decode.last.body["max_tokens"]) == (told["prompt"], told["max_tokens"])

    def test_what_is_null_is_not_said(self, client: httpx.Client) -> None:
        assert b"cmpl-9" in client.post(PATH, json={**ASKED, "seed": None, "stop": None, "n": 1}).content

    @pytest.mark.parametrize(
        "answer",
        [
            with_choice(text=""),
            with_choice(text="a\ufffd"),
            with_choice(finish_reason="stop"),
            with_choice(token_ids=[41]),
            {**ANSWER, "choices": ANSWER["choices"] * 2},
            {**ANSWER, "kv_transfer_params": {"disagg_spec": SPEC}},
            {**ANSWER, "kv_transfer_params": {"disagg_spec": SPEC, "first_tok": "x"}},
        ],
        ids=["no text", "half a character", "the end", "another token", "two", "no token", "no number"],
    )
    def test_where_prefills_token_is_no_beginning(
        self, client: httpx.Client, prefill: FakeEngine, decode: FakeEngine, answer: dict[str, Any]
    ) -> None:
        prefill.script.answer = answer
        assert client.post(PATH, json=ASKED).content == b"".join((*EVENTS, DONE))
        assert decode.last.body == {**ASKED, "kv_transfer_params": {"disagg_spec": SPEC}}

    def test_where_nobody_asked_for_it(self, serve: Serve, prefill: FakeEngine) -> None:
        prefill.script.answer = ANSWER
        assert serve(receivers=(TO_A,)).post(PATH, json=ASKED).content == b"".join((*EVENTS, DONE))

    def test_a_chat(self, client: httpx.Client) -> None:
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 7, "stream": True}
        assert client.post("/v1/chat/completions", json=chat).content == b"".join((*EVENTS, DONE))


class TestFailures:
    def test_decode_refuses_what_has_begun(self, client: httpx.Client, decode: FakeEngine) -> None:
        decode.script = Script(status=400)
        content = client.post(PATH, json=ASKED).content
        error = json.loads(content.split(b"\n\n")[1].removeprefix(b"data: "))["error"]
        assert error["message"] == "the decode engine answered 400 after the first token"
        assert DONE not in content

    def test_the_next_decode_engine_goes_on_behind_it(
        self, serve: Serve, prefill: FakeEngine, engines: list[FakeEngine]
    ) -> None:
        prefill.script.answer = ANSWER
        urls = (engines[1].url, engines[2].url)
        client = serve(decode=urls, receivers=(TO_A, TO_B), first_token=True, health_interval_s=60)
        engines[1].stop()
        content = client.post(PATH, json=ASKED).content
        assert content.endswith(b"".join((*EVENTS, DONE)))
        assert engines[2].last.body == {**ASKED, "prompt": [1, 2, 3, 42], "max_tokens": 6}
        engines[2].stop()
        for asked in ({**ASKED, "stream": False}, ASKED):
            assert error_of(client.post(PATH, json=asked))["code"] == 503


def test_lists_as_clients_write_them() -> None:
    body = Ask.parse(b'{"prompt": [ 1,2 ,\n3 \t\n], "max_tokens": 7}').body
    first = first_of(json.dumps(ANSWER).encode(), body)
    assert first is not None
    assert b"".join(first.prompt) == b"[ 1,2 ,\n3,42]"
    assert first.max_tokens == 6
    assert first_of(b"[" * 100_000, {"prompt": Raw(b"[1]")}) is None
