"""Peers that a real name server or a file names: they come, go, and are kept while nobody knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.name_server import NameServer
from support.redis_server import wait_for

from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, OTHER, make_ref, make_transfer
from kvstore.tiers import peer_watch
from kvstore.tiers.base import Tier
from kvstore.tiers.peer_watch import PeerWatch
from kvstore.tiers.peers import PeersTier

from .test_peers import Storage

ONE, TWO = "kvs://127.0.0.1:7300", "kvs://127.0.0.2:7300"
REF = make_ref(1)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "LOOK_INTERVAL_S", (0.01, 0.01))


@pytest.fixture
def names() -> Iterator[NameServer]:
    with NameServer({"engines": ["127.0.0.1"]}) as server:
        yield server


class Seen:
    """The peers that a watch has told, the last ones last."""

    def __init__(self, *urls: str, own: tuple[str, int] | None = None) -> None:
        self.told: list[list[str]] = []
        self.watch = PeerWatch(urls, own)

    def start(self) -> Seen:
        self.watch.start(lambda urls: self.told.append([*urls]))
        return self

    def shows(self, *urls: str) -> bool:
        return bool(self.told) and self.told[-1] == [*urls]


@pytest.fixture
def seen(names: NameServer) -> Iterator[Seen]:
    seen = Seen(dns(names)).start()
    yield seen
    seen.watch.close()


def dns(names: NameServer, port: int = 7300) -> str:
    return f"kvs+dns://engines:{port}?nameserver=127.0.0.1:{names.port}"


def test_peers_come_and_go(names: NameServer, seen: Seen) -> None:
    assert seen.told == [[ONE]]
    names.records["engines"] = ["127.0.0.2", "127.0.0.1"]
    wait_for("the second peer is known", lambda: seen.shows(ONE, TWO))
    assert (seen.watch.names("127.0.0.2"), seen.watch.names("127.0.0.2", 7300)) == (True, True)
    assert (seen.watch.names("127.0.0.2", 7301), seen.watch.names("127.0.0.3")) == (False, False)
    names.records["engines"] = ["127.0.0.2"]
    wait_for("the first peer has gone", lambda: seen.shows(TWO))
    wait_for("nobody may name it any more", lambda: not seen.watch.names("127.0.0.1"))


@pytest.mark.parametrize("is_gone", [False, True], ids=["fails", "unknown"])
def test_while_nobody_knows_the_last_peers_stay(
    names: NameServer, seen: Seen, caplog: pytest.LogCaptureFixture, *, is_gone: bool
) -> None:
    if is_gone:
        del names.records["engines"]
    names.fails = not is_gone
    before = names.asked
    wait_for("they are looked up again", lambda: names.asked > before + 4)
    assert seen.told == [[ONE]]
    assert seen.watch.names("127.0.0.1", 7300)
    assert caplog.text.count("the last known peers are kept") == 1


def test_empty_answers_keep_the_last_peers_for_a_time(
    names: NameServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other answer, such as a failure, begins that time anew."""
    now_s = [1000.0]
    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def look_often() -> None:
        before = names.asked
        wait_for("they are looked up again", lambda: names.asked > before + 8)

    seen = Seen(dns(names)).start()
    names.records["engines"] = []
    for answer in (["127.0.0.1"], None, []):
        look_often()
        now_s[0] += peer_watch.EMPTY_S - 1
        look_often()
        names.fails, names.records["engines"] = answer is None, answer or []
        look_often()
        names.fails, names.records["engines"] = False, []
        assert seen.told == [[ONE]]
    assert caplog.text.count("no peers are named now") == 1
    now_s[0] += 1
    wait_for("they were empty for too long", seen.shows)
    names.records["engines"] = ["127.0.0.2"]
    wait_for("a new one is found", lambda: seen.shows(TWO))
    seen.watch.close()


def test_targets_of_a_service_are_known_by_name_and_address(names: NameServer) -> None:
    names.records |= {"_kvs._tcp.engines": [("engine-0.pods", 7310)], "engine-0.pods": ["127.0.0.9"]}
    seen = Seen(f"kvs+srv://_kvs._tcp.engines?nameserver=127.0.0.1:{names.port}").start()
    assert seen.told == [["kvs://127.0.0.9:7310"]]
    assert [seen.watch.names(host, 7310) for host in ("Engine-0.pods", "127.0.0.9", "engines")] == [True, True, False]
    seen.watch.close()


def test_a_file_is_read_again_and_its_options_stay(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text("127.0.0.1:7300\n")
    seen = Seen(f"kvs+file://{file}?timeout_s=2").start()
    assert seen.told == [[f"{ONE}?timeout_s=2"]]
    file.write_text("# none\n")
    wait_for("the operator's empty list counts", seen.shows)
    assert not seen.watch.names("127.0.0.1")
    file.write_text("127.0.0.2:7300\n")
    wait_for("the list is read again", lambda: seen.shows(f"{TWO}?timeout_s=2"))
    seen.watch.close()


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (("127.0.0.1", 7300), [TWO]),
        (("localhost", 7300), [TWO]),
        (("0.0.0.0", 7300), []),
        (("127.0.0.1", 7301), [ONE, TWO]),
        (("nowhere.invalid", 7300), [ONE, TWO]),
        (None, [ONE, TWO]),
    ],
    ids=["address", "name", "all", "other port", "unknown", "not listening"],
)
def test_an_engine_leaves_itself_out(names: NameServer, own: tuple[str, int] | None, others: list[str]) -> None:
    names.records["engines"] = ["127.0.0.1", "127.0.0.2"]
    seen = Seen(dns(names), own=own).start()
    assert seen.told == ([others] if others else [])
    seen.watch.close()


def test_there_are_at_most_so_many(
    names: NameServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oneself is not counted, so that all engines of a group of one more can use each other."""
    monkeypatch.setattr(peer_watch, "MAX_MEMBERS", 2)
    names.records["engines"] = [f"127.0.0.{number}" for number in range(1, 6)]
    seen = Seen(dns(names), own=("127.0.0.1", 7300)).start()
    assert [len(told) for told in seen.told] == [2]
    assert "only 2 of 4 peers are used" in caplog.text
    seen.watch.close()


def test_a_change_that_fails_is_repeated(names: NameServer) -> None:
    watch, calls = PeerWatch([dns(names)]), list[Sequence[str]]()

    def change(urls: Sequence[str]) -> None:
        calls.append(urls)
        if len(calls) < 3:
            raise TierError("not yet") if len(calls) == 1 else RuntimeError("can't start new thread")

    watch.start(change)
    wait_for("it has been repeated", lambda: len(calls) == 3 and watch.names("127.0.0.1"))
    watch.close()
    assert len(calls) == 3


@pytest.mark.parametrize("url", ["kvs+dns://engines", "kvs+srv://engines:1", "kvs+file://host/path", "redis://h:1"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        PeerWatch([url])


class Engines:
    """A tier with watched peers, each of which is a storage of this process."""

    def __init__(self, names: NameServer, *fixed: str) -> None:
        self.storages = {ONE: Storage(), TWO: Storage()}
        self.opened: list[tuple[str, Namespace]] = []
        self.tier = PeersTier(None, fixed, self.open, MINE, EVEN, watch=PeerWatch([dns(names)]))

    def open(self, url: str, namespace: Namespace) -> Tier:
        self.opened.append((url, namespace))
        return self.storages[url]

    def read(self) -> list[str]:
        return [url for url, storage in self.storages.items() if storage in self.tier.parts]


@pytest.fixture
def engines(names: NameServer) -> Iterator[Engines]:
    engines = Engines(names)
    yield engines
    engines.tier.close()


def test_the_tier_reads_those_that_are_named_now(names: NameServer, engines: Engines) -> None:
    engines.storages[TWO].hold(1)
    assert engines.tier.contains([REF]) == [False]
    names.records["engines"] = ["127.0.0.1", "127.0.0.2"]
    wait_for("the peer is read", lambda: engines.tier.contains([REF]) == [True])
    (outcome,) = engines.tier.get([make_transfer(EVEN, REF)])
    assert outcome.name == "HIT"
    names.records["engines"] = ["127.0.0.1"]
    wait_for("the peer is not read any more", lambda: engines.read() == [ONE])
    (outcome,) = engines.tier.get([make_transfer(EVEN, REF)])
    assert outcome.name == "MISS", "a lookup found it, and the peer has gone"
    assert not engines.tier.lends


def test_after_a_reset_all_are_read_in_the_new_namespace(names: NameServer, engines: Engines) -> None:
    engines.tier.reset(OTHER)
    names.records["engines"] = ["127.0.0.1", "127.0.0.2"]
    wait_for("both are read", lambda: engines.read() == [ONE, TWO])
    assert engines.opened == [(ONE, MINE), (ONE, OTHER), (TWO, OTHER)]


def test_a_listed_peer_that_is_found_too_is_opened_once(names: NameServer) -> None:
    engines = Engines(names, ONE)
    assert engines.opened == [(ONE, MINE)]
    names.records["engines"] = ["127.0.0.2"]
    wait_for("both are read", lambda: engines.read() == [ONE, TWO])
    engines.tier.close()


def test_close_ends_the_thread(names: NameServer) -> None:
    before = threading.active_count()
    engines = Engines(names)
    engines.tier.close()
    engines.tier.close()
    wait_for("all threads have ended", lambda: threading.active_count() <= before)
    asked = names.asked
    names.records["engines"] = ["127.0.0.2"]
    assert (engines.opened, names.asked) == ([(ONE, MINE)], asked)
