"""A server is replaced while its clients work: they notice a pause, and no byte is lost or wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.cache_server import ServerThread
from support.gate import Gate
from support.redis_server import wait_for
from support.served import BIG, A, B, check_quiet, check_read, open_tier, settle
from support.succession import REFS, Line, check_all, chunk_files, fill

from kvstore.model.chunks import Outcome
from kvstore.model.keys import Namespace
from kvstore.model.lifetime import Lifetime
from kvstore.protocol import messages
from kvstore.testing.harness import EVEN, make_payload, make_ref, make_transfer
from kvstore.tiers.server import calls
from kvstore.tiers.server.tier import ServerTier

HANG_GUARD_S = 30.0


@pytest.fixture(params=["mapped", "framed"])
def tier(request: pytest.FixtureRequest, line: Line) -> Iterator[ServerTier]:
    tier = open_tier(line.now.url if request.param == "mapped" else line.tcp_url)
    yield tier
    tier.close()


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


def test_smaller_quotas_of_the_successor_hold_before_anybody_stores(disk_line: Line) -> None:
    """Or the first store would evict all that is too much, while no client is served."""
    tier = open_tier(disk_line.now.url)
    fill(tier)
    settle(disk_line.now)
    (space,) = disk_line.now.hub.stock.spaces.values()
    chunk_bytes = space.used_bytes // len(REFS)
    disk_line.succeed(quotas={"*": 10 * chunk_bytes})
    wait_for("the quota holds", lambda: disk_line.now.hub.stock.num_in_memory == 10)
    check_all(tier, REFS[-10:])
    settle(disk_line.now)
    assert disk_line.options.disk is not None
    assert len(chunk_files(disk_line.options.disk.folder)) == 10
    tier.close()


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
