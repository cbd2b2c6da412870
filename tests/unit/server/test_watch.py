"""Which connections are watched: those of the server's own port, whatever a number stood for before."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from kvstore.server.watch import Watch


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=30)
        return client, listener.accept()[0]


def test_a_number_that_stands_for_something_else_leaves_nothing_open(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    port = server.getsockname()[1]
    watch = Watch(port)
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    before = psutil.Process().num_fds()
    for fd in (reader, ours.fileno(), client.fileno(), 1 << 20):
        watch.come(fd)
    assert len(watch) == 0
    assert psutil.Process().num_fds() == before
    watch.come(server.fileno())
    watch.come(server.fileno())
    assert len(watch) == 1
    assert psutil.Process().num_fds() == before + 1
    watch.go(server.fileno())
    assert psutil.Process().num_fds() == before
    for each in (client, server, ours, theirs):
        each.close()
    os.close(reader)
    os.close(writer)


def test_what_is_heard_does_not_count(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    watch = Watch(server.getsockname()[1])
    fd = server.fileno()
    watch.come(fd)
    for heard in (True, True, False):
        client.sendall(bytes(800 << 10))
        assert len(server.recv(800 << 10, socket.MSG_WAITALL)) == 800 << 10
        if heard:
            watch.hear(fd)
        assert watch.look(()) == 0
    client.sendall(bytes(800 << 10))
    assert len(server.recv(800 << 10, socket.MSG_WAITALL)) == 800 << 10
    assert watch.look({fd}) == 0  # a client may have so much under way
    assert watch.look(()) == 1
    assert client.recv(1) == b""
    watch.close()
    client.close()
    server.close()
