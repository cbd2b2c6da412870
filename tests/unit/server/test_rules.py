"""The rules of the cache server, one by one and without sockets: stock, leases, requests, pieces, keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import ConfigError, ProtocolError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.messages import Refusal
from kvstore.protocol.runs import PAGE_BYTES
from kvstore.server.client_keys import ClientKeys
from kvstore.server.core import Core
from kvstore.server.owner import Owner
from kvstore.server.pool import FreePages, Pool
from kvstore.server.service import Service
from kvstore.server.sessions import FORGET_S, MAX_PIECES, SILENCE_S, Peer, Session, Sessions
from kvstore.server.spaces import Chunk, Space
from kvstore.server.stock import Stock
from kvstore.server.unix_socket import UnixSocket, make_private
from kvstore.testing.harness import make_ref

LAYOUT = KVLayout((PAGE_BYTES // 2,), 1, 16, 64)  # a chunk of four blocks takes two pages
CHUNK_BYTES = 2 * PAGE_BYTES
ONE, TWO, THREE = make_ref(1, 4), make_ref(2, 4), make_ref(3, 4)
HANG_GUARD_S = 30.0
LATER_S = 1e9


class Shop:
    """A stock with room for two chunks in memory and one on disk, and one namespace."""

    def __init__(self, chunks: int = 2, disk_chunks: int = 1, quota_bytes: int | None = None) -> None:
        self.free = FreePages(2 * chunks)
        quotas = {} if quota_bytes is None else {"mine": quota_bytes}
        pool_bytes = chunks * CHUNK_BYTES
        self.stock = Stock(
            pool_bytes, self.free, disk_bytes=disk_chunks * CHUNK_BYTES, policy="LRU", disk_policy="LRU", quotas=quotas
        )
        self.space = self._enter()
        self.sessions = Sessions(self.stock, pool_bytes)

    def _enter(self) -> Space:
        space = self.stock.enter(Namespace({"model": "mine"}), LAYOUT)
        assert space is not None
        return space

    def reserve(self, ref: ChunkRef) -> Chunk | None:
        return self.stock.reserve(self.space, ref, 1 << 60)

    def store(self, ref: ChunkRef) -> Chunk:
        chunk = self.reserve(ref)
        assert chunk is not None
        assert self.stock.complete(chunk, is_whole=True) is Outcome.STORED
        return chunk

    def client(self, token: bytes = b"") -> Session:
        return self.sessions.begin(Peer(0, b"one"), self.space, 1 << 60, token, 0.0)


# Stock


def test_a_write_that_clear_overtook_is_not_found() -> None:
    shop = Shop()
    chunk = shop.reserve(ONE)
    assert chunk is not None
    shop.stock.clear(shop.space)
    assert shop.stock.complete(chunk, is_whole=True) is Outcome.FAILED
    assert (list(shop.space.chunks), shop.space.used_bytes, shop.free.num_free) == ([], 0, 4)


@pytest.mark.parametrize("how", ["it is read", "it is pinned"])
def test_what_stays_while_others_want_its_pages(how: str) -> None:
    shop = Shop(chunks=1)
    chunk = shop.store(ONE)
    if how == "it is read":
        assert shop.stock.acquire(shop.space, ONE) is chunk
    else:
        shop.stock.pins.set(chunk, LATER_S)  # whatever share of the memory may be pinned
    assert shop.reserve(TWO) is None
    assert ONE in shop.space.chunks
    if how == "it is read":
        shop.stock.release(chunk)
    else:
        shop.stock.remove(shop.space, [ONE])
    assert shop.reserve(TWO) is not None


def test_pages_for_a_read_that_failed_are_given_back() -> None:
    shop = Shop()
    shop.stock.found_on_disk(shop.space, ONE, CHUNK_BYTES)
    chunk = shop.stock.acquire(shop.space, ONE)
    assert isinstance(chunk, Chunk)
    assert shop.free.num_free == 2
    shop.stock.loaded(chunk, Outcome.FAILED)
    shop.stock.release(chunk)
    assert shop.free.num_free == 4
    assert shop.stock.acquire(shop.space, ONE) is chunk, "it may be tried again"


def test_a_quota_is_kept() -> None:
    shop = Shop(quota_bytes=CHUNK_BYTES)
    shop.store(ONE)
    shop.store(TWO)
    assert (list(shop.space.chunks), shop.space.used_bytes) == ([TWO], CHUNK_BYTES)


def test_a_replaced_chunk_is_counted_once() -> None:
    shop = Shop()
    shop.store(ONE)
    shop.store(ONE)
    assert (shop.space.used_bytes, shop.free.num_free) == (CHUNK_BYTES, 2)


def test_what_was_removed_is_not_written_to_disk() -> None:
    shop = Shop()
    chunk = shop.store(ONE)
    assert shop.stock.acquire(shop.space, ONE) is chunk  # so that its pages are still there
    shop.stock.remove(shop.space, [ONE])
    assert not shop.stock.prepare_write(chunk, CHUNK_BYTES)
    assert shop.stock.num_on_disk == 0


def test_a_pin_ends_with_its_chunk() -> None:
    shop = Shop()
    shop.store(ONE)
    assert shop.stock.pin(shop.space, [ONE], LATER_S) == 1
    assert shop.stock.pins.used_bytes == CHUNK_BYTES
    shop.stock.remove(shop.space, [ONE])
    assert shop.stock.pins.used_bytes == 0


def test_what_leaves_the_disk_for_others_loses_its_file() -> None:
    shop = Shop()
    first, second = shop.store(ONE), shop.store(TWO)
    for chunk in (first, second):
        assert shop.stock.prepare_write(chunk, CHUNK_BYTES)
        shop.stock.written(chunk, CHUNK_BYTES)
    assert shop.stock.take_removals() == [(shop.space, ONE)]
    assert (first.disk_bytes, second.disk_bytes) == (0, CHUNK_BYTES)


def test_what_is_being_written_does_not_leave_the_disk() -> None:
    shop = Shop()
    first, second = shop.store(ONE), shop.store(TWO)
    assert shop.stock.prepare_write(first, CHUNK_BYTES)
    assert not shop.stock.prepare_write(second, CHUNK_BYTES)
    shop.stock.written(first, CHUNK_BYTES)
    assert shop.stock.prepare_write(second, CHUNK_BYTES)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_free_pages_that_lie_together_are_one_run(order: tuple[int, ...]) -> None:
    free = FreePages(9)
    taken = [free.take(3) for _ in range(3)]
    for number in order:
        runs = taken[number]
        assert runs is not None
        free.give(runs)
    assert free.take(9) == ((0, 9),)


# Leases


def test_pages_are_kept_while_pieces_are_on_their_way_to_them() -> None:
    shop = Shop()
    client, chunk = shop.client(), shop.reserve(ONE)
    assert chunk is not None
    lease = shop.sessions.lease(client, chunk, is_write=True)
    lease.copies = 1
    shop.sessions.end(client)
    assert shop.free.num_free == 2
    shop.sessions.copied(lease, is_sound=True)
    assert (shop.free.num_free, list(shop.space.chunks)) == (4, [])


@pytest.mark.parametrize("sound", [(True, True), (False, True), (True, False)])
def test_a_chunk_is_whole_only_if_every_piece_was(sound: tuple[bool, ...]) -> None:
    shop = Shop()
    client, chunk = shop.client(), shop.reserve(ONE)
    assert chunk is not None
    lease = shop.sessions.lease(client, chunk, is_write=True)
    lease.copies = len(sound)
    for is_sound in sound:
        shop.sessions.copied(lease, is_sound=is_sound)
    outcome = shop.sessions.give_back(client, lease, is_whole=True)
    assert outcome is (Outcome.STORED if all(sound) else Outcome.FAILED)


def test_only_the_end_of_its_connection_takes_the_pool_from_a_client_that_maps_it() -> None:
    shop = Shop()
    mapping = shop.client(b"token")
    chunk = shop.reserve(ONE)
    assert chunk is not None
    shop.sessions.lease(mapping, chunk, is_write=True)
    assert shop.sessions.expire(100 * FORGET_S) == []
    elsewhere = shop.sessions.begin(Peer(0, b"two"), shop.space, 1 << 60, b"", 0.0)
    assert shop.sessions.expire(SILENCE_S + 1) == []
    other = shop.reserve(TWO)
    assert other is not None
    shop.sessions.lease(elsewhere, other, is_write=True)
    assert shop.sessions.expire(SILENCE_S + 1) == [elsewhere]


def test_a_client_has_a_quarter_of_the_pool_at_most() -> None:
    shop = Shop(chunks=8)
    client = shop.client()
    granted = 0
    for number in range(8):
        if not shop.sessions.may_lease(client, CHUNK_BYTES):
            break
        chunk = shop.reserve(make_ref(number, 4))
        assert chunk is not None
        shop.sessions.lease(client, chunk, is_write=True)
        granted += 1
    assert granted == 2


# Requests and pieces


class Desk:
    """A service over a small pool. What it sends is in ``sent``; ``settle`` lets what its threads reported happen."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.pool = Pool(8 * CHUNK_BYTES)
        self.stock = Stock(self.pool.num_bytes, self.pool.free)
        self.sessions = Sessions(self.stock, self.pool.num_bytes)
        self.sent: list[messages.Answer] = []
        self.reports: list[Callable[[], None]] = []
        self.reported = threading.Semaphore(0)
        self.open_tokens: set[bytes] = set()
        core = Core(
            self.pool,
            self.stock,
            self.sessions,
            None,
            send=lambda _peer, answer, _frames: self.sent.append(answer),
            report=self._report,
            is_open=self._is_open,
            stats=dict,
            may_order=lambda _peer: True,
            now=lambda: 0.0,
        )
        self.service = Service(core, max_writes=1, pin_max_s=LATER_S, owner=owner)
        self.peer = Peer(0, b"one")

    def _report(self, work: Callable[[], None]) -> None:
        self.reports.append(work)
        self.reported.release()

    def _is_open(self, token: bytes) -> bool:
        return token in self.open_tokens

    def settle(self, count: int) -> None:
        for _ in range(count):
            assert self.reported.acquire(timeout=HANG_GUARD_S)
            self.reports.pop(0)()

    def ask(self, request: messages.Request, *frames: bytes) -> Any:
        before = len(self.sent)
        self.service.handle(self.peer, [messages.encode(request), *frames])
        return self.sent[-1] if len(self.sent) > before else None

    def hello(self, token: bytes = b"") -> Any:
        fields: dict[str, str | int] = {"model": "mine"}
        return self.ask(messages.Hello(1, messages.PROTOCOL_VERSION, fields, messages.Geometry.of(LAYOUT), 0, token))

    def lease(self, request: type[messages.Reserve | messages.Acquire], ref: ChunkRef) -> int:
        (grant,) = self.ask(request(2, messages.pack_refs([ref]))).grants
        assert grant.lease
        return int(grant.lease)

    def send(self, lease: int, payload: bytes, offset: int = 0) -> None:
        self.ask(messages.Piece(3, lease, offset, checksum_of(payload)), payload)

    def commit(self, lease: int) -> Outcome:
        return messages.outcome_of(self.ask(messages.Commit(4, [lease], True)).outcomes[0])

    def store(self, ref: ChunkRef) -> None:
        lease = self.lease(messages.Reserve, ref)
        self.send(lease, bytes(CHUNK_BYTES))
        self.settle(1)
        assert self.commit(lease) is Outcome.STORED


def checksum_of(payload: bytes) -> bytes:
    from kvstore.protocol.pieces import checksum

    return checksum([memoryview(payload)])


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    assert isinstance(desk.hello(), messages.Welcome)
    yield desk
    desk.service.close()
    desk.pool.close()


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_chunk_of_which_a_part_never_came_is_not_stored(desk: Desk, parts: int) -> None:
    lease = desk.lease(messages.Reserve, ONE)
    for number in range(parts):
        desk.send(lease, bytes(PAGE_BYTES), number * PAGE_BYTES)
    desk.settle(parts)
    assert desk.commit(lease) is (Outcome.STORED if parts == 2 else Outcome.FAILED)


def trail_of(ref: ChunkRef, first: int = 50) -> bytes:
    """A trail that begins with a block of this number."""
    keys = [make_ref(first + number, 1).prefix_key for number in range(ref.num_blocks - 1)]
    return b"".join([*keys, ref.prefix_key])


def nearest(desk: Desk, *trails: bytes) -> list[list[bytes]]:
    named: list[list[bytes]] = desk.ask(messages.Nearest(6, list(trails))).trails
    return named


def store_with_trail(desk: Desk, ref: ChunkRef, trail: bytes) -> None:
    lease = desk.lease(messages.Reserve, ref)
    assert desk.ask(messages.Describe(5, lease, trail)) is None
    desk.send(lease, bytes(CHUNK_BYTES))
    desk.settle(1)
    assert desk.commit(lease) is Outcome.STORED


def test_who_writes_a_chunk_tells_its_trail(desk: Desk) -> None:
    asked = trail_of(THREE)
    store_with_trail(desk, ONE, trail_of(ONE))
    assert nearest(desk, asked, trail_of(THREE, 90)) == [[trail_of(ONE)], []]
    store_with_trail(desk, TWO, trail_of(TWO, 70))
    read = desk.lease(messages.Acquire, TWO)
    desk.ask(messages.Describe(5, read, asked[:-16] + TWO.prefix_key))
    desk.ask(messages.Describe(5, 12345, trail_of(TWO)))
    assert nearest(desk, asked) == [[trail_of(ONE)]], "nobody else does"
    store_with_trail(desk, ONE, trail_of(ONE, 80))
    assert nearest(desk, asked, trail_of(THREE, 80)) == [[], [trail_of(ONE, 80)]], "the last writer's counts"
    desk.ask(messages.Remove(7, messages.pack_refs([ONE])))
    assert nearest(desk, trail_of(THREE, 80)) == [[]]


@pytest.mark.parametrize("trail", [trail_of(TWO), trail_of(ONE)[16:], trail_of(ONE)[:-1], trail_of(make_ref(1, 9))])
def test_a_trail_of_something_else_is_not_kept(desk: Desk, trail: bytes) -> None:
    store_with_trail(desk, ONE, trail)
    assert not list(next(iter(desk.stock.spaces.values())).trails)


def test_a_trail_as_large_as_its_chunk_is_not_kept() -> None:
    """A geometry of tiny blocks would otherwise take more memory for the names than the pool has for the bytes."""
    tiny = KVLayout((16,), 1, 1, 4)
    stock = Stock(64 * PAGE_BYTES, FreePages(64))
    space = stock.enter(Namespace({"model": "tiny"}), tiny)
    assert space is not None
    chunk = stock.reserve(space, ONE, 1 << 60)
    assert chunk is not None
    stock.describe(chunk, trail_of(ONE))
    stock.complete(chunk, is_whole=True)
    assert not list(space.trails)


def test_what_is_named_fits_into_a_message(desk: Desk) -> None:
    asked = [trail_of(THREE)] * messages.MAX_TRAILS
    store_with_trail(desk, ONE, trail_of(ONE))
    space = next(iter(desk.stock.spaces.values()))
    long = trail_of(ONE)[:16] + bytes(60_000)
    space.trails.add(long)
    named = nearest(desk, *asked)
    assert len(named) == len(asked)
    assert sum(len(trail) for near in named for trail in near) <= messages.MAX_MESSAGE_BYTES
    assert named[0]
    assert not named[-1]


def test_a_release_ends_no_write(desk: Desk) -> None:
    lease = desk.lease(messages.Reserve, ONE)
    desk.ask(messages.Release(5, [lease]))
    assert desk.sessions.num_leases == 1
    assert not desk.stock.spaces[next(iter(desk.stock.spaces))].chunks


def test_a_commit_ends_no_read(desk: Desk) -> None:
    desk.store(ONE)
    lease = desk.lease(messages.Acquire, ONE)
    assert desk.commit(lease) is Outcome.FAILED
    assert desk.sessions.num_leases == 1


def test_a_token_is_good_while_its_connection_is_there() -> None:
    desk = Desk()
    token = b"t" * messages.TOKEN_BYTES
    refused = desk.hello(token)
    assert (type(refused), refused.reason) == (messages.Refused, Refusal.TOKEN)
    desk.open_tokens.add(token)
    assert isinstance(desk.hello(token), messages.Welcome)
    desk.service.close()
    desk.pool.close()


def test_with_new_weights_the_chunks_of_the_old_ones_go_and_who_sent_them() -> None:
    old = Namespace({"model": "mine"})
    desk = Desk(Owner(old, LAYOUT))
    assert isinstance(desk.hello(), messages.Welcome)
    desk.store(ONE)
    desk.service.enter(old.at_epoch("1"))
    assert desk.pool.used_bytes == 0
    assert not desk.sessions.by_peer
    assert isinstance(desk.hello(), messages.Refused)
    desk.service.close()
    desk.pool.close()


@pytest.mark.parametrize("blocks", [0, 5, 1 << 30])
def test_chunks_have_the_size_of_their_namespace(desk: Desk, blocks: int) -> None:
    with pytest.raises(ProtocolError, match="1 to 4 blocks"):
        desk.ask(messages.Reserve(2, messages.pack_refs([ChunkRef(bytes(16), blocks)])))


def test_nothing_behind_the_end_of_a_chunk_is_read_or_written(desk: Desk) -> None:
    """What is there belongs to others, or was theirs."""
    short = make_ref(7, 1)  # a quarter of a chunk: half a page
    lease = desk.lease(messages.Reserve, short)
    with pytest.raises(ProtocolError, match="behind its end"):
        desk.send(lease, bytes(PAGE_BYTES))
    desk.send(lease, bytes(PAGE_BYTES // 2))
    desk.settle(1)
    assert desk.commit(lease) is Outcome.STORED
    reading = desk.lease(messages.Acquire, short)
    with pytest.raises(ProtocolError, match="behind its end"):
        desk.ask(messages.Fetch(6, reading, 0, PAGE_BYTES))


def test_a_place_to_write_to_is_not_read(desk: Desk) -> None:
    """Its pages hold what another client's chunk has left."""
    lease = desk.lease(messages.Reserve, ONE)
    answer = desk.ask(messages.Fetch(6, lease, 0, PAGE_BYTES))
    assert isinstance(answer, messages.Done)
    assert messages.outcome_of(answer.outcomes[0]) is Outcome.FAILED


def test_a_client_sends_few_pieces_at_once(desk: Desk) -> None:
    lease = desk.lease(messages.Reserve, ONE)
    for _ in range(MAX_PIECES):
        desk.send(lease, bytes(8))
    with pytest.raises(ProtocolError, match="pieces at once"):
        desk.send(lease, bytes(8))


def test_a_message_has_a_longest_length() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        messages.decode_request(bytes(messages.MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o777])
def test_a_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "pool"
    make_private(folder)
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="closed to others"):
        make_private(folder)


def test_one_server_to_a_folder(tmp_path: Path) -> None:
    pool = Pool(CHUNK_BYTES)
    unix_socket = UnixSocket(tmp_path / "pool", pool.fd)
    with pytest.raises(ConfigError, match="another cache server runs"):
        UnixSocket(tmp_path / "pool", pool.fd)
    unix_socket.close()
    UnixSocket(tmp_path / "pool", pool.fd).close()
    pool.close()


@pytest.mark.parametrize(
    ("mechanism", "key", "status"),
    [(b"CURVE", b"k" * 32, b"200"), (b"CURVE", b"x" * 32, b"400"), (b"NULL", b"k" * 32, b"400")],
    ids=["listed", "not listed", "no key needed"],
)
def test_whose_key_is_listed_comes_in(mechanism: bytes, key: bytes, status: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client_keys = ClientKeys(context, {z85.encode(b"k" * 32): "engine 1"})
    question = [b"1.0", b"7", b"", b"10.0.0.1", b"", mechanism, key]
    assert client_keys._judge(question)[1:3] == [b"7", status]
    assert client_keys._judge(question[:5])[2] == b"400"
    client_keys.close()
    context.term()
