"""Tests of common prefixes at real cache servers: mapped, in messages, after restarts, at peers, with old versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_tcp, short_folder
from support.parting import FLUSH_S, PROMPTS, check_ages, check_strangers
from support.redis_server import wait_for
from support.rig import BLOCK, CHUNK, Rig, tokens_of
from support.schedules import schedules

from kvstore.engine.options import RemoteOptions
from kvstore.model.chunks import Outcome
from kvstore.protocol import messages
from kvstore.server import payload as payload_rules
from kvstore.server.service import Service
from kvstore.testing.harness import MINE, ODD, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.server.connection import ServerConnection

HEAD = tokens_of(1, CHUNK + 2 * BLOCK)
ONE, OTHER = [*HEAD, *tokens_of(2, CHUNK)], [*HEAD, *tokens_of(3, CHUNK)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture(params=["mapped", "framed"], scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    with serving_ipc() if request.param == "mapped" else serving_tcp() as server:
        yield server


def remote(url: str | None, **others: object) -> RemoteOptions:
    options = {"timeout_s": 30.0} if url else {}
    return RemoteOptions(url, options, lookup_timeout_s=30.0, hold_s=0.2, max_queue=64, **others)  # type: ignore[arg-type]


def clear(server: ServerThread) -> None:
    for space in server.hub.stock.spaces.values():
        server.hub.stock.clear(space)


@schedules(20)
@given(prompts=st.lists(PROMPTS, max_size=6))
def test_strangers_find_what_they_have_in_common(server: ServerThread, prompts: list[list[int]]) -> None:
    rig = Rig()
    clear(server)
    check_strangers(rig, lambda: rig.open(slots=64, remote=remote(server.url)), prompts)


def test_a_restarted_server_still_knows_where_blocks_end(rig: Rig) -> None:
    with short_folder() as folder, ExitStack() as stopped:
        (folder / "disk").mkdir()
        lines = f"local_disk: {folder / 'disk'}\nmax_local_disk_size: 0.1\n"
        server = ServerProcess(folder, lines).start()
        stopped.callback(server.kill)
        with rig.open(remote=remote(server.url)) as engine:
            rig.store(engine, ONE)
            assert engine.flush(FLUSH_S)
        assert server.terminate() == 0
        server.start()
        with rig.open(remote=remote(server.url)) as engine:
            assert rig.retrieve(engine, OTHER) == len(HEAD)


def test_peers_are_asked_too(rig: Rig) -> None:
    """The chunk that shares most is found, at any of the peers."""
    with serving_tcp() as first, serving_tcp() as second:
        for server, prompt in ((first, HEAD[: CHUNK + BLOCK]), (second, ONE)):
            with rig.open(remote=remote(server.url)) as engine:
                rig.store(engine, [*prompt, *tokens_of(7, CHUNK)])
                assert engine.flush(FLUSH_S)
        with rig.open(remote=remote(None, peers=(first.url, second.url))) as engine:
            assert rig.retrieve(engine, OTHER) == len(HEAD)


def test_a_chunk_that_is_gone_is_not_named(rig: Rig, server: ServerThread) -> None:
    clear(server)
    with rig.open(remote=remote(server.url)) as engine:
        rig.store(engine, ONE)
        assert engine.flush(FLUSH_S)
        assert engine.clear(ONE) > 0
    with rig.open(remote=remote(server.url)) as engine:
        assert engine.lookup(OTHER) == 0
    assert all(not list(space.trails) for space in server.hub.stock.spaces.values())


@pytest.mark.parametrize("version", [1, messages.PROTOCOL_VERSION])
def test_leading_blocks_in_messages(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Only leading blocks are sent, in a few messages; an older server is asked for each range of them."""
    sent: list[messages.Request] = []
    send, say_hello = ServerConnection.send, ServerConnection.hello

    def note(connection: ServerConnection, request: messages.Request, *frames: object) -> None:
        sent.append(request)
        send(connection, request, *frames)  # type: ignore[arg-type]

    def hello(connection: ServerConnection, *arguments: object) -> object:
        connection.version = version
        return say_hello(connection, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerConnection, "send", note)
    monkeypatch.setattr(ServerConnection, "hello", hello)
    layout, ref = ODD, make_ref(1, ODD.blocks_per_chunk)
    setup = TierSetup(MINE, layout, UNBOUNDED_BYTES, {"timeout_s": 30.0})
    with serving_tcp() as server, closing(open_tier("server", replace(setup, options={"url": server.url}))) as tier:
        assert tier.put([make_transfer(layout, ref)]) == [Outcome.STORED]
        sent.clear()
        monkeypatch.setattr(messages, "PIECE_BYTES", piece_bytes := layout.payload_bytes(1) // 3 + 1)
        buffer = make_buffer(layout.slot_bytes)
        with monkeypatch.context() as patch:  # copies that other clients do not read take all room
            patch.setattr(payload_rules, "_MAX_SESSION_UNSENT_BYTES", 0)
            refused = tier.get([Transfer(ref, make_buffer(layout.slot_bytes), front_blocks=1)])
            assert (refused == [Outcome.HIT]) == (version == 1)
        sent.clear()
        assert tier.get([Transfer(ref, buffer, front_blocks=1)]) == [Outcome.HIT]
        wait_for("what was sent is counted out", lambda: server.hub.service.payload._unsent.held == 0)
    ranges, payload = layout.front_ranges(ref.num_blocks, 1), make_payload(layout, ref)
    assert buffer[: layout.payload_bytes(1)].tobytes() == b"".join(payload[begin:end] for begin, end in ranges)
    asked = [request for request in sent if isinstance(request, messages.Fetch | messages.Front)]
    assert sum(request.num_bytes for request in asked) == layout.payload_bytes(1)
    assert {type(request) for request in asked} == {messages.Front if version > 1 else messages.Fetch}
    assert len(asked) == (3 if version > 1 else sum(-(-(end - begin) // piece_bytes) for begin, end in ranges))


@pytest.mark.parametrize("older", ["server", "client"])
def test_an_older_version_is_served_as_before(rig: Rig, monkeypatch: pytest.MonkeyPatch, older: str) -> None:
    """Chunks and tails are found by their keys, and the other side gets no message that it does not know."""
    asked: list[messages.Request] = []
    handle = Service._answer

    def answer(service: Service, session: object, request: messages.Request, payload: object) -> object:
        asked.append(request)
        return handle(service, session, request, payload)  # type: ignore[arg-type]

    monkeypatch.setattr(Service, "_answer", answer)
    with serving_tcp() as server, monkeypatch.context() as patch:
        if older == "server":
            patch.setattr("kvstore.server.service.messages.PROTOCOL_VERSION", 1)
        say_hello = ServerConnection.hello

        def hello(connection: ServerConnection, *arguments: object) -> object:
            connection.version = 1 if older == "client" else 2
            return say_hello(connection, *arguments)  # type: ignore[arg-type]

        patch.setattr(ServerConnection, "hello", hello)
        with rig.open(remote=remote(server.url)) as engine:
            rig.store(engine, ONE)
            assert engine.flush(FLUSH_S)
        with rig.open(remote=remote(server.url)) as engine:
            assert engine.lookup(OTHER) == CHUNK
            assert rig.retrieve(engine, ONE) == len(ONE) // BLOCK * BLOCK
    assert asked
    assert not any(isinstance(request, messages.Describe | messages.Nearest) for request in asked)


def test_old_and_new_engines_share_a_server(rig: Rig, server: ServerThread) -> None:
    """Old and new engines find each other's chunks by their keys."""
    clear(server)
    say_hello = ServerConnection.hello

    def old(connection: ServerConnection, *arguments: object) -> object:
        connection.version = 1
        return say_hello(connection, *arguments)  # type: ignore[arg-type]

    check_ages(
        lambda: rig.open(remote=remote(server.url)), rig, lambda patch: patch.setattr(ServerConnection, "hello", old)
    )
