"""Hand-overs that are refused, or fail at any step: the server serves on, and nothing is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.gate import Gate
from support.redis_server import wait_for
from support.served import A, check_quiet, open_tier, settle
from support.succession import REFS, Line, check_all, chunk_files, fill

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.server.clients import TCP
from kvstore.server.options import ServerOptions
from kvstore.server.succession.estate import FORMAT
from kvstore.server.succession.giving import Giver
from kvstore.server.succession.link import Bequest, Claim, Link, Reply, Settled, SuccessionError
from kvstore.server.succession.taking import Succession, find_predecessor
from kvstore.testing.harness import EVEN, make_transfer
from kvstore.tiers.server import calls
from kvstore.tiers.server.connection import NoSessionError

HANG_GUARD_S = 30.0


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


def test_the_end_of_a_server_wakes_the_thread_that_awaits_successors(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.succession.giving._LOOK_S", 600.0)
    line.givers[-1].close()
    line.givers.append(Giver(line.now.hub))
    line.givers[-1].close()
    assert not line.givers[-1]._thread.is_alive()


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
