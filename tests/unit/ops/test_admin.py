"""The admin endpoint, over real HTTP, around a scheduler side with real workers."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.redis_server import wait_for
from support.remote import FakeServer
from support.uses import uses_of
from typer.testing import CliRunner

from kvstore.adapters.vllm.requests.params import RequestParams
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.operator import SchedulerControls
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.config import StoreConfig, load_config
from kvstore.model.errors import ConfigError
from kvstore.model.keys import NO_EXTRAS, PrefixHasher
from kvstore.ops.admin import answer
from kvstore.ops.admin_http import AdminServer
from kvstore.protocol.loopback import is_loopback
from kvstore.tools.cli import app

PROMPT = list(range(3 * CHUNK + 1))
CONFIG = StoreConfig(remote_url="redis://user:secret@cache:6379/0?password=secret", remote_password="secret")


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    engine = FakeVllm(Setup())
    yield engine
    engine.close()


@pytest.fixture
def controls(vllm: FakeVllm) -> SchedulerControls:
    return SchedulerControls(vllm.scheduler, CONFIG, {"vllm": "0.0"})


@pytest.fixture
def client(controls: SchedulerControls) -> Iterator[httpx.Client]:
    server = AdminServer(controls, "127.0.0.1", 0)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=30, verify=False) as made:
        yield made
    server.close()


def test_stats_are_what_was_counted(vllm: FakeVllm, client: httpx.Client) -> None:
    vllm.ask("first", PROMPT)
    vllm.forget_local()
    vllm.ask("again", PROMPT)
    vllm.scheduler.take_tally()
    stats = client.get("/stats").raise_for_status().json()
    assert stats["hit_tokens"] == {"memory": 3 * CHUNK, "disk": 0, "remote": 0}
    assert stats["asked_tokens"] == 2 * len(PROMPT)
    assert stats["misses"]["never_stored"] == 1
    info = client.get("/info").raise_for_status().json()
    assert info["known_chunks"] == info["used_slots"] == 3
    assert info["versions"].keys() == {"kvstore", "vllm"}


def test_the_configuration_without_secrets(client: httpx.Client) -> None:
    answer = client.get("/config").raise_for_status()
    assert "secret" not in answer.text
    shown = answer.json()
    assert shown.keys() == StoreConfig.model_fields.keys()
    assert shown["remote_url"] == "redis://***@cache:6379/0?password=***"
    assert shown["chunk_size"] == 256


def test_health(vllm: FakeVllm, client: httpx.Client) -> None:
    health = client.get("/health").raise_for_status().json()
    assert health == {"status": "ok", "enabled": True, "connected": True, "tiers": {"memory": "ok", "remote": "ok"}}
    vllm.scheduler._stats._tally.show("breaker_state|remote", 2)
    vllm.scheduler.take_tally()
    health = client.get("/health").raise_for_status().json()
    assert health["status"] == "degraded"
    assert health["tiers"]["remote"] == "left out"


def test_a_probe_gets_another_status_while_it_is_degraded(vllm: FakeVllm, client: httpx.Client) -> None:
    """A person reads the answer, but a load balancer only its status."""
    assert client.get("/healthz").status_code == 200
    vllm.scheduler._stats._tally.show("breaker_state|remote", 2)
    vllm.scheduler.take_tally()
    probed = client.get("/healthz")
    assert probed.status_code == 503
    assert probed.json() == client.get("/health").raise_for_status().json()


def test_a_probe_before_the_workers_have_reported() -> None:
    scheduler = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)))
    controls = SchedulerControls(scheduler, CONFIG, {})
    assert answer(controls, "GET", "/healthz").status == 503


class TestKv:
    """Queries for the tiers that hold a sequence's KV, without a request."""

    def test_by_tier(self, vllm: FakeVllm, client: httpx.Client) -> None:
        vllm.ask("first", PROMPT, salt="a")
        asked = {"tokens": [*PROMPT[: 2 * CHUNK], 7, 7], "salt": "a"}
        found = client.post("/kv", json=asked).raise_for_status().json()
        assert found == {
            "tokens": 2 * CHUNK + 2,
            "known_tokens": 2 * CHUNK,
            "tiers": {"memory": 2 * CHUNK, "remote": 0},
        }
        assert client.post("/kv", json={"tokens": PROMPT}).json()["known_tokens"] == 0
        assert uses_of(vllm.index) == 0

    def test_tails_and_chunks_elsewhere(self, tmp_path: Path) -> None:
        """As many tokens as a request would find; a chunk counts in its fastest tier."""
        server = FakeServer()
        vllm = FakeVllm(Setup(server=server, folder=tmp_path, local_cpu=False))
        vllm.ask("own", PROMPT[: CHUNK + 1])
        vllm.settle()
        other = FakeVllm(Setup(server=server))
        other.ask("more", PROMPT[: 2 * CHUNK + 2 * BLOCK + 1])
        other.settle()
        config = StoreConfig(local_cpu=False, local_disk="/disk", max_local_disk_size=1.0, remote_url="redis://cache")
        assert SchedulerControls(vllm.scheduler, config, {}).kv(PROMPT, NO_EXTRAS) == {
            "tokens": len(PROMPT),
            "known_tokens": 2 * CHUNK + 2 * BLOCK,
            "tiers": {"disk": CHUNK, "remote": CHUNK + 2 * BLOCK},
        }
        for engine in (other, vllm):
            engine.close()

    def test_an_engine_that_waits_for_its_workers_knows_nothing(self) -> None:
        scheduler = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)))
        assert not scheduler.find(PROMPT)

    def test_bodies_that_ask_for_nothing(self, client: httpx.Client) -> None:
        bodies = [
            b"",
            b"tokens",
            b"[" * 100_000,
            b"[1, 2]",
            b"{}",
            b'{"tokens": "1"}',
            b'{"tokens": [1.5]}',
            b'{"tokens": [-1]}',
            b'{"tokens": [4294967295]}',
            b'{"tokens": [1], "salt": 1}',
            b'{"tokens": [1], "tags": {"a": 1}}',
            b'{"tokens": [1], "model": "x"}',
        ]
        answers = {body: client.post("/kv", content=body) for body in bodies}
        assert not [body for body, answer in answers.items() if answer.status_code != 400]
        assert all(answer.json()["error"] for answer in answers.values())

    def test_a_body_without_end(self, client: httpx.Client) -> None:
        assert client.post("/kv", content=b" " * (5 << 20)).status_code == 413
        assert client.get("/health").status_code == 200


def test_disable_and_enable(vllm: FakeVllm, client: httpx.Client) -> None:
    vllm.ask("first", PROMPT)
    assert client.post("/disable").raise_for_status().json() == {"status": "disabled"}
    vllm.forget_local()
    vllm.ask("off", PROMPT)
    assert vllm.loaded_tokens["off"] == 0
    client.post("/enable").raise_for_status()
    vllm.forget_local()
    vllm.ask("on", PROMPT)
    assert vllm.loaded_tokens["on"] == 3 * CHUNK


def test_clear_is_done_by_the_schedulers_thread(vllm: FakeVllm, client: httpx.Client) -> None:
    vllm.ask("first", PROMPT)
    done_by = []
    clear = vllm.scheduler.clear

    def noted() -> int:
        done_by.append(threading.current_thread())
        return clear()

    vllm.scheduler.clear = noted  # type: ignore[method-assign] # to see who calls it
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/clear")
        while not asked.done():
            vllm.step()
    assert asked.result().status_code == 200
    assert asked.result().json() == {"status": "cleared", "chunks": 3}
    assert done_by == [threading.current_thread()]
    assert len(vllm.index) == 0


def test_clear_of_an_idle_engine_is_done_before_the_next_request(
    vllm: FakeVllm, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.adapters.vllm.scheduler.operator._WAIT_S", 0.01)
    vllm.ask("first", PROMPT)
    assert client.post("/clear").status_code == 202
    assert client.post("/clear").status_code == 202
    assert vllm.scheduler._actions.qsize() == 1, "requests do not pile up"
    vllm.forget_local()
    vllm.ask("again", PROMPT)
    assert vllm.loaded_tokens["again"] == 0


class TestPins:
    """Pins of clients, which the operator can list and undo."""

    def test_listed_and_undone(self, vllm: FakeVllm, client: httpx.Client) -> None:
        assert client.get("/pins").raise_for_status().json() == {"pins": [], "counts": False}
        vllm.ask("first", PROMPT, params=RequestParams(pin=True))
        vllm.settle()
        (pin,) = client.get("/pins").json()["pins"]
        assert pin.keys() == {"name", "chunks", "ends_in_s"}
        assert pin["chunks"] == 3
        assert 0 < pin["ends_in_s"] <= 86_400
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.post, "/unpin")
            while not asked.done():
                vllm.step()
        assert asked.result().json() == {"status": "unpinned", "pins": 1}
        assert client.get("/pins").json()["pins"] == []
        assert vllm.index.leases == uses_of(vllm.index) == 0

    def test_one_that_waits_for_what_its_request_stored(self, vllm: FakeVllm) -> None:
        vllm.connected.hints.add("pin x", PrefixHasher(CHUNK, BLOCK), 10**9)
        assert vllm.scheduler.unpin_all() == 1
        assert not vllm.connected.hints._coming

    def test_an_idle_engine_does_it_before_the_next_request(
        self, vllm: FakeVllm, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.adapters.vllm.scheduler.operator._WAIT_S", 0.01)
        vllm.ask("first", PROMPT, params=RequestParams(pin=True))
        vllm.settle()
        assert client.post("/unpin").status_code == client.post("/unpin").status_code == 202
        assert vllm.scheduler._actions.qsize() == 1, "requests do not pile up"
        vllm.ask("other", PROMPT[:BLOCK])
        assert vllm.index.leases == 0

    def test_the_command(self, vllm: FakeVllm, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(command: str, *options: str) -> tuple[int, str]:
            result = CliRunner().invoke(app, ["engine", command, "--admin", str(client.base_url), *options])
            return result.exit_code, result.output

        monkeypatch.setattr("kvstore.adapters.vllm.scheduler.operator._WAIT_S", 0.01)
        ignored = "pins of requests are ignored: request_fields does not list pin"
        assert run("pins") == (0, f"0 pins\n{ignored}\n")
        vllm.ask("first", PROMPT, params=RequestParams(pin=True))
        vllm.settle()
        code, text = run("pins")
        assert code == 0
        assert re.fullmatch(rf"pin [0-9a-f]{{32}}: 3 chunks, ends in 86,\d+ s\n1 pins\n{ignored}\n", text)
        assert json.loads(run("pins", "--json")[1])["pins"][0]["chunks"] == 3
        assert run("unpin") == (0, "accepted: it is done when the next request arrives\n")
        vllm.ask("other", PROMPT[:BLOCK])
        assert json.loads(run("pins", "--json")[1])["pins"] == []
        monkeypatch.setattr("kvstore.adapters.vllm.scheduler.operator._WAIT_S", 30.0)
        vllm.ask("second", PROMPT, params=RequestParams(pin=True))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(run, "unpin")
            while not asked.done():
                vllm.step()
        assert asked.result() == (0, "1 pins ended\n")

    def test_the_order_to_drain(self, controls: SchedulerControls, tmp_path: Path) -> None:
        """It cannot be taken back, so that not every program of this machine may give it."""
        file = tmp_path / "token"
        file.write_text("a-token-of-an-operator\n")
        file.chmod(0o600)
        for token, code in ((None, 2), (file.read_text().strip(), 0)):
            server = AdminServer(controls, "127.0.0.1", 0, token)
            url = f"http://127.0.0.1:{server.port}"
            assert httpx.post(f"{url}/drain", trust_env=False, verify=False).status_code == (401 if token else 403)
            assert controls.info()["draining"] is False
            how = ["engine", "drain", "--admin", url, "--token-file", str(file), "--wait-s", "0"]
            result = CliRunner().invoke(app, how)
            assert (result.exit_code, result.stdout) == (code, "" if code else "0 chunks are still to be written\n")
            server.close()
        assert controls.info()["draining"] is True

    def test_the_command_waits_until_all_is_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = [{"unwritten": 2}, {"unwritten": 1}, {"unwritten": 0, "unreached": 1}]
        monkeypatch.setattr("kvstore.tools.commands.engines._LOOK_S", 0.0)
        monkeypatch.setattr("kvstore.tools.commands.engines._ask", lambda *_: told.pop(0))
        result = CliRunner().invoke(app, ["engine", "drain"])
        said = "0 chunks are still to be written, and 1 workers do not say\n"
        assert (result.exit_code, result.stdout, told) == (0, said, [])
        monkeypatch.setattr("kvstore.tools.commands.engines._ask", lambda *_: {"unwritten": 5})
        result = CliRunner().invoke(app, ["engine", "drain", "--wait-s", "0"])
        assert (result.exit_code, result.stdout) == (1, "5 chunks are still to be written\n")

    def test_the_command_without_an_engine(self) -> None:
        for url in ("http://127.0.0.1:1", "kvs://127.0.0.1:1"):
            result = CliRunner().invoke(app, ["engine", "pins", "--admin", url])
            assert (result.exit_code, result.stdout) == (2, ""), url
            assert "admin" in result.stderr

    def test_before_the_workers_have_reported(self) -> None:
        scheduler = StoreScheduler(SchedulerOptions(SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=True)))
        assert SchedulerControls(scheduler, CONFIG, {}).pins()["pins"] == []
        assert scheduler.unpin_all() == 0


def test_pages_in_a_browser_are_turned_away(client: httpx.Client) -> None:
    for headers, status in (
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "[broken"}, 403),
        ({"Origin": "https://evil.example"}, 403),
    ):
        assert client.get("/health", headers=headers).status_code == status, headers


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /healthz HTT",
        b"POST /kv HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "all, and the answer is not read"],
)
def test_idle_and_slow_connections_keep_no_probe_out(client: httpx.Client, said: bytes) -> None:
    """There may be many: those that have waited longest make room."""
    address = "127.0.0.1", client.base_url.port or 0
    with ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection(address, timeout=20)).sendall(said)

        def is_answered() -> bool:
            probe = stack.enter_context(socket.create_connection(address, timeout=20))
            probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            try:
                return probe.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
            except ConnectionResetError:  # all the others were being answered at that moment
                return False

        wait_for("a probe is answered", is_answered)


def test_who_is_answered_keeps_a_place(client: httpx.Client, vllm: FakeVllm) -> None:
    """A clear waits for the engine's next step."""
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asked = pool.submit(client.post, "/clear")
        wait_for("it is being answered", lambda: vllm.scheduler._actions.qsize() == 1)
        address = "127.0.0.1", client.base_url.port or 0
        connections = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(80)]
        assert connections[0].recv(1) == b"", "it was closed in favour of a later one"
        while not asked.done():
            vllm.step()
    assert asked.result().status_code == 200


def test_wrong_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/nothing").status_code == 404
    assert "POST /clear" in client.get("/nothing").json()["paths"]
    assert client.get("/clear").status_code == 405
    assert client.post("/stats").status_code == 405
    assert client.delete("/stats").status_code == 405


def test_close_frees_the_port_and_ends_the_thread(controls: SchedulerControls) -> None:
    server = AdminServer(controls, "127.0.0.1", 0)
    assert httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False).status_code == 200
    server.close()
    server.close()
    assert not server._thread.is_alive()
    AdminServer(controls, "127.0.0.1", server.port).close()


class TestRefusals:
    @pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "example.org", "::", ""])
    def test_only_loopback(self, controls: SchedulerControls, host: str) -> None:
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="loopback"):
            AdminServer(controls, host, 0)
        enabled = {"kvstore.internal_api_server_enabled": True, "kvstore.internal_api_server_host": host}
        with pytest.raises(ConfigError, match=r"internal_api_server_host.*loopback"):
            load_config(enabled, environ={})

    def test_a_host_of_lmcaches_does_not_matter_while_it_is_off(self) -> None:
        load_config({"lmcache.internal_api_server_host": "0.0.0.0"}, environ={})

    def test_a_port_that_is_taken(self, controls: SchedulerControls) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
                AdminServer(controls, "127.0.0.1", port)

    def test_without_its_libraries(self, controls: SchedulerControls, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "uvicorn", None)
        with pytest.raises(ConfigError, match=r"uvicorn is not installed: pip install 'vllm-kvstore\[admin\]'"):
            AdminServer(controls, "127.0.0.1", 0)
