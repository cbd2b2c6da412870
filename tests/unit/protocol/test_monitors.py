"""Connections whose two ends leave at the same moment, and monitors that nobody reads, stop no other connection."""

from __future__ import annotations

import socket
import threading

import zmq

from kvstore.protocol import messages
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.monitors import Monitor
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.url import parse_server

WAIT_MS = 20_000


def _leave_after_a_message(router: zmq.Socket[bytes], address: str) -> None:
    if router.poll(WAIT_MS):
        name, *_ = router.recv_multipart()
        router.send_multipart([name, b"leave"])
    router.unbind(address)
    router.close(0)


def test_connections_that_end_at_both_sides_at_once() -> None:
    """ZeroMQ's thread reports the loss while this side closes; later connections of the context are served by it."""
    context, servers = open_context(), open_context()
    for _ in range(100):
        router = servers.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        leaving = threading.Thread(target=_leave_after_a_message, args=(router, f"tcp://127.0.0.1:{port}"))
        leaving.start()
        connection = ServerConnection(context, parse_server(f"kvs://127.0.0.1:{port}", {}))
        assert connection.tell(messages.Ping(connection.new_serial()))
        while connection.is_alive and not connection._socket.poll(1):
            pass
        connection.close()
        leaving.join()
    close_context(servers)
    close_context(context)


def test_more_losses_than_a_queue_holds() -> None:
    """A server's port may be another program's for hours, while a connection is idle."""
    context = open_context()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(WAIT_MS / 1000)
        dealer = context.socket(zmq.DEALER)
        dealer.reconnect_ivl = 1
        dealer.connect(f"tcp://127.0.0.1:{stranger.getsockname()[1]}")
        monitor = Monitor(context, dealer, zmq.EVENT_DISCONNECTED)
        for _ in range(2_100):
            stranger.accept()[0].close()
        monitor.close()
        monitor.close()
        dealer.close(0)
    close_context(context)
