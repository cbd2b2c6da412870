"""Engines that fail, stop answering, and recover."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from support.fake_engine import DONE, EVENTS, FakeEngine, Script
from support.proxied import ASKED, PATH, STREAMED, TO_A, TO_B, counted, error_of, send_raw
from support.redis_server import wait_for

Serve = Callable[..., httpx.Client]

FOUND = {"remote_host": "10.0.0.1", "remote_port": 5001, "num_tokens": 9}


class TestEnginesThatFail:
    def test_no_prefill_engine(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.stop()
        client = serve(receivers=(TO_A,))
        said = {"kvstore.skip_save": True, **FOUND}
        assert client.post(PATH, json={**ASKED, "kv_transfer_params": said}).status_code == 200
        assert decode.last.body == {**ASKED, "kv_transfer_params": {"kvstore.skip_save": True}}
        assert counted(client, "fallbacks_total", reason="no_prefill_engine") == 1

    def test_a_prefill_engine_that_is_gone_since(self, serve: Serve, engines: list[FakeEngine]) -> None:
        client = serve(prefill=(engines[0].url, engines[2].url), health_interval_s=60)
        engines[0].stop()
        assert client.post(PATH, json=ASKED).status_code == 200
        assert len(engines[2].seen) == 1, "the other one computes it"
        engines[2].stop()
        assert client.post(PATH, json=ASKED).status_code == 200
        assert counted(client, "fallbacks_total", reason="prefill_unreachable") == 1
        assert client.post(PATH, json=ASKED).status_code == 200
        assert counted(client, "fallbacks_total", reason="no_prefill_engine") == 1, "both are known to be gone"
        assert len(engines[1].seen) == 3

    def test_a_prefill_that_takes_too_long(self, serve: Serve, prefill: FakeEngine) -> None:
        prefill.script.holds_after = 0
        client = serve(prefill_timeout_s=0.2)
        assert client.post(PATH, json=ASKED).status_code == 200
        assert counted(client, "fallbacks_total", reason="prefill_timeout") == 1
        wait_for("the prefill is aborted", lambda: prefill.aborted == 1)

    def test_a_decode_engine_has_a_request_while_its_prompt_is_computed(
        self, serve: Serve, engines: list[FakeEngine]
    ) -> None:
        """Otherwise all long prompts would go to one decode engine."""
        prefill, first, second, _ = engines
        prefill.script.holds_after = 0
        client = serve(decode=(first.url, second.url))
        loads = {engine.url: 0 for engine in (first, second)}

        def held(count: int) -> bool:
            loads.update({url: counted(client, "engine_requests", engine=url, role="decode") for url in loads})
            return prefill.held == count

        with send_raw(client, json.dumps(ASKED).encode()):
            wait_for("one is computed", lambda: held(1))
            assert sorted(loads.values()) == [0, 1]
            with send_raw(client, json.dumps(ASKED).encode()):
                wait_for("two are computed", lambda: held(2))
                assert sorted(loads.values()) == [1, 1]
        wait_for("nothing is left", lambda: held(2) and sum(loads.values()) == 0)

    @pytest.mark.parametrize("ends_with", ["silence", "an error"])
    def test_what_one_prefill_engine_has_begun_no_other_begins(
        self, serve: Serve, engines: list[FakeEngine], ends_with: str
    ) -> None:
        """A prompt computed twice would take the engines' time twice; the decode engine computes it at once."""
        first, decode, second = engines[:3]
        first.script = Script(holds_after=0) if ends_with == "silence" else Script(status=500)
        client = serve(prefill=(first.url, second.url), prefill_timeout_s=0.2, timeout_s=20)
        assert client.post(PATH, json=ASKED).status_code == 200
        assert [len(engine.seen) for engine in (first, second, decode)] == [1, 0, 1]

    def test_a_prefill_engine_with_an_error_of_its_own(self, serve: Serve, prefill: FakeEngine) -> None:
        prefill.script.status = 500
        client = serve(receivers=(TO_A,))
        assert client.post(PATH, json=ASKED).status_code == 200
        assert counted(client, "fallbacks_total", reason="prefill_error") == 1

    def test_what_prefill_finds_wrong_is_passed_on(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.script = Script(status=400, answer={"error": {"message": "too long", "code": 400, "odd": [1]}})
        answer = serve().post(PATH, json=ASKED)
        assert answer.status_code == 400
        assert answer.json() == prefill.script.answer
        assert not decode.seen

    @pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
    def test_what_decode_finds_wrong_is_passed_on(self, serve: Serve, decode: FakeEngine, status: int) -> None:
        decode.script = Script(status=status, answer={"error": {"message": "why", "code": status}})
        answer = serve().post(PATH, json=STREAMED)
        assert answer.status_code == status
        assert answer.json() == decode.script.answer
        assert answer.headers.get("retry-after") == ("9" if status == 429 else None)

    def test_only_an_answer_that_is_well_is_a_stream(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script = Script(status=204, media_type="text/event-stream")
        client = serve()
        answer = client.post(PATH, json=STREAMED)
        assert (answer.status_code, answer.content) == (204, b"")
        assert counted(client, "errors_total", reason="broken") == 0, "no event that says so may follow that status"

    def test_a_decode_engine_that_is_gone_since(self, serve: Serve, engines: list[FakeEngine]) -> None:
        engines[0].script.answer = {"kv_transfer_params": {"disagg_spec": {"req_id": "for the first"}}}
        urls = (engines[1].url, engines[2].url)
        client = serve(decode=urls, receivers=(TO_A, TO_B), health_interval_s=60)
        engines[1].stop()
        assert client.post(PATH, json=STREAMED).content == b"".join((*EVENTS, DONE))
        assert engines[2].last.body == STREAMED, "it does not wait for KV that went elsewhere"
        assert counted(client, "fallbacks_total", reason="decode_unreachable") == 1
        assert client.get("/v1/models").status_code == 200

    def test_no_decode_engine(self, serve: Serve, decode: FakeEngine) -> None:
        client = serve(health_interval_s=60)
        assert client.get("/health").status_code == 200
        decode.stop()
        for asked in (ASKED, STREAMED):
            assert error_of(client.post(PATH, json=asked))["code"] == 503
        assert error_of(client.get("/v1/models"))["type"] == "server_error"
        assert client.get("/health").status_code == 503
        assert counted(client, "errors_total", reason="no_decode_engine") == 3

    def test_health_comes_and_goes(self, serve: Serve, engines: list[FakeEngine]) -> None:
        client = serve(decode=(engines[1].url, engines[2].url))
        engines[1].script.health = 503
        wait_for("it is left out", lambda: client.get("/health").json()["engines"]["decode"] == 1)
        for _ in range(3):
            client.post(PATH, json=ASKED).raise_for_status()
        assert (len(engines[1].seen), len(engines[2].seen)) == (0, 3)
        engines[1].script.health = 200
        wait_for("it is back", lambda: client.get("/health").json()["engines"]["decode"] == 2)
        client.post(PATH, json=ASKED).raise_for_status()
        client.post(PATH, json=ASKED).raise_for_status()
        assert len(engines[1].seen) == 1
        assert counted(client, "engine_healthy", engine=engines[1].url, role="decode") == 1

    def test_an_engine_that_starts_after_the_proxy(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        decode.stop()
        client = serve()
        assert client.get("/health").status_code == 503
        decode.start()
        wait_for("it is found", lambda: client.get("/health").status_code == 200)
        assert client.post(PATH, json=ASKED).status_code == 200

    @pytest.mark.parametrize(("piece_bytes", "dies_after"), [(0, 0), (0, 1), (0, 3), (50, 3)])
    def test_an_engine_that_dies_in_the_middle(
        self, serve: Serve, decode: FakeEngine, piece_bytes: int, dies_after: int
    ) -> None:
        decode.script = Script(piece_bytes=piece_bytes, dies_after=dies_after)
        client = serve()
        content = client.post(PATH, json=STREAMED).content
        whole = b"".join(EVENTS)
        sent = whole[: piece_bytes * dies_after] if piece_bytes else b"".join(EVENTS[:dies_after])
        passed = sent[: sent.rfind(b"\n\n") + 2] if sent else b""
        assert content.startswith(passed), "whole events only"
        error = json.loads(content.removeprefix(passed).removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert DONE not in content
        assert counted(client, "errors_total", reason="broken") == 1

    def test_a_stream_that_ends_too_early_without_an_error(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script.events = EVENTS
        content = serve().post(PATH, json=STREAMED).content
        assert content.startswith(b"".join(EVENTS) + b'data: {"error"')
        assert DONE not in content

    def test_an_engine_that_falls_silent(self, serve: Serve, decode: FakeEngine) -> None:
        client = serve(timeout_s=0.3)
        decode.script.holds_after = 0
        assert error_of(client.post(PATH, json=ASKED))["code"] == 504
        decode.script.holds_after = 2
        content = client.post(PATH, json=STREAMED).content
        assert content.startswith(b"".join(EVENTS[:2]) + b'data: {"error"')
        assert b'"code": 504' in content
        assert counted(client, "errors_total", reason="timeout") == 2
        wait_for("both are aborted", lambda: decode.aborted == 2)
