"""Servers that do not answer like a Redis: errors of the tier, within bounds of memory and of questions."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kvstore.model.errors import TierError
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.redis.connection import Reader
from kvstore.tiers.redis.nodes import _slot_map
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.redis.url import Address

NO_RESP = {
    "no length": b"$abc\r\n",
    "no number": b":x\r\n",
    "a number of 5,000 digits": b":" + b"1" * 5000 + b"\r\n",
    "a huge value": b"$99999999999999\r\n",
    "a huge array": b"*1000000000\r\n",
    "negative": b"*-5\r\n",
    "negative value": b"$-2\r\n",
    "an empty line": b"\r\n",
    "a line without an end": b"+" + b"x" * (1 << 17),
    "arrays in arrays": b"*1\r\n" * 3000,
    "many arrays of many": b"*1000000\r\n*1000000\r\n",
    "moved to nowhere": b"-MOVED x\r\n",
    "a value without an end": b"$2\r\nabcd",
}
NO_REDIS = {  # in RESP
    **NO_RESP,
    "a word": b"+OK\r\n",
    "a list": b"*1\r\n+x\r\n",
    "a number": b":7\r\n",
    "not yet": b"-LOADING soon\r\n",
    "another value": b"$3\r\nabc\r\n",
}
CALLS: dict[str, Callable[[RedisTier], Any]] = {
    "contains": lambda tier: tier.contains([make_ref(1)]),
    "get": lambda tier: tier.get([Transfer(make_ref(1), make_buffer(EVEN.slot_bytes))]),
    "put": lambda tier: tier.put([make_transfer(EVEN, make_ref(1))]),
    "remove": lambda tier: tier.remove([make_ref(1)]),
    "clear": lambda tier: tier.clear(),
    "check": lambda tier: tier.check(),
}


class Impostor:
    """Server that gives the test's answer to every command, except those with which redis-py opens a connection."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()
        except OSError:
            return

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while asked := client.recv(1 << 16):
                    is_greeting = b"CLIENT" in asked or b"SELECT" in asked
                    for _ in range(asked.count(b"*")):
                        client.sendall(b"+OK\r\n" if is_greeting else self._answer())
            except OSError:
                return


@contextmanager
def tier_before(answer: Callable[[], bytes]) -> Iterator[RedisTier]:
    server = Impostor(answer)
    options = {"url": f"redis://127.0.0.1:{server.port}", "timeout_s": 0.2}
    tier = RedisTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, options))
    try:
        yield tier
    finally:
        tier.close()
        server.close()


@pytest.mark.parametrize("answer", NO_REDIS.values(), ids=NO_REDIS)
def test_every_call_ends_with_an_error_of_the_tier(answer: bytes) -> None:
    with tier_before(lambda: answer) as tier:
        for call in CALLS.values():
            with pytest.raises(TierError):
                call(tier)


def test_a_server_that_forgets_the_epoch_is_asked_once() -> None:
    with tier_before(lambda: b"+OK\r\n") as tier, pytest.raises(TierError, match="does not keep the epoch"):
        CALLS["get"](tier)


def test_an_epoch_that_is_another_one_at_every_look() -> None:
    numbers = iter(range(1 << 20))
    with tier_before(lambda: b"$16\r\n%016d\r\n" % next(numbers)) as tier:
        for call in (CALLS["contains"], CALLS["get"], lambda tier: tier.nearest([b"x" * 16])):
            with pytest.raises(TierError, match="another epoch in each of 8 reads"):
                call(tier)


@contextmanager
def reading(sent: bytes) -> Iterator[Reader]:
    """Yield a reader of what a server has sent before it hung up."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(5.0)  # a reader that waits for missing bytes has failed
        with theirs:
            sender = threading.Thread(target=theirs.sendall, args=(sent,))
            sender.start()
            reader = Reader()
            reader.on_connect(SimpleNamespace(_sock=ours))  # type: ignore[arg-type]
            if len(sent) < 1 << 16:
                sender.join()
                theirs.shutdown(socket.SHUT_WR)
            yield reader
        sender.join()


@pytest.mark.parametrize("sent", NO_RESP.values(), ids=NO_RESP)
def test_what_is_no_resp_is_a_broken_connection(sent: bytes) -> None:
    for read in (Reader.reply, lambda reader: reader.value_into(8, memoryview(bytearray(8)))):
        with reading(sent) as reader, pytest.raises(RedisConnectionError):
            read(reader)


def test_what_is_announced_takes_no_memory() -> None:
    with reading(b"*1000000\r\n$50000\r\n" + b"x" * 100) as reader:
        tracemalloc.start()
        try:
            with pytest.raises(RedisConnectionError):
                reader.reply()
            with reading(b"$60000000\r\nx") as other, pytest.raises(RedisConnectionError):
                other.reply()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_a_reply_is_bounded_with_all_that_is_in_it() -> None:
    big = b"$30000000\r\n"
    sent = b"*3\r\n" + (big + b"x" * 30_000_000 + b"\r\n") * 2 + big
    with reading(sent) as reader, pytest.raises(RedisConnectionError, match="length 30000000; at most"):
        reader.reply()


def test_sound_replies_are_read_as_they_are() -> None:
    sent = b"*5\r\n:-3\r\n$5\r\nab\r\nc\r\n*-1\r\n*2\r\n+x\r\n$-1\r\n$0\r\n\r\n-ERR no\r\n"
    with reading(sent) as reader:
        assert reader.reply() == [-3, b"ab\r\nc", None, [b"x", None], b""]
        assert isinstance(reader.reply(), ResponseError)


@pytest.mark.parametrize("slots", [(0, 10**12), (-5, 3), (9, 8), (16_000, 16_384)])
def test_a_map_with_slots_that_no_cluster_has(slots: tuple[int, int]) -> None:
    with pytest.raises(ResponseError, match="malformed answer to CLUSTER SLOTS"):
        _slot_map([[*slots, [b"host", 1]]], Address("asked", 1))
