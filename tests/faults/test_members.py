"""Several cache servers that come, go, fail, and return with what was cleared or removed while they were away."""

from __future__ import annotations

import gc
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.cache_server import ServerThread
from support.members import POOL_BYTES, QUICKLY, Cluster, held, members_in, names_in, open_members, owned, read, store
from support.name_server import NameServer
from support.redis_server import wait_for
from support.served import open_tier

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ClosedError, ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.testing.harness import EVEN, MINE, make_ref
from kvstore.tiers.base import Tier
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.members import tier as members_tier
from kvstore.tiers.members.addresses import Member, Members

REFS = [make_ref(number) for number in range(24)]
STORED = [Outcome.STORED] * len(REFS)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(members_tier, "_INTERVAL_S", QUICKLY)
    monkeypatch.setattr("kvstore.engine.opening.PROBE_INTERVAL_S", 0.1)
    cluster = Cluster(tmp_path, 3)
    yield cluster
    cluster.close()


@pytest.fixture
def tier(cluster: Cluster) -> Iterator[Tier]:
    tier = open_members(cluster.url)
    yield tier
    tier.close()


def test_each_chunk_is_at_its_owner_only(cluster: Cluster, tier: Tier) -> None:
    assert store(tier, REFS) == STORED
    assert [cluster.chunks(number) for number in range(3)] == [
        len(owned(cluster.names, REFS)[name]) for name in cluster.names
    ]
    assert read(tier, REFS) == held(tier, REFS) == set(REFS)


def test_a_server_that_ends_costs_its_chunks_only(cluster: Cluster, tier: Tier) -> None:
    store(tier, REFS)
    lost = owned(cluster.names, REFS)[cluster.names[1]]
    assert lost
    cluster.end(1)
    assert read(tier, REFS) == set(REFS) - lost
    assert [part.answers for part in tier.parts].count(False) == 1
    assert tier.answers
    assert [ref for ref, presence in zip(REFS, tier.look(REFS), strict=True) if presence is None] == [
        ref for ref in REFS if ref in lost
    ], "nobody knows whether it has these"
    assert {
        ref for ref, answer in zip(REFS, RemoteDirectory((tier,)).answer(REFS), strict=True) if answer is None
    } == lost
    assert read(tier, REFS) == set(REFS) - lost
    cluster.begin(1)
    wait_for("it is used again", lambda: all(part.answers for part in tier.parts))
    assert set(store(tier, sorted(lost))) == {Outcome.STORED}
    assert read(tier, REFS) == set(REFS)


def test_a_server_that_comes_takes_its_part(cluster: Cluster, tier: Tier) -> None:
    cluster.name_and_wait(tier, 0, 1)
    store(tier, REFS)
    cluster.name_and_wait(tier, 0, 1, 2)
    taken = owned(cluster.names, REFS)[cluster.names[2]]
    assert read(tier, REFS) == set(REFS) - taken
    cluster.name_and_wait(tier, 0, 1)
    assert read(tier, REFS) == set(REFS), "they are still where they were"


@pytest.mark.parametrize(
    ("how", "memory"),
    [
        *(("clear", "known"), ("clear", "forgotten"), ("clear", "nameless"), ("reset", "known"), ("remove", "known")),
        *(("remove", "forgotten"), ("remove", "overflown")),
    ],
)
def test_nothing_returns_with_a_server_that_was_away(
    cluster: Cluster, tier: Tier, how: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = members_in(tier)
    if memory == "forgotten":
        monkeypatch.setattr(members_tier, "_MAX_NAMES", 0)
    elif memory == "nameless":  # as with kvs+dns, where addresses change hands
        monkeypatch.setattr(inner, "_source", inner._source._replace(keeps_names=False))
    elif memory == "overflown":
        monkeypatch.setattr(members_tier, "_MAX_REMOVED", 2)
    store(tier, REFS)
    cluster.name_and_wait(tier, 0, 1)
    sweeps: dict[str, Callable[[], None]] = {
        "clear": tier.clear,
        "remove": lambda: tier.remove(REFS),
        "reset": lambda: tier.reset(MINE.at_epoch("next")),
    }
    sweeps[how]()
    assert held(tier, REFS) == set()
    cluster.name(0, 1, 2)
    while cluster.names[2] not in names_in(tier):
        assert held(tier, REFS) == read(tier, REFS) == set()
    assert held(tier, REFS) == read(tier, REFS) == set()
    wait_for("it is used", lambda: store(tier, REFS) == STORED)
    assert read(tier, REFS) == set(REFS)
    if how != "reset":
        assert cluster.chunks(2) == len(owned(cluster.names, REFS)[cluster.names[2]])


def test_a_server_that_missed_nothing_keeps_its_chunks(cluster: Cluster, tier: Tier) -> None:
    tier.clear()
    store(tier, REFS)
    tier.remove(REFS[:2])
    cluster.name_and_wait(tier, 0, 1)
    cluster.name_and_wait(tier, 0, 1, 2)
    assert read(tier, REFS) == set(REFS[2:])


def test_one_that_missed_a_removal_loses_no_other_chunk(cluster: Cluster, tier: Tier) -> None:
    tier.clear()
    store(tier, REFS)
    cluster.name_and_wait(tier, 0, 1)
    tier.remove(REFS[:4])
    cluster.name_and_wait(tier, 0, 1, 2)
    wait_for("it is told", lambda: read(tier, REFS) == set(REFS[4:]))


@pytest.mark.parametrize("how", ["clear", "remove"])
def test_nothing_is_read_or_stored_before_it_has_caught_up(
    cluster: Cluster, tier: Tier, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tier, REFS)
    cluster.name_and_wait(tier, 0, 1)
    late = owned(cluster.names, REFS)[cluster.names[2]]
    if how == "clear":
        tier.clear()
    else:
        tier.remove(late)
    with monkeypatch.context() as patch:
        patch.setattr(members_tier.MembersTier, "_settle", lambda _self, _member: None)
        cluster.name_and_wait(tier, 0, 1, 2)
        assert set(store(tier, sorted(late))) == {Outcome.FAILED}, "it would be removed at once"
        assert late.isdisjoint(held(tier, REFS) | read(tier, REFS))
    wait_for("it has caught up", lambda: set(store(tier, sorted(late))) == {Outcome.STORED})
    assert late <= read(tier, REFS)


def test_a_chunk_that_moved_and_was_removed_does_not_move_back(cluster: Cluster, tier: Tier) -> None:
    """It is at its first owner, then at another one, where it is removed; the first one was away then, or here."""
    moving = sorted(owned(cluster.names, REFS)[cluster.names[2]])
    store(tier, moving, version=1)  # as if its bytes were wrong
    cluster.name_and_wait(tier, 0, 1)
    assert set(store(tier, moving, version=1)) == {Outcome.STORED}
    cluster.name_and_wait(tier, 0, 1, 2)
    tier.remove(moving[:1])  # from a server that does not own it, too
    cluster.name_and_wait(tier, 0, 1)
    assert held(tier, moving) == set(moving[1:])
    tier.remove(moving)
    cluster.name_and_wait(tier, 0, 1, 2)
    assert read(tier, moving) == set()
    wait_for("they can be stored", lambda: set(store(tier, moving)) == {Outcome.STORED})
    assert read(tier, moving) == set(moving)


def test_an_address_that_another_server_has_now(cluster: Cluster, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that had it was told of a removal; the other one has its disk, and was away."""
    inner = members_in(tier)
    monkeypatch.setattr(inner, "_source", inner._source._replace(keeps_names=False))
    cluster.give_disk(1)
    wait_for("it is used again", lambda: store(tier, REFS) == STORED)
    without_two = [cluster.names[0], cluster.names[2]]
    moving = owned(cluster.names, REFS)[cluster.names[1]] & owned(without_two, REFS)[cluster.names[2]]
    assert moving
    cluster.name_and_wait(tier, 0, 2)
    tier.remove(moving)
    cluster.name_and_wait(tier, 0)
    cluster.end(1)
    cluster.end(2)
    cluster.begin(1, at=2)
    cluster.name_and_wait(tier, 0, 2)
    assert read(tier, sorted(moving)) == held(tier, sorted(moving)) == set()
    wait_for("it is used", lambda: set(store(tier, sorted(moving))) == {Outcome.STORED})
    assert read(tier, sorted(moving)) == set(moving)


@pytest.mark.parametrize("how", ["clear", pytest.param("remove", marks=pytest.mark.sweep)])
def test_a_server_that_is_down_returns_nothing_from_its_disk(cluster: Cluster, tier: Tier, how: str) -> None:
    cluster.give_disk(2)
    wait_for("it is used again", lambda: store(tier, REFS) == STORED)
    cluster.end(2)
    if how == "clear":
        with pytest.raises(TierError):
            tier.clear()
    else:
        tier.remove(REFS)
    assert held(tier, REFS) == read(tier, REFS) == set()
    cluster.begin(2)
    assert cluster.chunks(2) > 0, "it has kept them"
    wait_for("it has caught up", lambda: held(tier, REFS) == read(tier, REFS) == set() and cluster.chunks(2) == 0)
    wait_for("it is used", lambda: store(tier, REFS) == STORED)
    assert read(tier, REFS) == set(REFS)


def test_a_disk_that_returns_after_a_restart_still_has_the_rest(cluster: Cluster, tier: Tier) -> None:
    cluster.give_disk(2)
    wait_for("it is used again", lambda: store(tier, REFS) == STORED)
    cluster.end(2)
    cluster.begin(2)
    wait_for("it is used again", lambda: read(tier, REFS) == set(REFS))


def test_without_the_right_to_clear_a_server_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a single server, whose chunks stay if the engine's key may not clear. One key pair fits all servers."""
    monkeypatch.setattr(members_tier, "_INTERVAL_S", QUICKLY)
    monkeypatch.setattr("kvstore.engine.opening.PROBE_INTERVAL_S", 0.1)
    make_keys(tmp_path, "server")
    make_keys(tmp_path / "clients", "mine")
    keys, listed = read_pair(tmp_path / "server.key"), read_list(tmp_path / "clients")
    options = ServerOptions(POOL_BYTES, tcp=TcpAddress("127.0.0.1", 0), keys=keys, listed=listed)
    servers = [ServerThread(options) for _ in range(2)]
    tier = open_members(
        "kvs://" + ",".join(f"127.0.0.1:{server.hub.tcp_port}" for server in servers),
        client_key_file=str(tmp_path / "clients/mine.key"),
        server_key_file=str(tmp_path / "server.pub"),
    )
    assert store(tier, REFS) == STORED
    with pytest.raises(TierError, match="Clear needs the right clear"):
        tier.clear()
    wait_for("they are used again", lambda: read(tier, REFS) == set(REFS))
    tier.remove(REFS[:3])
    assert read(tier, REFS) == set(REFS[3:])
    assert any("keeps chunks that were cleared" in record.getMessage() for record in caplog.records)
    tier.close()
    for server in servers:
        server.close()


def test_names_that_are_lost_keep_the_last_servers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstore.tiers.members.addresses._ANSWER_WITHIN_S", 0.5)
    targets = [("kvs.cache", int(name.rpartition(":")[2])) for name in cluster.names]
    with NameServer({"_kvs._tcp.cache": targets, "kvs.cache": ["127.0.0.1"]}) as names:
        tier = open_members(f"kvs+srv://_kvs._tcp.cache?nameserver=127.0.0.1:{names.port}")
        expected = names_in(tier)
        assert len(expected) == 3
        store(tier, REFS)

        def ask_on() -> None:
            asked = names.asked
            wait_for("they were asked again", lambda: names.asked > asked + 8)
            assert names_in(tier) == expected

        names.records["_kvs._tcp.cache"] = []
        ask_on()
        names.fails = True
        ask_on()
        names.fails, names.records = False, {}
        ask_on()
        assert read(tier, REFS) == set(REFS)
        names.records |= {"_kvs._tcp.cache": targets[:1], "kvs.cache": ["127.0.0.1"]}
        wait_for("they are known again", lambda: len(names_in(tier)) == 1)
        tier.close()
    said = [record.getMessage() for record in caplog.records if "last known" in record.getMessage()]
    assert len(said) == 2, "one for each cause"


def test_a_wrong_line_changes_nothing(cluster: Cluster, tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    cluster.file.write_text(f"{cluster.names[0]}\nnonsense\n")
    wait_for("it is reported", lambda: "'nonsense' is no address of a cache server" in caplog.text)
    assert names_in(tier) == sorted(cluster.names)
    tier.close()
    with pytest.raises(ConfigError, match="'nonsense' is no address"):
        open_members(cluster.url)
    with pytest.raises(ConfigError, match="a cache server has no option 'conections'"):
        open_members("kvs://a:1,b:1?conections=2")


def test_servers_may_be_known_later_than_the_engine(cluster: Cluster) -> None:
    cluster.file.unlink()
    tier = open_members(cluster.url)
    assert not tier.answers
    assert set(store(tier, REFS)) == {Outcome.FAILED}
    assert held(tier, REFS) == read(tier, REFS) == set()
    cluster.name_and_wait(tier, 0, 1, 2)
    assert store(tier, REFS) == STORED
    tier.close()


def test_close_does_not_wait_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_tier, "_FIRST_ANSWER_S", 0.01)
    monkeypatch.setattr(members_tier, "_END_S", 0.01)
    monkeypatch.setattr("kvstore.tiers.members.addresses._ANSWER_WITHIN_S", 0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        tier = open_members(f"kvs+dns://cache:1?nameserver=127.0.0.1:{silent.getsockname()[1]}")
        tier.close()
        tier.close()
        with pytest.raises(ClosedError):
            tier.contains(REFS)
    wait_for("its thread ends", lambda: "kvstore-members" not in {thread.name for thread in threading.enumerate()})


@pytest.mark.sweep
def test_servers_that_come_and_go_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_tier, "_INTERVAL_S", (60.0, 60.0))
    places = [Member(f"h{number}:1", f"kvs://127.0.0.1:{number + 1}") for number in range(8)]
    own, opened = psutil.Process(), Counter[str]()
    tier = open_members("kvs://127.0.0.1:1,127.0.0.1:2")
    inner = members_in(tier)
    open_member = inner._open_member

    def count(member: Member, namespace: Namespace) -> Tier:
        opened[member.name] += 1
        return open_member(member, namespace)

    monkeypatch.setattr(inner, "_open_member", count)

    def turn(times: int) -> None:
        for number in range(times):
            inner._change(places[number % 4 : number % 4 + 3])
        for closing in inner._closing:
            closing.join()

    turn(8)
    gc.collect()
    threads, descriptors = own.num_threads(), own.num_fds()
    turn(400)
    assert opened.total() > 400
    wait_for("they have ended", lambda: own.num_threads() <= threads + 2)
    wait_for("they are closed", lambda: own.num_fds() <= descriptors + 4)
    tier.close()


def test_more_servers_than_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All engines take the same ones."""
    monkeypatch.setattr(members_tier, "MAX_MEMBERS", 2)
    found = [Member(f"h{number}:1", f"kvs://127.0.0.1:{number}") for number in (3, 1, 2)]
    tier = members_tier.MembersTier(
        Members(lambda: found, ""), lambda member, namespace: open_tier(member.url, EVEN, namespace), MINE, EVEN
    )
    assert names_in(tier) == ["h1:1", "h2:1"]
    assert "only 2 of 3 cache servers are used" in caplog.text
    tier.close()
