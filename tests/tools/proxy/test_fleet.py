"""Engines that are added and removed while the proxy runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_engine import DONE, EVENTS, FakeEngine
from support.proxied import ASKED, PATH, STREAMED, TO_A, TO_B, counted
from support.redis_server import wait_for

from kvstore.model.errors import ConfigError
from kvstore.tools.proxy.enginesfile import read_listing
from kvstore.tools.proxy.listing import Listed

Serve = Callable[..., httpx.Client]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engines.yaml"


def write(file: Path, prefill: Sequence[dict[str, Any]], decode: Sequence[dict[str, Any]]) -> None:
    """Write the file as an operator should, atomically."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"prefill": prefill, "decode": decode}), encoding="utf-8")
    new.replace(file)


class TestFile:
    def test_what_it_says(self, file: Path) -> None:
        file.write_text(
            "prefill:\n  - url: http://10.0.0.5:8100/\n    weight: 2\n"
            "decode:\n  - url: https://d:8200\n    kv: kvs://10.0.0.1:5001\n  - url: http://e\n",
            encoding="utf-8",
        )
        listing = read_listing(file)
        assert listing.prefill == (Listed("http://10.0.0.5:8100", None, 2.0),)
        assert listing.decode == (Listed("https://d:8200", TO_A), Listed("http://e"))
        file.write_text("decode: [{url: 'http://e'}]", encoding="utf-8")
        assert read_listing(file).prefill == (), "the decode engines compute all"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "the whole: Input should be"),
            ("prefill: [{url: 'http://a'}]", "decode: Field required"),
            ("decode: []", "decode: List should have at least 1"),
            ("decode: [{url: 'a:1'}]", "it must be http://HOST:PORT"),
            ("decode: [{url: 'http://a'}, {url: 'http://a/'}]", "names an engine twice"),
            ("decode: [{url: 'http://a', weight: 0}]", "decode.0.weight"),
            ("decode: [{url: 'http://a', weight: .nan}]", "decode.0.weight"),
            ("decode: [{url: 'http://a', kv: 'http://a'}]", "kv is 'http://a': it must be kvs://HOST:PORT"),
            ("prefill: [{url: 'http://a', kv: 'kvs://a:1'}]\ndecode: [{url: 'http://a'}]", "prefill.0.kv: Extra"),
            ("decode: [{url: 'http://a', wieght: 1}]", "decode.0.wieght: Extra inputs"),
            ("decode: [", "is no YAML"),
            ("\x00", "is no YAML"),
            ("decode: [{url: 2001-99-99}]", "is no YAML"),
            ("[" * 100_000, "is no YAML"),
            ("#" * (2 << 20), "has more than"),
        ],
    )
    def test_what_it_may_not_say(self, file: Path, content: str, message: str) -> None:
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"engines\.yaml") as error:
            read_listing(file)
        assert message in str(error.value)

    def test_none(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            read_listing(file)
        file.write_bytes(b"\xff\xfe\xff")
        with pytest.raises(ConfigError, match="is no YAML"):
            read_listing(file)


class TestChanges:
    def test_engines_come_and_go(self, serve: Serve, engines: list[FakeEngine], file: Path) -> None:
        urls = [{"url": engine.url} for engine in engines]
        write(file, urls[:1], urls[1:2])
        client = serve(prefill=(), decode=(), engines_file=file)
        client.post(PATH, json=ASKED).raise_for_status()

        write(file, urls[2:3], [urls[1], urls[3]])
        wait_for("it is there", lambda: client.get("/health").json()["engines"]["decode"] == 2)
        before = len(engines[1].seen)
        for _ in range(4):
            client.post(PATH, json=ASKED).raise_for_status()
        assert [len(engine.seen) for engine in engines] == [1, before + 2, 4, 2]
        assert counted(client, "engine_healthy", engine=engines[3].url, role="decode") == 1
        assert f'engine="{engines[0].url}"' not in client.get("/metrics").text, "it is gone"

    def test_what_an_engine_has_begun_it_ends(self, serve: Serve, engines: list[FakeEngine], file: Path) -> None:
        prefill, first, second, _ = ({"url": engine.url} for engine in engines)
        write(file, [prefill], [first])
        client = serve(prefill=(), decode=(), engines_file=file)
        engines[1].script.holds_after = 1
        with client.stream("POST", PATH, json=STREAMED) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == EVENTS[0]
            write(file, [prefill], [second])
            wait_for("the other one is asked", lambda: _asked(client, engines[2]))
            assert counted(client, "engine_requests", engine=engines[1].url, role="decode") == 1
            engines[1].gate.set()
            assert b"".join(pieces) == b"".join((*EVENTS[1:], DONE))
        wait_for("it has nothing to do", lambda: engines[1].url not in client.get("/metrics").text)

    def test_another_weight(self, serve: Serve, engines: list[FakeEngine], file: Path) -> None:
        prefill, first, second, _ = ({"url": engine.url} for engine in engines)
        write(file, [prefill], [first, second])
        client = serve(prefill=(), decode=(), engines_file=file, health_interval_s=0.05)
        write(file, [prefill], [{**first, "weight": 3}, second])

        def ratio() -> tuple[int, int]:
            for engine in engines:
                engine.seen.clear()
            for _ in range(8):
                client.post(PATH, json=ASKED).raise_for_status()
            return len(engines[1].seen), len(engines[2].seen)

        wait_for("three of four", lambda: ratio() == (6, 2))

    def test_another_receiver(self, serve: Serve, engines: list[FakeEngine], file: Path) -> None:
        prefill, decode = ({"url": engine.url} for engine in engines[:2])
        write(file, [prefill], [{**decode, "kv": str(TO_A)}])
        client = serve(prefill=(), decode=(), engines_file=file)

        def told() -> str:
            client.post(PATH, json=ASKED).raise_for_status()
            return str(engines[0].last.body["kv_transfer_params"]["disagg_spec"]["receiver_host"])

        assert told() == TO_A.host
        write(file, [prefill], [{**decode, "kv": str(TO_B)}])
        wait_for("it is told the new one", lambda: told() == TO_B.host)

    @pytest.mark.parametrize("wrong", ["decode: []", None], ids=["wrong", "gone"])
    def test_a_file_that_cannot_be_used_changes_nothing(
        self, serve: Serve, engines: list[FakeEngine], file: Path, wrong: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        urls = [{"url": engine.url} for engine in engines]
        write(file, urls[:1], urls[1:2])
        client = serve(prefill=(), decode=(), engines_file=file)
        if wrong is None:
            file.unlink()
        else:
            file.write_text(wrong, encoding="utf-8")
        wait_for("it is noticed", lambda: counted(client, "engines_file_outdated") == 1)
        assert "the engines stay as they are: the engines' file" in caplog.text
        client.post(PATH, json=ASKED).raise_for_status()
        assert len(engines[1].seen) == 1
        write(file, urls[:1], urls[2:3])
        wait_for("it is used again", lambda: _asked(client, engines[2]))
        assert counted(client, "engines_file_outdated") == 0


def _asked(client: httpx.Client, engine: FakeEngine) -> bool:
    client.post(PATH, json=ASKED).raise_for_status()
    return bool(engine.seen)
