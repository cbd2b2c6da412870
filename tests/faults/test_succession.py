"""A server is replaced while its clients work: they notice a pause, and no byte is lost or wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.cache_server import ServerThread
from support.gate import Gate
from support.redis_server import wait_for
from support.served import BIG, A, B, check_quiet, check_read, open_tier, settle
from support.succession import Line, a_line

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.model.lifetime import Lifetime
from kvstore.protocol import messages
from kvstore.server.clients import TCP
from kvstore.server.disk_tiers import DiskOptions
from kvstore.server.options import ServerOptions
from kvstore.server.succession.estate import FORMAT
from kvstore.server.succession.link import Bequest, Claim, Link, Reply, Settled, SuccessionError
from kvstore.server.succession.taking import Succession, find_predecessor
from kvstore.testing.harness import EVEN, make_payload, make_ref, make_transfer
from kvstore.tiers.server import calls
from kvstore.tiers.server.connection import NoSessionError
from kvstore.tiers.server.tier import ServerTier

HANG_GUARD_S = 30.0
REFS = [make_ref(number) for number in range(40)]


@pytest.fixture
def line() -> Iterator[Line]:
    with a_line() as line:
        yield line


@pytest.fixture
def disk_line(tmp_path: Path) -> Iterator[Line]:
    with a_line(disk=DiskOptions(tmp_path / "disk", 1 << 30)) as line:
        yield line


@pytest.fixture(params=["mapped", "framed"])
def tier(request: pytest.FixtureRequest, line: Line) -> Iterator[ServerTier]:
    tier = open_tier(line.now.url if request.param == "mapped" else line.tcp_url)
    yield tier
    tier.close()


def chunk_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.safetensors") if path.parent.name != ".free"]


def fill(tier: ServerTier, refs: list[ChunkRef] = REFS) -> None:
    for ref in refs:
        assert tier.put([make_transfer(EVEN, ref)]) == [Outcome.STORED]


def check_all(tier: ServerTier, refs: list[ChunkRef] = REFS) -> None:
    assert tier.contains(refs) == [True] * len(refs)
    assert {check_read(tier, ref) for ref in refs} == {Outcome.HIT}


def test_clients_notice_nothing_and_find_all_that_was_stored(line: Line, tier: ServerTier) -> None:
    fill(tier)
    for number in range(3):
        line.succeed()
        check_all(tier)
        fill(tier, [make_ref(100 + number)])
    check_all(tier, [make_ref(100 + number) for number in range(3)])
    tier.remove(REFS[:1])
    assert check_read(tier, REFS[0]) is Outcome.MISS
    tier.clear()
    assert not any(tier.contains(REFS))
    tier.close()
    check_quiet(line.now)


def test_a_reset_meets_the_successor(line: Line, tier: ServerTier) -> None:
    fill(tier)
    line.succeed()
    tier.reset(Namespace({"model": "another epoch"}))
    assert not any(tier.contains(REFS))
    fill(tier)
    other = open_tier(line.now.url)  # of the former epoch
    assert not any(other.contains(REFS))
    other.close()


def test_calls_under_way_are_repeated(line: Line, tier: ServerTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the grant and the end of a write the server is replaced: the bytes go to other pages."""
    gate = Gate()
    real = calls.grants

    def slow(*args: object) -> list[messages.Grant]:
        granted = real(*args)  # type: ignore[arg-type]
        gate()
        return granted

    monkeypatch.setattr(calls, "grants", slow)
    outcomes: list[Outcome] = []
    writing = threading.Thread(target=lambda: outcomes.extend(tier.put([make_transfer(EVEN, A)])))
    writing.start()
    assert gate.reached.wait(HANG_GUARD_S)
    line.succeed()
    gate.open()
    writing.join(HANG_GUARD_S)
    assert outcomes == [Outcome.STORED]
    assert check_read(tier, A) is Outcome.HIT
    tier.close()
    check_quiet(line.now)


def test_pages_that_a_client_still_uses_are_not_given_away(line: Line) -> None:
    """Its views of lent chunks stay as they are, even if their chunks are removed and the memory is filled."""
    tier, other = open_tier(line.now.url), open_tier(line.now.url)
    fill(tier, [A, B])
    loan = tier.borrow([A, B])
    before = line.now.hub.pool.used_bytes
    for _ in range(2):
        line.succeed()
        assert line.now.hub.pool.used_bytes == before
    other.remove([A, B])
    big = open_tier(line.now.url, BIG, Namespace({"model": "big"}))
    for number in range(40):
        big.put([make_transfer(BIG, make_ref(number))])
    for ref, payload in zip((A, B), loan.payloads, strict=True):
        assert payload is not None
        assert payload.tobytes() == make_payload(EVEN, ref)
    loan.end()
    for each in (tier, other, big):
        each.close()
    check_quiet(line.now)


def test_a_client_that_sleeps_keeps_its_pages_until_it_wakes(line: Line) -> None:
    """Nothing in it notices the end of its server, so it may go on to write."""
    tier = open_tier(line.now.url)
    fill(tier, [A])
    connection = tier._connections._connect(tier._connections.namespace)
    tier._connections._watcher.close(1.0)
    (grant,) = calls.grants(connection, messages.Reserve, [B])
    runs = set(grant.runs)
    line.succeed()
    hub = line.now.hub
    held = [lease for session in hub.sessions.by_peer.values() for lease in session.leases.values()]
    assert [set(lease.chunk.runs) for lease in held] == [runs]
    free = hub.pool.free.num_free
    connection.close()
    wait_for("its pages are free", lambda: hub.pool.free.num_free > free)
    tier.close()
    check_quiet(line.now)


def test_a_client_that_was_disconnected_keeps_its_pages_too(line: Line) -> None:
    """It still maps the memory, and may not have noticed yet."""
    tier = open_tier(line.now.url)
    connection = tier._connections._connect(tier._connections.namespace)
    tier._connections._watcher.close(1.0)
    (grant,) = calls.grants(connection, messages.Reserve, [B])
    connection.send(messages.Remove(1, b"not a ref"))
    wait_for("it is disconnected", lambda: line.now.hub.reception.num_malformed == 1)
    free = line.now.hub.pool.free.num_free
    line.succeed()
    assert line.now.hub.pool.free.num_free == free
    connection.close()
    wait_for("its pages are free", lambda: line.now.hub.pool.free.num_free > free)
    assert grant.lease
    tier.close()
    check_quiet(line.now)


def test_pins_ends_trails_and_counters_go_on(line: Line) -> None:
    tier = open_tier(line.now.url)
    fill(tier)
    tier.limit([Lifetime(A, None)])
    space = next(iter(line.now.hub.stock.spaces.values()))
    line.now.hub.ask(lambda: line.now.hub.stock.pins.pin(space, [A], 1e9), HANG_GUARD_S)
    before = line.now.hub.snapshot(HANG_GUARD_S)["namespaces"]
    line.succeed()
    after = line.now.hub.snapshot(HANG_GUARD_S)["namespaces"]
    assert [each["counters"] for each in after] == [each["counters"] for each in before]
    assert [chunk.ref for chunk in line.now.hub.stock.pins] == [A]
    tier.close()


def test_the_disk_goes_on(disk_line: Line) -> None:
    tier = open_tier(disk_line.now.url)
    fill(tier)
    disk_line.succeed()
    settle(disk_line.now)
    tier.remove(REFS[:5])
    fill(tier, [make_ref(100)])
    disk_line.succeed()
    settle(disk_line.now)
    assert disk_line.options.disk is not None
    assert len(chunk_files(disk_line.options.disk.folder)) == len(REFS) - 5 + 1
    disk_line.close()
    again = ServerThread(disk_line.options)
    check_all(tier, [*REFS[5:], make_ref(100)])
    assert not any(tier.contains(REFS[:5]))
    tier.close()
    again.close()


def test_chunks_that_waited_for_the_disk_are_written_by_the_successor(disk_line: Line) -> None:
    hub = disk_line.now.hub
    hub.ask(hub.pause.hold_writes, HANG_GUARD_S)  # type: ignore[union-attr]
    tier = open_tier(disk_line.now.url)
    fill(tier)
    disk_line.succeed()
    settle(disk_line.now)
    assert disk_line.options.disk is not None
    assert len(chunk_files(disk_line.options.disk.folder)) == len(REFS)
    tier.close()


def claim(options: ServerOptions, **changes: object) -> Claim:
    disk = str(options.disk.folder) if options.disk else ""
    own: dict[str, object] = {"formats": (1, FORMAT), "version": "x", "pool_bytes": options.pool_bytes, "disk": disk}
    return Claim(**own | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"formats": (FORMAT + 1, FORMAT + 2), "version": "7.1"}, "7.1 reads 2 to 3: upgrade step by step"),
        ({"pool_bytes": 1 << 30}, "keep it, or restart the server"),
        ({"disk": "/elsewhere"}, "local_disk names /elsewhere, and the server here uses none"),
    ],
    ids=["format", "size", "disk"],
)
def test_a_successor_that_cannot_work_is_refused(line: Line, changes: dict[str, object], said: str) -> None:
    link = line.link()
    link.send(claim(line.options, **changes))
    reply, _ = link.receive(Reply)
    assert not reply.is_yes
    assert said in reply.why
    link.close()
    line.succeed()


def test_the_successor_says_why_it_was_refused(line: Line) -> None:
    with pytest.raises(SuccessionError, match="keep it, or restart"):
        line.succeed(pool_bytes=1 << 20)


def test_there_may_be_nobody_to_replace(tmp_path: Path) -> None:
    assert find_predecessor(ServerOptions(1 << 20, folder=tmp_path)) is None
    with pytest.raises(ConfigError, match="add one to server_listen"):
        find_predecessor(ServerOptions(1 << 20))


def leave_at_once(_: Link, __: Line) -> None: ...


def leave_after_the_claim(link: Link, line: Line) -> None:
    link.send(claim(line.options))


def leave_with_the_estate(link: Link, line: Line) -> None:
    link.send(claim(line.options))
    link.receive(Reply)
    _, fds = link.receive(Bequest, 3)
    for fd in fds:
        os.close(fd)


def say_nonsense(link: Link, line: Line) -> None:
    link.send(claim(line.options))
    link.receive(Reply)
    link.send(Reply(is_yes=True))


def leave_before_the_last_word(link: Link, line: Line) -> None:
    leave_with_the_estate(link, line)
    link._socket.shutdown(0)  # SHUT_RD: the last word cannot be sent
    link.send(Settled())


@pytest.mark.parametrize(
    "fault", [leave_at_once, leave_after_the_claim, leave_with_the_estate, say_nonsense, leave_before_the_last_word]
)
def test_a_server_goes_on_if_its_successor_fails(line: Line, fault: Callable[[Link, Line], None]) -> None:
    tiers = [open_tier(line.now.url), open_tier(line.tcp_url)]
    fill(tiers[0])
    link = line.link()
    fault(link, line)
    link.close()
    for tier in tiers:
        check_all(tier)
        fill(tier)
    line.succeed()
    for tier in tiers:
        check_all(tier)
        tier.close()
    check_quiet(line.now)


def test_a_successor_that_cannot_settle_leaves_the_server_as_it_was(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(line.now.url)
    fill(tier)

    def broken(_: Succession) -> None:
        raise SuccessionError("broken")

    monkeypatch.setattr(Succession, "become_owner", broken)
    with pytest.raises(SuccessionError, match="broken"):
        line.succeed()
    monkeypatch.undo()
    check_all(tier)
    line.succeed()
    check_all(tier)
    tier.close()


def test_files_change_only_once_the_server_has_given_up(disk_line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former server may go on, and neither knows what the other writes or deletes."""
    hub = disk_line.now.hub
    assert hub.pause is not None
    hub.ask(hub.pause.hold_writes, HANG_GUARD_S)
    tier = open_tier(disk_line.now.url)
    fill(tier)
    assert disk_line.options.disk is not None
    files: list[int] = []

    def broken(_: Succession) -> None:
        assert disk_line.options.disk is not None
        files.append(len(chunk_files(disk_line.options.disk.folder)))
        raise SuccessionError("broken")

    monkeypatch.setattr(Succession, "become_owner", broken)
    with pytest.raises(SuccessionError, match="broken"):
        disk_line.succeed()
    assert files == [0]
    wait_for("the former server writes them", lambda: hub.service.writes.num_unwritten == 0)
    assert len(chunk_files(disk_line.options.disk.folder)) == len(REFS)
    tier.close()


def test_nothing_is_changed_during_a_hand_over(line: Line) -> None:
    hub = line.now.hub
    assert hub.pause is not None
    hub.ask(hub.pause.begin, HANG_GUARD_S)
    with pytest.raises(ConfigError, match="ask its successor"):
        hub.change(line.options, HANG_GUARD_S)
    with pytest.raises(ConfigError, match="ask its successor"):
        hub.drain(HANG_GUARD_S)
    hub.ask(hub.pause.end, HANG_GUARD_S)
    assert hub.change(line.options, HANG_GUARD_S) == 0


def test_a_defect_in_the_estate_leaves_the_server_as_it_was(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(line.now.url)
    fill(tier)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.server.succession.giving.draw_up", lambda *_: 1 // 0)
        with pytest.raises(SuccessionError, match="it has ended"):
            line.succeed()
    check_all(tier)
    line.succeed()
    check_all(tier)
    tier.close()


def test_a_server_that_ends_pauses_no_more(line: Line) -> None:
    """Or a hand-over that goes on would hold back the writes of its drain."""
    hub = line.now.hub
    assert hub.pause is not None
    hub.ask(hub.pause.begin, HANG_GUARD_S)
    hub.ask(hub.pause.give_up, HANG_GUARD_S)
    for step in (hub.pause.hold_writes, hub.pause.begin, hub.pause.is_quiet, hub.pause.make_final):
        with pytest.raises(SuccessionError, match="keeps its chunks"):
            hub.ask(step, HANG_GUARD_S)
    assert not hub.service.writes.is_held
    assert not hub.pause.is_on


@pytest.mark.parametrize("ends", ["clear", "reset"])
def test_a_put_is_not_repeated_after_a_clear(line: Line, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would bring back what was removed while it was under way."""
    tier = open_tier(line.now.url)
    gate = Gate()
    real = calls.commit

    def slow(*args: Any, **options: Any) -> list[Outcome]:
        gate()
        return real(*args, **options)

    monkeypatch.setattr(calls, "commit", slow)
    outcomes: list[Outcome] = []
    writing = threading.Thread(target=lambda: outcomes.extend(tier.put([make_transfer(EVEN, A)])))
    writing.start()
    assert gate.reached.wait(HANG_GUARD_S)
    if ends == "clear":
        tier.clear()
    else:
        tier.reset(Namespace({"model": "next"}))
    line.succeed()
    gate.open()
    writing.join(HANG_GUARD_S)
    assert outcomes == [Outcome.FAILED]
    assert not any(tier.contains([A]))
    tier.close()


def test_a_disk_that_hangs_is_not_handed_over(disk_line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs might write or delete a file later, and the successor would not know."""
    monkeypatch.setattr("kvstore.server.succession.giving._QUIET_S", 0.2)
    tier = open_tier(disk_line.now.url)
    fill(tier)
    settle(disk_line.now)
    disk = disk_line.now.hub.core.disk
    assert disk is not None
    monkeypatch.setattr(type(disk._tiers), "rest", lambda _: False)
    with pytest.raises(SuccessionError, match="ended"):
        disk_line.succeed()
    monkeypatch.undo()
    check_all(tier)
    disk_line.succeed()
    tier.close()


def test_a_server_that_ends_during_the_hand_over_keeps_its_chunks(disk_line: Line) -> None:
    tier = open_tier(disk_line.now.url)
    fill(tier)
    link = disk_line.link()
    assert disk_line.options.disk is not None
    link.send(claim(disk_line.options, disk=str(disk_line.options.disk.folder.resolve())))
    link.receive(Reply)
    _, fds = link.receive(Bequest, 4)
    for fd in fds:
        os.close(fd)
    disk_line.now.close()
    assert disk_line.now.drained
    link.send(Settled())
    with pytest.raises(SuccessionError):
        link.receive(Reply)
    link.close()
    assert len(chunk_files(disk_line.options.disk.folder)) == len(REFS)
    with pytest.raises(TierError):
        tier.contains(REFS)
    tier.close()


class Stale:
    """Socket that still reports what was true a moment ago: that it can send."""

    def __init__(self, socket: object) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def get(self, _: int) -> int:
        return zmq.POLLOUT


def test_a_request_to_a_server_that_ends_just_now_does_not_wait_for_ever(line: Line) -> None:
    tier = open_tier(line.now.url)
    connection = tier._connections._connect(tier._connections.namespace)
    tier._connections._watcher.close(1.0)
    line.close()
    wait_for("it has noticed", lambda: not connection._socket.poll(0, zmq.POLLOUT))
    connection._socket = Stale(connection._socket)  # type: ignore[assignment]
    said: list[str] = []

    def ask() -> None:
        try:
            connection.send(messages.Ping(1))
        except NoSessionError as error:
            said.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HANG_GUARD_S)
    assert len(said) == 1
    connection.close()
    tier.close()


def test_a_lost_connection_is_noticed_at_once(line: Line) -> None:
    """ZeroMQ would connect again by itself, and the call would wait for its answer until the deadline."""
    tier = open_tier(line.tcp_url, timeout_s=600.0)
    fill(tier)
    hub = line.now.hub
    gate = Gate()
    hub._jobs.report(gate)
    assert gate.reached.wait(HANG_GUARD_S)
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.extend(tier.contains(REFS)))
    asking.start()
    fds = [session.fd for peer, session in hub.sessions.by_peer.items() if peer.socket == TCP]
    for fd in fds:
        assert hub.network is not None
        hub.network.watch.cut(fd)
    gate.open()
    asking.join(HANG_GUARD_S)
    assert found == [True] * len(REFS)
    tier.close()
