"""Watched connections: only those of the server's own port, even if their file descriptor was another file before."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import psutil
import pytest
from support.gate import HANG_GUARD_S

from kvstore.server.connections import Watch


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=30)
        return client, listener.accept()[0]


def test_a_number_that_stands_for_something_else_leaves_nothing_open(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    port = server.getsockname()[1]
    watch = Watch(port, 9)
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    before = psutil.Process().num_fds()
    for fd in (reader, ours.fileno(), client.fileno(), 1 << 20):
        watch.add(fd)
    assert len(watch) == 0
    assert psutil.Process().num_fds() == before
    watch.add(server.fileno())
    watch.add(server.fileno())
    assert len(watch) == 1
    assert psutil.Process().num_fds() == before + 1
    watch.remove(server.fileno())
    assert psutil.Process().num_fds() == before
    for each in (client, server, ours, theirs):
        each.close()
    os.close(reader)
    os.close(writer)


def test_what_is_heard_does_not_count(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    watch = Watch(server.getsockname()[1], 9)
    fd = server.fileno()
    watch.add(fd)
    for heard in (True, True, False):
        client.sendall(bytes(800 << 10))
        assert len(server.recv(800 << 10, socket.MSG_WAITALL)) == 800 << 10
        if heard:
            watch.note_message(fd)
        assert watch.cut_endless() == 0
    client.sendall(bytes(800 << 10))
    assert len(server.recv(800 << 10, socket.MSG_WAITALL)) == 800 << 10
    watch.note_hello(fd)
    assert watch.cut_endless() == 0  # a client may have so much under way
    watch.add(fd)  # another one, without a hello
    assert watch.cut_endless() == 1
    assert client.recv(1) == b""
    watch.close()
    client.close()
    server.close()


def test_a_peer_that_has_filled_the_window_hears_that_it_is_cut_off(pair: tuple[socket.socket, socket.socket]) -> None:
    """Nothing tells it, once its bytes are read, that there is room again, and it waits in vain to send more."""
    client, server = pair
    client.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            client.send(bytes(1 << 20))
    watch = Watch(server.getsockname()[1], 0)
    watch.add(server.fileno())  # one too many
    while server.recv(1 << 20):  # as ZeroMQ, which then reports the end
        pass
    fd = server.fileno()
    server.close()
    watch.remove(fd)
    client.settimeout(HANG_GUARD_S)
    with pytest.raises(ConnectionError):
        client.sendall(bytes(16 << 20))
    client.close()


def test_beyond_the_bound_the_oldest_goes_that_said_no_hello() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = [socket.create_connection(listener.getsockname(), timeout=30) for _ in range(4)]
        far = [listener.accept()[0] for _ in near]
        watch = Watch(listener.getsockname()[1], 3)
        for each in far[:3]:
            watch.add(each.fileno())
        watch.note_hello(far[0].fileno())
        watch.add(far[3].fileno())
        assert near[1].recv(1) == b"", "the oldest stranger"
        for each in (near[0], near[2], near[3]):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        watch.close()
        for each in (*near, *far):
            each.close()
