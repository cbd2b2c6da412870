"""Rights of a client at a cache server, which follow from its key, for every kind of request and every tenant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.shop import CHUNK_BYTES, LAYOUT, ONE, TWO, Desk, checksum_of

from kvstore.protocol import messages
from kvstore.protocol.keyfiles import EVERY_RIGHT, NEEDED, NO_RIGHT, Right
from kvstore.protocol.messages import Refusal, Request
from kvstore.protocol.payload import Geometry
from kvstore.server.clients import OURSELVES, TCP, Client
from kvstore.server.exposition import Exposition
from kvstore.server.operators import stats
from kvstore.server.passes import Passes
from kvstore.server.sessions import Peer

FORMAT = Path(__file__).parents[3] / "docs/FORMAT.md"
GEOMETRY = Geometry.of(LAYOUT)
PIECE = bytes(8)
SPACE_ID = bytes(8)
REQUESTS: list[Request] = [
    messages.Hello(1, messages.PROTOCOL_VERSION, {"model": "mine"}, GEOMETRY, 0, b""),
    messages.Lookup(1, messages.pack_refs([ONE])),
    messages.Reserve(1, messages.pack_refs([TWO])),
    messages.ReserveFor(1, messages.pack_refs([TWO]), bytes(16)),
    messages.Commit(1, [1], True),
    messages.Acquire(1, messages.pack_refs([ONE])),
    messages.Release(1, [1]),
    messages.Piece(1, 1, 0, checksum_of(PIECE)),
    messages.Fetch(1, 1, 0, 8),
    messages.Remove(1, messages.pack_refs([ONE])),
    messages.Clear(1),
    messages.Scan(1, 0),
    messages.Ping(1),
    messages.Stats(1),
    messages.ClearSpaces(1, b""),
    messages.Pin(1, SPACE_ID, messages.pack_refs([ONE]), True),
    messages.Explain(1, SPACE_ID, messages.pack_refs([ONE])),
    messages.Pins(1),
    messages.UnpinSpaces(1, b""),
    messages.Describe(1, 1, bytes(16)),
    messages.Nearest(1, [bytes(16)]),
    messages.Sending(1, "sender", 0, []),
    messages.Front(1, 1, 1, 0, 8),
    messages.Attach(1, "nixl", b""),
    messages.Offer(1, 1, 0, 8, 0, PIECE),
    messages.Expire(1, 1, 1),
    messages.Prolong(1, messages.pack_refs([ONE]), [1]),
    messages.Ask(1, messages.pack_refs([ONE])),
]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    with closing(made.service), closing(made.pool):
        yield made


def client(name: str, rights: Right, tenant: str = "") -> Client:
    return Client(name, TCP, rights, tenant)


def come_as(desk: Desk, who: Client, peer: bytes) -> None:
    """Continue over another connection, after a hello."""
    desk.client, desk.peer = who, Peer(TCP, peer)
    assert isinstance(desk.hello(), messages.Welcome)


def ask(desk: Desk, request: Request) -> messages.Answer | None:
    answer: messages.Answer | None = desk.ask(request, *([PIECE] if isinstance(request, messages.Piece) else []))
    return answer


def test_every_kind_of_request_has_its_right() -> None:
    """The author of a new kind decides who may send it, says so in docs/FORMAT.md, and adds one to this file."""
    kinds = set(Request.__subclasses__())
    assert set(NEEDED) == kinds == {type(request) for request in REQUESTS}
    page = FORMAT.read_text(encoding="utf-8")
    rows = re.findall(r"^- ((?:`\w+`| or )+|none): ([\d, ]+)$", page, re.MULTILINE)
    documented = {int(tag): words for words, tags in rows for tag in tags.split(", ")}
    named = {kind: [str(right.name).lower() for right in Right if right & NEEDED[kind]] for kind in kinds}
    words = {kind: " or ".join(f"`{name}`" for name in names) or "none" for kind, names in named.items()}
    assert documented == {kind.__struct_config__.tag: text for kind, text in words.items()}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_without_it_a_request_is_refused_and_counted(desk: Desk, request_: Request) -> None:
    needed = NEEDED[type(request_)]
    come_as(desk, OURSELVES, b"owner")
    desk.store(ONE)
    desk.client = client("poor", EVERY_RIGHT & ~needed)
    desk.peer = Peer(TCP, b"poor")
    if not needed:
        desk.client = client("poor", NO_RIGHT)
        assert isinstance(ask(desk, request_), messages.Report)
        return
    answer = ask(desk, request_)
    assert isinstance(answer, messages.Refused)
    assert answer.reason == Refusal.NO_RIGHT
    assert type(request_).__name__ in answer.message
    core = desk.service._core
    assert sum(core.denied.values()) == 1
    assert 'kvstore_server_denied_total{client="poor",lacked="' in page(desk)
    assert [list(space.chunks) for space in desk.stock.spaces.values()] == [[ONE]]
    assert not desk.stock.pins.used_bytes


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_with_it_alone_a_request_is_answered(desk: Desk, request_: Request) -> None:
    for right in (right for right in Right if right & NEEDED[type(request_)]):
        desk.client, desk.peer = client("able", right), Peer(TCP, right.name.encode() if right.name else b"")
        desk.hello()
        if isinstance(request_, messages.Hello | messages.Offer | messages.Attach):
            continue  # sent already; without a channel there is nothing to attach
        answer = ask(desk, request_)
        assert not (isinstance(answer, messages.Refused) and answer.reason == Refusal.NO_RIGHT)


def test_what_a_client_says_of_its_capacity_means_nothing(desk: Desk) -> None:
    come_as(desk, OURSELVES, b"owner")
    desk.store(ONE)
    desk.peer = Peer(TCP, b"another")
    hello = messages.Hello(1, messages.PROTOCOL_VERSION, {"model": "mine"}, GEOMETRY, 1, b"")
    assert isinstance(desk.ask(hello), messages.Welcome)
    desk.store(TWO)
    assert list(next(iter(desk.stock.spaces.values())).chunks) == [ONE, TWO]


class TestTenants:
    A = client("a", EVERY_RIGHT, "tenant-a")
    B = client("b", EVERY_RIGHT, "tenant-b")

    @pytest.fixture(autouse=True)
    def _two(self, desk: Desk) -> None:
        """Let both use the same model; b comes last."""
        come_as(desk, self.A, b"a")
        desk.store(ONE)
        come_as(desk, self.B, b"b")

    def left(self, desk: Desk) -> dict[str, int]:
        return {space.tenant: len(space.chunks) for space in desk.stock.spaces.values()}

    def space_of(self, desk: Desk, tenant: str) -> bytes:
        return next(space.id for space in desk.stock.spaces.values() if space.tenant == tenant)

    def test_one_does_not_see_what_another_has_stored(self, desk: Desk) -> None:
        refs = messages.pack_refs([ONE])
        assert desk.ask(messages.Lookup(2, refs)).found == b"\0"
        assert not desk.ask(messages.Acquire(2, refs)).grants[0].lease
        assert desk.ask(messages.Scan(2, 0)).total == 0
        assert desk.ask(messages.Scan(2, 0)).usage.used_bytes == 0

    def test_one_changes_nothing_of_another(self, desk: Desk) -> None:
        for request in (
            messages.Remove(2, messages.pack_refs([ONE])),
            messages.Clear(2),
            messages.ClearSpaces(2, b""),
            messages.UnpinSpaces(2, b""),
        ):
            desk.ask(request)
        desk.store(ONE)
        assert self.left(desk) == {"tenant-a": 1, "tenant-b": 1}

    def test_orders_reach_the_own_tenant(self, desk: Desk) -> None:
        refs, of_a = messages.pack_refs([ONE]), self.space_of(desk, "tenant-a")
        desk.store(ONE)
        for request in (messages.Pin(2, of_a, refs, True), messages.Explain(2, of_a, refs)):
            assert desk.ask(request).reason == Refusal.UNKNOWN
        assert json.loads(desk.ask(messages.Pin(2, self.space_of(desk, "tenant-b"), refs, True)).body) == {"chunks": 1}
        for who, seen in ((self.B, 1), (self.A, 0), (OURSELVES, 1), (client("root", Right.OPERATE), 1)):
            desk.client = who
            assert len(json.loads(desk.ask(messages.Pins(2)).body)["pins"]) == seen
        desk.client = self.A
        desk.ask(messages.UnpinSpaces(2, b""))
        assert desk.stock.pins.used_bytes == CHUNK_BYTES, "that of b"

    def test_stats_tell_what_one_may_know(self, desk: Desk) -> None:
        def told() -> list[str]:
            tree = json.loads(desk.ask(messages.Stats(2)).body)
            assert tree.keys() <= {"version", "status", "namespaces", "namespaces_left_out"}
            return [space["tenant"] for space in tree["namespaces"]]

        assert told() == ["tenant-b"]
        desk.peer = Peer(TCP, b"before a hello")
        for who, tenants in ((self.A, ["tenant-a"]), (replace(self.A, rights=Right.READ), [])):
            desk.client = who
            assert told() == tenants
        desk.client = replace(OURSELVES, tenant="")
        assert desk.service._stats(desk.client, None) == {}, "all that the server tells"

    def test_a_connection_of_another_key_has_no_session_of_this_one(self, desk: Desk) -> None:
        """Routing ids are chosen by clients, and free again when a connection ends."""
        desk.client, desk.peer = self.B, Peer(TCP, b"a")
        assert desk.ask(messages.Lookup(2, messages.pack_refs([ONE]))).reason == Refusal.NO_SESSION


def page(desk: Desk) -> str:
    tree = stats(desk.service._core, 1.0, 0)
    return Exposition().page({**tree, "malformed": 0, "refused": 0, "passes": Passes().tree()})
