"""``kvstore proxy`` as a process, and its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.disaggregated import ProxyProcess
from support.fake_engine import DONE, EVENTS, FakeEngine
from support.redis_server import wait_for

STREAMED = {"model": "m", "prompt": "the client's secret", "stream": True}


@contextmanager
def started(engines: list[FakeEngine], folder: Path, *options: str) -> Iterator[ProxyProcess]:
    proxy = ProxyProcess([engines[0].url], [engines[1].url], folder / "proxy.log", options)
    try:
        yield proxy.start()
    finally:
        proxy.kill()


def asked_in_a_thread(proxy: ProxyProcess, answers: list[bytes]) -> threading.Thread:
    def ask() -> None:
        with httpx.Client(trust_env=False, timeout=60) as client:
            answers.append(client.post(f"{proxy.url}/v1/completions", json=STREAMED).content)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


class TestItsEnd:
    def test_the_end_of_the_terminal_is_not_its_end(self, engines: list[FakeEngine], tmp_path: Path) -> None:
        with started(engines, tmp_path) as proxy:
            proxy.signal(signal.SIGHUP)
            wait_for("it has heard", lambda: "SIGHUP" in proxy.log.read_text())
            assert httpx.get(f"{proxy.url}/health", trust_env=False).status_code == 200
            proxy.signal(signal.SIGTERM)
            assert proxy.wait() == 0

    def test_answers_under_way_may_end(self, engines: list[FakeEngine], tmp_path: Path) -> None:
        engines[1].script.holds_after = 1
        answers: list[bytes] = []
        with started(engines, tmp_path) as proxy:
            thread = asked_in_a_thread(proxy, answers)
            wait_for("it is under way", lambda: engines[1].held == 1)
            proxy.signal(signal.SIGTERM)
            wait_for("nobody new comes in", lambda: not proxy.is_listening())
            assert proxy.is_alive()
            engines[1].gate.set()
            assert proxy.wait() == 0
            thread.join()
        assert answers == [b"".join((*EVENTS, DONE))]
        assert "secret" not in proxy.log.read_text()

    @pytest.mark.parametrize("how", ["time", "second signal"])
    def test_or_are_cut_off_with_an_error(self, engines: list[FakeEngine], tmp_path: Path, how: str) -> None:
        engines[1].script.holds_after = 1
        answers: list[bytes] = []
        with started(engines, tmp_path, "--drain-s", "0.2" if how == "time" else "600") as proxy:
            thread = asked_in_a_thread(proxy, answers)
            wait_for("it is under way", lambda: engines[1].held == 1)
            proxy.signal(signal.SIGTERM)
            if how == "second signal":
                wait_for("nobody new comes in", lambda: not proxy.is_listening())
                proxy.signal(signal.SIGTERM)
            assert proxy.wait() == 1
            thread.join()
        assert answers[0].startswith(EVENTS[0] + b'data: {"error"')
        assert DONE not in answers[0]
        wait_for("the engine is told", lambda: engines[1].aborted == 1)

    def test_an_idle_one_ends_at_once(self, engines: list[FakeEngine], tmp_path: Path) -> None:
        with started(engines, tmp_path) as proxy, httpx.Client(trust_env=False) as client:
            assert client.get(f"{proxy.url}/health").status_code == 200
            proxy.signal(signal.SIGINT)
            assert proxy.wait() == 0


def test_api_keys_are_read_again(engines: list[FakeEngine], tmp_path: Path) -> None:
    """An answer under way goes on, though its key is gone; wrong files change nothing."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\n")
    keys.chmod(0o600)
    engines[1].script.holds_after = 1
    with (
        started(engines, tmp_path, "--api-key-file", str(keys), "--health-interval-s", "0.1") as proxy,
        httpx.Client(base_url=proxy.url, trust_env=False, timeout=60) as client,
    ):

        def status(key: str) -> int:
            return client.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code

        headers = {"authorization": "Bearer first-key"}
        with client.stream("POST", "/v1/completions", json=STREAMED, headers=headers) as answer:
            assert (status("first-key"), status("second-key")) == (200, 401)
            keys.write_text("second-key\nthird-key\n")
            wait_for("the new keys count", lambda: status("second-key") == status("third-key") == 200)
            assert status("first-key") == 401
            engines[1].gate.set()
            assert answer.read().endswith(DONE)
        keys.write_text("bad\n")
        wait_for("it is noticed", lambda: "keys stays as it was" in proxy.log.read_text())
        assert status("second-key") == 200
