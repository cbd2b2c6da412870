"""Orders to drain, from process to process of one user."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from support.redis_server import wait_for

from kvstore.model.errors import TierError
from kvstore.ops import drains
from kvstore.ops.drains import DrainListener, Left, drain_all, drain_at, workers_here


class Worker:
    """A worker with chunks to write."""

    def __init__(self) -> None:
        self.left: int | Exception = 7
        self.orders = 0

    def drain(self) -> int:
        self.orders += 1
        if isinstance(self.left, Exception):
            raise self.left
        return self.left


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def listener(worker: Worker) -> Iterator[DrainListener]:
    listener = DrainListener(worker.drain)
    yield listener
    listener.close()


def test_its_end_wakes_the_thread(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_LOOK_S", 600.0)
    listener = DrainListener(worker.drain)
    listener.close()
    assert not listener._thread.is_alive()
    assert worker.orders == 0


@pytest.mark.parametrize("ids", [("prod", "prod"), ("prod_dp0", "prod_dp1"), ("prod", "prod_dp17")])
def test_ranks_of_data_parallelism_are_one_engine(worker: Worker, ids: tuple[str, str]) -> None:
    listeners = [DrainListener(worker.drain, engine) for engine in ids]
    names = {listener.name for listener in listeners}
    assert {found.engine for found in workers_here() if found.name in names} == {drains.mark_of("prod")}
    for listener in listeners:
        listener.close()


def test_it_ends_although_no_file_can_be_opened(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = DrainListener(worker.drain)

    def none(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.protocol.knock.socket.socket", none)
        listener.close()
    assert not listener._thread.is_alive()


def send(listener: DrainListener, order: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{listener.name}")
        connection.sendall(order)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(32)


def test_an_order_says_what_is_left(worker: Worker, listener: DrainListener) -> None:
    assert drain_at(listener.name) == 7
    worker.left = 0
    assert drain_at(listener.name) == 0


@pytest.mark.parametrize("error", [TimeoutError(), TierError("the disk is gone")], ids=["hangs", "fails"])
def test_an_order_that_fails_has_no_answer_and_can_be_repeated(
    worker: Worker, listener: DrainListener, error: Exception
) -> None:
    worker.left = error
    assert drain_at(listener.name) is None
    worker.left = 3
    assert drain_at(listener.name) == 3


@pytest.mark.parametrize("order", [b"", b"drai", b"DRAIN"])
def test_other_words_are_no_order(worker: Worker, listener: DrainListener, order: bytes) -> None:
    assert send(listener, order) == b""
    assert worker.orders == 0


def test_whoever_says_nothing_keeps_nobody_out(listener: DrainListener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{listener.name}")
        assert drain_at(listener.name) == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_not_heard(worker: Worker, listener: DrainListener) -> None:
    child = os.fork()
    if not child:
        os.setuid(65534)
        os._exit(1 if drain_at(listener.name) is None else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert worker.orders == 0
    assert drain_at(listener.name) == 7


def test_workers_of_this_host_are_found_by_their_engine(worker: Worker) -> None:
    listeners = [DrainListener(worker.drain, engine) for engine in ("one", "two", "one")]
    try:
        found = {listening.name: listening for listening in workers_here()}
        marks = [found[listener.name].engine for listener in listeners]
        assert marks[0] == marks[2] != marks[1]
        assert {found[listener.name].process for listener in listeners} == {os.getpid()}
        assert worker.orders == 0
        assert drain_all([listener.name for listener in listeners] + [""]) == Left(7, 1)
        assert worker.orders == 3
    finally:
        for listener in listeners:
            listener.close()
    assert not {listener.name for listener in listeners} & {listening.name for listening in workers_here()}


def test_one_to_which_too_many_have_connected_is_found() -> None:
    """One that was missing would not be drained, and nobody would know."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy, ExitStack() as waiting:
        name = f"kvstore-drain-{'0' * 8}-{'1' * 32}"
        busy.bind(f"\0{name}")
        busy.listen(0)
        with suppress(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                client.setblocking(False)
                client.connect(f"\0{name}")
        assert name in {listening.name for listening in workers_here()}
        assert drain_all([name]) == Left(0, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_workers_that_do_not_hear_this_user_are_not_found(listener: DrainListener) -> None:
    child = os.fork()
    if not child:
        os.setuid(65534)
        os._exit(int(listener.name in {listening.name for listening in workers_here()}))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert listener.name in {listening.name for listening in workers_here()}


def test_nothing_is_left_after_close(listener: DrainListener) -> None:
    listener.close()
    listener.close()
    assert drain_at(listener.name) is None
    wait_for("the thread has ended", lambda: "kvstore-drain" not in {one.name for one in threading.enumerate()})
