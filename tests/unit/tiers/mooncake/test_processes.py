"""Tests of Mooncake's process: orders that it does not take, memory that it gives, forks, and its end."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.diskwork import get, make_ref, put
from support.stand_in_mooncake import BOUND_S, Fake, a_fake, give_up, held, wait_for

from kvstore.model.chunks import Outcome
from kvstore.model.errors import TierError
from kvstore.tiers.base import Tier
from kvstore.tiers.mooncake import outbox, session
from kvstore.tiers.mooncake.calls import Calls
from kvstore.tiers.mooncake.outbox import Outbox
from kvstore.tiers.mooncake.session import Session

A, B = make_ref(1), make_ref(2)
FAILED, HIT, STORED = Outcome.FAILED, Outcome.HIT, Outcome.STORED


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with a_fake(tmp_path, monkeypatch) as one:
        yield one


def calls_of(tier: Tier) -> Calls:
    found = tier._calls  # type: ignore[attr-defined]
    assert isinstance(found, Calls)
    return found


def session_of(tier: Tier) -> Session:
    found = calls_of(tier)._session
    assert found is not None
    return found


def test_lines_reach_a_reader_that_is_slow_in_order() -> None:
    """No caller waits for it, small lines do not overtake a large one, and a line has no hole."""
    near, far = socket.socketpair()
    lines = [b"%d " % number + b"x" * size + b"\n" for number, size in enumerate((1, 1 << 20, 3, 1 << 21, 5))]
    with near, far:
        box = Outbox(near)
        for line in lines:
            box.put(line)
        with far.makefile("rb") as reader:
            assert [reader.readline() for _ in lines] == lines
        box.close()


def test_a_small_line_waits_behind_one_that_is_being_sent() -> None:
    """Also if the socket could take it, which happens between two parts of the other."""
    sent: list[bytes] = []
    is_free = threading.Event()

    class Link(socket.socket):
        def send(self, line: bytes, _flags: int = 0) -> int:  # type: ignore[override]
            sent.append(line[:1])
            return 1

        def sendall(self, line: bytes, _flags: int = 0) -> None:  # type: ignore[override]
            is_free.wait(BOUND_S)
            sent.append(line)

    with Link() as link:
        box = Outbox(link)
        for line in (b"first\n", b"second\n"):
            box.put(line)
        is_free.set()
        wait_for(lambda: sum(map(len, sent)) == len(b"first\nsecond\n"))
        assert b"".join(sent) == b"first\nsecond\n"
        box.close()


def test_lines_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_MOST_BYTES", 1 << 21)
    near, far = socket.socketpair()
    with near:
        with far:
            box = Outbox(near)
            box.put(b"x" * (1 << 20))
            with pytest.raises(BufferError, match="wait to be read"):
                box.put(b"x" * (1 << 21))
            box.put(b"y\n")
        wait_for(lambda: box._is_over)
        with pytest.raises(OSError, match="has gone"):
            box.put(b"x")


def test_a_lookup_of_many_chunks_comes_in_parts(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [make_ref(number) for number in range(10)]
    tier = fake.open()
    monkeypatch.setattr(sys.modules[type(tier).__module__], "_FEW", 3)
    assert put(tier, refs[4]) == [STORED]
    orders = record_orders(monkeypatch)
    assert tier.contains(refs) == [number == 4 for number in range(10)]
    tier.remove(refs)
    assert [len(keys) for _, keys in orders] == [3, 3, 3, 1] * 2
    assert tier.contains(refs) == [False] * 10


def test_others_pass_while_orders_wait_for_a_process_that_hangs(fake: Fake) -> None:
    """An order that the process does not read keeps no lock: replies arrive, and calls end at their deadlines."""
    tier = fake.open(timeout_s=1.0, connections=1)
    tier.check()
    fake.tell("hang-exist")
    running = session_of(tier)
    first = running.start("exist", "", (), {"keys": ["a"]})
    orders = [running.start("exist", "", (), {"keys": ["b" * (1 << 20)]}) for _ in range(3)]
    fake.untell("hang-exist")
    assert first.result(BOUND_S)["codes"] == [0]
    assert [order.result(BOUND_S)["codes"] for order in orders] == [[0]] * 3


def test_a_late_write_is_removed_while_the_process_takes_no_orders(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that takes replies only leaves the removal behind, and takes the next reply."""
    tier = fake.open(connections=2)
    tier.check()
    for call in ("hang-put", "hang-get", "hang-exist"):
        fake.tell(call)
    assert give_up(tier, lambda: put(tier, A), monkeypatch) == [FAILED]
    running = session_of(tier)
    running.start("exist", "", (), {"keys": ["x"]})
    waiting = [running.start("exist", "", (), {"keys": ["b" * (1 << 20)]}) for _ in range(2)]
    fake.untell("hang-put")
    wait_for(lambda: not held(tier))
    fake.untell("hang-exist")
    fake.untell("hang-get")
    for order in waiting:
        assert order.result(BOUND_S)["codes"] == [0]
    wait_for(lambda: tier.contains([A]) == [False])


def test_no_process_starts_after_the_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a call that was under way longer than ``close`` waits."""
    tier = fake.open()
    tier.check()
    calls = calls_of(tier)
    monkeypatch.setattr(session, "_start", lambda *_: pytest.fail("a process was started"))
    calls.close()
    with pytest.raises(TierError, match="were closed"):
        calls.ask("", calls.deadline_s(), "exist", keys=[])
    with pytest.raises(TierError, match="were closed"):
        calls.take(1, calls.deadline_s())


def test_memory_is_given_by_a_tier_that_moves_chunks(fake: Fake) -> None:
    """Lookups give none; transfers give it once a process, and it leaves the store with the tier."""
    asking, moving = fake.open(segment_mib=3), fake.open(segment_mib=3)
    assert asking.contains([A]) == [False]
    asking.remove([A])
    assert not fake.given()
    assert put(moving, A) == [STORED]
    assert put(moving, B) == [STORED]
    assert get(moving, A) is HIT
    assert fake.given() == [3 << 20]
    moving.close()
    asking.close()
    assert not fake.given()


def test_memory_is_given_when_a_tier_is_checked(fake: Fake) -> None:
    """Else an empty store would have no room for the epoch."""
    fake.open(segment_mib=1).check()
    fake.open().check()
    assert fake.given() == [1 << 20]


def test_memory_that_the_store_does_not_take(fake: Fake) -> None:
    tier = fake.open(segment_mib=1)
    fake.tell("refuse")
    with pytest.raises(TierError, match="does not take 1,048,576 bytes of memory, code -1"):
        tier.check()
    fake.untell("refuse")
    tier.check()
    assert put(tier, A) == [STORED]


def test_memory_that_takes_too_long(fake: Fake) -> None:
    tier = fake.open(segment_mib=1, timeout_s=0.5)
    tier.contains([A])
    fake.tell("hang-give")
    with pytest.raises(TierError, match="takes too long"):
        put(tier, A)
    fake.untell("hang-give")
    wait_for(lambda: fake.given() == [1 << 20])
    assert put(tier, A) == [STORED]


def test_what_is_held_and_replaced_is_counted(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = fake.open()
    put(tier, A)
    fake.tell("hang-get")
    assert give_up(tier, lambda: get(tier, A), monkeypatch) is FAILED
    assert (tier.counters.held, tier.counters.replaced) == (1, 0)
    fake.untell("hang-get")
    wait_for(lambda: not held(tier))
    fake.tell("fail-get")
    assert get(tier, A) is FAILED
    fake.untell("fail-get")
    tier.check()
    assert (tier.counters.held, tier.counters.replaced) == (2, 1)


def test_an_end_fails_one_call_before_it_is_noticed(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = fake.open()
    tier.check()
    running = session_of(tier)

    def refuse(line: bytes) -> None:
        raise BrokenPipeError("the other end has gone")

    with monkeypatch.context() as patch:
        patch.setattr(running._outbox, "put", refuse)
        patch.setattr(running._process, "kill", lambda: None)  # its end would be noticed
        with pytest.raises(TierError, match="has ended"):
            tier.contains([A])
    assert tier.contains([A]) == [False]
    assert session_of(tier) is not running


def test_a_fork_leaves_process_and_memory_to_its_parent(fake: Fake) -> None:
    """The child has a process and slots of its own, and its end takes nothing from the parent."""
    tier = fake.open()
    assert put(tier, A) == [STORED]
    before = session_of(tier)
    child = os.fork()
    if not child:  # no assertion leaves it
        code = 1
        try:
            is_apart = calls_of(tier)._session is None
            tier.check()  # as the stand-in's store is that of its process
            is_apart = is_apart and put(tier, B) == [STORED] and session_of(tier) is not before
            tier.close()
            code = 0 if is_apart else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(tier, A) is HIT
    assert session_of(tier) is before


def test_a_fork_after_the_end_of_a_process(fake: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    """Python would print what a hook raises, and leave the other hooks out."""
    tier = fake.open()
    tier.check()
    running = session_of(tier)
    running.kill()
    wait_for(lambda: running.is_over and running._link.fileno() < 0)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert capfd.readouterr().err == ""


def test_mooncakes_process_ends_with_its_engine_although_a_fork_lives(fake: Fake) -> None:
    tier = fake.open()
    tier.check()
    running = session_of(tier)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the parent's end of the pipe is closed
        os._exit(0)
    try:
        os.close(reading)
        os.close(os.dup(writing))
        running._link.shutdown(socket.SHUT_RD)  # ends the thread that listens, which closes this end
        wait_for(lambda: running._process.poll() is not None)
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def record_orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    orders: list[tuple[str, list[str]]] = []
    start = Session.start

    def record(self: Session, call: str, *args: object) -> Future[session.Reply]:
        order = args[-1]
        assert isinstance(order, dict)
        if "keys" in order:
            orders.append((call, order["keys"]))
        return start(self, call, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "start", record)
    return orders


def test_a_chunk_is_stored_where_sessions_refuse(fake: Fake) -> None:
    """They do not replace objects."""
    tier = fake.open()
    assert [put(tier, A), put(tier, A)] == [[STORED]] * 2
    fake.tell("no-session")
    assert put(tier, A, B) == [STORED] * 2
    assert [get(tier, A), get(tier, B)] == [HIT] * 2


def test_a_write_that_fails_keeps_its_slot(fake: Fake) -> None:
    """It may read it late, and nothing revokes it meanwhile: its memory would be another object's."""
    tier = fake.open()
    tier.check()
    before = session_of(tier)
    fake.tell("fail-put")
    assert put(tier, A) == [FAILED]
    assert (before.slots.held, tier.counters.held) == (1, 1)
    fake.untell("fail-put")
    tier.check()
    assert session_of(tier) is not before
    assert put(tier, A) == [STORED]


@pytest.mark.parametrize(
    ("fault", "told"), [("fail-epoch", "does not take the epoch, code -800"), ("raise-epoch", "in the middle")]
)
def test_an_epoch_that_cannot_be_written_costs_the_process(fake: Fake, fault: str, told: str) -> None:
    """The write may read its page late, when it holds another epoch."""
    tier = fake.open()
    tier.check()
    before = session_of(tier)
    fake.tell(fault)
    with pytest.raises(TierError, match=told):
        tier.clear()
    fake.untell(fault)
    tier.clear()
    assert session_of(tier) is not before
    assert put(tier, A) == [STORED]


def test_an_epoch_that_cannot_be_written_costs_the_process_late(fake: Fake) -> None:
    tier = fake.open(timeout_s=1.0)
    tier.check()
    before = session_of(tier)
    fake.tell("hang-epoch")
    fake.tell("fail-epoch")
    with pytest.raises(TierError, match="did not answer"):
        tier.clear()
    assert not before.is_over
    fake.untell("hang-epoch")
    wait_for(lambda: before.is_over)


def test_a_write_that_another_overtakes_is_over(fake: Fake) -> None:
    """It failed, but its transfer has ended, so its slot and its process stay in use."""
    tier = fake.open()
    tier.check()
    before = session_of(tier)
    fake.tell("overtake")
    assert put(tier, A) == [FAILED]
    assert (before.slots.held, tier.counters.held) == (0, 0)
    fake.untell("overtake")
    assert put(tier, A) == [STORED]
    assert session_of(tier) is before
