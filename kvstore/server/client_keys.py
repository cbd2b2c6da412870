"""Admits only network clients with a listed public key, through ZeroMQ's authentication protocol (ZAP, RFC 27).

``zmq.auth.Authenticator`` does the same on an asyncio loop or a separate thread, but does not report refusals, and
names clients by their keys. Here the thread that decides counts refusals, and clients are named by their key files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import zmq
from zmq.utils import z85

from kvstore.model.throttle import Throttle
from kvstore.protocol.keyfiles import ListedKey

logger = logging.getLogger(__name__)

_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_REQUEST_FRAMES: Final = 7  # version, id, domain, address, identity, mechanism, the key


class ClientKeys:
    """Answers ZeroMQ's requests to authenticate a client. Belongs to the thread that decides.

    Args:
        context: the context of the sockets that clients connect to.
        listed: clients by their public keys in Z85.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listed: Mapping[bytes, ListedKey]) -> None:
        self.refused = 0
        self._names = {z85.decode(key): client.name for key, client in listed.items()}
        self._throttle = Throttle(logger)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answer all requests that wait."""
        while self.socket.poll(0):
            self.socket.send_multipart(self._judge(self.socket.recv_multipart()))

    def close(self) -> None:
        """Stop answering, so that no client can connect any more."""
        self.socket.close()

    def _judge(self, question: Sequence[bytes]) -> list[bytes]:
        if len(question) < 2:
            return [_VERSION, b"", b"500", b"malformed", b"", b""]
        request_id = question[1]
        is_known = len(question) == _REQUEST_FRAMES and question[5] == b"CURVE" and question[6] in self._names
        if is_known:
            return [_VERSION, request_id, b"200", b"OK", self._names[question[6]].encode(), b""]
        self.refused += 1
        address = question[3].decode("ascii", "replace") if len(question) > 3 else "an unknown address"
        self._throttle.log(address, "refused a client from %s: its key is not on the list", address)
        return [_VERSION, request_id, b"400", b"not on the list", b"", b""]
