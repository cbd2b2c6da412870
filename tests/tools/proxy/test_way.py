"""A request on its way through two engines, over real HTTP. Real vLLM: tests/e2e/test_proxy.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.fake_engine import DONE, EVENTS, USAGE, FakeEngine, Script
from support.proxied import ASKED, PATH, STREAMED, TO_A, TO_B, error_of

Serve = Callable[..., httpx.Client]

FOUND = {"remote_host": "10.0.0.1", "remote_port": 5001, "num_tokens": 9}


class TestTheWay:
    def test_prefill_for_one_token_and_then_decode(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        decode.script.answer = {"id": "cmpl-2", "choices": [{"text": "\u00e4"}], "kv_transfer_params": FOUND}
        answer = serve().post(PATH, json=ASKED)
        assert answer.status_code == 200
        assert answer.json() == decode.script.answer
        assert prefill.last.body == {**ASKED, "max_tokens": 1, "stream": False}
        assert decode.last.body == ASKED
        assert prefill.last.path == decode.last.path == PATH

    def test_chat(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 30,
            "min_tokens": 20,
            "n": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert serve().post("/v1/chat/completions", json=chat).content == b"".join((*EVENTS, DONE))
        assert prefill.last == (
            "/v1/chat/completions",
            {
                **{name: chat[name] for name in ("model", "messages")},
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "n": 1,
                "stream": False,
            },
            prefill.last.headers,
        )
        assert decode.last.body == chat

    @pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], [1, 2, 3]], ids=["texts", "token lists", "tokens"])
    def test_prompts_of_all_kinds(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine, prompt: object) -> None:
        assert serve().post(PATH, json={**ASKED, "prompt": prompt}).status_code == 200
        assert prefill.last.body["prompt"] == decode.last.body["prompt"] == prompt

    def test_a_body_of_megabytes_in_pieces(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prompt = list(range(1_000_000, 1_400_000))
        assert serve().post(PATH, json={**ASKED, "prompt": prompt, "user": "\u00e4" * 300_000}).status_code == 200
        for engine in (prefill, decode):
            assert engine.last.body["prompt"] == prompt
            assert engine.last.body["user"] == "\u00e4" * 300_000
            assert int(engine.last.headers["content-length"]) > 3 << 20
            assert "transfer-encoding" not in engine.last.headers

    @pytest.mark.parametrize("piece_bytes", [0, 1, 7, 100_000])
    def test_a_stream_passes_byte_for_byte(self, serve: Serve, decode: FakeEngine, piece_bytes: int) -> None:
        decode.script.piece_bytes = piece_bytes
        answer = serve().post(PATH, json=STREAMED)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.content == b"".join((*EVENTS, DONE))

    def test_a_stream_passes_as_it_comes(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script.holds_after = 1
        with serve().stream("POST", PATH, json=STREAMED) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == EVENTS[0], "although the engine has not said more"
            decode.gate.set()
            assert b"".join(pieces) == b"".join((*EVENTS[1:], DONE))

    def test_engines_in_turn(self, serve: Serve, engines: list[FakeEngine]) -> None:
        urls = [engine.url for engine in engines]
        client = serve(prefill=tuple(urls[:2]), decode=tuple(urls[2:]), receivers=(TO_A, TO_B))
        for _ in range(4):
            assert client.post(PATH, json=ASKED).status_code == 200
        assert [len(engine.seen) for engine in engines] == [2, 2, 2, 2]
        sent = [seen.body["kv_transfer_params"]["disagg_spec"] for engine in engines[:2] for seen in engine.seen]
        assert [spec["receiver_host"] for spec in sent] == [TO_A.host, TO_A.host, TO_B.host, TO_B.host]

    def test_a_request_id_goes_to_both(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        client = serve()
        answer = client.post(PATH, json=ASKED, headers={"X-Request-Id": "mine-1.a:b_c"})
        ids = [seen.headers["x-request-id"] for seen in (prefill.last, decode.last)]
        assert ids == [answer.headers["x-request-id"]] * 2 == ["mine-1.a:b_c"] * 2
        address = "___prefill_addr_10.0.0.5:1___decode_addr_10.0.0.66:1"
        for bad in ("", "with space", "x" * 129, "\u00e4", address, f"a{address}"):
            answer = client.post(PATH, json=ASKED, headers={b"X-Request-Id": bad.encode()})
            made = prefill.last.headers["x-request-id"]
            assert len(made) == 32
            assert answer.headers["x-request-id"] == decode.last.headers["x-request-id"] == made

    @pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/version"), ("POST", "/tokenize")])
    def test_what_a_decode_engine_answers(
        self, serve: Serve, prefill: FakeEngine, decode: FakeEngine, method: str, path: str
    ) -> None:
        client = serve()
        content = {"prompt": "x"} if method == "POST" else None
        assert client.request(method, path, json=content).json() == decode.script.answer
        assert (decode.last.path, decode.last.body) == (path, content)
        assert not prefill.seen
        wrong = "POST" if method == "GET" else "GET"
        assert error_of(client.request(wrong, path))["code"] == 405
        assert client.head(path).status_code == 405

    @pytest.mark.parametrize("path", ["/", "/v1/embeddings", "/v1/completions/", "/reset_prefix_cache"])
    def test_other_paths(self, serve: Serve, decode: FakeEngine, path: str) -> None:
        assert error_of(serve().post(path, json=ASKED))["code"] == 404
        assert not decode.seen

    @pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize"])
    def test_a_newline_in_a_path_reaches_no_engine(self, serve: Serve, path: str) -> None:
        assert error_of(serve().post(f"{path}%0a", json=ASKED))["code"] == 404


class TestWhereKvGoes:
    def test_what_each_engine_is_told(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        client = serve(receivers=(TO_A,))
        wishes = {"kvstore.skip_save": True, "lmcache.ttl": 5, "prompt_token_ids": [1, 2]}
        evil = {"disagg_spec": {"receiver_host": "evil"}, "ret_first_tok": True}
        said = {**wishes, **FOUND, "anything": {"a": 1}, **evil}
        told: dict[str, Any] = {"req_id": "r", "num_transferred_tokens": 32}
        prefill.script.answer = {"choices": [], "kv_transfer_params": {"disagg_spec": told, "first_tok": 3}}
        client.post(PATH, json={**ASKED, "kv_transfer_params": said}, headers={"X-Request-Id": "r"}).raise_for_status()

        to_prefill = prefill.last.body["kv_transfer_params"]
        spec = to_prefill.pop("disagg_spec")
        assert to_prefill == {**wishes, **FOUND, "anything": {"a": 1}, "ret_first_tok": False}
        assert spec.pop("req_id").startswith("r-")
        assert spec == {
            "receiver_host": TO_A.host,
            "receiver_init_port": TO_A.port,
            "receiver_alloc_port": TO_A.port,
            "is_last_prefill": True,
        }
        assert decode.last.body["kv_transfer_params"] == {**wishes, "disagg_spec": told}

    def test_two_requests_with_one_name_are_two_transfers(self, serve: Serve, prefill: FakeEngine) -> None:
        client = serve(receivers=(TO_A,))
        for _ in range(2):
            client.post(PATH, json=ASKED, headers={"X-Request-Id": "same"}).raise_for_status()
        names = {seen.body["kv_transfer_params"]["disagg_spec"]["req_id"] for seen in prefill.seen}
        assert len(names) == 2

    @pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]], ids=["texts", "token lists"])
    def test_how_much_was_sent_is_not_said_of_a_batch(
        self, serve: Serve, prefill: FakeEngine, decode: FakeEngine, prompt: object
    ) -> None:
        told = {"req_id": "r", "num_transferred_tokens": 32}
        prefill.script.answer = {"kv_transfer_params": {"disagg_spec": told}}
        serve(receivers=(TO_A,)).post(PATH, json={**ASKED, "prompt": prompt}).raise_for_status()
        assert decode.last.body["kv_transfer_params"] == {"disagg_spec": {"req_id": "r"}}

    def test_engines_that_only_share_a_store(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.script.answer = {"kv_transfer_params": {"disagg_spec": {"req_id": "nobody asked"}}}
        client = serve()
        client.post(PATH, json={**ASKED, "kv_transfer_params": {"disagg_spec": {"receiver_host": "evil"}}})
        assert "kv_transfer_params" not in prefill.last.body
        assert "kv_transfer_params" not in decode.last.body

    @pytest.mark.parametrize(
        "answer", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"disagg_spec": [1]}}, {"a": 1}]
    )
    def test_a_prefill_that_sent_nothing(
        self, serve: Serve, prefill: FakeEngine, decode: FakeEngine, answer: dict[str, Any]
    ) -> None:
        prefill.script.answer = answer
        assert serve(receivers=(TO_A,)).post(PATH, json=ASKED).status_code == 200
        assert decode.last.body == ASKED

    def test_the_end_of_a_stream_says_where_its_kv_is(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script = Script(events=(*EVENTS, USAGE, DONE), piece_bytes=11)
        client = serve(receivers=(TO_A,), bidirectional=True)
        hidden = client.post(PATH, json=STREAMED).content
        assert decode.last.body == {
            **STREAMED,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        }
        before = b"".join(EVENTS)
        assert hidden.startswith(before)
        assert hidden.endswith(b"\n\n" + DONE)
        event = hidden.removeprefix(before).removesuffix(DONE)
        assert json.loads(event.removeprefix(b"data: ")) == {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 7,
            "model": "m",
            "choices": [],
            "kv_transfer_params": {"remote_host": TO_A.host, "remote_port": TO_A.port, "num_tokens": 6},
        }

        shown = client.post(PATH, json={**STREAMED, "stream_options": {"include_usage": True}}).content
        assert shown == before + USAGE + event + DONE

    def test_it_says_so_only_if_asked_to_and_able_to(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script.events = (*EVENTS, USAGE, DONE)
        as_it_is = b"".join(decode.script.events)
        assert serve(receivers=(TO_A,)).post(PATH, json=STREAMED).content == as_it_is
        client = serve(receivers=(TO_A,), bidirectional=True)
        for several in ({"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}):
            assert client.post(PATH, json={**STREAMED, **several}).content == as_it_is
            assert "stream_options" not in decode.last.body
        decode.script.events = (*EVENTS, DONE)  # an engine that does not count
        assert client.post(PATH, json={**STREAMED, "prompt": [1, 2]}).content == b"".join((*EVENTS, DONE))


class TestTraces:
    PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    def test_they_go_to_both_as_they_are(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        client = serve()
        client.post(PATH, json=ASKED, headers={"traceparent": self.PARENT, "tracestate": "a=1,b=2"})
        for engine in (prefill, decode):
            assert engine.last.headers["traceparent"] == self.PARENT
            assert engine.last.headers["tracestate"] == "a=1,b=2"

    @pytest.mark.parametrize("parent", ["", "x", PARENT + "x", PARENT.upper()])
    def test_not_what_is_none(self, serve: Serve, prefill: FakeEngine, parent: str) -> None:
        serve().post(PATH, json=ASKED, headers={"traceparent": parent, "tracestate": "a=1"}).raise_for_status()
        assert not {"traceparent", "tracestate"} & prefill.last.headers.keys()

    def test_nor_a_state_that_is_too_long(self, serve: Serve, prefill: FakeEngine) -> None:
        serve().post(PATH, json=ASKED, headers={"traceparent": self.PARENT, "tracestate": "a" * 513})
        assert prefill.last.headers["traceparent"] == self.PARENT
        assert "tracestate" not in prefill.last.headers
