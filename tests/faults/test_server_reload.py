"""Changes of a cache server's configuration while it runs: keys, rights, tenants, quotas, its log, and its end."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_tcp
from support.redis_server import wait_for
from support.served import A, B, check_quiet, check_read, open_tier
from support.shop import Shop

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.connections import Watch
from kvstore.testing.harness import EVEN, MINE, make_ref, make_transfer
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.tier import ServerTier
from kvstore.tiers.server.url import parse_server

WAIT_S = 10.0
TOKEN = "token-of-an-operator"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path, "server")
    for name in ("stays", "goes"):
        make_keys(tmp_path / "clients", name)
    return tmp_path


@pytest.fixture
def server(keys: Path) -> Iterator[ServerThread]:
    with serving_tcp(keys=read_pair(keys / "server.key"), listed=read_list(keys / "clients")) as server:
        yield server


def files(keys: Path, name: str) -> dict[str, Any]:
    """Return options of a client, which waits for a short time only where it is refused."""
    return {
        "timeout_s": 1.0 if name == "goes" else 10.0,
        "client_key_file": str(keys / f"clients/{name}.key"),
        "server_key_file": str(keys / "server.pub"),
    }


def read_again(server: ServerThread, keys: Path, **others: object) -> int:
    options = replace(server.hub.options, listed=read_list(keys / "clients"), **others)  # type: ignore[arg-type]
    return server.hub.change(options, WAIT_S)


def describe(keys: Path, name: str, lines: str) -> None:
    path = keys / f"clients/{name}.pub"
    path.write_text(path.read_text().split("\n")[0] + f"\n{lines}\n")


def is_refused(tier: ServerTier) -> bool:
    try:
        tier.contains([A])
    except TierError:
        return True
    return False


def test_new_keys_come_in_and_old_ones_leave_and_all_others_notice_nothing(keys: Path, server: ServerThread) -> None:
    stays, goes = (open_tier(server.url, **files(keys, name)) for name in ("stays", "goes"))
    assert stays.put([make_transfer(EVEN, A)]) == goes.put([make_transfer(EVEN, B)]) == [Outcome.STORED]
    before = {peer for peer, session in server.hub.sessions.by_peer.items() if session.client.name == "stays"}
    (keys / "clients/goes.pub").unlink()
    make_keys(keys / "clients", "comes")
    assert read_again(server, keys) > 0
    comes = open_tier(server.url, **files(keys, "comes"))
    assert check_read(comes, A) is check_read(stays, B) is Outcome.HIT
    assert before == {peer for peer, session in server.hub.sessions.by_peer.items() if session.client.name == "stays"}
    assert is_refused(goes)
    wait_for("its key is refused", lambda: server.hub._client_keys is not None and server.hub._client_keys.refused > 0)
    for tier in (stays, goes, comes):
        tier.close()
    check_quiet(server)


def test_a_key_that_replaces_another_of_its_name(keys: Path, server: ServerThread) -> None:
    """The name alone would let a stolen key stay connected for ever."""
    old = open_tier(server.url, **files(keys, "goes"))
    old.put([make_transfer(EVEN, A)])
    for suffix in ("key", "pub"):
        (keys / f"clients/goes.{suffix}").rename(keys / f"stolen.{suffix}")
    make_keys(keys / "clients", "goes")
    assert read_again(server, keys) > 0
    assert is_refused(old)
    new = open_tier(server.url, **files(keys, "goes"))
    assert check_read(new, A) is Outcome.HIT
    old.close()
    new.close()


def test_a_key_with_another_name_gives_back_what_it_took_under_the_old_one(keys: Path, server: ServerThread) -> None:
    tier = open_tier(server.url, **files(keys, "stays"))
    tier.put([make_transfer(EVEN, A)])
    (keys / "clients/stays.pub").rename(keys / "clients/renamed.pub")
    assert read_again(server, keys) > 0
    wait_for("it is connected again", lambda: not is_refused(tier))
    tier.close()
    wait_for("its sessions end", lambda: not server.hub.sessions.by_peer)
    for shares in (server.hub.sessions._counts, server.hub.sessions._leased):
        assert not any(shares._of_sharer.values())
        assert not shares.held


def test_a_key_that_was_only_away_comes_back(keys: Path, server: ServerThread) -> None:
    tier = open_tier(server.url, **files(keys, "goes"))
    tier.put([make_transfer(EVEN, A)])
    public = keys / "clients/goes.pub"
    text = public.read_text()
    public.unlink()
    read_again(server, keys)
    wait_for("it is refused", lambda: is_refused(tier))
    public.write_text(text)
    read_again(server, keys)
    wait_for("it reads again", lambda: not is_refused(tier))
    assert check_read(tier, A) is Outcome.HIT
    tier.close()


def test_a_connection_that_was_let_in_before_its_key_went_gets_nothing(
    keys: Path, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its connection could not be cut off, as the server does not know it yet."""
    tier = open_tier(server.url, **files(keys, "goes"))
    tier.put([make_transfer(EVEN, A)])
    (keys / "clients/goes.pub").unlink()
    monkeypatch.setattr(Watch, "cut", lambda *_: None)
    read_again(server, keys)
    assert is_refused(tier) or tier.contains([A]) == [False]
    assert server.hub.core.denied
    assert not server.hub.sessions.by_peer
    tier.close()


def test_other_rights_hold_for_the_next_request(keys: Path, server: ServerThread) -> None:
    tier = open_tier(server.url, **files(keys, "goes"))
    assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
    sessions = list(server.hub.sessions.by_peer)
    describe(keys, "goes", "rights: read")
    assert read_again(server, keys) == 0
    assert tier.put([make_transfer(EVEN, B)]) == [Outcome.FULL]
    assert check_read(tier, A) is Outcome.HIT
    describe(keys, "goes", "rights: read, write")
    read_again(server, keys)
    assert tier.put([make_transfer(EVEN, B)]) == [Outcome.STORED]
    assert sessions == list(server.hub.sessions.by_peer)
    tier.close()


def test_another_tenant_sees_nothing_of_the_former_one(keys: Path, server: ServerThread) -> None:
    tier = open_tier(server.url, **files(keys, "goes"))
    tier.put([make_transfer(EVEN, A)])
    describe(keys, "goes", "tenant: other")
    assert read_again(server, keys) > 0
    wait_for("it is connected again", lambda: not is_refused(tier))
    assert tier.contains([A]) == [False]
    assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
    assert {space.tenant for space in server.hub.stock.spaces.values()} == {"", "other"}
    tier.close()


def test_options_that_are_not_safe_change_nothing(keys: Path, server: ServerThread) -> None:
    with pytest.raises(ConfigError, match="server_operators"):
        read_again(server, keys, operators=frozenset({"nobody"}))
    assert server.hub.options.operators == frozenset()
    tier = open_tier(server.url, **files(keys, "goes"))
    tier.close()


def test_a_smaller_quota_evicts_at_once_and_none_lets_everything_in() -> None:
    with serving_ipc() as server:
        tier = open_tier(server.url)
        refs = [make_ref(number) for number in range(40)]
        assert set(tier.put([make_transfer(EVEN, ref) for ref in refs])) == {Outcome.STORED}
        (space,) = server.hub.stock.spaces.values()
        size_bytes = space.used_bytes // 40
        server.hub.change(replace(server.hub.options, quotas={"*": 10 * size_bytes}), WAIT_S)
        wait_for("the rest is evicted", lambda: space.used_bytes == 10 * size_bytes)
        assert tier.contains(refs) == [False] * 30 + [True] * 10, "those used last stay"
        assert tier.put([make_transfer(EVEN, refs[0])]) == [Outcome.STORED]
        assert space.used_bytes == 10 * size_bytes
        server.hub.change(replace(server.hub.options, quotas={}), WAIT_S)
        assert set(tier.put([make_transfer(EVEN, ref) for ref in refs])) == {Outcome.STORED}
        assert space.used_bytes == 40 * size_bytes
        tier.close()
        check_quiet(server)


def test_namespaces_that_get_one_quota_go_in_turn() -> None:
    shop = Shop(chunks=8)
    refs = [make_ref(number, 4) for number in range(3)]
    for ref in refs:
        shop.store(ref)
    list(shop.stock.change_quotas({"mine": 2 * shop.space.used_bytes // 3}))
    assert list(shop.space.chunks) == refs[1:]
    list(shop.stock.change_quotas({}))
    assert [quota.name for quota in shop.stock.spaces.quotas] == [""], "quotas without namespaces are forgotten"


class Process:
    """A server process with keys and pages, whose configuration a test writes again."""

    def __init__(self, process: ServerProcess, keys: Path) -> None:
        self.process = process
        self.keys = keys
        self.token = keys / "token"
        self.token.write_text(TOKEN)
        self.token.chmod(0o600)
        lines = f"server_clients: {keys}/clients\nserver_http_port: 0\nserver_http_token_file: {self.token}\n"
        self.usual = process.config.read_text() + lines

    def start(self, more: str = "") -> None:
        self.process.config.write_text(self.usual + more)
        self.process.start()
        (self.page,) = re.findall(r"http://127.0.0.1:\d+", self.process.log.read_text())[-1:]

    def write(self, more: str) -> None:
        self.process.config.write_text(self.usual + more)

    def hang_up(self) -> None:
        assert self.process.process is not None
        os.kill(self.process.process.pid, signal.SIGHUP)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.page + path)

    def order(self, path: str, token: str = TOKEN) -> httpx.Response:
        return httpx.post(self.page + path, headers={"authorization": f"Bearer {token}"})

    def reloads(self, outcome: str) -> int:
        (found,) = re.findall(
            rf'^kvstore_server_reloads_total{{outcome="{outcome}"}} (\d+)', self.get("/metrics").text, re.MULTILINE
        )
        return int(found)


@pytest.fixture
def running(process: ServerProcess, keys: Path) -> Process:
    process.terminate()
    return Process(process, keys)


def test_a_hang_up_reads_the_file_again(running: Process) -> None:
    running.start()
    tier = open_tier(running.process.url)
    tier.put([make_transfer(EVEN, A)])
    operator = Operator(parse_server(running.process.url, {}))
    wait_for("it is on disk, and not in use", lambda: operator.stats()["tiers"]["disk"]["unwritten"] == 0)
    operator.close()
    running.write("server_quotas: '*=0.000001'\nserver_log_level: DEBUG\nmax_write_queue: 7\n")
    running.hang_up()
    wait_for("it is read", lambda: running.reloads("ok") == 1)
    log = running.process.log.read_text()
    assert "'needs_restart': ['max_write_queue']" in log
    assert "'quotas_changed': True" in log
    wait_for("the chunk does not fit any more", lambda: tier.contains([A]) == [False])
    running.write("server_quotas: nonsense\n")
    running.hang_up()
    wait_for("it is refused", lambda: running.reloads("refused") == 1)
    assert "the former configuration stays in use: server_quotas has 'nonsense'" in running.process.log.read_text()
    assert tier.put([make_transfer(EVEN, A)]) == [Outcome.FULL]
    tier.close()
    assert running.process.terminate() == 0


def test_orders_need_the_token_and_pages_do_not(running: Process) -> None:
    token = running.token
    running.start()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert running.get(path).status_code == 200
    assert running.order("/reload", "another-token-of-16").status_code == 401
    assert httpx.post(f"{running.page}/drain").status_code == 401
    make_keys(running.keys / "clients", "comes")
    told = running.order("/reload").raise_for_status().json()
    assert told["clients_added"] == ["comes"]
    assert (told["disconnected"], told["needs_restart"], told["quotas_changed"]) == (0, [], False)
    token.write_text("x" * 16)
    assert running.order("/reload").raise_for_status().json()["clients_added"] == []
    assert running.order("/reload").status_code == 401, "the token itself was read again"
    assert running.order("/reload", "x" * 16).status_code == 200
    (running.keys / "clients/comes.pub").write_text("no key\n")
    refused = running.order("/reload", "x" * 16)
    assert refused.status_code == 409
    assert "comes.pub" in refused.json()["error"]


def test_a_drained_server_is_alive_but_not_ready(running: Process) -> None:
    running.start()
    tier = open_tier(running.process.url)
    assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
    assert running.get("/readyz").text == "ok\n"
    assert running.order("/drain").json()["status"] == "closing"
    wait_for("all is on disk", lambda: running.order("/drain").json()["unwritten"] == 0)
    assert (running.get("/readyz").status_code, running.get("/healthz").status_code) == (503, 200)
    assert check_read(tier, A) is Outcome.HIT
    assert tier.put([make_transfer(EVEN, B)]) != [Outcome.STORED]
    with pytest.raises(TierError, match="closing"):
        open_tier(running.process.url).contains([A])
    tier.close()
    assert running.process.terminate() == 0


def test_clients_notice_nothing_of_many_changes(running: Process) -> None:
    """Requests of four clients are answered, with the right bytes, while keys and quotas change all the time."""
    running.start()
    is_over = threading.Event()
    failed: list[object] = []

    def work(number: int) -> None:
        tier = open_tier(running.process.url, namespace=MINE.at_epoch(f"client {number}"))
        refs = [make_ref(each) for each in range(20)]
        while not is_over.is_set():
            if set(tier.put([make_transfer(EVEN, ref) for ref in refs])) - {Outcome.STORED, Outcome.FULL}:
                failed.append("a store")
            if {check_read(tier, ref) for ref in refs} - {Outcome.HIT, Outcome.MISS}:
                failed.append("a read")
        tier.close()

    def guarded(number: int) -> None:
        try:
            work(number)
        except (TierError, AssertionError) as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        running.write(["", "server_quotas: '*=0.0002'\n", "server_quotas: conformance=0.0001\n"][turn % 3])
        make_keys(running.keys / "clients", f"client-{turn}")
        assert running.order("/reload").raise_for_status().json()["clients_added"] == [f"client-{turn}"]
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failed
