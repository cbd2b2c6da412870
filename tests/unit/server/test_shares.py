"""Bounds on what one key, or one socket, may take of the server, so that it can still serve others."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from support.shop import CHUNK_BYTES, LAYOUT, ONE, Shop, whole

from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace
from kvstore.protocol.contexts import close_context, open_context
from kvstore.protocol.keyfiles import USUAL_RIGHTS, ListedKey
from kvstore.server import connections
from kvstore.server.clients import IPC, OURSELVES, TCP, Client, Clients, Shares
from kvstore.server.connections import Listener, allowed_clients
from kvstore.server.sessions import Peer, Session, Sessions
from kvstore.testing.harness import make_ref

A, B = (Client(name, TCP, USUAL_RIGHTS) for name in "ab")
ANYBODY = Client("", TCP, USUAL_RIGHTS)


def test_a_key_and_a_socket_have_their_share() -> None:
    shares = Shares(10, {TCP: 8}, 5)
    shares.take(A, 5)
    assert not shares.has_room(A, 1)
    shares.take(B, 3)
    assert not shares.has_room(B, 1), "all of the network"
    assert shares.has_room(OURSELVES, 2)
    assert not shares.has_room(OURSELVES, 3)
    shares.give(A, 5)
    assert shares.has_room(A, 5)
    assert not Shares(10, {TCP: 8}, 5).has_room(ANYBODY, 9)
    assert Shares(10, {TCP: 8}, 5).has_room(ANYBODY, 8), "clients without a key are bounded by their socket"


def test_keys_of_one_tenant_have_one_share() -> None:
    one, two = (Client(name, TCP, USUAL_RIGHTS, "team") for name in "ab")
    shares = Shares(10, {TCP: 10}, 5)
    shares.take(one, 3)
    shares.take(two, 2)
    assert not shares.has_room(two, 1)
    assert shares.has_room(Client("team", TCP, USUAL_RIGHTS), 5), "a key of that name is another"
    listed = {b"1": ListedKey("a", tenant="team"), b"2": ListedKey("b", tenant="team"), b"3": ListedKey("team")}
    assert Clients(listed, frozenset()).num_sharers == 2


def test_sessions_by_key_and_by_socket() -> None:
    shop = Shop()
    sessions = Sessions(shop.stock, 8 * CHUNK_BYTES, {IPC: 2, TCP: 6}, num_sharers=2)
    begun: list[Session] = []
    for who in (A, A, A, A, B, B, B, B):
        if sessions.may_begin(who):
            begun.append(sessions.begin(Peer(TCP, bytes([len(begun)])), who, shop.space, b"", 0.0))
    assert [session.client.name for session in begun] == ["a"] * 3 + ["b"] * 3
    assert sessions.may_begin(OURSELVES)
    list(sessions.end(begun[0]))
    list(sessions.end(begun[0]))
    assert sessions.may_begin(A)
    assert sessions.may_begin(B) is False


@pytest.mark.parametrize("num_sharers", [0, 2])
def test_leases_leave_room_for_others(num_sharers: int) -> None:
    """Of 32 chunks, all clients may lease 24, the network 20, one of several keys 16, and one session 8."""
    shop = Shop(chunks=32)
    sessions = Sessions(shop.stock, 32 * CHUNK_BYTES, {IPC: 9, TCP: 9}, num_sharers)
    chunk = shop.store(ONE)

    def lease_all(who: Client) -> int:
        count = 0
        for number in range(4):
            session = sessions.begin(Peer(who.socket, who.name.encode() + bytes([number])), who, shop.space, b"", 0.0)
            while sessions.may_lease(session, CHUNK_BYTES):
                sessions.lease(session, chunk, is_write=False)
                count += 1
        return count

    assert [lease_all(A), lease_all(B), lease_all(OURSELVES)] == ([16, 4, 4] if num_sharers else [20, 0, 4])


def test_the_limit_of_files_bounds_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
    few = allowed_clients(has_ipc=True, has_tcp=True)
    assert 128 <= sum(few.values()) <= 256
    assert allowed_clients(has_ipc=True, has_tcp=False).keys() == {IPC}
    limits[:] = [1024, 1 << 20]
    many = allowed_clients(has_ipc=False, has_tcp=True)
    assert limits == [65_536, 1 << 20], "raised as far as it is of use"
    assert many[TCP] == 16_384
    others = 2 * len([*Path("/proc/self/fd").iterdir()])  # which earlier tests of this process have open
    limits[:] = [20_000 + others, 20_000 + others]
    assert allowed_clients(has_ipc=True, has_tcp=True)[TCP] * 63 // 64 >= 6400
    limits[:] = [256, 256]
    with pytest.raises(ConfigError, match=r"may open 256 files .* LimitNOFILE"):
        allowed_clients(has_ipc=True, has_tcp=True)


@pytest.mark.slow
def test_a_server_with_too_few_files_says_so_and_ends() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from kvstore.server.hub import Hub\nfrom kvstore.server.options import ServerOptions, TcpAddress\n"
        "Hub(ServerOptions(1 << 20, tcp=TcpAddress('127.0.0.1', 0)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "may open 200 files" in ended.stderr


def test_the_door_is_shut_while_few_files_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    context = open_context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    made = Listener(router, router.FD)
    port, used = made.port, 10
    monkeypatch.setattr(made, "_used", lambda: used)
    room = connections.room_for_clients(connections.limit_of_files())

    def is_open_at(share: float) -> bool:
        nonlocal used
        used = int(room * share)
        for _ in range(100):  # a thread of ZeroMQ releases the address
            made.look()
        return made.is_open

    assert is_open_at(0.99)
    assert not is_open_at(1.01)
    assert not is_open_at(connections._OPEN_BELOW + 0.01)
    while not is_open_at(connections._OPEN_BELOW - 0.01):
        pass
    assert made.port == port
    router.close(linger=0)
    close_context(context)


def test_pins_of_one_tenant_leave_room_for_those_of_others() -> None:
    shop = Shop(chunks=16)
    spaces = []
    for tenant in ("", "a", "b"):
        space = shop.stock.spaces.enter(Namespace({"model": "mine"}), LAYOUT, tenant)
        assert space is not None
        for number in range(5):
            chunk = whole(shop.stock.reserve(space, make_ref(number, 4)))
            assert chunk is not None
            shop.stock.complete(chunk, is_whole=True)
        spaces.append(space)
    ours, a, b = spaces
    pins, refs = shop.stock.pins, [make_ref(number, 4) for number in range(5)]
    assert pins.pin(a, refs, 9.0) == 4, "of 16 chunks 8 may be pinned"
    assert pins.pin(a, refs, 10.0) == 4, "the same again, for longer"
    assert pins.pin(b, refs[:3], 9.0) == 3
    assert pins.pin(ours, refs, 9.0) == 1
    shop.stock.remove(a, refs[:1])
    assert pins.pin(ours, refs, 9.0) == 2
    shop.stock.clear(a)
    assert pins.pin(ours, refs, 9.0) == 5
    assert pins.used_bytes == 8 * CHUNK_BYTES
    shop.stock.clear(ours)
    assert pins.pin(b, refs, 9.0) == 4
