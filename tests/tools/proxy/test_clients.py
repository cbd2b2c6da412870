"""Clients of the proxy: broken connections, malformed requests and keys."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from support.fake_engine import DONE, EVENTS, USAGE, FakeEngine
from support.proxied import ASKED, PATH, STREAMED, TO_A, TO_B, counted, error_of, send_raw
from support.redis_server import wait_for

from kvstore.tools.proxy import admission

Serve = Callable[..., httpx.Client]


class TestClients:
    @pytest.mark.parametrize("asked", [ASKED, STREAMED], ids=["whole", "stream"])
    def test_one_that_hangs_up_while_decoding(self, serve: Serve, decode: FakeEngine, asked: dict[str, Any]) -> None:
        decode.script.holds_after = 0
        client = serve()
        self._hang_up(client, asked, decode)
        wait_for("it is counted", lambda: counted(client, "errors_total", reason="client_gone") == 1)
        assert counted(client, "in_flight") == 0

    def test_one_that_hangs_up_while_prefilling(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.script.holds_after = 0
        self._hang_up(serve(), ASKED, prefill)
        assert not decode.seen

    @pytest.mark.parametrize("is_late", [False, True])
    def test_one_that_hangs_up_after_asking_ahead(self, serve: Serve, prefill: FakeEngine, is_late: bool) -> None:
        prefill.script.holds_after = 0
        client = serve()
        content = json.dumps(ASKED).encode()
        ahead = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}" % PATH.encode()
        with send_raw(client, content) as connection:
            if is_late:
                wait_for("the engine works", lambda: prefill.held == 1)
            connection.sendall(ahead)
            wait_for("the engine works", lambda: prefill.held == 1)
        wait_for("the engine is told", lambda: prefill.aborted == 1)
        wait_for("nothing is under way", lambda: counted(client, "in_flight") == 0)

    @staticmethod
    def _hang_up(client: httpx.Client, asked: dict[str, Any], engine: FakeEngine) -> None:
        with send_raw(client, json.dumps(asked).encode()):
            wait_for("the engine works", lambda: engine.held == 1)
        wait_for("the engine is told", lambda: engine.aborted == 1)

    def test_one_that_does_not_read(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script.events = (b"data: " + b"x" * (1 << 20) + b"\n\n",) * 64 + (DONE,)
        client = serve(timeout_s=2)
        with send_raw(client, json.dumps(STREAMED).encode()):
            wait_for("it is given up", lambda: counted(client, "errors_total", reason="client_gone") == 1)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[1]", b'{"kv_transfer_params": 3}', b"[" * 100_000, b'"\xff"'], ids=repr
    )
    def test_one_that_sends_nonsense(self, serve: Serve, engines: list[FakeEngine], content: bytes) -> None:
        error = error_of(serve().post(PATH, content=content))
        assert (error["code"], error["type"]) == (400, "invalid_request_error")
        assert not any(engine.seen for engine in engines)

    def test_bodies_that_are_too_large(self, serve: Serve, prefill: FakeEngine) -> None:
        client = serve(max_body_mb=1000 / (1 << 20))
        large = {**ASKED, "prompt": "x" * 1000}
        assert error_of(client.post(PATH, json=large))["code"] == 413
        assert error_of(client.post(PATH, content=iter([b"x" * 600] * 2)))["code"] == 413, "of a length not told"
        assert not prefill.seen
        assert client.post(PATH, json=ASKED).status_code == 200

    def test_one_whose_body_does_not_come(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admission, "_BODY_TIMEOUT_S", 0.1)
        client = serve()
        address = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{".encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert counted(client, "errors_total", reason="slow_body") == 1
        assert counted(client, "in_flight") == 0

    def test_those_whose_bodies_do_not_come_keep_nobody_out(self, serve: Serve) -> None:
        client = serve(max_requests=1)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(unfinished(client, b"{"))
            assert client.post(PATH, json=ASKED).status_code == 200

    def test_bodies_share_a_budget(self, serve: Serve, decode: FakeEngine) -> None:
        client = serve(max_body_mb=0.1, max_bodies_mb=0.15)
        large = b'{"prompt": "' + b"x" * 90_000
        with unfinished(client, large) as first:
            wait_for("its body is there", lambda: client.post(PATH, content=large + b'"}').status_code == 503)
            assert client.post(PATH, json=ASKED).status_code == 200, "a small one has room"
            assert counted(client, "errors_total", reason="busy") >= 1
            first.sendall(b'"}')
        wait_for("its room is free", lambda: client.post(PATH, content=large + b'"}').status_code == 200)
        wait_for("nothing runs", lambda: counted(client, "in_flight") == 0)
        decode.script.holds_after = 0
        with send_raw(client, large + b'"}'):
            wait_for("the engine has it", lambda: decode.held == 1)
            assert client.post(PATH, content=large + b'"}').status_code == 503, "one that is being answered counts"
        decode.gate.set()
        wait_for("it is given back", lambda: client.post(PATH, content=large + b'"}').status_code == 200)

    def test_too_many_at_once(self, serve: Serve, decode: FakeEngine) -> None:
        decode.script.holds_after = 1
        client = serve(max_requests=2)
        streams = [client.stream("POST", PATH, json=STREAMED) for _ in range(2)]
        answers = [stream.__enter__() for stream in streams]
        refused = client.post(PATH, json=ASKED)
        assert error_of(refused)["code"] == 503
        assert refused.headers["retry-after"] == "1"
        assert counted(client, "in_flight") == 2
        decode.gate.set()
        for answer, stream in zip(answers, streams, strict=True):
            assert answer.read() == b"".join((*EVENTS, DONE))
            stream.__exit__(None, None, None)
        wait_for("the engines' connections are given back", lambda: counted(client, "in_flight") == 0)
        assert client.post(PATH, json=ASKED).status_code == 200
        assert counted(client, "errors_total", reason="busy") == 1
        assert counted(client, "errors_total", reason="client_gone") == 0
        assert counted(client, "requests_total", path=PATH, status="503") == 1
        assert counted(client, "prefill_seconds_count") == 3

    def test_pages_in_a_browser_are_turned_away(self, serve: Serve, engines: list[FakeEngine]) -> None:
        client = serve()
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            assert error_of(client.post(PATH, json=ASKED, headers=headers))["code"] == 403
        assert not any(engine.seen for engine in engines)

    def test_many_at_once_while_engines_come_and_go(self, serve: Serve, engines: list[FakeEngine]) -> None:
        """Every answer is whole, or reports that it is not, and nothing of any request is left."""
        prefill, first, second, _ = engines
        client = serve(decode=(first.url, second.url), receivers=(TO_A, TO_B), bidirectional=True)
        for engine in (first, second):
            engine.script.events = (*EVENTS, USAGE, DONE)
            engine.script.piece_bytes = 3

        def ask(number: int) -> None:
            if number % 5 == 4:
                with send_raw(client, json.dumps(STREAMED).encode()):
                    return
            answer = client.post(PATH, json=STREAMED if number % 2 else ASKED)
            if answer.status_code != 200:
                assert error_of(answer)["code"] in {502, 503, 504}  # 504: of one that stops and is slow to
            elif number % 2:
                assert answer.content.startswith(b"".join(EVENTS)) or b'data: {"error"' in answer.content
                assert answer.content.endswith(DONE) != (b'data: {"error"' in answer.content)
            else:
                assert answer.json() == first.script.answer

        with ThreadPoolExecutor(12) as pool:
            asked = pool.map(ask, range(150))
            for engine in (first, prefill, second):
                engine.stop()
                engine.start()
            list(asked)
        wait_for("nothing is under way", lambda: counted(client, "in_flight") == 0)
        wait_for("all are back", lambda: client.get("/health").json()["engines"] == {"prefill": 1, "decode": 2})
        assert client.post(PATH, json=STREAMED).content.endswith(DONE)


@contextmanager
def unfinished(client: httpx.Client, begin: bytes, more: str = "") -> Iterator[socket.socket]:
    """Yield a connection on which two bytes of a body are missing."""
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=20) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}Content-Length: {len(begin) + 2}\r\n\r\n"
        connection.sendall(head.encode() + begin)
        yield connection


class TestKeys:
    def test_one_key_leaves_a_share_to_others(self, serve: Serve, decode: FakeEngine) -> None:
        client = serve(max_requests=4, max_body_mb=0.1, max_bodies_mb=0.2, api_keys=("greedy-key", "modest-key"))
        greedy, modest = ({"Authorization": f"Bearer {name}-key"} for name in ("greedy", "modest"))
        large = b'{"prompt": "' + b"x" * 90_000
        with unfinished(client, large, "Authorization: Bearer greedy-key\r\n"):
            wait_for(
                "its body is there",
                lambda: client.post(PATH, content=large + b'"}', headers=greedy).status_code == 503,
            )
            assert client.post(PATH, content=large + b'"}', headers=modest).status_code == 200
        decode.script.holds_after = 1
        streams = [client.stream("POST", PATH, json=STREAMED, headers=greedy) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        assert client.post(PATH, json=ASKED, headers=greedy).status_code == 503
        assert client.post(PATH, json=ASKED, headers=modest).status_code == 200
        decode.gate.set()
        for stream in streams:
            stream.__exit__(None, None, None)

    def test_clients_need_the_key(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        client = serve(api_keys=("other-key", "secret-key"))
        for given in ({}, {"Authorization": "Bearer secret-kex"}, {"Authorization": "secret-key"}):
            for method, path in (("POST", PATH), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/nothing")):
                answer = client.request(method, path, headers=given)
                assert error_of(answer)["code"] == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200, "for whoever balances the load"
        assert not prefill.seen

        good = {"Authorization": "Bearer secret-key", "Host": "models.example"}
        assert client.post(PATH, json=ASKED, headers=good).status_code == 200
        assert [seen.headers["authorization"] for seen in (prefill.last, decode.last)] == ["Bearer secret-key"] * 2

    def test_engines_may_have_another(self, serve: Serve, prefill: FakeEngine, decode: FakeEngine) -> None:
        client = serve(api_keys=("secret-key",), engine_api_key="engine-key")
        client.post(PATH, json=ASKED, headers={"Authorization": "Bearer secret-key"}).raise_for_status()
        assert [seen.headers["authorization"] for seen in (prefill.last, decode.last)] == ["Bearer engine-key"] * 2

    def test_without_a_key_what_the_client_says_is_passed_on(
        self, serve: Serve, prefill: FakeEngine, decode: FakeEngine
    ) -> None:
        client = serve()
        client.post(PATH, json=ASKED, headers={"Authorization": "Bearer vllms"}).raise_for_status()
        assert [seen.headers["authorization"] for seen in (prefill.last, decode.last)] == ["Bearer vllms"] * 2
        for given in ({}, {b"Authorization": "Bearer \u00e4".encode("latin-1")}):
            client.post(PATH, json=ASKED, headers=given).raise_for_status()
            assert "authorization" not in decode.last.headers
